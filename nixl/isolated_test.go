package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/native/dl"
)

// isolateCommand is the command of a process that holds agents: this binary, as ServeHost.
func isolateCommand(t testing.TB) []string {
	t.Helper()
	if dl.ABI() == 0 {
		t.Skip("built without cgo")
	}
	t.Setenv(childVariable, "host")
	return []string{os.Args[0]}
}

// The process gets none of the router's tokens and keys, and still what it needs to
// find and set up libraries.
func TestHostEnviron(t *testing.T) {
	kept := []string{"PATH=/bin", LibraryVariable + "=/x", UCXVariable + "=/y", "UCX_TLS=tcp", "NIXL_LOG_LEVEL=info"}
	if got := hostEnviron(append([]string{"SLUICE_REGISTRATION_TOKEN=planted", "SLUICE_ADMIN_TOKEN=planted", "SLUICE_ENGINE=http://u:planted@h"}, kept...)); !slices.Equal(got, kept) {
		t.Errorf("got %q, want %q", got, kept)
	}
}

// hostProcessOf is the process that an agent lives in.
func hostProcessOf(t testing.TB, a *Agent) *os.Process {
	t.Helper()
	d, ok := a.driver.(*isolated)
	if !ok {
		t.Fatal("the agent lives in this process")
	}
	return d.host.cmd.Process
}

// testCrash kills a tier's process as a fault inside of UCX does, and answers how long
// the tier took to be seen down, and to be up again with another process.
func testCrash(t *testing.T, tier *AgentTier) (down, up time.Duration) {
	t.Helper()
	first := tier.Agent()
	p := hostProcessOf(t, first)
	began := time.Now()
	if err := p.Signal(syscall.SIGSEGV); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the death to be seen", func() bool { return first.Health() != nil })
	down = time.Since(began)
	testwait.Until(t, "another process", func() bool {
		a := tier.Agent()
		return a != nil && a != first
	})
	up = time.Since(began)
	if n := hostProcessOf(t, tier.Agent()).Pid; n == p.Pid || n == os.Getpid() {
		t.Errorf("the agent lives in process %d; the dead one was %d, we are %d", n, p.Pid, os.Getpid())
	}
	return down, up
}

// With the libucp of our own: messages, what does not fit in a slot, a crash.
func TestIsolatedUCX(t *testing.T) {
	lib := fakeUCX(t)
	tier := StartUCXTier(UCXTierConfig{
		UCX: UCXConfig{Agent: Config{Name: "router", StartTimeout: 5 * time.Second}, Path: lib}, Isolate: isolateCommand(t),
	})
	defer tier.Close()
	reason := wantTier(t, tier, TierUp)
	if !strings.Contains(reason, "in process ") || !strings.Contains(reason, lib) || slices.Contains(ResidentUCX(), lib) {
		t.Errorf("%s; here: %v", reason, ResidentUCX())
	}
	a := tier.Agent()
	if md, err := a.Metadata(t.Context()); err != nil || len(md) < 10 {
		t.Errorf("%x, %v", md, err)
	}
	if _, err := a.LoadPeer(t.Context(), make([]byte, isolatedSpill+1), ""); err == nil {
		t.Error("a payload beyond the shared places was taken")
	}
	m := must[*Memory](t)(NewHostMemory(4096))
	if err := a.Register(t.Context(), m); err == nil || !strings.Contains(err.Error(), "process of its own") {
		t.Errorf("memory that the process does not have was registered: %v", err)
	}
	down, up := testCrash(t, tier)
	t.Logf("seen after %s, back after %s", down, up)
	if err := a.Notify(t.Context(), &Peer{name: "x"}, nil); !errors.Is(err, ErrDied) && !errors.Is(err, ErrClosed) {
		t.Errorf("a call to the dead agent: %v", err)
	}
}

// A process that stands still is no better than a dead one.
func TestIsolatedSuspendedProcess(t *testing.T) {
	cfg := Config{Name: "router", CallTimeout: 200 * time.Millisecond}
	tier := StartUCXTier(UCXTierConfig{UCX: UCXConfig{Agent: cfg, Path: fakeUCX(t)}, Isolate: isolateCommand(t), CheckInterval: time.Millisecond})
	defer tier.Close()
	wantTier(t, tier, TierUp)
	first := tier.Agent()
	testwait.Holds(t, 20*time.Millisecond, "a process that answers is kept", func() bool { return tier.Agent() == first })
	p := hostProcessOf(t, first)
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	testwait.Until(t, "another process", func() bool { a := tier.Agent(); return a != nil && a != first })
	t.Logf("another one after %s", time.Since(began))
	// The time was waited for once: the process was ended before its agent was closed.
	if d := first.driver.(*isolated); !strings.Contains(d.host.exitReason, "was killed: ") {
		t.Errorf("the process that stood still: %q", d.host.exitReason)
	}
}

// Data from the other process is not trusted.
func TestIsolatedCorruptRing(t *testing.T) {
	tier := StartUCXTier(UCXTierConfig{UCX: UCXConfig{Agent: Config{Name: "router"}, Path: fakeUCX(t)}, Isolate: isolateCommand(t), CheckInterval: time.Millisecond})
	defer tier.Close()
	wantTier(t, tier, TierUp)
	a := tier.Agent()
	d := a.driver.(*isolated)
	if !d.acquire() {
		t.Fatal("closed")
	}
	s := &d.events[d.head.evtHead.Load()&uint64(len(d.events)-1)]
	s.op, s.length, s.big, s.aux = evNotif, 1<<31, 0xdead, 1<<30
	d.head.evtTail.Add(1)
	d.head.evtTail.Add(1 << 40)
	d.head.waiting.Store(0)
	if err := wakeReader(d.ring); err != nil {
		t.Fatal(err)
	}
	d.release()
	testwait.Until(t, "nonsense to cost the agent", func() bool { b := tier.Agent(); return b != nil && b != a })
}

// The same in the ring of commands, which senders write to: none of them stays in it, nor
// does the tier, which gives the ring back only when they have left.
func TestIsolatedCorruptRingForSenders(t *testing.T) {
	tier := StartUCXTier(UCXTierConfig{UCX: UCXConfig{Agent: Config{Name: "router"}, Path: fakeUCX(t)}, Isolate: isolateCommand(t), CheckInterval: time.Hour})
	defer tier.Close()
	wantTier(t, tier, TierUp)
	a := tier.Agent()
	d := a.driver.(*isolated)
	if !d.acquire() {
		t.Fatal("closed")
	}
	tail := d.head.cmdTail.Load()
	d.commands[tail&uint64(len(d.commands)-1)].seq.Store(tail + 7)
	sent := make(chan error, 1)
	go func() { sent <- d.push(&command{op: opCheck, handle: noPeer}) }()
	select {
	case err := <-sent:
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%v, want ErrClosed", err)
		}
	case <-time.After(time.Minute):
		t.Error("a sender does not come back")
	}
	d.release()
	testwait.Until(t, "nonsense to cost the agent", func() bool { b := tier.Agent(); return b != nil && b != a })
}

func wakeReader(r *ring) error {
	_, err := syscall.Write(r.eventFD, one[:])
	return err
}

// The real NIXL in a process of its own: notifications, records written into a board
// that both processes have, and a crash under load, of which every completion slot's holder
// may go on looking at the board.
func TestRealIsolated(t *testing.T) {
	search := realNIXL(t)
	command := isolateCommand(t)
	var inbox atomic.Int64
	var board atomic.Pointer[CompletionBoard]
	var landed atomic.Int64
	tier := StartAgentTier(AgentTierConfig{
		Agent:   Config{Name: "router", Search: search, OnNotification: func(Notification) { inbox.Add(1) }},
		Isolate: command,
		Ready: func(ctx context.Context, a *Agent) error {
			b, err := NewCompletionBoard(ctx, a, 256, func(CompletionSlot, Completion) { landed.Add(1) })
			board.Store(b)
			return err
		},
	})
	defer tier.Close()
	if reason := wantTier(t, tier, TierUp); !strings.Contains(reason, "NIXL 1.5.1, UCX 1.23") {
		t.Error(reason)
	}
	engine := realNetwork().open(t, Config{Name: "engine"})
	out := hostMemory(t, engine, 4096)
	work := func(n int) {
		t.Helper()
		a, b := tier.Agent(), board.Load()
		p := connectAgents(t, engine, a)
		inbox.Store(0)
		landed.Store(0)
		for i := range n {
			k, ok := b.Acquire(uint64(i), time.Now().Add(time.Minute))
			if !ok {
				t.Fatal("no completion slot")
			}
			rec := k.Record(Completion{Request: uint64(i), Bytes: 7})
			copy(out.Bytes(), rec[:])
			tr := must[*Transfer](t)(engine.Start(t.Context(), Write, []Span{{out, 0, recordBytes}}, p, []Remote{b.Remote(k)}, fmt.Appendf(nil, "%d", i)))
			must[Telemetry](t)(tr.Wait(t.Context()))
			testwait.Until(t, "the record", func() bool { _, s := b.Poll(k); return s == Completed })
			b.Release(k)
		}
		testwait.Until(t, "all notifications", func() bool { return inbox.Load() == int64(n) })
		defer func() { // the next agent of that name is another
			if err := engine.DropPeer(t.Context(), p); err != nil {
				t.Error(err)
			}
		}()
		// A peer that is reached from there, with metadata longer than a slot.
		q := connectAgents(t, a, engine)
		if err := a.Notify(t.Context(), q, []byte(strings.Repeat("x", 4000))); err != nil {
			t.Error(err)
		}
	}
	work(100)
	older := board.Load()
	k, _ := older.Acquire(1, time.Now().Add(time.Minute))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { // load, across the crash
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			b := board.Load()
			if k, ok := b.Acquire(1, time.Now().Add(time.Minute)); ok {
				b.Poll(k)
				_ = b.CompleteNotified(k.Index, k.Nonce, Completion{}) // by the tier below
				b.Release(k)
			}
			testwait.Pace(50 * time.Microsecond)
		}
	}()
	down, up := testCrash(t, tier)
	t.Logf("a crash is seen after %s, and the tier is back after %s", down.Round(time.Millisecond/10), up.Round(time.Millisecond))
	close(stop)
	<-stopped
	if _, s := older.Poll(k); s != Pending {
		t.Errorf("the dead agent's completion slot is %v", s)
	}
	if err := older.CompleteNotified(k.Index, k.Nonce, Completion{}); err != nil {
		t.Errorf("the dead agent's completion slot cannot be ended by another tier: %v", err)
	}
	older.Release(k)
	work(20)
}

// A process whose router has died ends by itself.
func TestHostEndsWithItsRouter(t *testing.T) {
	h, err := startHost(isolateCommand(t))
	if err != nil {
		t.Fatal(err)
	}
	h.conn.Close() // as the kernel does for a dead router
	select {
	case <-h.done:
	case <-time.After(5 * time.Second):
		h.cmd.Process.Kill()
		t.Fatal("it is still there after 5 s")
	}
	if code := h.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("it ended with %d", code)
	}
}
