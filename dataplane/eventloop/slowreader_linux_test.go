package eventloop

import (
	"io"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/bench/testwait"
	"sluice/dataplane/membudget"
)

// A client that does not read stops the reading of its own engine, once its socket is
// full, and of no other's.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	s := begin(t, 1)
	small := func(t *Task) {
		for _, fd := range []int{t.In, t.Out} {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 16<<10)
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 16<<10)
		}
	}
	slow, fast := open(t, s, small), open(t, s, small)
	_ = slow.client.SetReadBuffer(16 << 10)
	const all = 4 << 20
	sent := make(chan error, 1)
	go func() {
		_, err := slow.engine.Write(make([]byte, all))
		sent <- err
	}()
	testwait.Until(t, "the engine is read", func() bool { return slow.h.count() > 0 })
	taken := testwait.Settled(t, 50*time.Millisecond, "what is read of the engine", slow.h.count)
	t.Logf("%d KiB taken of %d KiB, for a client that reads nothing", taken>>10, all>>10)
	if taken > 256<<10 {
		t.Errorf("%d bytes taken, with 64 KiB in sockets and %d in a read", taken, readSize)
	}
	for range 50 {
		fast.send("x")
		fast.expectReceived("x")
	}
	// It reads on: everything comes, in order and whole.
	_ = slow.client.SetReadDeadline(time.Now().Add(testTimeout))
	if n, err := io.CopyN(io.Discard, slow.client, all); err != nil || n != all {
		t.Fatal(n, err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	slow.send("end$")
	slow.expectReceived("end$")
	if e := slow.expectEnd(Done); e.Sent != all+4 || e.Unsent != nil {
		t.Errorf("%+v", e)
	}
}

// A client that takes nothing is cut after WriteTimeout; one that takes a little stays.
func TestStalledReader(t *testing.T) {
	t.Parallel()
	s := begin(t, 1)
	const limit = 2 * time.Second // a machine may stand still for a while
	stalled := open(t, s, func(t *Task) { t.WriteTimeout = limit })
	slow := open(t, s, func(t *Task) { t.WriteTimeout = limit })
	for _, st := range []*stream{stalled, slow} {
		_ = st.client.SetReadBuffer(4 << 10)
		go func() {
			_, _ = st.engine.Write(make([]byte, 16<<20))
			_ = st.engine.Close()
		}()
	}
	began := time.Now()
	buf := make([]byte, 256<<10)
	for time.Since(began) < 3*limit/2 {
		if _, err := io.ReadFull(slow.client, buf); err != nil {
			t.Fatal(err)
		}
		testwait.Pace(limit / 10)
	}
	e := stalled.expectEnd(SendStalled)
	e.Release()
	slow.expectOpen()
}

// For a client that is slow at most what one small read brings is held, and that only where
// nobody could know that it is: where more comes at once it is read as the socket has room,
// and what is left stays at the engine.
func TestSlowReaderUsesLittleMemory(t *testing.T) {
	t.Parallel()
	budget := membudget.NewBudget(1 << 20)
	s, err := Start(Options{Loops: 1, Tick: 10 * time.Millisecond, Budget: budget})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	slow := open(t, s, func(t *Task) { _ = unix.SetsockoptInt(t.Out, unix.SOL_SOCKET, unix.SO_SNDBUF, 96<<10) })
	_ = slow.client.SetReadBuffer(16 << 10)
	const all, piece = 4 << 20, 16 << 10
	go func() { _, _ = slow.engine.Write(make([]byte, all)) }()
	testwait.Until(t, "the engine is read", func() bool { return slow.h.count() > 0 })
	taken := testwait.Settled(t, 50*time.Millisecond, "what is read of the engine", slow.h.count)
	t.Logf("%d KiB taken, %d bytes held", taken>>10, budget.Used())
	most := 0
	for read := 0; read < all; read += piece {
		_ = slow.client.SetReadDeadline(time.Now().Add(testTimeout))
		if _, err := io.CopyN(io.Discard, slow.client, piece); err != nil {
			t.Fatal(err)
		}
		testwait.Pace(100 * time.Microsecond)
		most = max(most, int(budget.Used()))
	}
	if peak := budget.Peak(); peak > smallRead {
		t.Errorf("%d bytes held for a client that reads slowly, want at most %d", peak, smallRead)
	}
	if most > 0 {
		t.Errorf("%d bytes held for a client that is known to be slow, want none", most)
	}
}

// Buffered bytes count in a budget; a slow client beyond it is cancelled, others
// are not, and everything is given back.
func TestUnsentUsesBudget(t *testing.T) {
	t.Parallel()
	budget := membudget.NewBudget(512 << 10)
	s, err := Start(Options{Loops: 1, Tick: 10 * time.Millisecond, Budget: budget})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	small := func(t *Task) { _ = unix.SetsockoptInt(t.Out, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<10) }
	slow, fast, large := open(t, s, small), open(t, s, small), open(t, s, small)
	for _, st := range []*stream{slow, large} {
		_ = st.client.SetReadBuffer(4 << 10)
	}
	// As a Rewriter's output may be larger than what was read.
	slow.h.repeat.Store(8)
	large.h.repeat.Store(128)
	const some = 25 << 10 // with its small buffers, the client takes seconds for more
	_, _ = slow.engine.Write(make([]byte, some))
	testwait.Until(t, "something is held", func() bool { return budget.Used() > 0 })
	go func() { _, _ = large.engine.Write(make([]byte, 8<<20)) }()
	e := large.expectEnd(BudgetExhausted)
	e.Release()
	rest := budget.Limit() - budget.Used()
	if !budget.Acquire(rest) {
		t.Fatalf("%d of %d used", budget.Used(), budget.Limit())
	}
	fast.send("x")
	fast.expectReceived("x")
	late := open(t, s, small)
	_ = late.client.SetReadBuffer(4 << 10)
	_, _ = late.engine.Write(make([]byte, 30<<10))
	late.expectOpen()
	budget.Release(rest)
	slow.expectOpen()
	_ = slow.client.SetReadDeadline(time.Now().Add(testTimeout))
	if n, err := io.CopyN(io.Discard, slow.client, 8*some); err != nil {
		t.Fatal(n, err)
	}
	testwait.Until(t, "all is given back", func() bool { return budget.Used() == 0 })
}

// Bytes that a client has not read when the engine is done are released at the end.
func TestUnsentAtTheEnd(t *testing.T) {
	t.Parallel()
	s := begin(t, 1)
	st := prepare(t)
	_ = unix.SetsockoptInt(st.task.Out, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<10)
	_ = st.client.SetReadBuffer(4 << 10)
	full := 0 // of what was sent before
	for n := 0; n >= 0; full += max(n, 0) {
		n, _ = unix.Write(st.task.Out, make([]byte, 4<<10))
	}
	const most = smallRead - 1 // one read has it, and the end
	_, _ = st.engine.Write(make([]byte, most))
	st.send("$")
	testwait.Until(t, "all has come", func() bool {
		n, err := unix.IoctlGetInt(st.task.In, unix.TIOCINQ)
		return err == nil && n == most+1
	})
	s.Attach(st.task)
	e := st.expectEnd(Done)
	if e.Unsent == nil || int(e.Sent)+len(e.Unsent.B) != most+1 {
		t.Fatalf("%d sent, held %v", e.Sent, e.Unsent)
	}
	e.Release()
	if n, err := io.CopyN(io.Discard, st.client, int64(full)+e.Sent); err != nil {
		t.Error(n, err)
	}
}
