package kvevents

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// These are orders of events by which a feed could be live and wrong, or live with
// nobody at the other end.

// staysFalse checks that a state does not come while what should not lead to it is in progress.
func (r *feedHarness) staysFalse(s worker.FeedState, within time.Duration) {
	r.t.Helper()
	testwait.Holds(r.t, within, fmt.Sprintf("the feed is not %v", s), func() bool { return r.state() != s })
}

// A retry that works while the connection is lost brings what is held, but nobody
// would hear if that changed.
func TestRetryWhileDisconnected(t *testing.T) {
	e := newEngine(t, true)
	e.set(func() { e.unresponsive = true })
	s := newEventWriter(31, 1)
	all := batches(s, 20)
	for _, b := range all {
		e.store(b)
	}
	r := newFeedHarness(t, e, func(o *Options) { o.ReplayTimeout = 50 * time.Millisecond })
	r.start()
	e.subscribed()
	r.await("replay_failures", 1)
	e.closePublisher()
	e.set(func() { e.unresponsive = false })
	r.await("replayed_batches", len(all))
	r.awaitState(worker.FeedBroken)
	r.staysFalse(worker.FeedLive, 300*time.Millisecond)
	r.indexEquals(all...)
	b := s.batch()
	all = append(all, b)
	e.store(b) // published to nobody
	e.open(e.Endpoint)
	r.awaitState(worker.FeedLive)
	r.indexEquals(all...)
}

// stepped is a feed that the test's own goroutine drives.
func (r *feedHarness) stepped() *feed {
	r.t.Helper()
	f, err := newFeed(r.feeds, r.src)
	if err != nil {
		r.t.Fatal(err)
	}
	f.mu.Lock() // it is the test's, not the poller's
	r.t.Cleanup(f.close)
	return f
}

// A message published between the end of a connection and the next one reaches no subscriber, and
// no gap shows it.
func TestReconnect(t *testing.T) {
	e := newEngine(t, true)
	r := newFeedHarness(t, e, func(o *Options) { o.TailCheck = time.Hour })
	f := r.stepped()
	s := newEventWriter(32, 1)
	all := batches(s, 10)
	for _, b := range all {
		e.store(b)
	}
	step := func(what string, ok func() bool) {
		t.Helper()
		testwait.Until(t, what, func() bool {
			f.watchConnection()
			f.drain()
			if f.connected && !f.known {
				f.startPosition()
			}
			f.flush()
			return ok()
		})
	}
	step("live", func() bool { return r.state() == worker.FeedLive })
	e.subscribed()
	f.markEnded(f.conns[0], errConnectionLost)
	b := s.batch()
	all = append(all, b)
	e.store(b)
	e.subscribed()
	want := r.describe(r.oracle(all...))
	step("what was published in between", func() bool { return r.describe(r.index) == want && r.state() == worker.FeedLive })
}

// A live message of the previous process, left over from a connection that is lost, does
// not show that a connection exists.
func TestLeftoversOfALostConnection(t *testing.T) {
	for _, replay := range []bool{true, false} {
		e := newEngine(t, replay)
		r := newFeedHarness(t, e, nil)
		f := r.stepped()
		testwait.Until(t, "connected", func() bool { f.watchConnection(); return f.connected })
		f.startPosition()
		e.subscribed()
		for len(f.wakeCh) > 0 {
			<-f.wakeCh
		}
		all := batches(newEventWriter(33, 1), 6)
		for _, b := range all[:2] {
			e.store(b) // lost, so that the next shows a gap
		}
		for _, b := range all[2:] {
			e.publish(b)
		}
		select { // nobody else rings
		case <-f.wakeCh:
		case <-time.After(20 * time.Second):
			t.Fatal("nothing comes")
		}
		e.closePublisher()
		testwait.Until(t, "the loss is known", func() bool { f.watchConnection(); return !f.connected })
		testwait.Holds(t, 100*time.Millisecond, fmt.Sprintf("replay %v: it is not live without a connection", replay), func() bool {
			f.drain()
			return r.state() != worker.FeedLive
		})
	}
}

// bound is a rig whose engine connects to the feed and has been heard.
func bound(t *testing.T, seed uint64) (e *engine, r *feedHarness, s *eventWriter, all [][]byte) {
	t.Helper()
	e = newEngine(t, true)
	e.closePublisher()
	r = newFeedHarness(t, e, nil)
	r.src.Bind = true
	testwait.Until(t, "bind the feed", func() bool { return r.feeds.Start(r.src) == nil })
	e.connect()
	s = newEventWriter(seed, 1)
	all = batches(s, 5)
	for _, b := range all {
		e.publish(b)
	}
	r.indexEquals(all...)
	r.awaitState(worker.FeedLive)
	return e, r, s, all
}

// questions is how many replays the engine was asked for.
func (e *engine) questions() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.requested)
}

func (e *engine) connect() {
	e.t.Helper()
	e.pub = must(e.ctx.NewSocket(zmq.XPUB))
	e.pub.SetLinger(0)
	if err := e.pub.Connect(e.Endpoint); err != nil {
		e.t.Fatal(err)
	}
	e.subscribed()
}

// Traffic that never pauses does not keep a rank from being believed again after
// a foreign process has left a port of this feed.
func TestStrangerAmidTraffic(t *testing.T) {
	e, r, s, all := bound(t, 34)
	other := must(e.ctx.NewSocket(zmq.XPUB))
	other.SetLinger(0)
	other.SetRcvtimeo(20 * time.Second)
	if err := other.Connect(e.Endpoint); err != nil {
		t.Fatal(err)
	}
	must(other.RecvBytes(0))
	before := e.questions()
	other.Close()
	testwait.Until(t, "proven amid traffic", func() bool {
		b := s.batch()
		all = append(all, b)
		e.publish(b)
		return e.questions() > before && r.state() == worker.FeedLive
	})
	r.indexEquals(all...)
}

// An engine that has left a port of this feed and still answers replays is ignored.
func TestEngineLeavesABoundFeed(t *testing.T) {
	e, r, s, all := bound(t, 35)
	before := e.questions()
	e.pub.Close()
	r.awaitState(worker.FeedBroken)
	testwait.Until(t, "it has been asked", func() bool { return e.questions() > before })
	r.staysFalse(worker.FeedLive, 300*time.Millisecond)
	b := s.batch()
	all = append(all, b)
	e.store(b)
	e.connect()
	r.awaitState(worker.FeedLive)
	r.indexEquals(all...)
}

// A replay that is of another life each time it is asked is given up for a while.
func TestReplayOfRepeatedRestarts(t *testing.T) {
	e := newEngine(t, false)
	router := must(e.ctx.NewSocket(zmq.ROUTER))
	router.SetLinger(0)
	router.SetRcvtimeo(20 * time.Millisecond)
	if err := router.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at := must(router.GetLastEndpoint())
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer router.Close()
		for incarnation := uint64(1); ; {
			select {
			case <-stop:
				return
			default:
			}
			m, err := router.RecvMessageBytes(0)
			if err != nil || len(m) != 3 {
				continue
			}
			incarnation++
			s := newEventWriter(rand.Uint64(), incarnation)
			for _, seq := range []uint64{0, 2} { // number 1 is missing, so it is asked again
				router.SendMessage(m[0], "", binary.BigEndian.AppendUint64(nil, seq), s.batch())
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	r := newFeedHarness(t, e, func(o *Options) { o.RetryMin, o.RetryMax = 20*time.Second, 20*time.Second })
	r.src.ReplayEndpoint = at
	r.start()
	r.awaitState(worker.FeedBroken)
	r.await("replay_failures", 1)
	if cached, n := r.index.CachedBlocks(r.rank.Slot), r.get("restarts"); cached != 0 || n > maxRestarts {
		t.Errorf("%d blocks held after %d lives", cached, n)
	}
}

// A listener that must drop more than the index is notified of a restart before the index is cleared,
// and not of a gap.
func TestOnRestartPrecedesClear(t *testing.T) {
	e := newEngine(t, true)
	var r *feedHarness
	notified := make(chan int, 8)
	r = newFeedHarness(t, e, func(o *Options) {
		o.OnRestart = func(rank *worker.Rank) { notified <- o.Index.CachedBlocks(rank.Slot) }
	})
	s := newEventWriter(36, 1)
	all := batches(s, 10)
	for _, b := range all {
		e.store(b)
	}
	r.start()
	e.subscribed()
	r.indexEquals(all...)
	r.awaitState(worker.FeedLive)
	e.store(s.batch())
	e.publish(s.batch()) // a gap
	r.await("gaps", 1)
	r.awaitState(worker.FeedLive)
	if len(notified) != 0 {
		t.Error("a gap was reported as a restart")
	}
	e.restart()
	e.publish(newEventWriter(37, 2).batch())
	select {
	case cached := <-notified:
		if cached == 0 {
			t.Error("the index was cleared before")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the restart was not reported")
	}
	r.await("restarts", 1)
}
