package front

import (
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"sluice/dataplane/relay"
)

// framings is a body as an engine may send it; the last is ended by the connection.
func framings(body string) map[string]string {
	chunks := ""
	for rest := body; len(rest) > 0; {
		n := min(len(rest), 70_000)
		chunks += chunk(rest[:n])
		rest = rest[n:]
	}
	return map[string]string{
		"length":  fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body),
		"chunked": "Transfer-Encoding: chunked\r\n\r\n" + chunks + "0\r\n\r\n",
		"close":   "Connection: close\r\n\r\n" + body,
	}
}

// TestCompressedRelay checks that non-streaming responses that are too long to be buffered, or of
// unknown length, are compressed like buffered ones, each twice on a connection.
func TestCompressedRelay(t *testing.T) {
	long := `{"text":"` + strings.Repeat("an answer ", 120_000) + `"}`
	const json = "application/json; charset=utf-8"
	for _, c := range []struct {
		name, kind, body, accept, version string
		want                              string
		varies                            bool
	}{
		{"long, gzip", json, long, "gzip", "1.1", "gzip", true},
		{"long, zstd", json, long, "gzip, deflate, br, zstd", "1.1", "zstd", true},
		{"long, not liked", json, long, "br", "1.1", "", true},
		{"long, HTTP/1.0", json, long, "gzip", "1.0", "", false},
		{"long, no JSON", "audio/wav", long, "gzip", "1.1", "", false},
		{"long, lines of JSON", "application/jsonlines", long, "gzip", "1.1", "", false},
		{"short", json, `{"text":"an answer"}`, "gzip", "1.1", "", false},
		{"events", "text/event-stream", helloStream + "data: [DONE]\n\n", "gzip", "1.1", "", false},
	} {
		for framing, raw := range framings(c.body) {
			if c.name == "short" && framing != "length" {
				continue // the router does not know that it is short
			}
			t.Run(c.name+", "+framing, func(t *testing.T) {
				e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
					_, err := io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Type: "+c.kind+"\r\n"+raw)
					return err == nil && framing != "close"
				})
				ends := make(chan relay.Result, 2)
				r := start(t, Options{CompressMin: 1 << 10}, relayTo(e, endHook(ends)))
				client := r.dial()
				for range 2 {
					client.send(fmt.Sprintf("POST %s HTTP/%s\r\nHost: a\r\nConnection: keep-alive\r\nAccept-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s", chat, c.version, c.accept, len(hello), hello))
					resp, err := http.ReadResponse(client.br, nil)
					if err != nil {
						t.Fatal(err)
					}
					if got, vary := resp.Header.Get("Content-Encoding"), resp.Header.Get("Vary"); got != c.want || (vary == "Accept-Encoding") != c.varies {
						t.Errorf("coding %q and Vary %q, want %q and %v", got, vary, c.want, c.varies)
					}
					sent, got := decodedOf(t, resp)
					if got != c.body {
						t.Errorf("%d bytes, not the %d that the engine sent", len(got), len(c.body))
					}
					if (c.want == "gzip" || c.want == "zstd") && sent > len(c.body)/4 {
						t.Errorf("%d bytes were sent of %d", sent, len(c.body))
					}
					wantEnd(t, ends, relay.Completed)
					if resp.Close {
						break
					}
				}
				if n := r.server.compressing.Load(); n != 0 {
					t.Errorf("%d are counted after their end", n)
				}
			})
		}
	}
}

// decodedOf reads a whole body, and returns its transferred size and its decoded bytes.
func decodedOf(t *testing.T, resp *http.Response) (sent int, body string) {
	t.Helper()
	raw := &countingReader{r: resp.Body}
	var r io.Reader = raw
	var err error
	switch resp.Header.Get("Content-Encoding") {
	case "gzip":
		r, err = gzip.NewReader(raw)
	case "zstd":
		r, err = zstd.NewReader(raw)
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("after %d bytes: %v", len(out), err)
	}
	if rest, err := io.ReadAll(raw); err != nil || len(rest) > 0 {
		t.Fatalf("%d bytes behind the coding's end, %v", len(rest), err)
	}
	return raw.n, string(out)
}

type countingReader struct {
	r io.Reader
	n int
}

func (c *countingReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += n
	return n, err
}

// A client can recognise a compressed response that was truncated because the engine died.
func TestCompressedRelayTruncated(t *testing.T) {
	body := `{"text":"` + strings.Repeat("an answer ", 1000) + `"}`
	for framing, raw := range framings(body) {
		if framing == "close" {
			continue // the end of the engine's connection ends this body normally
		}
		e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
			_, _ = io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"+raw[:len(raw)-100])
			return false
		})
		ends := make(chan relay.Result, 1)
		r := start(t, Options{CompressMin: 1 << 10}, relayTo(e, endHook(ends)))
		c := r.dial()
		c.send(chatPost(hello, "Accept-Encoding: gzip"))
		resp := c.head()
		if _, err := io.ReadAll(resp.Body); err != io.ErrUnexpectedEOF || resp.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("%s: coding %q, ended by %v", framing, resp.Header.Get("Content-Encoding"), err)
		}
		<-ends
		if n := r.server.compressing.Load(); n != 0 {
			t.Errorf("%s: %d are counted after their end", framing, n)
		}
	}
}

// At most maxCompressing responses have an encoder at once. Others are sent uncompressed, and a
// client that has disconnected keeps no encoder.
func TestCompressedRelayIsBounded(t *testing.T) {
	more := make(chan struct{})
	e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk(`{"text":"`))
		select {
		case <-more:
		case <-time.After(testTimeout):
		}
		_, err := io.WriteString(nc, chunk(`an answer"}`)+"0\r\n\r\n")
		return err == nil
	})
	ends := make(chan relay.Result, maxCompressing+2)
	r := start(t, Options{CompressMin: 1 << 10}, relayTo(e, endHook(ends)))
	ask := func() (*client, *http.Response) {
		c := r.dial()
		c.send(chatPost(hello, "Accept-Encoding: gzip"))
		resp := c.head()
		if resp.Header.Get("Vary") != "Accept-Encoding" {
			t.Errorf("Vary %q", resp.Header.Get("Vary"))
		}
		return c, resp
	}
	var first *client
	for i := range maxCompressing {
		c, resp := ask()
		if got := resp.Header.Get("Content-Encoding"); got != "gzip" {
			t.Fatalf("answer %d of %d: coding %q", i, maxCompressing, got)
		}
		if i == 0 {
			first = c
		}
	}
	_, beyond := ask()
	if got := beyond.Header.Get("Content-Encoding"); got != "" {
		t.Errorf("one more: coding %q", got)
	}
	_ = first.Close()
	wantEnd(t, ends, relay.ClientGone)
	if _, resp := ask(); resp.Header.Get("Content-Encoding") != "gzip" {
		t.Error("no encoder was given back by the one that left")
	}
	close(more)
	if _, body := decodedOf(t, beyond); body != `{"text":"an answer"}` {
		t.Errorf("one more: %q", body)
	}
	for range maxCompressing + 1 {
		wantEnd(t, ends, relay.Completed)
	}
	if n := r.server.compressing.Load(); n != 0 {
		t.Errorf("%d are counted after their end", n)
	}
}
