package front

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// atOnce is how soon both legs of a stream end after one of them did; tries is how
// often a machine that is busy may miss it.
const (
	atOnce = 100 * time.Millisecond
	tries  = 10
)

// protocolEnds are an event of each protocol, and the last events by which it tells
// that an engine failed.
var protocolEnds = []struct {
	path, event string
	failed      func(message string, code int) string
}{
	{chat, helloStream, func(message string, code int) string {
		return fmt.Sprintf("data: {\"error\":{\"message\":%q,\"type\":\"upstream_error\",\"param\":null,\"code\":%d}}\n\ndata: [DONE]\n\n", message, code)
	}},
	{"/v1/messages", "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n", func(message string, code int) string {
		return fmt.Sprintf("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":%q,\"message\":%q}}\n\n", anthropicType(code), message)
	}},
	{"/v1/responses", "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n", func(message string, _ int) string {
		return fmt.Sprintf("event: error\ndata: {\"type\":\"error\",\"code\":\"upstream_error\",\"message\":%q,\"param\":null,\"sequence_number\":1}\n\n", message)
	}},
}

// engineFailures are how an engine fails behind an event, and what clients are told.
var engineFailures = []struct {
	name    string
	fail    func(nc net.Conn, call *upstream.Call)
	cause   relay.Cause
	message string
	code    int
}{
	{"closed", func(nc net.Conn, _ *upstream.Call) { _ = nc.Close() }, relay.EngineClosed, "the engine closed the connection before the end of the stream", 502},
	{"half closed", func(nc net.Conn, _ *upstream.Call) { _ = nc.(*net.TCPConn).CloseWrite() }, relay.EngineClosed, "the engine closed the connection before the end of the stream", 502},
	{"reset", func(nc net.Conn, _ *upstream.Call) { _ = nc.(*net.TCPConn).SetLinger(0); _ = nc.Close() }, relay.EngineClosed, "the engine closed the connection before the end of the stream", 502},
	{"broken framing", func(nc net.Conn, _ *upstream.Call) { _, _ = io.WriteString(nc, "nonsense\r\n") }, relay.EngineBroke, "the engine broke the framing of its stream", 502},
	{"cut by the router", func(_ net.Conn, call *upstream.Call) { call.Cut() }, relay.Cut, "the router ended the stream: another part of this request failed", 502},
	{"silent", func(net.Conn, *upstream.Call) {}, relay.EngineStalled, "the engine took too long to go on with the stream", 504},
}

// Whatever ends the engine's side of a stream, the client gets an error event of its
// own protocol and the proper end, its connection serves on, and the engine's is closed:
// at once.
func TestEngineFailsInEveryProtocol(t *testing.T) { onBoth(t, testEngineFailsInEveryProtocol) }

func testEngineFailsInEveryProtocol(t *testing.T, by Relay) {
	for _, p := range protocolEnds {
		for _, f := range engineFailures {
			t.Run(strings.TrimPrefix(p.path, "/v1/")+", "+f.name, func(t *testing.T) {
				opt := Options{Relay: by}
				if f.cause == relay.EngineStalled {
					opt.StreamIdleTimeout = 60 * time.Millisecond
				}
				conns, left := make(chan net.Conn, 1), make(chan time.Time, 1)
				e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
					_, _ = io.WriteString(nc, streamHead+chunk(p.event))
					conns <- nc
					_, _ = nc.Read(make([]byte, 1))
					left <- time.Now()
					return false
				})
				ends, calls := make(chan relay.Result, 1), make(chan *upstream.Call, 1)
				r := start(t, opt, func(x *Exchange) {
					call := new(upstream.Call)
					resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Doc.Body}}, call)
					if err != nil {
						t.Error(err)
						return
					}
					calls <- call
					x.Relay(resp, call, endHook(ends)())
				})
				c := r.dial()
				for try := 1; ; try++ {
					c.send(post(p.path, streamDoc))
					resp := c.head()
					got := make([]byte, len(p.event))
					if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != p.event {
						t.Fatalf("%q (%v)", got, err)
					}
					began := time.Now()
					f.fail(<-conns, <-calls)
					rest, err := io.ReadAll(resp.Body)
					took := time.Since(began)
					if want := p.failed(f.message, f.code); err != nil || string(rest) != want {
						t.Fatalf("%q (%v)\nwant %q", rest, err, want)
					}
					if res := wantEnd(t, ends, f.cause); !res.Reusable {
						t.Errorf("%+v", res)
					}
					took = max(took, (<-left).Sub(began)) - opt.StreamIdleTimeout
					c.serves()
					if s := e.ep.Stats(); s.Open != 0 {
						t.Fatalf("%d engine connections are left", s.Open)
					}
					if took <= atOnce {
						break
					}
					if try == tries {
						t.Fatalf("both legs ended %v and more after the engine failed, %d times, want within %v once", took, try, atOnce)
					}
				}
			})
		}
	}
}

// Whatever ends the client's side of a stream, the engine's leg is cut at once.
func TestClientFailsInEveryProtocol(t *testing.T) { onBoth(t, testClientFailsInEveryProtocol) }

func testClientFailsInEveryProtocol(t *testing.T, by Relay) {
	for _, p := range protocolEnds {
		for name, leave := range leaveBy {
			t.Run(strings.TrimPrefix(p.path, "/v1/")+", "+name, func(t *testing.T) {
				left := make(chan time.Time, 1)
				e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
					_, _ = io.WriteString(nc, streamHead+chunk(p.event))
					_, _ = nc.Read(make([]byte, 1))
					left <- time.Now()
					return false
				})
				ends := make(chan relay.Result, 1)
				r := start(t, Options{Relay: by}, relayTo(e, endHook(ends)))
				for try := 1; ; try++ {
					c := r.dial()
					c.send(post(p.path, streamDoc))
					if _, err := io.ReadFull(c.head().Body, make([]byte, len(p.event))); err != nil {
						t.Fatal(err)
					}
					began := time.Now()
					leave(c)
					took := (<-left).Sub(began)
					wantEnd(t, ends, relay.ClientGone)
					until(t, "connection closed", func() bool { return r.s.conns.len() == 0 })
					if took <= atOnce {
						break
					}
					if try == tries {
						t.Fatalf("the engine was left %v and more after the client had gone, %d times, want within %v once", took, try, atOnce)
					}
				}
			})
		}
	}
}
