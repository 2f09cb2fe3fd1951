package front

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
)

// endWithin bounds the time between the ends of the two sides of a stream: the median of endTries.
// tries is how often a test starts again because the machine was suspended.
const (
	endWithin = 100 * time.Millisecond
	endTries  = 5
	tries     = 10
)

// protocolEndings has, for each protocol, an event and the last events of a stream whose engine
// has failed.
var protocolEndings = []struct {
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

// engineFailures are the ways in which an engine fails after an event, and the error that clients
// get.
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
	{"broken framing", func(nc net.Conn, _ *upstream.Call) { _, _ = io.WriteString(nc, "nonsense\r\n") }, relay.EngineMalformed, "the engine sent a malformed stream", 502},
	{"cut by the router", func(_ net.Conn, call *upstream.Call) { call.Cancel() }, relay.Cancelled, "the router ended the stream: another part of this request failed", 502},
	{"silent", func(net.Conn, *upstream.Call) {}, relay.EngineStalled, "the engine sent nothing for too long", 504},
}

// relayFrom starts a router that relays a response of e, and reports its call and its end.
func relayFrom(t *testing.T, e *engine, opt Options) (r *testServer, ends chan relay.Result, calls chan *upstream.Call) {
	ends, calls = make(chan relay.Result, 1), make(chan *upstream.Call, 1)
	return start(t, opt, func(x Exchange) {
		call := new(upstream.Call)
		resp, err := e.ep.Do(&upstream.Request{Method: "POST", Path: "/", Body: [][]byte{x.Request().Doc.Body}}, call)
		if err != nil {
			t.Error(err)
			return
		}
		calls <- call
		x.Relay(resp, call, endHook(ends)())
	}), ends, calls
}

// For every way in which the engine's side of a stream ends, the client at once gets an error event and the end
// of the stream in its protocol. Its connection serves another request, and the engine's is
// closed.
func TestEngineFailsInEveryProtocol(t *testing.T) {
	withBothRelayModes(t, testEngineFailsInEveryProtocol)
}

func testEngineFailsInEveryProtocol(t *testing.T, by RelayMode) {
	for _, p := range protocolEndings {
		for _, f := range engineFailures {
			t.Run(strings.TrimPrefix(p.path, "/v1/")+", "+f.name, func(t *testing.T) {
				opt := Options{RelayMode: by}
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
				r, ends, calls := relayFrom(t, e, opt)
				c := r.dial()
				all := make([]time.Duration, endTries)
				for i := range all {
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
					all[i] = max(took, (<-left).Sub(began)) - opt.StreamIdleTimeout
					c.expectServes()
					if s := e.ep.Stats(); s.Open != 0 {
						t.Fatalf("%d engine connections are left", s.Open)
					}
				}
				if m := testwait.Median(all...); m > endWithin {
					t.Errorf("both legs ended %v after the engine failed (median of %v), want within %v", m, all, endWithin)
				}
			})
		}
	}
}

// If an engine fails after the last event of a response, the stream is complete and is reported
// as complete. Only the engine's connection is not used again.
func TestEngineFailsAfterFinalEvent(t *testing.T) {
	t.Parallel()
	withBothRelayModes(t, testEngineFailsAfterFinalEvent)
}

func testEngineFailsAfterFinalEvent(t *testing.T, by RelayMode) {
	ends := map[string]string{
		chat:            "data: [DONE]\n\n",
		"/v1/messages":  "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
		"/v1/responses": "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\"}}\n\n",
	}
	for _, p := range protocolEndings {
		for _, f := range engineFailures {
			for _, secure := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, TLS %v", strings.TrimPrefix(p.path, "/v1/"), f.name, secure), func(t *testing.T) {
					opt := Options{RelayMode: by}
					if f.cause == relay.EngineStalled {
						opt.StreamIdleTimeout = 60 * time.Millisecond
					}
					conns := make(chan net.Conn, 1)
					e := startEngineTLS(t, secure, func(nc net.Conn, _ *http.Request) bool {
						_, _ = io.WriteString(nc, streamHead+chunk(p.event)+chunk(ends[p.path]))
						conns <- nc
						_, _ = nc.Read(make([]byte, 1))
						return false
					})
					r, results, calls := relayFrom(t, e, opt)
					c := r.dial()
					c.send(post(p.path, streamDoc))
					resp := c.head()
					got := make([]byte, len(p.event+ends[p.path])) // all of it: a reset would discard unread bytes
					if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != p.event+ends[p.path] {
						t.Fatalf("%q (%v)", got, err)
					}
					nc := <-conns
					if s, ok := nc.(*tls.Conn); ok && f.cause == relay.EngineClosed {
						nc = s.NetConn()
					}
					f.fail(nc, <-calls)
					if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
						t.Errorf("%q behind the end (%v)", rest, err)
					}
					if res := wantEnd(t, results, relay.Completed); res.Err != nil || !res.Reusable {
						t.Errorf("%+v", res)
					}
					c.expectServes()
					if s := e.ep.Stats(); s.Open != 0 || s.Idle != 0 {
						t.Errorf("%d engine connections are left", s.Open)
					}
				})
			}
		}
	}
}

// For every way in which the client's side of a stream ends, the engine's call is cancelled at once.
func TestClientFailsInEveryProtocol(t *testing.T) {
	withBothRelayModes(t, testClientFailsInEveryProtocol)
}

func testClientFailsInEveryProtocol(t *testing.T, by RelayMode) {
	for _, p := range protocolEndings {
		for name, leave := range disconnectKinds {
			t.Run(strings.TrimPrefix(p.path, "/v1/")+", "+name, func(t *testing.T) {
				left := make(chan time.Time, 1)
				e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
					_, _ = io.WriteString(nc, streamHead+chunk(p.event))
					_, _ = nc.Read(make([]byte, 1))
					left <- time.Now()
					return false
				})
				ends := make(chan relay.Result, 1)
				r := start(t, Options{RelayMode: by}, relayTo(e, endHook(ends)))
				all := make([]time.Duration, endTries)
				for i := range all {
					c := r.dial()
					c.send(post(p.path, streamDoc))
					if _, err := io.ReadFull(c.head().Body, make([]byte, len(p.event))); err != nil {
						t.Fatal(err)
					}
					began := time.Now()
					leave(c)
					all[i] = (<-left).Sub(began)
					wantEnd(t, ends, relay.ClientGone)
					testwait.Until(t, "connection closed", func() bool { return r.server.conns.len() == 0 })
				}
				if m := testwait.Median(all...); m > endWithin {
					t.Errorf("the engine was left %v after the client had gone (median of %v), want within %v", m, all, endWithin)
				}
			})
		}
	}
}
