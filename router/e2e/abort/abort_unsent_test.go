package abort

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// The tests of this file are about clients that leave before the prefill leg of concurrent legs has been sent.

// fillableListener is a listener whose queue of new connections can be filled, so that no further connection is
// established.
type fillableListener struct {
	*net.TCPListener
	mu sync.Mutex // locked while the queue is to stay full
}

// Accept implements net.Listener.
func (l *fillableListener) Accept() (net.Conn, error) {
	nc, err := l.TCPListener.Accept()
	l.mu.Lock() // while the queue is to stay full, the connection waits here, and none is accepted after it
	defer l.mu.Unlock()
	return nc, err
}

// setBacklog sets the length of the queue.
func (l *fillableListener) setBacklog(n int) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = syscall.Listen(int(fd), n) }); err != nil {
		return err
	}
	return failed
}

// fill fills the queue until release.
func (l *fillableListener) fill(t *testing.T) (release func()) {
	t.Helper()
	l.mu.Lock()
	var fills []net.Conn
	release = sync.OnceFunc(func() {
		if err := l.setBacklog(128); err != nil {
			t.Error(err)
		}
		l.mu.Unlock()
		for _, nc := range fills {
			nc.Close()
		}
	})
	if err := l.setBacklog(0); err != nil {
		release()
		t.Fatal(err)
	}
	for range 20 {
		nc, err := net.DialTimeout("tcp", l.Addr().String(), 300*time.Millisecond)
		if err != nil {
			return release
		}
		fills = append(fills, nc)
	}
	release()
	t.Fatal("the queue of the listener does not become full")
	return nil
}

// serveWithoutKeepAlive passes requests on to an engine, each on a connection of its own.
func serveWithoutKeepAlive(t *testing.T, ln net.Listener, e *sim.Engine) {
	t.Helper()
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		out, _ := http.NewRequestWithContext(req.Context(), req.Method, e.URL()+req.URL.RequestURI(), bytes.NewReader(body))
		out.Header = req.Header.Clone()
		resp, err := http.DefaultClient.Do(out)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer resp.Body.Close()
		answer, _ := io.ReadAll(resp.Body)
		w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
		w.Header().Set("Content-Length", fmt.Sprint(len(answer)))
		w.WriteHeader(resp.StatusCode)
		w.Write(answer)
	})}
	s.SetKeepAlivesEnabled(false)
	go s.Serve(ln)
	t.Cleanup(func() { s.Close() })
}

// TestClientAbortsWhilePrefillConnects: the client leaves while the connection for the prefill leg is not
// established. The leg is never sent, and the decode leg, which has been, leaves nothing in its engine.
func TestClientAbortsWhilePrefillConnects(t *testing.T) {
	t.Parallel()
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		if !fam.Concurrent {
			continue
		}
		for _, shape := range harness.Shapes {
			t.Run(fam.Name+"/"+shape.Name, func(t *testing.T) {
				t.Parallel()
				tcp, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				ln := &fillableListener{TCPListener: tcp.(*net.TCPListener)}
				r, p, d := concurrentLegsFleet(t, fam, func(p *sim.Engine) string {
					serveWithoutKeepAlive(t, ln, p)
					return "http://" + ln.Addr().String()
				})
				p.ForgetRequests()
				d.ForgetRequests()
				release := ln.fill(t)
				defer release()
				l := harness.StartRequest(t, r, "connects", fmt.Sprintf(endlessChat, shape.Extra))
				testwait.Until(t, "decode has admitted its leg", func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting > 0 })
				abortedAt := l.Disconnect()
				harness.WantClientGone(t, r, "connects")
				release()
				wantReleased(t, r, "connects", abortedAt, p, d)
				if n := len(harness.GenerateRequests(p)); n != 0 {
					t.Errorf("prefill received %d legs, want none", n)
				}
				if n := r.Metric(`sluice_leg_retries_total{leg="prefill"}`) + r.Metric(`sluice_leg_retries_total{leg="decode"}`); n != 0 {
					t.Errorf("%v legs were sent again", n)
				}
			})
		}
	}
}

// TestClientAbortsWhilePeerInfoIsFetched: the client leaves while the router asks the bootstrap server of
// prefill what the decode leg must name. Neither leg is sent.
func TestClientAbortsWhilePeerInfoIsFetched(t *testing.T) {
	t.Parallel()
	for _, shape := range harness.Shapes {
		t.Run(shape.Name, func(t *testing.T) {
			t.Parallel()
			r, p, d := concurrentLegsFleet(t, harness.MatrixFamilyNamed(t, "mooncake"), nil)
			for _, w := range r.Fleet.View().Workers {
				r.Runner.WorkerRemoved(w) // so that it is asked again
			}
			p.ForgetRequests()
			d.ForgetRequests()
			until := make(chan struct{})
			answer := sync.OnceFunc(func() { close(until) })
			defer answer()
			p.Fault(sim.Fault{Kind: sim.Stall, Leg: "bootstrap", Until: until})
			l := harness.StartRequest(t, r, "asks", fmt.Sprintf(endlessChat, shape.Extra))
			testwait.Until(t, "the bootstrap server is asked", func() bool { return p.Stats().Faults == 1 })
			abortedAt := l.Disconnect()
			harness.WantClientGone(t, r, "asks")
			if took := time.Since(abortedAt); took > 1500*time.Millisecond { // the query itself ends after 2 s
				t.Errorf("the request ended %v after its client had left; want its query cancelled", took)
			}
			answer()
			wantReleased(t, r, "asks", abortedAt, p, d)
			if n, m := len(harness.GenerateRequests(p)), len(harness.GenerateRequests(d)); n != 0 || m != 0 {
				t.Errorf("prefill received %d legs, decode %d; want none", n, m)
			}
		})
	}
}
