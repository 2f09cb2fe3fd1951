package front

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"sluice/bench/testwait"
	"sluice/dataplane/fieldrules"
	"sluice/dataplane/rawsocket"
	"sluice/dataplane/relay"
)

// expectPipelinedRefusal reads the refusal of a pipelined request and the end of the connection.
// id is the expected request id, "" if the server has made it.
func (c *client) expectPipelinedRefusal(id string) {
	c.t.Helper()
	resp, body := c.readResponse()
	if resp.StatusCode != 400 || resp.Header.Get("X-Sluice-Reason") != string(Pipelined) || !resp.Close {
		c.t.Errorf("the request that came too early: %d %v %s", resp.StatusCode, resp.Header, body)
	}
	if got := resp.Header.Get("X-Request-Id"); id != "" && got != id || !fieldrules.ValidRequestID([]byte(got)) {
		c.t.Errorf("X-Request-Id %q, want %q", got, id)
	}
	contains(c.t, body, `"type":"invalid_request_error"`, "pipelining")
	c.expectClosed()
}

// dialTLS returns a client that speaks TLS on the connection of c.
func dialTLS(c *client) *client {
	return newClient(c.t, tls.Client(c.Conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}))
}

// onTransports runs test over TCP and over TLS.
func onTransports(t *testing.T, test func(t *testing.T, opt Options, dial func(*testServer) *client)) {
	if !t.Run("plain", func(t *testing.T) { test(t, Options{}, (*testServer).dial) }) {
		return
	}
	t.Run("TLS", func(t *testing.T) {
		onLoops := httptest.NewUnstartedServer(nil)
		onLoops.StartTLS() // has a certificate
		defer onLoops.Close()
		test(t, Options{TLS: &tls.Config{Certificates: onLoops.TLS.Certificates, MinVersion: tls.VersionTLS12}}, func(r *testServer) *client { return dialTLS(r.dial()) })
	})
}

// receivedByKernel waits until the socket of a connection has unread bytes.
func receivedByKernel(t *testing.T, c *conn) {
	testwait.Until(t, "bytes of the next request", func() bool {
		var p [1]byte
		n := 0
		_ = c.raw.Control(func(fd uintptr) { n, _ = rawsocket.Peek(int(fd), p[:]) })
		return n > 0
	})
}

// A pipelined request is refused and does not delay the response to the previous request: whether it
// arrives in the same write or while that request is handled, complete or in part.
func TestPipelinedIsRefused(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		entered, more := make(chan struct{}, 1), make(chan bool, 1)
		r := start(t, opt, func(x Exchange) {
			entered <- struct{}{}
			if <-more {
				receivedByKernel(t, x.(*httpExchange).c)
			}
			echo(x)
		})
		second := chatPost(probeBody, "X-Request-Id: second")
		for name, k := range map[string]struct {
			first, behind, rest string
		}{
			"one write":                         {first: chatPost(hello) + second},
			"one write, a page":                 {first: chatPost(hello) + "GET /livez HTTP/1.1\r\nHost: a\r\nX-Request-Id: second\r\n\r\n"},
			"one write, three requests":         {first: chatPost(hello) + second + second},
			"one write, an empty line between":  {first: chatPost(hello) + "\r\n" + second},
			"two writes":                        {first: chatPost(hello), behind: second},
			"two writes, an empty line between": {first: chatPost(hello), behind: "\r\n" + second},
			"a byte":                            {first: chatPost(hello), behind: second[:1], rest: second[1:]},
			"a byte in the first write":         {first: chatPost(hello) + second[:1], rest: second[1:]},
			"half of it in the first write":     {first: chatPost(hello) + second[:len(second)/2], rest: second[len(second)/2:]},
			"HTTP/1.0 with keep-alive":          {first: strings.Replace(chatPost(hello, "Connection: keep-alive"), "/1.1", "/1.0", 1) + second},
			"large":                             {first: chatPost(`{"prompt":"` + strings.Repeat("m", 60<<10) + `"}`), behind: second},
		} {
			ok := t.Run(name, func(t *testing.T) {
				before := r.calls.Load()
				c := dial(r)
				c.t = t
				c.send(k.first)
				<-entered
				if k.behind != "" {
					c.send(k.behind)
				}
				more <- k.behind != ""
				resp, body := c.readResponse()
				if resp.StatusCode != 200 || !strings.HasSuffix(k.first[:strings.Index(k.first, "}")+1], body) {
					t.Errorf("first: %d %q", resp.StatusCode, body)
				}
				if k.rest != "" {
					_, _ = io.WriteString(c, k.rest)
				}
				c.expectPipelinedRefusal("second")
				if n := r.calls.Load() - before; n != 1 {
					t.Errorf("the handler ran %d times", n)
				}
			})
			if !ok {
				return // a failed case may have waited for its whole timeout, and the others would too
			}
		}
		r.observed.mu.Lock()
		defer r.observed.mu.Unlock()
		if n := r.observed.refused[Pipelined]; n != 11 {
			t.Errorf("%d were counted as refused", n)
		}
	})
}

// A request that is sent right after the response is not pipelined, and neither is an empty line
// at the end of a body.
func TestQuickReuseIsNotPipelining(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
			_, _ = io.WriteString(nc, streamHead+chunk(helloStream)+"0\r\n\r\n")
			return true
		})
		for _, by := range []RelayMode{RelayLoop, RelayGoroutine} {
			opt.RelayMode = by
			ends := make(chan relay.Result, 1000)
			streams := relayTo(e, endHook(ends))
			r := start(t, opt, func(x Exchange) {
				if string(x.Request().Doc.Body) == probeBody {
					streams(x)
					return
				}
				echo(x)
			})
			c := dial(r)
			for i := range 600 {
				body, want := hello, hello
				if i%3 == 2 {
					body, want = probeBody, helloStream
				}
				request := chatPost(body)
				if i%2 == 0 {
					request += "\r\n"
				}
				c.send(request)
				if resp, got := c.readResponse(); resp.StatusCode != 200 || got != want {
					t.Fatalf("%s, request %d: %d %q", by, i, resp.StatusCode, got)
				}
			}
			_ = c.Close()
		}
	})
}

// A request that is pipelined behind a stream is refused too, in each relay mode and whenever it
// arrives.
func TestPipelinedAfterStream(t *testing.T) {
	onTransports(t, func(t *testing.T, opt Options, dial func(*testServer) *client) {
		withBothRelayModes(t, func(t *testing.T, by RelayMode) {
			for _, k := range []struct {
				name, framing, end string
			}{
				{"chunked", "Transfer-Encoding: chunked", chunk("data: [DONE]\n\n") + "0\r\n\r\n"},
				{"sized", fmt.Sprintf("Content-Length: %d", len(helloStream)+14), "data: [DONE]\n\n"},
				{"died", "Transfer-Encoding: chunked", ""},
			} {
				for _, when := range []string{"one write", "in progress"} {
					t.Run(k.name+"/"+when, func(t *testing.T) {
						free := make(chan struct{})
						e := startEngine(t, func(nc net.Conn, _ *http.Request) bool {
							text := helloStream
							if k.name != "sized" {
								text = chunk(text)
							}
							_, _ = io.WriteString(nc, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"+k.framing+"\r\n\r\n"+text)
							<-free
							_, _ = io.WriteString(nc, k.end)
							return k.end != ""
						})
						ends, at := make(chan relay.Result, 1), make(chan *conn, 1)
						opt := opt
						opt.RelayMode = by
						streams := relayTo(e, endHook(ends))
						r := start(t, opt, func(x Exchange) {
							at <- x.(*httpExchange).c
							streams(x)
						})
						c, next := dial(r), chatPost(probeBody, "X-Request-Id: second")
						c.t = t
						if when == "one write" {
							c.send(chatPost(hello) + next)
						} else {
							c.send(chatPost(hello))
						}
						resp, err := http.ReadResponse(c.br, nil)
						if err != nil || resp.StatusCode != 200 {
							t.Fatal(resp, err)
						}
						part := make([]byte, len(helloStream))
						if _, err := io.ReadFull(resp.Body, part); err != nil || string(part) != helloStream {
							t.Fatalf("%q %v", part, err)
						}
						if when != "one write" {
							c.send(next)
							receivedByKernel(t, <-at)
						}
						close(free)
						rest, err := io.ReadAll(resp.Body)
						if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
							t.Errorf("%q %v", rest, err)
						}
						c.expectPipelinedRefusal("")
						if n := r.calls.Load(); n != 1 {
							t.Errorf("the handler ran %d times", n)
						}
						<-ends
					})
				}
			}
		})
	})
}

// Bytes of a body are not a pipelined request, whatever they look like. Bytes after a response that
// ends the connection get no answer.
func TestNotPipelined(t *testing.T) {
	entered, more := make(chan struct{}, 1), make(chan bool, 1)
	r := start(t, Options{}, func(x Exchange) {
		entered <- struct{}{}
		if <-more {
			receivedByKernel(t, x.(*httpExchange).c)
		}
		echo(x)
	})
	c := r.dial()
	c.send(chatPost(hello, "Connection: close"))
	<-entered
	c.send(chatPost(probeBody))
	more <- true
	if resp, body := c.readResponse(); !resp.Close || body != hello {
		t.Errorf("%v %q", resp.Close, body)
	}
	c.expectClosed()

	c = r.dial()
	head, body, _ := strings.Cut(chatPost(hello, "Expect: 100-continue"), "\r\n\r\n")
	c.send(head + "\r\n\r\n")
	if resp, err := http.ReadResponse(c.br, nil); err != nil || resp.StatusCode != 100 {
		t.Fatal(resp, err)
	}
	c.send(body)
	<-entered
	more <- false
	if resp, got := c.readResponse(); resp.StatusCode != 200 || got != hello {
		t.Errorf("%d %q", resp.StatusCode, got)
	}
	c.send(chatPost(probeBody))
	<-entered
	more <- false
	if resp, got := c.readResponse(); resp.StatusCode != 200 || got != probeBody {
		t.Errorf("behind it: %d %q", resp.StatusCode, got)
	}
}
