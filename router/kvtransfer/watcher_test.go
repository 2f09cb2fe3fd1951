package kvtransfer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/nixl"
	"sluice/router/kvtransfer/completion"
	"sluice/router/worker"
)

func start(t testing.TB, opt Options) *Watcher {
	t.Helper()
	w, err := Start(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

func startOverZMQ(t testing.TB) *Watcher {
	t.Helper()
	w := start(t, Options{Endpoint: "tcp://127.0.0.1:*", Slots: 64, retry: 20 * time.Millisecond})
	testwait.Until(t, "ZMQ is up", func() bool { return w.Up(nixl.TierZMQ) })
	return w
}

// push connects as a connector does.
func push(t testing.TB, endpoint string) *zmq.Socket {
	t.Helper()
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	s, err := ctx.NewSocket(zmq.PUSH)
	if err == nil {
		err = s.SetLinger(0)
	}
	if err == nil {
		err = s.SetImmediate(true)
	}
	if err == nil {
		err = s.Connect(endpoint)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(); ctx.Term() })
	return s
}

func line(event, status, request string, bytes int, micros int) []byte {
	return fmt.Appendf(nil, "SLUICE1 %s %s - - %d %d 0/0/1 d0 cmpl-%s-0-0badcafe", event, status, bytes, micros, request)
}

func send(t testing.TB, s *zmq.Socket, m []byte) {
	t.Helper()
	if _, err := s.SendBytes(m, 0); err != nil {
		t.Fatal(err)
	}
}

func rank(slot int, id string) *worker.Rank {
	return &worker.Rank{ID: worker.ID{Worker: id}, Slot: worker.Slot(slot)}
}

func TestNoTierCostsNothing(t *testing.T) {
	w, err := Start(Options{})
	if w != nil || err != nil {
		t.Fatalf("%v, %v", w, err)
	}
	if w.Open("r", time.Now()) != nil || w.RatesFrom(rank(1, "p")) != nil || w.HandleMessage([]byte("x")) || w.TransferRates() != nil {
		t.Error("a nil Watch does something")
	}
	var wait *Transfer
	wait.AcquireSlot(time.Second)
	wait.Guard(nil, 0)
	if wait.LostReason() != "" || !wait.Unguard() || wait.Close() != (completion.Result{}) || wait.AppendSlot(nil) != nil {
		t.Error("a nil Wait does something")
	}
	if s := w.Status(); s.Active != nixl.TierHTTP || len(s.Tiers) != 4 {
		t.Errorf("%+v", s)
	}
	if _, err := w.Document(netip.Addr{}); err != ErrNoTier {
		t.Errorf("a document: %v", err)
	}
	w.Close()
}

// TestOverZMQ: reports over ZMQ complete transfers, as a line or as a slot's record, and update
// the rate of the pair.
func TestOverZMQ(t *testing.T) {
	w := startOverZMQ(t)
	s := push(t, w.zmq.at())
	wait := w.Open("a", time.Now())
	send(t, s, line("recv", "ok", "a", 1<<20, 500))
	testwait.Until(t, "the report is booked", func() bool { return wait.expected.Result().State == completion.Done })
	res := wait.Close()
	if res.Bytes != 1<<20 || res.Duration != 500*time.Microsecond || res.Elapsed <= 0 {
		t.Errorf("%+v", res)
	}
	p, d := rank(3, "p0"), rank(5, "d0")
	w.RecordTransfer(p, d, 1000, &res)
	if ns := w.RatesFrom(p).NSPerToken(5); ns < 499 || ns > 501 {
		t.Errorf("%v ns a token, want 500", ns)
	}
	w.ForgetRank(d)
	if len(w.TransferRates()) != 0 {
		t.Error("a pair with a rank that left")
	}

	wait = w.Open("b", time.Now())
	wait.AcquireSlot(time.Minute)
	if completionSlot := string(wait.AppendSlot([]byte("x"))); !strings.HasPrefix(completionSlot, `x{"slot":`) || !strings.HasSuffix(completionSlot, fmt.Sprintf(`","board":%d}`, w.messageBoard.ID())) {
		t.Errorf("completion slot %s", completionSlot)
	}
	rec := wait.slot.Record(nixl.Completion{Request: wait.slot.Request, Bytes: 7, Duration: time.Millisecond})
	k := wait.slot.Index
	message := append([]byte{'S', 'L', 'B', '1', byte(k), byte(k >> 8), byte(k >> 16), byte(k >> 24)}, rec[:]...)
	forged := append([]byte(nil), message...)
	forged[8+8]++ // changes the nonce; the checksum fails too, as for a guessed record
	send(t, s, forged)
	send(t, s, message)
	testwait.Until(t, "the record is booked", func() bool { return wait.expected.Result().State == completion.Done })
	if wait.Close(); w.Reports()["refused"] != 1 || w.Reports()["recv_ok"] != 2 {
		t.Errorf("%v", w.Reports())
	}
	send(t, s, []byte("nonsense"))
	send(t, s, line("recv", "ok", "nobody", 1, 1))
	testwait.Until(t, "what fits nothing is counted", func() bool { r := w.Reports(); return r["malformed"] == 1 && r["unknown"] == 1 })
	if n := w.Pending(); n != 0 {
		t.Errorf("%d waits are open", n)
	}
	if o := w.Outcomes(); o["done"] != 2 || o["unknown"] != 0 {
		t.Errorf("%v", o)
	}
}

// TestGuard: a lost hand-over cancels the guarded call, whichever of the two comes first.
func TestGuard(t *testing.T) {
	w := startOverZMQ(t)
	for _, k := range []struct{ event, status, why string }{{"recv", "failed", "failed"}, {"expired", "ok", "expired"}} {
		for _, before := range []bool{false, true} {
			wait, call := w.Open("g", time.Now()), new(upstream.Call)
			if before {
				w.handleMessage(line(k.event, k.status, "g", 0, 0))
			}
			wait.Guard(call, 0)
			if !before {
				w.handleMessage(line(k.event, k.status, "g", 0, 0))
			}
			if !call.Cancelled() || wait.LostReason() != k.why || wait.Unguard() {
				t.Errorf("%v, before %v: cut %v, lost %q", k, before, call.Cancelled(), wait.LostReason())
			}
			wait.Close()
		}
	}
	// Calls that were unguarded are not cancelled, nor are calls of a closed transfer.
	wait, call := w.Open("g", time.Now()), new(upstream.Call)
	wait.Guard(call, time.Minute)
	if !wait.Unguard() {
		t.Error("lost without a word")
	}
	w.handleMessage(line("recv", "failed", "g", 0, 0))
	wait.Close()
	w.handleMessage(line("recv", "failed", "g", 0, 0))
	if call.Cancelled() {
		t.Error("a call that had been let go was cut")
	}
	// A stall.
	wait, call = w.Open("g", time.Now()), new(upstream.Call)
	wait.Guard(call, time.Millisecond)
	testwait.Until(t, "the stall cuts", call.Cancelled)
	if wait.LostReason() != "stalled" {
		t.Errorf("lost %q", wait.LostReason())
	}
	wait.Close()
	// A report in time prevents the stall.
	wait, call = w.Open("g", time.Now()), new(upstream.Call)
	w.handleMessage(line("recv", "ok", "g", 0, 0))
	wait.Guard(call, time.Millisecond)
	testwait.Holds(t, 20*time.Millisecond, "the call is not cut, because the KV has come", func() bool { return !call.Cancelled() && wait.LostReason() == "" })
	wait.Close()
	// The deadline of the previous hand-over does not cancel the call of the next.
	for range 20 {
		wait, call = w.Open("g", time.Now()), new(upstream.Call)
		wait.Guard(call, time.Millisecond)
		testwait.Pace(time.Duration(rand.IntN(60)) * time.Millisecond)
		let := wait.Unguard()
		wait.Close()
		next, other := w.Open("g", time.Now()), new(upstream.Call)
		next.Guard(other, time.Minute)
		if !let {
			testwait.Until(t, "the call is cut", call.Cancelled)
		}
		if call.Cancelled() == let || other.Cancelled() || next.LostReason() != "" {
			t.Fatalf("let go: %v, cut: %v; the next: cut %v, lost %q", let, call.Cancelled(), other.Cancelled(), next.LostReason())
		}
		next.Close()
	}
	if o := w.Outcomes(); o["stalled"] < 1 || o["expired"] != 2 || o["failed"] != 3 {
		t.Errorf("%v", o)
	}
}

// TestAwaitLoss: AwaitLoss waits briefly for a report that arrives just after the engine's
// answer. A busy machine may make some reports later than that, but not most of them.
func TestAwaitLoss(t *testing.T) {
	w := startOverZMQ(t)
	const tries = 9
	seen := 0
	for range tries {
		wait := w.Open("a", time.Now())
		if wait.AwaitLoss() {
			t.Error("lost without a word")
		}
		notified := make(chan struct{})
		go func() {
			defer close(notified)
			testwait.Pace(2 * time.Millisecond)
			w.handleMessage(line("recv", "failed", "a", 0, 0))
		}()
		lost := wait.AwaitLoss()
		<-notified
		wait.Close()
		if lost {
			seen++
		}
	}
	if seen <= tries/2 {
		t.Errorf("%d of %d reports were waited for", seen, tries)
	}
}

// TestCloseOnReport: a report that arrives after the end of its request is still recorded for
// lingerFor.
func TestCloseOnReport(t *testing.T) {
	w := startOverZMQ(t)
	got := make(chan completion.Result, 1)
	late := func(r completion.Result) { got <- r }
	stock := w.Open("stock", time.Now())
	if stock.CloseOnReport(late) {
		t.Error("it waits for an engine that is not known to tell")
	}
	stock.Close()
	for _, notified := range []bool{true, false} {
		wait := w.Open("late", time.Now())
		wait.AcquireSlot(time.Minute)
		began := time.Now()
		if !wait.CloseOnReport(late) {
			t.Fatal("it does not linger")
		}
		if notified {
			w.handleMessage(line("recv", "failed", "late", 7, 9)) // ignored: the line names no slot
			w.handleMessage(fmt.Appendf(nil, "SLUICE1 recv ok %d %016x 7 9 0/0/1 d0 cmpl-late-0-0badcafe", wait.slot.Index, wait.slot.Nonce))
		}
		r := <-got
		if took := time.Since(began); notified != (r.State == completion.Done) || notified != (r.Bytes == 7) || took > lingerFor+5*time.Second || !notified && took < lingerFor {
			t.Errorf("notified %v: %+v after %s", notified, r, took)
		}
	}
	if n := w.Reports()["refused"]; n != 1 {
		t.Errorf("%d refused, want the line without a completion slot", n)
	}
	if o := w.Outcomes(); o["done"] != 1 || o["unknown"] != 2 || w.Pending() != 0 || w.lingering.Load() != 0 {
		t.Errorf("%v, %d open, %d linger", o, w.Pending(), w.lingering.Load())
	}
}

// TestZMQComesBack: a port in use keeps the tier down until the port is free, and the router
// continues.
func TestZMQComesBack(t *testing.T) {
	other := startOverZMQ(t)
	at := other.zmq.at()
	w := start(t, Options{Endpoint: at, Slots: 64, retry: 10 * time.Millisecond})
	testwait.Until(t, "the tier says why it is down", func() bool {
		s, why := w.zmq.Status()
		return s == nixl.TierDown && strings.Contains(why, "in use")
	})
	if w.Open("x", time.Now()) != nil {
		t.Error("a wait is opened although nobody could tell")
	}
	if active := w.Status(); active.Active != nixl.TierHTTP || !strings.Contains(active.Reason, "zmq is down") {
		t.Errorf("%+v", active)
	}
	d, _ := w.Document(netip.Addr{})
	other.Close()
	testwait.Until(t, "the tier is up", func() bool { return w.Up(nixl.TierZMQ) })
	e, _ := w.Document(netip.Addr{})
	if d.ZMQ != nil || e.ZMQ == nil || d.Epoch == e.Epoch {
		t.Errorf("documents: %+v then %+v", d, e)
	}
	wait := w.Open("x", time.Now())
	if wait == nil {
		t.Fatal("no wait although the tier is up")
	}
	wait.Close()
}

// TestNetworks: a sender outside the networks cannot deliver a report.
func TestNetworks(t *testing.T) {
	w := start(t, Options{Endpoint: "tcp://127.0.0.1:*", Networks: []netip.Prefix{netip.MustParsePrefix("10.9.8.0/24")}, Slots: 64})
	testwait.Until(t, "ZMQ is up", func() bool { return w.Up(nixl.TierZMQ) })
	s := push(t, w.zmq.at())
	s.SetSndtimeo(300 * time.Millisecond)
	s.SendBytes([]byte("nonsense"), 0)
	testwait.Holds(t, 50*time.Millisecond, "no frame from outside of the networks comes through", func() bool { return w.Reports()["malformed"] == 0 })
	in := start(t, Options{Endpoint: "tcp://127.0.0.1:*", Networks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}, Slots: 64})
	testwait.Until(t, "ZMQ is up", func() bool { return in.Up(nixl.TierZMQ) })
	send(t, push(t, in.zmq.at()), []byte("nonsense"))
	testwait.Until(t, "a frame from inside comes through", func() bool { return in.Reports()["malformed"] == 1 })
}

// TestNoNetworkFits: a socket that no sender in the networks could reach is not bound at all.
func TestNoNetworkFits(t *testing.T) {
	w := start(t, Options{Endpoint: "tcp://127.0.0.1:*", Networks: []netip.Prefix{netip.MustParsePrefix("fd00::/8")}, Slots: 64})
	testwait.Until(t, "the tier says why it is down", func() bool {
		s, why := w.zmq.Status()
		return s == nixl.TierDown && strings.Contains(why, "fd00::/8")
	})
}

func TestReachable(t *testing.T) {
	at := netip.MustParseAddr("10.0.0.7")
	for _, k := range []struct{ bound, want string }{
		{"tcp://0.0.0.0:8091", "tcp://10.0.0.7:8091"}, {"tcp://*:8091", "tcp://10.0.0.7:8091"}, {"tcp://[::]:8091", "tcp://10.0.0.7:8091"},
		{"tcp://10.1.1.1:8091", "tcp://10.1.1.1:8091"}, {"tcp://router:8091", "tcp://router:8091"},
	} {
		if got := replaceWildcard(k.bound, at); got != k.want {
			t.Errorf("%s: %s, want %s", k.bound, got, k.want)
		}
	}
	if s := fmt.Sprintf("%v", &Document{Epoch: "e", NIXL: &DocumentNIXL{Metadata: []byte("secret")}}); strings.Contains(s, "secret") || strings.Contains(s, "115") {
		t.Errorf("printed: %s", s)
	}
}

// BenchmarkWatched measures the cost of a watched hand-over while a tier is up. The Runner
// passes the current time, because it already has it.
func BenchmarkWatched(b *testing.B) {
	w := startOverZMQ(b)
	p, d := rank(3, "p0"), rank(5, "d0")
	call := new(upstream.Call)
	room := make([]byte, 0, 256)
	now := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		wait := w.Open("bench", now)
		wait.AcquireSlot(time.Minute)
		room = wait.AppendSlot(room[:0])
		wait.Guard(call, 0)
		wait.Unguard()
		res := wait.Close()
		w.RecordTransfer(p, d, 1000, &res)
	}
}

func TestWatchedAllocatesNothing(t *testing.T) {
	w := startOverZMQ(t)
	call := new(upstream.Call)
	room := make([]byte, 0, 256)
	n := testing.AllocsPerRun(200, func() {
		wait := w.Open("bench", time.Now())
		wait.AcquireSlot(time.Minute)
		room = wait.AppendSlot(room[:0])
		wait.Guard(call, time.Minute)
		wait.Unguard()
		res := completion.Result{State: completion.Done, Duration: time.Millisecond, Bytes: 1 << 20}
		w.RecordTransfer(rankA, rankB, 1000, &res)
		wait.Close()
	})
	if n != 0 && !raceOn {
		t.Errorf("%v allocations for a watched request", n)
	}
}

var rankA, rankB = rank(3, "p0"), rank(5, "d0")

// TestCancelIsOfItsTransfer: the goroutine that cancels a stalled call may be preempted right
// after the cancellation. By then the Transfer may belong to another request, which must not be
// reported lost.
func TestCancelIsOfItsTransfer(t *testing.T) {
	w := startOverZMQ(t)
	wait := w.Open("first", time.Now())
	var begin, done atomic.Pointer[upstream.Call]
	until := func(ok func() bool) { // spins, to follow closely on two processors
		for n := 0; !ok(); n++ {
			if n > 1000 {
				runtime.Gosched()
			}
		}
	}
	go func() {
		for last := (*upstream.Call)(nil); ; done.Store(last) {
			until(func() bool { return begin.Load() != last })
			if last = begin.Load(); last == over {
				return
			}
			wait.cancelCall(last)
		}
	}()
	defer begin.Store(over)
	for i, end := 0, time.Now().Add(time.Second); i < 200_000 && time.Now().Before(end); i++ {
		call := new(upstream.Call)
		wait.Guard(call, 0)
		begin.Store(call)
		until(func() bool { return wait.call.Load() == cancelledCall })
		// The same operations as Close and Open.
		if wait.Unguard() || wait.LostReason() == "" {
			t.Fatal("the cut is not known")
		}
		wait.call.Store(nil)
		wait.lost.Store(false)
		until(func() bool { return done.Load() == call })
		if wait.LostReason() != "" {
			t.Fatalf("round %d: a hand-over without a notification is lost", i)
		}
	}
}

var over = new(upstream.Call)
