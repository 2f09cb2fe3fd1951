package front

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/dataplane/relay"
)

// A client can recognise a truncated response of an engine that sends neither Content-Length nor
// chunks. An event stream ends with an error event. Otherwise HTTP/1.1 clients get chunks without
// the last one, and HTTP/1.0 clients get a reset.
func TestUnframedEngineFails(t *testing.T) { withBothRelayModes(t, testUnframedEngineFails) }

func testUnframedEngineFails(t *testing.T, by RelayMode) {
	const events, whole = "text/event-stream", helloStream + "data: [DONE]\n\n"
	for _, k := range []struct {
		name, kind, body string
		reset            bool // the engine's connection
		added, good      bool
	}{
		{"whole", events, whole, false, false, true},
		{"whole, reset", events, whole, true, false, true},
		{"reset behind an event", events, helloStream, true, true, true},
		{"closed behind an event", events, helloStream, false, true, true},
		{"closed before any event", events, "", false, true, true},
		{"closed inside an event", events, helloStream + "data: {", false, true, true},
		{"reset inside an event", events, helloStream + "data: {", true, true, true},
		{"JSON", "application/json", `{"a":1}`, false, false, true},
		{"half of JSON, reset", "application/json", `{"a":`, true, false, false},
	} {
		for _, version := range []string{"HTTP/1.1", "HTTP/1.0"} {
			t.Run(k.name+", "+version, func(t *testing.T) {
				free := make(chan struct{})
				e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
					_, _ = io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Type: "+k.kind+"\r\nConnection: close\r\n\r\n"+k.body)
					select {
					case <-free:
					case <-time.After(100 * time.Millisecond): // no byte for the client to wait for
					}
					if k.reset {
						_ = nc.(*net.TCPConn).SetLinger(0)
					}
					return false
				})
				ends := make(chan relay.Result, 1)
				r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
				c := r.dial()
				c.send(strings.Replace(chatPost(streamDoc), "HTTP/1.1", version, 1))
				resp := c.head()
				seen := strings.TrimSuffix(k.body, "data: {") // half an event is not shown
				got := make([]byte, len(seen))
				if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != seen {
					t.Fatalf("%q (%v)", got, err)
				}
				close(free)
				rest, err := io.ReadAll(resp.Body)
				if (len(rest) > 0) != k.added || k.added && (!strings.Contains(string(rest), `"upstream_error"`) || !strings.HasSuffix(string(rest), "data: [DONE]\n\n")) {
					t.Errorf("%q behind it", rest)
				}
				res := <-ends
				if res.Reusable != k.good || (res.Err == nil) != (k.good && !k.added) {
					t.Errorf("%+v", res)
				}
				switch {
				case k.good && err != nil:
					t.Errorf("not ended well: %v", err)
				case k.good && version == "HTTP/1.1":
					c.expectServes()
				case k.good:
					c.expectClosed()
				case version == "HTTP/1.1" && err != io.ErrUnexpectedEOF, version == "HTTP/1.0" && !errors.Is(err, syscall.ECONNRESET):
					t.Errorf("ended by %v", err)
				}
			})
		}
	}
}
