package front

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/ascii"
	"sluice/dataplane/compression"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// TestCompressedRequest sends bodies in each coding, several on one connection, which must stay
// usable after a refused body as well.
func TestCompressedRequest(t *testing.T) {
	const limit = 64 << 10
	text := `{"model":"m","prompt":"` + strings.Repeat("a long prompt ", 1000) + `"}`
	bodies := make(chan string, 1)
	r := start(t, Options{MaxBodyBytes: limit, BodyBudgetBytes: 16 * limit}, func(x Exchange) {
		bodies <- string(x.Request().Doc.Body)
		if len(x.Header("Content-Encoding")) == 0 {
			t.Error("the handler does not see the client's header lines as they came")
		}
		for _, f := range x.ForwardFields(nil) {
			if ascii.EqualFold(f.Name, "Content-Encoding") {
				t.Error("the engine would get a Content-Encoding that the body no longer has")
			}
		}
		x.ReplyJSON(200, []byte("{}"))
	})
	whole := func(c compression.Algorithm, s string) string { return string(c.Append(nil, []byte(s))) }
	for _, c := range []struct {
		name, encoding, body string
		status               int
		says                 string
	}{
		{"gzip", "gzip", whole(compression.Gzip, text), 200, ""},
		{"gzip by its old name", "x-gzip", whole(compression.Gzip, text), 200, ""},
		{"zstd", "zstd", whole(compression.Zstd, text), 200, ""},
		{"identity", "identity", text, 200, ""},
		{"bomb", "gzip", whole(compression.Gzip, strings.Repeat(" ", 4<<20)), 413, "larger than 65536 bytes when its gzip is decoded"},
		{"zstd bomb", "zstd", whole(compression.Zstd, strings.Repeat(" ", 4<<20)), 413, "larger than 65536 bytes when its zstd is decoded"},
		{"cut", "zstd", whole(compression.Zstd, text)[:40], 400, "the zstd body is truncated"},
		{"not what it says", "gzip", text, 400, "is not valid gzip"},
		{"two codings", "gzip, zstd", "x", 415, "Content-Encoding must be one of gzip, zstd, identity"},
		{"brotli", "br", "x", 415, `got \"br\"`},
		{"no JSON inside", "gzip", whole(compression.Gzip, "hello"), 400, ""},
		{"forbidden field inside", "gzip", whole(compression.Gzip, `{"kv_transfer_params":{"remote_host":"a"}}`), 400, "kv_transfer_params"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := r.dial()
			for range 2 {
				fmt.Fprintf(cl, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s", chat, c.encoding, len(c.body), c.body)
				resp, err := http.ReadResponse(cl.br, nil)
				if err != nil {
					t.Fatal(err)
				}
				answer, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				if resp.StatusCode != c.status || !strings.Contains(string(answer), c.says) {
					t.Fatalf("status %d, %s; want %d and %q", resp.StatusCode, answer, c.status, c.says)
				}
				if c.status == 200 {
					if got := <-bodies; got != text {
						t.Errorf("the handler saw %d bytes, not the %d that were sent", len(got), len(text))
					}
				}
				if c.status == 415 && resp.Header.Get("Accept-Encoding") != compression.Known {
					t.Errorf("Accept-Encoding %q does not say what would be accepted", resp.Header.Get("Accept-Encoding"))
				}
			}
		})
	}
	if n := r.server.BodyBytes(); n != 0 {
		t.Errorf("%d bytes of the budget are held after all", n)
	}
}

func TestCompressedResponse(t *testing.T) {
	long := []byte(`{"text":"` + strings.Repeat("an answer ", 1000) + `"}`)
	short := []byte(`{"text":"an answer"}`)
	noise := make([]byte, 4<<10)
	for i, x := 0, uint32(1); i < len(noise); i++ {
		x = x*1664525 + 1013904223
		noise[i] = byte(x >> 24)
	}
	answers := map[string][]byte{"long": long, "short": short, "noise": noise}
	r := start(t, Options{CompressMin: 1 << 10}, func(x Exchange) { x.ReplyJSON(200, answers[string(x.Header("X-Which"))]) })
	plain := start(t, Options{}, func(x Exchange) { x.ReplyJSON(200, long) })
	for _, c := range []struct{ which, accept, want string }{
		{"long", "gzip", "gzip"},
		{"long", "gzip, deflate, br, zstd", "zstd"},
		{"long", "br", ""},
		{"long", "", ""},
		{"long", "gzip;q=0", ""},
		{"short", "gzip", ""},
		{"noise", "gzip", ""},
	} {
		body, got := fetchCompressed(t, r, c.which, c.accept)
		if got != c.want || !bytes.Equal(body, answers[c.which]) {
			t.Errorf("%s with %q: coding %q and %d bytes, want %q and %d", c.which, c.accept, got, len(body), c.want, len(answers[c.which]))
		}
	}
	if body, got := fetchCompressed(t, plain, "long", "gzip"); got != "" || !bytes.Equal(body, long) {
		t.Errorf("with compression off: coding %q and %d bytes", got, len(body))
	}
}

// fetchCompressed returns a decoded response and its Content-Encoding.
func fetchCompressed(t *testing.T, r *testServer, which, accept string) ([]byte, string) {
	t.Helper()
	cl := r.dial()
	if accept != "" {
		accept = "Accept-Encoding: " + accept + "\r\n"
	}
	fmt.Fprintf(cl, "POST %s HTTP/1.1\r\nHost: a\r\nX-Which: %s\r\n%sContent-Length: 2\r\n\r\n{}", chat, which, accept)
	resp, err := http.ReadResponse(cl.br, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, body := decodedOf(t, resp)
	return []byte(body), resp.Header.Get("Content-Encoding")
}

// TestCompressedStream splits an engine's chunks at any byte, breaks the engine's stream, and
// sends a second stream over the same connection.
func TestCompressedStream(t *testing.T) {
	events := make([]string, 20)
	framed, whole := "", ""
	for i := range events {
		events[i] = fmt.Sprintf("data: {\"choices\":[{\"delta\":{\"content\":\"word %d\"}}]}\n\n", i)
		framed += chunk(events[i])
		whole += events[i]
	}
	ending := framed + chunk("data: [DONE]\n\n") + "0\r\n\r\n"
	step := 7
	var dies atomic.Bool
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		raw := streamHead + ending
		if dies.Load() {
			raw = streamHead + framed
		}
		for len(raw) > 0 {
			n := min(step, len(raw))
			if _, err := io.WriteString(nc, raw[:n]); err != nil {
				return false
			}
			raw = raw[n:]
		}
		return !dies.Load()
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{CompressStreams: true}, relayTo(e, endHook(ends)))
	for _, accept := range []string{"gzip", "zstd", "br", "gzip"} {
		c := r.dial()
		for _, die := range []bool{false, false, true} {
			dies.Store(die)
			fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: a\r\nAccept-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s", chat, accept, len(hello), hello)
			resp, err := http.ReadResponse(c.br, nil)
			if err != nil {
				t.Fatal(err)
			}
			want := accept
			if accept == "br" {
				want = ""
			}
			if got := resp.Header.Get("Content-Encoding"); got != want || resp.Header.Get("Vary") != "Accept-Encoding" {
				t.Fatalf("accepting %s: coding %q, Vary %q", accept, got, resp.Header.Get("Vary"))
			}
			var body io.Reader = resp.Body
			switch want {
			case "gzip":
				body, err = gzip.NewReader(resp.Body)
			case "zstd":
				body, err = zstd.NewReader(resp.Body)
			}
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(body)
			if err != nil {
				t.Fatalf("%s, engine dies %v: %v behind %d bytes", accept, die, err, len(got))
			}
			if !die && string(got) != whole+"data: [DONE]\n\n" || die && (!strings.HasPrefix(string(got), whole) || !strings.Contains(string(got[len(whole):]), `"error"`)) {
				t.Errorf("%s, engine dies %v: %q", accept, die, got)
			}
			<-ends
		}
	}
}

// TestCompressedEventsAreFlushed reads each event before the engine makes the next.
func TestCompressedEventsAreFlushed(t *testing.T) {
	more := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, streamHead)
		for i := range 5 {
			_, _ = io.WriteString(nc, chunk(fmt.Sprintf("data: {\"n\":%d}\n\n", i)))
			select {
			case <-more:
			case <-time.After(testTimeout):
			}
		}
		_, _ = io.WriteString(nc, chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	ends := make(chan relay.Result, 1)
	r := start(t, Options{CompressStreams: true}, relayTo(e, endHook(ends)))
	c := r.dial()
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", chat, len(hello), hello)
	resp, err := http.ReadResponse(c.br, nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(testTimeout))
	body, err := gzip.NewReader(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		want := fmt.Sprintf("data: {\"n\":%d}\n\n", i)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(body, got); err != nil || string(got) != want {
			t.Fatalf("event %d: %q, %v", i, got, err)
		}
		more <- struct{}{}
	}
	if rest, err := io.ReadAll(body); err != nil || string(rest) != "data: [DONE]\n\n" {
		t.Errorf("%q, %v", rest, err)
	}
	<-ends
}

// An engine's Vary line is kept in addition to Vary: Accept-Encoding, on both paths.
func TestCompressedResponseVaries(t *testing.T) {
	body := `{"text":"` + strings.Repeat("an answer ", 300) + `"}`
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, err := fmt.Fprintf(nc, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nVary: X-Engine\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		return err == nil
	})
	r := start(t, Options{CompressMin: 1 << 10}, func(x Exchange) {
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: chat, Body: [][]byte{x.Request().Doc.Body}}, new(upstream.Call))
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Release()
		x.Reply(resp, []byte(body))
	})
	for name, raw := range map[string]string{
		"plain":    chatPost(hello, "Accept-Encoding: gzip"),
		"fasthttp": fmt.Sprintf("POST %s HTTP/1.1\r\nHost: test\r\nAccept-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", chat, len(hello), hello),
	} {
		c := r.dial()
		c.send(raw)
		resp, _ := c.readResponse()
		got := strings.Join(resp.Header.Values("Vary"), ", ")
		if resp.StatusCode != 200 || resp.Header.Get("Content-Encoding") != "gzip" || !strings.Contains(got, "X-Engine") || !strings.Contains(got, "Accept-Encoding") {
			t.Errorf("%s: %d, coding %q, Vary %q", name, resp.StatusCode, resp.Header.Get("Content-Encoding"), got)
		}
	}
}
