package faults

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

const (
	chunkedJSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
	toCloseJSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
)

// TestBrokenAnswersRunAgain: if a response that is not streamed is truncated, in any framing, or
// empty, the router runs the request on another engine. The client receives one complete
// response.
func TestBrokenAnswersRunAgain(t *testing.T) {
	t.Parallel()
	inChunks := func(body string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(body), body) }
	half := harness.WholeAnswer[:len(harness.WholeAnswer)/2]
	for name, k := range map[string]struct {
		sent   string
		reset  bool
		stream bool
	}{
		"chunked, cut in a chunk":              {chunkedJSON + fmt.Sprintf("%x\r\n%s", len(harness.WholeAnswer), half), false, false},
		"chunked, reset in a chunk":            {chunkedJSON + fmt.Sprintf("%x\r\n%s", len(harness.WholeAnswer), half), true, false},
		"chunked, cut between chunks":          {chunkedJSON + inChunks(half), false, false},
		"chunked, without the last chunk":      {chunkedJSON + inChunks(harness.WholeAnswer), false, false},
		"chunked, without the last line":       {chunkedJSON + inChunks(harness.WholeAnswer) + "0\r\n", false, false},
		"chunked, with bad framing":            {chunkedJSON + inChunks(half) + "zz\r\n", false, false},
		"until close, cut":                     {toCloseJSON + half, false, false},
		"until close, nothing":                 {toCloseJSON, false, false},
		"no bytes":                             {"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n", false, false},
		"no chunks":                            {chunkedJSON + "0\r\n\r\n", false, false},
		"no type, no chunks":                   {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", false, false},
		"blank":                                {chunkedJSON + "2\r\n\r\n\r\n0\r\n\r\n", false, false},
		"a stream of no bytes":                 {"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n", false, true},
		"a stream without events":              {streamHeadOK + "0\r\n\r\n", false, true},
		"a stream until close, without events": {"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", false, true},
		"a stream until close, half an event":  {"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + harness.StreamChunk[:20], false, true},
		"no stream, no bytes":                  {"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			breaks := func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				_, _ = io.Copy(io.Discard, r.Body)
				harness.ReplyRaw(w, k.sent, k.reset)
			}
			more := ""
			if k.stream {
				more = `,"stream":true`
			}
			bad, good := harness.StartScripted(t, breaks), harness.StartScripted(t, harness.AnswerOK)
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, bad.Worker(worker.Aggregated, "w0"), good.Worker(worker.Aggregated, "w1"))
			for range 2 { // round robin: one of the requests meets the fault
				if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(more)); a.Status != 200 || a.Text(t) != "ok" || a.Header.Get("X-Sluice-Worker") != "w1" {
					t.Errorf("%d from %s: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
				}
			}
			if asked.Load() == 0 {
				t.Error("the engine that breaks off was not asked")
			}
			if k.stream {
				return
			}
			// The same for a decode after a hand-over.
			p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
				harness.ReplyJSON(w, 200, harness.PrefillReply(harness.GoodHandle))
			})
			bad, good = harness.StartScripted(t, breaks), harness.StartScripted(t, harness.AnswerOK)
			r = harness.StartRouter(t, harness.ShortPrefillTimeout, p.Worker(worker.Prefill, "p0"), bad.Worker(worker.Decode, "w0"), good.Worker(worker.Decode, "w1"))
			for range 2 {
				if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(more)); a.Status != 200 || a.Text(t) != "ok" || a.Header.Get("X-Sluice-Worker") != "w1" {
					t.Errorf("behind a hand-over: %d from %s: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
				}
			}
			// Without another engine: an error, and no empty or partial response.
			alone := harness.StartRouter(t, harness.ShortPrefillTimeout, harness.StartScripted(t, breaks).Worker(worker.Aggregated, "w0"))
			if a := harness.Post(t, alone.URL+"/v1/chat/completions", harness.Chat(more)); a.Status != 502 || !strings.Contains(string(a.Body), `"error"`) {
				t.Errorf("alone: %d %q", a.Status, a.Body)
			}
		})
	}
}

const streamHeadOK = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

// TestLongChunkedAnswers: the router forwards a chunked response of any length. If a response is
// truncated after the part that the router buffers, the router closes the client's connection
// without a last chunk.
func TestLongChunkedAnswers(t *testing.T) {
	t.Parallel()
	for _, size := range []int{100, 100 << 10, 1 << 20, 3 << 20} {
		for _, breaks := range []bool{false, true} {
			text := strings.Repeat("x", size)
			answer := strings.Replace(harness.WholeAnswer, `"ok"`, `"`+text+`"`, 1)
			if answer == harness.WholeAnswer {
				t.Fatal("no text in", harness.WholeAnswer)
			}
			e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				var sent strings.Builder
				sent.WriteString(chunkedJSON)
				for rest := answer; rest != ""; rest = rest[min(len(rest), 10000):] {
					part := rest[:min(len(rest), 10000)]
					fmt.Fprintf(&sent, "%x\r\n%s\r\n", len(part), part)
				}
				if !breaks {
					sent.WriteString("0\r\n\r\n")
				}
				harness.ReplyRaw(w, sent.String(), false)
			})
			r := harness.StartRouter(t, harness.ShortPrefillTimeout, e.Worker(worker.Aggregated, "w0"))
			resp, err := http.Post(r.URL+"/v1/chat/completions", "application/json", strings.NewReader(harness.Chat("")))
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			switch {
			case !breaks && (err != nil || resp.StatusCode != 200 || string(got) != answer):
				t.Errorf("%d bytes: %d, %d bytes came, %v", size, resp.StatusCode, len(got), err)
			case breaks && size < 1<<20 && (err != nil || resp.StatusCode != 502):
				t.Errorf("%d bytes that break off: %d, %d bytes came, %v", size, resp.StatusCode, len(got), err)
			case breaks && size >= 1<<20 && err == nil:
				t.Errorf("%d bytes that break off: %d, and a proper end behind %d bytes", size, resp.StatusCode, len(got))
			}
		}
	}
}
