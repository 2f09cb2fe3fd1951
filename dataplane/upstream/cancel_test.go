package upstream

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// expectCancelled runs f, which must fail with ErrCancelled, and cuts once ready says so.
func expectCancelled(t *testing.T, call *Call, ready func() bool, f func() error) error {
	t.Helper()
	result := make(chan error, 1)
	go func() { result <- f() }()
	testwait.Until(t, "ready to be cut", ready)
	call.Cancel()
	select {
	case err := <-result:
		if !errors.Is(err, ErrCancelled) || !call.Cancelled() {
			t.Fatalf("cut gave %v", err)
		}
		return err
	case <-time.After(long):
		t.Fatal("a cut call goes on")
	}
	return nil
}

func TestCancelBeforeDo(t *testing.T) {
	e := newEngine(t, echo).endpoint(t, Options{})
	for _, warm := range []bool{false, true} {
		if warm {
			mustRequest(t, e, "x")
		}
		dialed := e.Stats().Dialed
		var call Call
		call.Cancel()
		call.Cancel()
		_, err := e.Do(post("x"), &call)
		if !errors.Is(err, ErrCancelled) || phaseOf(t, err) != PhaseDial {
			t.Errorf("warm=%v: %v", warm, err)
		}
		if s := e.Stats(); s.Dialed != dialed {
			t.Errorf("a cut call dialled: %+v", s)
		}
	}
}

// blackhole gives an address whose SYNs are not answered: a listener with a
// full backlog that nobody accepts from.
func blackhole(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", sa.(*syscall.SockaddrInet4).Port)
	for range 8 {
		nc, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { nc.Close() })
	}
	t.Skip("the kernel takes every connection")
	return ""
}

func TestCancelWhileDialling(t *testing.T) {
	noLeaks(t)
	e, err := NewEndpoint("http://"+blackhole(t), Options{ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	var call Call
	err = expectCancelled(t, &call, func() bool { return call.leg.Load() != nil }, func() error {
		_, err := e.Do(post("x"), &call)
		return err
	})
	if phaseOf(t, err) != PhaseDial || e.Stats().Open != 0 {
		t.Errorf("%v, %+v", err, e.Stats())
	}
}

func TestCancelInHandshake(t *testing.T) {
	noLeaks(t)
	got := make(chan struct{})
	srv := newEngine(t, func(p *peer) {
		_, _ = p.br.ReadByte()
		close(got)
		p.gone()
	})
	e, err := NewEndpoint("https://"+srv.ln.Addr().String(), Options{TLS: alwaysScript(&tls.Config{ServerName: "engine"}), ConnectTimeout: long})
	if err != nil {
		t.Fatal(err)
	}
	var call Call
	err = expectCancelled(t, &call, func() bool { <-got; return true }, func() error {
		_, err := e.Do(post("x"), &call)
		return err
	})
	if phaseOf(t, err) != PhaseDial || e.Stats().Open != 0 {
		t.Errorf("%v, %+v", err, e.Stats())
	}
}

// The engine sees the connection end, wherever the answer had got to.
func TestCancelInProgress(t *testing.T) {
	for name, c := range map[string]struct {
		sent  string
		phase Phase
		read  func(*Response) error
	}{
		"after the write": {"", PhaseHead, nil},
		"in the head":     {"HTTP/1.1 200 OK\r\nContent-Le", PhaseHead, nil},
		"in a sized body": {"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", PhaseBody, readAll},
		"in a chunk":      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\nhalf", PhaseBody, readAll},
		"in a long chunk": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\nhalf", PhaseBody, readAll},
		"close-delimited": {"HTTP/1.1 200 OK\r\n\r\nhalf", PhaseBody, readAll},
		"raw":             {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\nhalf", PhaseBody, readRaw},
	} {
		for _, warm := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/warm=%v", name, warm), func(t *testing.T) {
				noLeaks(t)
				gone := make(chan struct{})
				var sent atomic.Bool
				e := newEngine(t, func(p *peer) {
					if warm {
						_, body, _ := p.request()
						p.send(answer(body))
					}
					p.request()
					p.send(c.sent)
					sent.Store(true)
					p.gone()
					close(gone)
				}).endpoint(t, Options{})
				if warm {
					mustRequest(t, e, "warm")
				}
				var call Call
				err := expectCancelled(t, &call, sent.Load, func() error {
					resp, err := e.Do(post("x"), &call)
					if err != nil {
						return err
					}
					defer resp.Release()
					return c.read(resp)
				})
				<-gone
				// A cut may come before the head was taken in.
				if p := phaseOf(t, err); p != c.phase && p != PhaseHead {
					t.Errorf("phase %v", p)
				}
				if s := e.Stats(); s.Open != 0 || s.Idle != 0 || s.Cancelled == 0 {
					t.Errorf("%+v", s)
				}
			})
		}
	}
}

func readAll(r *Response) error { _, err := r.ReadAll(nil, 64<<20); return err }

func readRaw(r *Response) error {
	buf := make([]byte, 100)
	for {
		if _, err := r.ReadRaw(buf); err != nil {
			return err
		}
	}
}

func TestCancelWhileWriting(t *testing.T) {
	noLeaks(t)
	var started atomic.Bool
	e := newEngine(t, func(p *peer) {
		_, _ = p.br.ReadByte()
		started.Store(true)
		buf := make([]byte, 1)
		for { // a trickle, until the client is gone
			testwait.Pace(time.Millisecond)
			if _, err := p.Read(buf); err != nil {
				return
			}
		}
	}).endpoint(t, Options{})
	var call Call
	err := expectCancelled(t, &call, started.Load, func() error {
		_, err := e.Do(post(strings.Repeat("x", 32<<20)), &call)
		return err
	})
	if phaseOf(t, err) != PhaseWrite || e.Stats().Open != 0 {
		t.Errorf("%v, %+v", err, e.Stats())
	}
}

// A cut that comes too late finds nothing: the connection serves others.
func TestCancelAfterRelease(t *testing.T) {
	e := newEngine(t, echo).endpoint(t, Options{})
	var first Call
	if _, err := request(e, post("one"), &first); err != nil {
		t.Fatal(err)
	}
	var second Call
	resp, err := e.Do(post("two"), &second)
	if err != nil {
		t.Fatal(err)
	}
	first.Cancel()
	if b, err := resp.ReadAll(nil, 10); err != nil || string(b) != "two" {
		t.Fatalf("%q, %v", b, err)
	}
	resp.Release()
	first.Cancel()
	mustRequest(t, e, "three")
	if s := e.Stats(); s.Dialed != 1 || s.Reused != 2 {
		t.Errorf("%+v", s)
	}
}

// A cut between the last byte and Release closes this connection, no other.
func TestCancelBeforeRelease(t *testing.T) {
	e := newEngine(t, echo).endpoint(t, Options{})
	var call Call
	resp, err := e.Do(post("one"), &call)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resp.ReadAll(nil, 10); err != nil {
		t.Fatal(err)
	}
	call.Cancel()
	resp.Release()
	if s := e.Stats(); s.Open != 0 || s.Idle != 0 {
		t.Errorf("%+v", s)
	}
	mustRequest(t, e, "two")
}

// Cuts at any moment, early and late, from other goroutines: an answer is the
// request's own, and who was not cut is not disturbed.
func TestConcurrentCancels(t *testing.T) {
	noLeaks(t)
	e := newEngine(t, echo).endpoint(t, Options{MaxIdle: 4})
	const workers, rounds = 8, 300
	var wg, cancellers sync.WaitGroup
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(w), 7))
			for i := range rounds {
				call := new(Call)
				cancelOnce := w%2 == 0
				if cancelOnce {
					spins := rnd.IntN(4000)
					cancellers.Add(1)
					go func() {
						defer cancellers.Done()
						for range spins {
							_ = call.Cancelled()
						}
						call.Cancel()
					}()
				}
				want := fmt.Sprintf("%d/%d", w, i)
				got, err := request(e, post(want), call)
				switch {
				case err == nil && got != want:
					t.Errorf("asked %q, got %q", want, got)
				case err != nil && !cancelOnce:
					t.Errorf("%q was not cut: %v", want, err)
				case err != nil && !errors.Is(err, ErrCancelled):
					t.Errorf("%q: %v", want, err)
				}
			}
		}()
	}
	wg.Wait()
	cancellers.Wait()
	if s := e.Stats(); s.Open != s.Idle || s.Open > 4 {
		t.Errorf("%+v", s)
	} else {
		t.Logf("%+v", s)
	}
}

// TestHalfClose: an answer that the engine sends after our side is closed is still
// read, and its connection is not used again; an engine that takes no notice holds
// the call for halfCloseTimeout.
func TestHalfClose(t *testing.T) {
	for _, answers := range []bool{true, false} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		came := make(chan struct{}, 1)
		go func() {
			for {
				nc, err := ln.Accept()
				if err != nil {
					return
				}
				defer nc.Close()
				go func() {
					buf := make([]byte, 4096)
					_, _ = nc.Read(buf)
					came <- struct{}{}
					if _, err := nc.Read(buf); err == io.EOF && answers {
						fmt.Fprint(nc, "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhandle")
					}
				}()
			}
		}()
		e, err := NewEndpoint("http://"+ln.Addr().String(), Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		var call Call
		go func() {
			<-came
			call.HalfClose()
			call.HalfClose()
			call.Cancel()
		}()
		began := time.Now()
		resp, err := e.Do(post("x"), &call)
		if !call.Cancelled() {
			t.Error("the call does not say that it was cut")
		}
		if !answers {
			if took := time.Since(began); !errors.Is(err, ErrCancelled) || took < halfCloseTimeout/2 || took > halfCloseTimeout+5*time.Second {
				t.Errorf("%v after %v, want a cut after %v", err, took, halfCloseTimeout)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if body, err := resp.ReadAll(nil, 100); err != nil || string(body) != "handle" {
			t.Errorf("%q, %v", body, err)
		}
		resp.Release()
		if s := e.Stats(); s.Idle != 0 || s.Open != 0 {
			t.Errorf("the connection is kept: %+v", s)
		}
	}
}
