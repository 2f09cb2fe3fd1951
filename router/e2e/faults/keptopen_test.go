package faults

import (
	"bufio"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestEngineKeepsStreamOpen: an engine keeps a stream open after [DONE]. The router releases the
// rank and the client at once, and forwards nothing that follows.
func TestEngineKeepsStreamOpen(t *testing.T) {
	t.Parallel()
	var booked []time.Duration // how long the rank was behind [DONE]
	for name, behind := range map[string]string{"silence": "", "an event": harness.StreamChunk, "events without end": "endless"} {
		t.Run(name, func(t *testing.T) {
			e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				flush := w.(http.Flusher).Flush
				for _, part := range []string{harness.StreamChunk, harness.StreamEnding, behind} {
					testwait.Pace(20 * time.Millisecond) // so that the router reads each part separately
					if part != "" && part != "endless" {
						_, _ = io.WriteString(w, part)
					}
					flush()
				}
				for behind == "endless" && r.Context().Err() == nil {
					testwait.Pace(50 * time.Millisecond)
					_, _ = io.WriteString(w, harness.StreamChunk)
					flush()
				}
				<-r.Context().Done()
			})
			for _, allow := range []int{0, 1} { // migrations; with none the router forwards the bytes unparsed
				c := harness.StartRouter(t, func(c *config.Config) { harness.ShortPrefillTimeout(c); c.Migration.MaxAttempts = allow }, e.Worker(worker.Aggregated, "w0"), harness.StartScripted(t, harness.AnswerOK).Worker(worker.Decode, "w1"))
				resp, err := http.Post(c.URL+"/v1/chat/completions", "application/json", strings.NewReader(harness.Chat(`,"stream":true`)))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				body, got := bufio.NewReader(resp.Body), ""
				for !strings.Contains(got, "[DONE]") {
					line, err := body.ReadString('\n')
					if got += line; err != nil {
						t.Fatalf("%v behind %q", err, got)
					}
				}
				done := time.Now()
				harness.WantNoLoad(t, c)
				booked = append(booked, time.Since(done))
				rest, err := io.ReadAll(body)
				if took := time.Since(done); err != nil || strings.Trim(string(rest), "\r\n: ") != "" || took > 4*time.Second {
					t.Errorf("%q came behind [DONE], and the end (%v) after %v", rest, err, took)
				}
				if n := strings.Count(got, `"ok"`); n != 1 {
					t.Errorf("got %q", got)
				}
			}
		})
	}
	if m := testwait.Median(booked...); m > 700*time.Millisecond {
		t.Errorf("the rank was booked for %v behind [DONE] (median of %v)", m, booked)
	}
}

// TestEngineOmitsDone: an engine sends the finish reason of the only choice, no [DONE], and nothing
// more, and keeps the connection open. The client gets its end long before timeouts.stream_idle.
func TestEngineOmitsDone(t *testing.T) {
	const finish = `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	for _, allow := range []int{0, 1} { // migrations; with none the router forwards the bytes unparsed
		t.Run(strconv.Itoa(allow), func(t *testing.T) {
			t.Parallel()
			e := harness.StartScripted(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				for _, part := range []string{harness.StreamChunk, harness.StreamChunk, finish} {
					testwait.Pace(20 * time.Millisecond) // so that an event loop relays it
					_, _ = io.WriteString(w, part)
					w.(http.Flusher).Flush()
				}
				<-r.Context().Done()
			})
			r := harness.StartRouter(t, func(c *config.Config) { c.Migration.MaxAttempts, c.Timeouts.StreamIdle = allow, 8*time.Second }, e.Worker(worker.Aggregated, "w0"))
			began := time.Now()
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`))
			if took := time.Since(began); a.Status != 200 || !strings.HasSuffix(string(a.Body), finish+harness.StreamEnding) || took > 6*time.Second {
				t.Errorf("status %d after %v: %q", a.Status, took, a.Body)
			}
		})
	}
}
