package upstream

import (
	"errors"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// grouped is a request in a group.
func grouped(g *Group, body string) *Request {
	r := post(body)
	r.Group, r.Tokens = g, 100
	return r
}

// expectAbandoned runs f, which must fail with ErrFrozen once its group is abandoned.
func expectAbandoned(t *testing.T, g *Group, call *Call, ready func() bool, f func() error) error {
	t.Helper()
	result := make(chan error, 1)
	go func() { result <- f() }()
	testwait.Until(t, "ready to be abandoned", ready)
	if n := g.Abandon(); n != 1 {
		t.Errorf("%d calls abandoned, want 1", n)
	}
	if n := g.Abandon(); n != 0 {
		t.Errorf("%d calls abandoned twice", n)
	}
	select {
	case err := <-result:
		if !errors.Is(err, ErrFrozen) || call.Cancelled() {
			t.Fatalf("it gave %v, cut %v", err, call.Cancelled())
		}
		if message := ClientMessage(err); !strings.HasSuffix(message, "the engine is frozen") {
			t.Errorf("message %q", message)
		}
		return err
	case <-time.After(long):
		t.Fatal("an abandoned call goes on")
	}
	return nil
}

// TestAbandon: every phase of a call ends when its engine is found frozen, and leaves the
// group.
func TestAbandon(t *testing.T) {
	inHand := func(g *Group) func() bool { return func() bool { return g.State(0).Calls == 1 } }
	empty := func(g *Group) {
		t.Helper()
		if s := g.State(0); s.Calls != 0 || g.first != nil {
			t.Errorf("calls are left: %+v", s)
		}
	}
	t.Run("dial", func(t *testing.T) {
		e, err := NewEndpoint("http://"+blackhole(t), Options{ConnectTimeout: long})
		if err != nil {
			t.Fatal(err)
		}
		var g Group
		var call Call
		err = expectAbandoned(t, &g, &call, func() bool { return g.State(0).Calls == 1 && call.leg.Load() != nil }, func() error {
			_, err := e.Do(grouped(&g, "x"), &call)
			return err
		})
		if phaseOf(t, err) != PhaseDial {
			t.Errorf("phase of %v", err)
		}
		empty(&g)
	})
	t.Run("head", func(t *testing.T) {
		e := newEngine(t, func(p *peer) { p.request(); p.gone() }).endpoint(t, Options{})
		var g Group
		var call Call
		err := expectAbandoned(t, &g, &call, func() bool { return inHand(&g)() && call.Sent() }, func() error {
			_, err := e.Do(grouped(&g, "x"), &call)
			return err
		})
		if phaseOf(t, err) != PhaseHead {
			t.Errorf("phase of %v", err)
		}
		empty(&g)
	})
	const head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
	t.Run("body", func(t *testing.T) {
		e := newEngine(t, func(p *peer) { p.request(); p.send(head + "3\r\nabc\r\n"); p.gone() }).endpoint(t, Options{})
		var g Group
		var call Call
		resp, err := e.Do(grouped(&g, "x"), &call)
		if err != nil {
			t.Fatal(err)
		}
		if s := g.State(0); s.Calls != 1 || s.Answered != 1 || s.Longest != 100 || s.Overdue != 1 {
			t.Errorf("before its body: %+v", s)
		}
		resp.NoteProgress(true)
		resp.NoteProgress(false)
		if s := g.State(0); s.Longest != 0 || s.Overdue != 0 || s.Bytes != 1 {
			t.Errorf("behind its first byte: %+v", s)
		}
		expectAbandoned(t, &g, &call, inHand(&g), func() error { _, err := resp.ReadAll(nil, 100); return err })
		resp.Release()
		empty(&g)
	})
	t.Run("lent", func(t *testing.T) {
		e := newEngine(t, func(p *peer) { p.request(); p.send(head); p.gone() }).endpoint(t, Options{})
		var g Group
		var call Call
		resp, err := e.Do(grouped(&g, "x"), &call)
		if err != nil {
			t.Fatal(err)
		}
		cut := make(chan struct{})
		if _, _, ok := resp.Detach(new(Detachment), dialInProgress(func() { close(cut) })); !ok {
			t.Fatal("it cannot be lent")
		}
		if n := g.Abandon(); n != 1 {
			t.Errorf("%d calls", n)
		}
		<-cut
		if err := resp.DetachedError(ErrCancelled); !errors.Is(err, ErrFrozen) {
			t.Errorf("it gave %v", err)
		}
		resp.Release()
		empty(&g)
	})
	t.Run("over", func(t *testing.T) {
		e := newEngine(t, echo).endpoint(t, Options{})
		var g Group
		var call Call
		for range 3 {
			resp, err := e.Do(grouped(&g, "x"), &call)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := resp.ReadAll(nil, 100); err != nil {
				t.Fatal(err)
			}
			resp.Release()
			if g.Abandon() != 0 {
				t.Error("a call that is over was abandoned")
			}
			call.Reset()
		}
		if s := e.Stats(); s.Dialed != 1 {
			t.Errorf("its connection was not kept: %+v", s)
		}
	})
	t.Run("cut", func(t *testing.T) {
		e := newEngine(t, func(p *peer) { p.request(); p.gone() }).endpoint(t, Options{})
		var g Group
		var call Call
		expectCancelled(t, &call, call.Sent, func() error { _, err := e.Do(grouped(&g, "x"), &call); return err })
		if g.Abandon() != 0 || !call.Cancelled() {
			t.Error("a call that was cut was abandoned")
		}
		empty(&g)
	})
}
