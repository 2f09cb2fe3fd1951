package kvevents

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

func batches(s *eventWriter, n int) (out [][]byte) {
	for range n {
		out = append(out, s.batch())
	}
	return out
}

// layouts runs a test with both forms of the replay's answer.
func layouts(t *testing.T, run func(t *testing.T, e *engine)) {
	for _, withTopic := range []bool{false, true} {
		t.Run(fmt.Sprintf("topic_frame=%v", withTopic), func(t *testing.T) {
			e := newEngine(t, true)
			e.set(func() { e.withTopic = withTopic })
			run(t, e)
		})
	}
}

func TestLive(t *testing.T) {
	e := newEngine(t, false)
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	if r.state() != worker.FeedSilent {
		t.Errorf("state %v before the first message, of an engine that cannot be asked", r.state())
	}
	all := batches(newEventWriter(1, 1), 200)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
	r.awaitState(worker.FeedLive)
	if got := r.get("batches"); got != 200 || r.get("gaps")+r.get("resets")+r.get("restarts") != 0 {
		t.Errorf("counted %v", r.n)
	}
	if got := r.rank.EventBlockSize.Load(); got != writerBlock {
		t.Errorf("block size %d, want %d", got, writerBlock)
	}
	r.feeds.Stop(r.rank.ID)
	if r.index.Len() != 0 || r.rank.CachedBlocks.Load() != 0 || r.state() != worker.FeedNone {
		t.Errorf("after Stop: %d entries, held %d, state %v", r.index.Len(), r.rank.CachedBlocks.Load(), r.state())
	}
}

func TestStartReplaysEarlierBatches(t *testing.T) {
	layouts(t, func(t *testing.T, e *engine) {
		s := newEventWriter(2, 1)
		all := batches(s, 50)
		for _, b := range all {
			e.store(b)
		}
		r := newFeedHarness(t, e, nil)
		r.start()
		e.subscribed()
		r.awaitState(worker.FeedLive)
		r.indexEquals(all...)
		for _, b := range batches(s, 20) {
			e.publish(b)
			all = append(all, b)
		}
		r.indexEquals(all...)
		if r.get("replayed_batches") < 50 || r.get("restarts")+r.get("resets") != 0 {
			t.Errorf("counted %v", r.n)
		}
	})
}

// Messages that came by replay and also wait in the subscription must be distinguished from the
// beginning of a new life.
func TestLiveCopiesOfReplayedBatches(t *testing.T) {
	e := newEngine(t, true)
	e.set(func() { e.pause = 5 * time.Millisecond })
	s := newEventWriter(3, 1)
	all := batches(s, 40)
	for _, b := range all[:30] {
		e.store(b)
	}
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	for _, b := range all[30:] { // while the replay drips
		e.publish(b)
	}
	r.indexEquals(all...)
	if r.get("restarts")+r.get("resets") != 0 {
		t.Errorf("counted %v", r.n)
	}
}

func TestGapIsReplayed(t *testing.T) {
	layouts(t, func(t *testing.T, e *engine) {
		r := newFeedHarness(t, e, nil)
		r.start()
		e.subscribed()
		r.awaitState(worker.FeedLive)
		all := batches(newEventWriter(4, 1), 100)
		for i, b := range all {
			if i%10 == 3 || i%10 == 4 || i%10 == 9 && i < 99 {
				e.store(b)
			} else {
				e.publish(b)
			}
		}
		r.indexEquals(all...)
		if r.get("gaps")+r.get("tail_checks") == 0 || r.get("resets")+r.get("restarts") != 0 || r.state() != worker.FeedLive {
			t.Errorf("state %v, counted %v", r.state(), r.n)
		}
	})
}

func TestGapTheReplayNoLongerCovers(t *testing.T) {
	layouts(t, func(t *testing.T, e *engine) {
		r := newFeedHarness(t, e, nil)
		r.start()
		e.subscribed()
		r.awaitState(worker.FeedLive)
		all := batches(newEventWriter(5, 1), 60)
		for _, b := range all[:20] {
			e.publish(b)
		}
		r.indexEquals(all[:20]...)
		for _, b := range all[20:59] {
			e.store(b)
		}
		e.set(func() {
			for seq := range uint64(40) {
				delete(e.stored, seq)
			}
		})
		e.publish(all[59])
		r.await("resets", 1)
		r.indexEquals(all[40:]...)
		if r.get("resets") != 1 || r.state() != worker.FeedLive {
			t.Errorf("state %v, counted %v", r.state(), r.n)
		}
	})
}

// An engine that fails to encode a batch leaves a number that nobody has.
func TestPermanentGap(t *testing.T) {
	e := newEngine(t, true)
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedLive)
	all := batches(newEventWriter(6, 1), 40)
	for i, b := range all {
		if i == 25 {
			e.set(func() { e.next++ })
			continue
		}
		e.publish(b)
	}
	r.await("batches", 39)
	r.indexEquals(all[26:]...)
	if r.get("gaps") != 1 || r.get("resets") != 1 || r.get("restarts") != 0 || r.state() != worker.FeedLive {
		t.Errorf("state %v, counted %v", r.state(), r.n)
	}
}

// An engine's socket drops what a slow reader does not take in time; the end of
// an answer then comes with a hole before it.
func TestReplayWithLosses(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(7, 1), 100)
	for _, b := range all {
		e.store(b)
	}
	e.set(func() { e.dropOnce = map[uint64]bool{30: true, 31: true} })
	r := newFeedHarness(t, e, nil)
	r.start()
	r.awaitState(worker.FeedLive)
	r.indexEquals(all...)
	if r.get("resets") != 0 || r.get("replays") < 2 {
		t.Errorf("counted %v", r.n)
	}
}

// A message published between the replay's answer and the subscription's arrival is
// heard by nobody; the feed asks for it though no message follows that would tell.
func TestLostBeforeTheSubscriptionStood(t *testing.T) {
	e := newEngine(t, true)
	s := newEventWriter(6, 1)
	all := batches(s, 4)
	for _, b := range all[:3] {
		e.store(b)
	}
	r := newFeedHarness(t, e, func(o *Options) { o.TailCheck = time.Second })
	r.start()
	r.awaitState(worker.FeedLive)
	e.store(all[3])
	want := r.describe(r.oracle(all...))
	testwait.Until(t, "the batch is asked for", func() bool { return r.describe(r.index) == want })
	if r.get("gaps") != 0 || r.get("tail_checks") == 0 {
		t.Errorf("counted %v, want a tail check and no gap", r.n)
	}
}

// However many messages are damaged on their way, the engine is asked for what they
// said as long as it can tell.
func TestManyDamagedMessages(t *testing.T) {
	e := newEngine(t, true)
	s := newEventWriter(7, 1)
	r := newFeedHarness(t, e, nil)
	r.start()
	r.awaitState(worker.FeedLive)
	e.subscribed()
	var all [][]byte
	for n := range maxResyncs + 4 {
		b := s.batch()
		all = append(all, b)
		e.send(e.store(b), b[:len(b)-1])
		want := r.describe(r.oracle(all...))
		testwait.Until(t, fmt.Sprint("damaged message ", n, " is asked for"), func() bool { return r.get("resyncs") > n && r.describe(r.index) == want })
	}
}

// A replay that takes long is not given up while it brings something.
func TestLongReplay(t *testing.T) {
	e := newEngine(t, true)
	e.set(func() { e.pause = 10 * time.Millisecond })
	s := newEventWriter(5, 1)
	for range 300 {
		e.store(s.batch())
	}
	// All of it takes longer than what is waited for something new.
	r := newFeedHarness(t, e, func(o *Options) { o.ReplayTimeout, o.maxIdleTimeouts = 2*time.Second, 1 })
	r.start()
	testwait.Until(t, "the replay is through", func() bool { return r.state() == worker.FeedLive && r.get("batches") >= 300 })
	if n, f := r.get("replayed_batches"), r.get("replay_failures"); n != 300 || f != 0 {
		t.Errorf("%d batches came by replay, %d replays failed; want 300 and 0", n, f)
	}
}

// The very next message may be lost from a replay like any other.
func TestReplayThatLosesTheNext(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(9, 1), 8)
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedLive)
	for _, b := range all[:5] {
		e.publish(b)
	}
	r.indexEquals(all[:5]...)
	e.store(all[5])
	e.store(all[6])
	e.set(func() { e.dropOnce[5] = true })
	e.publish(all[7])
	r.indexEquals(all...)
	r.awaitState(worker.FeedLive)
	if r.get("resets") != 0 {
		t.Errorf("counted %v, want nothing dropped", r.n)
	}
}

func TestReplayWithAPermanentHole(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(8, 1), 60)
	for _, b := range all {
		e.store(b)
	}
	e.set(func() { delete(e.stored, 30) })
	r := newFeedHarness(t, e, nil)
	r.start()
	r.awaitState(worker.FeedLive)
	r.indexEquals(all[31:]...)
	if r.get("resets") != 1 {
		t.Errorf("counted %v", r.n)
	}
}

func TestGapWithoutReplay(t *testing.T) {
	e := newEngine(t, false)
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	r.awaitOpen()
	all := batches(newEventWriter(9, 1), 60)
	for i, b := range all {
		if i == 30 {
			e.store(b)
		} else {
			e.publish(b)
		}
	}
	r.await("batches", 59)
	r.indexEquals(all[31:]...)
	if r.get("gaps") != 1 || r.get("resets") != 1 || r.state() != worker.FeedLive {
		t.Errorf("state %v, counted %v", r.state(), r.n)
	}
}

// Numbers that begin again are a new life, whatever the connection says.
func TestRestartDetectedBySequence(t *testing.T) {
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay=%v", replay), func(t *testing.T) {
			e := newEngine(t, replay)
			r := newFeedHarness(t, e, nil)
			r.start()
			e.subscribed()
			r.awaitOpen()
			for _, b := range batches(newEventWriter(10, 1), 30) {
				e.publish(b)
			}
			r.await("batches", 30)
			e.restart()
			all := batches(newEventWriter(11, 2), 10)
			for _, b := range all[:4] {
				e.store(b) // before the first that gets through
			}
			from := 4
			if replay {
				from = 0
			}
			for _, b := range all[4:] {
				e.publish(b)
			}
			r.indexEquals(all[from:]...)
			if r.get("restarts") != 1 || r.state() != worker.FeedLive {
				t.Errorf("state %v, counted %v", r.state(), r.n)
			}
		})
	}
}

// After a replay at start no live number is known yet, and a new life must not
// pass for the live copies of what was replayed.
func TestRestartRightAfterReplay(t *testing.T) {
	e := newEngine(t, true)
	for _, b := range batches(newEventWriter(12, 1), 30) {
		e.store(b)
	}
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedLive)
	e.restart()
	all := batches(newEventWriter(13, 2), 5)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
	if r.get("restarts") != 1 {
		t.Errorf("counted %v", r.n)
	}
}

// A new life whose numbers have passed the one waited for shows in nothing but
// the connection.
func TestRestartHiddenBySequence(t *testing.T) {
	for _, replay := range []bool{true, false} {
		for _, published := range []int{3, 20, 40} { // fewer, as many, more than before
			t.Run(fmt.Sprintf("replay=%v/published=%d", replay, published), func(t *testing.T) {
				e := newEngine(t, replay)
				r := newFeedHarness(t, e, nil)
				r.start()
				e.subscribed()
				r.awaitOpen()
				for _, b := range batches(newEventWriter(14, 1), 20) {
					e.publish(b)
				}
				r.await("batches", 20)
				s := newEventWriter(15, 2)
				all := batches(s, published)
				e.reopen(func() {
					e.restart()
					for _, b := range all {
						e.store(b)
					}
				})
				e.subscribed()
				from := 0
				if !replay {
					r.indexEquals()
					from = published
				}
				for _, b := range batches(s, 10) {
					e.publish(b)
					all = append(all, b)
				}
				r.indexEquals(all[from:]...)
				r.awaitState(worker.FeedLive)
			})
		}
	}
}

func TestReconnectToTheSameIncarnation(t *testing.T) {
	e := newEngine(t, true)
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedLive)
	s := newEventWriter(16, 1)
	all := batches(s, 20)
	for _, b := range all {
		e.publish(b)
	}
	r.await("batches", 20)
	e.reopen(func() {
		r.awaitState(worker.FeedBroken) // nothing is believed until the engine has proven itself
		if cached := r.index.CachedBlocks(r.rank.Slot); cached == 0 {
			t.Error("held blocks are dropped before a restart is known")
		}
		b := s.batch()
		e.store(b)
		all = append(all, b)
	})
	e.subscribed()
	for _, b := range batches(s, 5) {
		e.publish(b)
		all = append(all, b)
	}
	r.indexEquals(all...)
	r.awaitState(worker.FeedLive)
	if r.get("restarts")+r.get("resets") != 0 {
		t.Errorf("counted %v", r.n)
	}
}

func TestDeadReplay(t *testing.T) {
	e := newEngine(t, true)
	e.set(func() { e.unresponsive = true })
	s := newEventWriter(17, 1)
	all := batches(s, 20)
	for _, b := range all {
		e.store(b)
	}
	r := newFeedHarness(t, e, func(o *Options) { o.ReplayTimeout = 50 * time.Millisecond })
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedBroken)
	r.await("replay_failures", 2)
	live := batches(newEventWriter(18, 3), 10) // chains of their own
	for _, b := range live {
		e.publish(b)
	}
	r.indexEquals(live...)
	if s := r.state(); s == worker.FeedLive {
		t.Errorf("state %v without a replay", s)
	}
	e.set(func() { e.unresponsive = false })
	r.awaitState(worker.FeedLive)
	r.indexEquals(append(all, live...)...)
}

func TestReplayEndpointNobodyListensAt(t *testing.T) {
	e := newEngine(t, false)
	r := newFeedHarness(t, e, func(o *Options) { o.ReplayTimeout = 50 * time.Millisecond })
	r.src.ReplayEndpoint = "tcp://127.0.0.1:1"
	r.start()
	e.subscribed()
	r.awaitState(worker.FeedBroken)
	all := batches(newEventWriter(19, 1), 10)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
}

// A subscription that overflows while a replay drips loses messages; the gap is
// found and filled.
func TestOverflow(t *testing.T) {
	e := newEngine(t, true)
	e.pub.Close()
	e.openAnywhere(5)
	s := newEventWriter(20, 1)
	all := batches(s, 200)
	ballast := wireBatch(nil, pack(nil, []any{"Ballast", make([]byte, 1<<16)})) // fills the kernel's buffers
	for _, b := range all[:50] {
		e.store(b)
	}
	e.set(func() { e.pause = 10 * time.Millisecond })
	r := newFeedHarness(t, e, func(o *Options) { o.inboxBytes, o.TailCheck = 1<<18, 50*time.Millisecond })
	r.start()
	e.subscribed()
	testwait.Until(t, "a question", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return len(e.requested) > 0 })
	for _, b := range all[50:] {
		e.publish(b)
		for range 4 {
			e.publish(ballast)
		}
	}
	e.set(func() { e.pause = 0 })
	want := r.describe(r.oracle(all...))
	// Nothing more is published that would show what was lost.
	testwait.Until(t, "everything after the flood", func() bool { return r.describe(r.index) == want })
	if r.get("gaps")+r.get("tail_checks") == 0 || r.get("resets")+r.get("restarts") != 0 {
		t.Errorf("counted %v, want a gap and no loss", r.n)
	}
}

func TestBindMode(t *testing.T) {
	e := newEngine(t, true)
	e.closePublisher() // its port is free for the feed now
	r := newFeedHarness(t, e, nil)
	r.src.Bind = true
	r.start()
	e.pub = must(e.ctx.NewSocket(zmq.XPUB))
	e.pub.SetLinger(0)
	if err := e.pub.Connect(e.Endpoint); err != nil {
		t.Fatal(err)
	}
	e.subscribed()
	all := batches(newEventWriter(21, 1), 10)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
	r.awaitState(worker.FeedLive)
}

// TestBindIsRetried: an endpoint that another process has, as the previous router has it during
// a hot restart, is bound when that process releases it.
func TestBindIsRetried(t *testing.T) {
	e := newEngine(t, false)
	e.closePublisher()
	previous := newFeedHarness(t, e, nil)
	previous.src.Bind = true
	previous.start()
	addr := strings.TrimPrefix(e.Endpoint, "tcp://")
	testwait.Until(t, "the previous process listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	r := newFeedHarness(t, e, nil)
	r.src.Bind = true
	r.start()
	testwait.Until(t, "the first attempt fails", func() bool {
		r.feeds.mu.Lock()
		defer r.feeds.mu.Unlock()
		return r.feeds.feeds[r.rank.ID].connError() != nil
	})
	previous.feeds.ReleaseBound()
	e.pub = must(e.ctx.NewSocket(zmq.XPUB))
	e.pub.SetLinger(0)
	if err := e.pub.Connect(e.Endpoint); err != nil {
		t.Fatal(err)
	}
	e.subscribed()
	all := batches(newEventWriter(21, 1), 5)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
}

// Another peer that connects to a port of the feed, such as a health probe or a
// second engine before the first is known to be gone, and leaves again, does not cost
// the rank its trust for good.
func TestStrangersAtABoundFeed(t *testing.T) {
	for name, visit := range map[string]func(e *engine, addr string){
		"connects and leaves": func(e *engine, addr string) { must(net.Dial("tcp", addr)).Close() },
		"speaks HTTP": func(e *engine, addr string) {
			c := must(net.Dial("tcp", addr))
			c.Write([]byte("GET / HTTP/1.0\r\n\r\n"))
			testwait.Pace(50 * time.Millisecond)
			c.Close()
		},
		"is an engine too": func(e *engine, addr string) {
			other := must(e.ctx.NewSocket(zmq.XPUB))
			other.SetLinger(0)
			other.SetRcvtimeo(10 * time.Second)
			if err := other.Connect(e.Endpoint); err != nil {
				e.t.Fatal(err)
			}
			must(other.RecvBytes(0))
			other.Close()
		},
	} {
		for _, replay := range []bool{true, false} {
			if !replay && name == "is an engine too" {
				continue // which of the two it was nobody can tell
			}
			t.Run(fmt.Sprintf("%s, replay %v", name, replay), func(t *testing.T) {
				e := newEngine(t, replay)
				e.closePublisher()
				r := newFeedHarness(t, e, nil)
				r.src.Bind = true
				r.start()
				e.pub = must(e.ctx.NewSocket(zmq.XPUB))
				e.pub.SetLinger(0)
				if err := e.pub.Connect(e.Endpoint); err != nil {
					t.Fatal(err)
				}
				e.subscribed()
				all := batches(newEventWriter(21, 1), 10)
				for _, b := range all[:5] {
					e.publish(b)
				}
				r.indexEquals(all[:5]...)
				r.awaitState(worker.FeedLive)
				visit(e, strings.TrimPrefix(e.Endpoint, "tcp://"))
				time.Sleep(300 * time.Millisecond) // its effect on the feed is over
				for _, b := range all[5:] {
					e.publish(b)
				}
				r.indexEquals(all...)
				r.awaitState(worker.FeedLive)
			})
		}
	}
}

func TestEngineStartsLate(t *testing.T) {
	e := newEngine(t, true)
	e.closePublisher()
	r := newFeedHarness(t, e, nil)
	r.start()
	if r.state() != worker.FeedSyncing {
		t.Errorf("state %v with nobody there", r.state())
	}
	all := batches(newEventWriter(22, 1), 10)
	for _, b := range all {
		e.store(b)
	}
	e.open(e.Endpoint)
	r.awaitState(worker.FeedLive)
	r.indexEquals(all...)
}

// An engine whose endpoint does not speak ZMQ does not stay pending without end.
func TestNoPublisher(t *testing.T) {
	ln := must(net.Listen("tcp", "127.0.0.1:0"))
	defer ln.Close() // takes connections, and says nothing
	e := newEngine(t, true)
	var log syncLines
	r := newFeedHarness(t, e, func(o *Options) {
		o.ReplayTimeout = 200 * time.Millisecond
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
	})
	there := r.src.Endpoint
	r.src.Endpoint = "tcp://" + ln.Addr().String()
	r.start()
	r.awaitState(worker.FeedBroken)
	if log.n.Load() != 1 {
		t.Errorf("%d lines logged, want one", log.n.Load())
	}
	r.src.Endpoint = there
	r.start()
	r.awaitState(worker.FeedLive)
}

// A name may have addresses of both families where the engine listens on one.
func TestHostNames(t *testing.T) {
	e := newEngine(t, true)
	all := batches(newEventWriter(23, 1), 10)
	for _, b := range all {
		e.store(b)
	}
	r := newFeedHarness(t, e, nil)
	r.src.Endpoint = strings.Replace(e.Endpoint, "127.0.0.1", "localhost", 1)
	r.src.ReplayEndpoint = strings.Replace(e.Replay, "127.0.0.1", "localhost", 1)
	r.start()
	r.awaitState(worker.FeedLive)
	r.indexEquals(all...)
}

func TestIPv6(t *testing.T) {
	e := newEngine(t, false)
	e.pub.Close()
	e.pub = must(e.ctx.NewSocket(zmq.XPUB))
	e.pub.SetLinger(0)
	e.pub.SetIpv6(true)
	if err := e.pub.Bind("tcp://[::1]:*"); err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	e.Endpoint = must(e.pub.GetLastEndpoint())
	r := newFeedHarness(t, e, nil)
	r.start()
	e.subscribed()
	r.awaitOpen()
	all := batches(newEventWriter(24, 1), 10)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
}
