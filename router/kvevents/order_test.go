package kvevents

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/router/worker"
)

// These are orders of events by which a feed could be live and wrong, or live with
// nobody at the other end.

// never checks that a state does not come while what should not lead to it is under way.
func (r *rig) never(s worker.FeedState, within time.Duration) {
	r.t.Helper()
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if r.state() == s {
			r.t.Fatalf("the feed is %v", s)
		}
	}
}

// A retry that works while the connection is lost brings what is held, but nobody
// would hear if that changed.
func TestRetryWhileDisconnected(t *testing.T) {
	e := newEngine(t, true)
	e.set(func() { e.deaf = true })
	s := newScribe(31, 1)
	all := batches(s, 20)
	for _, b := range all {
		e.keep(b)
	}
	r := newRig(t, e, func(o *Options) { o.ReplayTimeout = 50 * time.Millisecond })
	r.start()
	e.subscribed()
	r.await("replay_failures", 1)
	e.leave()
	e.set(func() { e.deaf = false })
	r.await("replayed_batches", len(all))
	r.awaitState(worker.FeedBroken)
	r.never(worker.FeedLive, 300*time.Millisecond)
	r.holds(all...)
	b := s.batch()
	all = append(all, b)
	e.keep(b) // published to nobody
	e.open(e.Endpoint)
	r.awaitState(worker.FeedLive)
	r.holds(all...)
}

// stepped is a feed that the test's own goroutine drives.
func (r *rig) stepped() *feed {
	r.t.Helper()
	f, err := newFeed(r.feeds, r.src)
	if err != nil {
		r.t.Fatal(err)
	}
	f.mu.Lock() // it is the test's, not the poller's
	r.t.Cleanup(f.close)
	return f
}

// What is published between the end of a connection and the next one reaches nobody, and
// no gap tells of it.
func TestCutAndMadeAgain(t *testing.T) {
	e := newEngine(t, true)
	r := newRig(t, e, func(o *Options) { o.TailCheck = time.Hour })
	f := r.stepped()
	s := newScribe(32, 1)
	all := batches(s, 10)
	for _, b := range all {
		e.keep(b)
	}
	step := func(what string, ok func() bool) {
		t.Helper()
		eventually(t, what, func() bool {
			f.watchConnection()
			f.drain()
			if f.connected && !f.known {
				f.begin()
			}
			f.flush()
			return ok()
		})
	}
	step("live", func() bool { return r.state() == worker.FeedLive })
	e.subscribed()
	f.ended(f.lines[0], errCut)
	b := s.batch()
	all = append(all, b)
	e.keep(b)
	e.subscribed()
	want := r.describe(r.oracle(all...))
	step("what was published in between", func() bool { return r.describe(r.index) == want && r.state() == worker.FeedLive })
}

// A live message of the life before, left over from a connection that is lost, is
// no sign of a connection.
func TestLeftoversOfALostConnection(t *testing.T) {
	for _, replay := range []bool{true, false} {
		e := newEngine(t, replay)
		r := newRig(t, e, nil)
		f := r.stepped()
		eventually(t, "connected", func() bool { f.watchConnection(); return f.connected })
		f.begin()
		e.subscribed()
		for len(f.bell) > 0 {
			<-f.bell
		}
		all := batches(newScribe(33, 1), 6)
		for _, b := range all[:2] {
			e.keep(b) // lost, so that the next shows a gap
		}
		for _, b := range all[2:] {
			e.publish(b)
		}
		select { // nobody else rings
		case <-f.bell:
		case <-time.After(20 * time.Second):
			t.Fatal("nothing comes")
		}
		e.leave()
		eventually(t, "the loss is known", func() bool { f.watchConnection(); return !f.connected })
		for range 100 {
			f.drain()
			if r.state() == worker.FeedLive {
				t.Fatalf("replay %v: live without a connection", replay)
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// bound is a rig whose engine connects to the feed and has been heard.
func bound(t *testing.T, seed uint64) (e *engine, r *rig, s *scribe, all [][]byte) {
	t.Helper()
	e = newEngine(t, true)
	e.leave()
	r = newRig(t, e, nil)
	r.src.Bind = true
	eventually(t, "bind the feed", func() bool { return r.feeds.Start(r.src) == nil })
	e.connect()
	s = newScribe(seed, 1)
	all = batches(s, 5)
	for _, b := range all {
		e.publish(b)
	}
	r.holds(all...)
	r.awaitState(worker.FeedLive)
	return e, r, s, all
}

// questions is how many replays the engine was asked for.
func (e *engine) questions() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.asked)
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
// somebody else has left a port of ours.
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
	eventually(t, "proven amid traffic", func() bool {
		b := s.batch()
		all = append(all, b)
		e.publish(b)
		return e.questions() > before && r.state() == worker.FeedLive
	})
	r.holds(all...)
}

// An engine that has left a port of ours and still answers replays is not heard.
func TestEngineLeavesABoundFeed(t *testing.T) {
	e, r, s, all := bound(t, 35)
	before := e.questions()
	e.pub.Close()
	r.awaitState(worker.FeedBroken)
	eventually(t, "it has been asked", func() bool { return e.questions() > before })
	r.never(worker.FeedLive, 300*time.Millisecond)
	b := s.batch()
	all = append(all, b)
	e.keep(b)
	e.connect()
	r.awaitState(worker.FeedLive)
	r.holds(all...)
}

// A replay that is of another life each time it is asked is given up for a while.
func TestReplayOfEverNewLives(t *testing.T) {
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
		for life := uint64(1); ; {
			select {
			case <-stop:
				return
			default:
			}
			m, err := router.RecvMessageBytes(0)
			if err != nil || len(m) != 3 {
				continue
			}
			life++
			s := newScribe(rand.Uint64(), life)
			for _, seq := range []uint64{0, 2} { // number 1 is missing, so it is asked again
				router.SendMessage(m[0], "", binary.BigEndian.AppendUint64(nil, seq), s.batch())
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-done })
	r := newRig(t, e, func(o *Options) { o.RetryMin, o.RetryMax = 20*time.Second, 20*time.Second })
	r.src.Replay = at
	r.start()
	r.awaitState(worker.FeedBroken)
	r.await("replay_failures", 1)
	if held, n := r.index.Held(r.rank.Slot), r.get("restarts"); held != 0 || n > maxLives {
		t.Errorf("%d blocks held after %d lives", held, n)
	}
}

// Who is to drop more than the index is told of a new life before the index is cleared,
// and not of a gap.
func TestRestartIsToldBeforehand(t *testing.T) {
	e := newEngine(t, true)
	var r *rig
	told := make(chan int, 8)
	r = newRig(t, e, func(o *Options) {
		o.OnRestart = func(rank *worker.Rank) { told <- o.Index.Held(rank.Slot) }
	})
	s := newScribe(36, 1)
	all := batches(s, 10)
	for _, b := range all {
		e.keep(b)
	}
	r.start()
	e.subscribed()
	r.holds(all...)
	r.awaitState(worker.FeedLive)
	e.keep(s.batch())
	e.publish(s.batch()) // a gap
	r.await("gaps", 1)
	r.awaitState(worker.FeedLive)
	if len(told) != 0 {
		t.Error("a gap was told as a restart")
	}
	e.newLife()
	e.publish(newScribe(37, 2).batch())
	select {
	case held := <-told:
		if held == 0 {
			t.Error("the index was cleared before")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the restart was not told")
	}
	r.await("restarts", 1)
}
