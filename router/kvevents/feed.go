package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/zeebo/xxh3"

	"sluice/router/worker"
)

// feed is one rank's subscription. All of its fields but kick belong to the
// goroutine of run; no ZMQ socket is ever touched by two goroutines.
//
// What it believes is kept in position: next is the sequence number it waits
// for, and everything before it in this life of the engine has been applied, or
// the rank was cleared since. That last clause is what makes the index safe after
// losses: after a clear, a block enters only by a store whose whole chain has
// been seen since, so the index may know too little, never what is gone.
type feed struct {
	src Source
	opt *Options
	ctx *zmq.Context

	sub, monitor, wake *zmq.Socket
	poll               *zmq.Poller
	kick               *zmq.Socket // stop's end of wake
	stopping           atomic.Bool
	done               chan struct{}

	log        *slog.Logger
	unreadable uint64 // messages, ever
	sayAgain   time.Time

	*Applier
	position
	waiting   inbox            // live messages that came while a replay went on
	peers     map[int]struct{} // descriptors of who has connected to a port of ours
	connected bool
	suspect   bool      // the connection was lost: the engine may have a new life
	retryAt   time.Time // of a replay that failed; zero: none is due
	backoff   time.Duration
	redialAt  time.Time // when a lost connection is made anew by hand; zero: not
	unheardAt time.Time // when it is said that there has been no connection yet; zero: there was one
	checkAt   time.Time // when the engine is asked whether a quiet end was the end
	checking  bool      // it is being asked
	resyncAt  time.Time // when all that the engine keeps is asked for, after a message that could not be read
	resyncs   int       // of this life
	vain      int       // of those, where something could not be read again
	resuming  resumption
	shown     published
}

type position struct {
	known    bool
	next     uint64
	lastHash uint64 // of message next-1, when hasLast
	hasLast  bool
	// replayed are the hashes of the messages got by replay that may still come
	// live, the first of them with number replayedFrom.
	replayedFrom uint64
	replayed     []uint64
	replayedTime float64 // of the first, by the engine's clock
}

const (
	socketsPerFeed = 6
	maxBurst       = 1024 // messages handled between looks at the other sockets
)

var feedNumber atomic.Uint64 // makes inproc names unique in the process

func newFeed(ctx *zmq.Context, opt *Options, src Source) (f *feed, err error) {
	f = &feed{src: src, opt: opt, ctx: ctx, done: make(chan struct{}), peers: make(map[int]struct{}),
		log: opt.Log.With("rank", src.Rank.ID.String()), poll: zmq.NewPoller(),
		Applier: NewApplier(opt.Index, src.Rank, src.Model, src.Engine)}
	f.Tap, f.OnClear = opt.Tap, opt.OnClear
	defer func() {
		if err != nil {
			f.close()
			closeSocket(f.kick)
		}
	}()
	name := fmt.Sprintf("inproc://sluice-kvevents-%d", feedNumber.Add(1))
	if f.wake, err = f.socket(zmq.PAIR); err != nil {
		return f, err
	}
	if err = f.wake.Bind(name + "-wake"); err != nil {
		return f, err
	}
	if f.kick, err = f.socket(zmq.PAIR); err != nil {
		return f, err
	}
	if err = f.kick.Connect(name + "-wake"); err != nil {
		return f, err
	}
	if f.sub, err = f.socket(zmq.SUB); err != nil {
		return f, err
	}
	if err = f.sub.Monitor(name+"-events", zmq.EVENT_ACCEPTED|zmq.EVENT_HANDSHAKE_SUCCEEDED|zmq.EVENT_DISCONNECTED); err != nil {
		return f, err
	}
	if f.monitor, err = f.socket(zmq.PAIR); err != nil {
		return f, err
	}
	// ZMQ's own thread writes the events and must never wait for this feed.
	if err = f.monitor.SetRcvhwm(0); err != nil {
		return f, err
	}
	if err = f.monitor.Connect(name + "-events"); err != nil {
		return f, err
	}
	if err = errors.Join(f.sub.SetSubscribe(src.Topic), setFamily(f.sub, src.Endpoint)); err != nil {
		return f, err
	}
	if src.Bind {
		err = f.sub.Bind(src.Endpoint)
	} else {
		err = f.sub.Connect(src.Endpoint)
	}
	for _, s := range []*zmq.Socket{f.wake, f.monitor, f.sub} {
		f.poll.Add(s, zmq.POLLIN)
	}
	f.unheardAt = time.Now().Add(opt.ReplayTimeout)
	if src.Resume != nil {
		f.resume(src.Resume)
	}
	f.setState(worker.FeedSyncing)
	if src.Replay == "" && src.Resume == nil {
		f.setState(worker.FeedSilent)
	}
	return f, err
}

// stop ends the goroutine, waits for it and clears the rank. It is called once.
func (f *feed) stop() {
	f.stopping.Store(true)
	f.kick.SendBytes(nil, zmq.DONTWAIT)
	<-f.done
	f.kick.Close()
	f.clear()
	f.src.Rank.Held.Store(0)
	f.setState(worker.FeedNone)
}

func (f *feed) run() {
	defer close(f.done)
	defer f.close()
	for !f.stopping.Load() {
		if _, err := f.poll.Poll(f.wait()); err != nil {
			f.log.Error("kv events: the feed ends", "error", err)
			f.distrust("resets")
			f.setState(worker.FeedBroken)
			f.flush()
			return
		}
		f.watchConnection()
		f.drain()
		if f.connected && !f.known || due(f.retryAt) {
			f.begin()
		}
		if due(f.redialAt) {
			f.redial()
		}
		if due(f.checkAt) {
			f.checkTail()
		}
		if due(f.resyncAt) {
			f.resync()
		}
		if due(f.resuming.by) {
			f.unresumed()
		}
		if due(f.unheardAt) {
			f.unheard()
		}
		f.flush()
	}
}

func due(at time.Time) bool { return !at.IsZero() && !time.Now().Before(at) }

// wait is how long there is nothing to do unless a socket says so; -1: for ever.
func (f *feed) wait() time.Duration {
	if len(f.waiting.queue) > 0 {
		return 0
	}
	wait := time.Duration(-1)
	for _, at := range [...]time.Time{f.retryAt, f.redialAt, f.checkAt, f.resuming.by, f.resyncAt, f.unheardAt} {
		if left := max(0, time.Until(at)) + time.Millisecond; !at.IsZero() && (wait < 0 || left < wait) {
			wait = left
		}
	}
	return wait
}

// begin takes up a new position: from the replay's start where there is one,
// else with the next live message; until that comes, nothing says that the engine
// speaks here at all.
func (f *feed) begin() {
	resume := f.resuming.pending
	if f.src.Replay == "" {
		if resume {
			f.unresumed()
		}
		f.known = true
		f.setState(worker.FeedSilent)
		return
	}
	f.resuming = resumption{}
	// A retry may be due while the connection is lost: what the index has is not believed
	// for that, and less than ever.
	f.catchUp(resume, resume || f.suspect)
}

func (f *feed) drain() {
	heard := false
	defer func() {
		// While somebody has left a port of ours, another check is due, which no traffic
		// may put off.
		if heard && f.src.Replay != "" && !f.suspect {
			f.checkAt = time.Now().Add(f.opt.TailCheck)
		}
	}()
	for range maxBurst {
		if f.stopping.Load() {
			return
		}
		frames, read := f.waiting.take()
		var err error
		if !read {
			frames, err = f.sub.RecvMessageBytes(zmq.DONTWAIT)
		}
		if err != nil {
			if zmq.AsErrno(err) != zmq.Errno(syscall.EAGAIN) {
				f.log.Warn("kv events: cannot receive", "error", err)
			}
			return
		}
		// A message may be the first of a new connection: hear of that before.
		if !f.watchConnection() {
			f.live(frames)
			heard = true
		}
	}
}

// live handles one message of the subscription.
func (f *feed) live(frames [][]byte) {
	if len(frames) != 3 || len(frames[1]) != 8 || f.src.Topic != "" && string(frames[0]) != f.src.Topic {
		f.counts["garbage"]++
		return
	}
	seq, payload := binary.BigEndian.Uint64(frames[1]), frames[2]
	if !f.known {
		f.begin()
		if f.stopping.Load() {
			return
		}
		f.afterCatchUp(seq, payload)
		return
	}
	switch {
	case !f.hasLast && f.next == 0 && !f.canAsk():
		f.apply(seq, payload) // where to begin, as nobody can be asked
		if f.state() == worker.FeedSilent {
			f.believe()
		}
	case seq == f.next:
		f.apply(seq, payload)
		if f.suspect && f.src.Bind && f.src.Replay == "" {
			// Nobody has come since somebody left a port of ours: it is the engine that
			// was there before, and another has left.
			f.suspect, f.connected = false, true
			f.setState(worker.FeedLive)
		}
	case seq > f.next:
		f.gap(seq, payload)
	case !f.wasReplayed(seq, payload):
		f.restart(seq, payload)
	}
}

// wasReplayed says whether a message with a number below next is the live copy
// of one that came by replay, or was waiting here when a replay came that no longer
// reached back to it, rather than the beginning of a new life. In the second case
// only its time can tell: what a new life says is newer than all of the old.
func (f *feed) wasReplayed(seq uint64, payload []byte) bool {
	if len(f.replayed) > 0 && seq < f.replayedFrom {
		b, err := f.dec.Reset(payload)
		return err == nil && b.Time < f.replayedTime
	}
	i := seq - f.replayedFrom
	return seq >= f.replayedFrom && i < uint64(len(f.replayed)) && f.replayed[i] == xxh3.Hash(payload)
}

// gap handles a number above the one waited for.
func (f *feed) gap(seq uint64, payload []byte) {
	f.counts["gaps"]++
	f.say("kv events: gap", seq)
	if f.canAsk() {
		f.catchUp(true, false)
	}
	if !f.stopping.Load() {
		f.afterCatchUp(seq, payload)
	}
}

// restart handles a number below the one waited for: a new life of the engine.
// What the old one held goes before anything new is applied.
func (f *feed) restart(seq uint64, payload []byte) {
	f.say("kv events: the engine has restarted", seq)
	f.newLife()
	if f.canAsk() {
		f.catchUp(false, false)
	}
	if !f.stopping.Load() {
		f.afterCatchUp(seq, payload)
	}
}

// say logs what a number led to, once a second at most: an engine may send any numbers,
// and the counters have all of them.
func (f *feed) say(what string, seq uint64) {
	if now := time.Now(); !now.Before(f.sayAgain) {
		f.sayAgain = now.Add(time.Second)
		f.log.Info(what, "want", f.next, "got", seq)
	}
}

// afterCatchUp applies a live message for which all that could be asked has been
// asked: what is still missing before it is lost.
func (f *feed) afterCatchUp(seq uint64, payload []byte) {
	switch {
	case f.known && f.hasLast && seq < f.next:
		return // it came by replay
	case f.known && f.hasLast && seq > f.next:
		f.distrust("resets")
	}
	f.known = true
	f.apply(seq, payload)
	if f.retryAt.IsZero() {
		f.believe()
	}
}

// believe says that what the index holds of the rank is all the engine has told: live,
// where there is a connection by which it would be heard if that changed, else broken
// until there is one.
func (f *feed) believe() {
	if f.connected || len(f.peers) > 0 {
		f.setState(worker.FeedLive)
	} else {
		f.setState(worker.FeedBroken)
	}
}

// canAsk says whether there is a replay endpoint that is not known to fail.
func (f *feed) canAsk() bool { return f.src.Replay != "" && f.retryAt.IsZero() }

// newLife forgets the engine's old life.
func (f *feed) newLife() {
	f.begins("restarts")
	f.resyncs, f.vain = 0, 0
}

// begins forgets all that was known, and counts why: what comes next is, or may be, of
// another life.
func (f *feed) begins(why string) {
	if f.opt.OnRestart != nil {
		f.opt.OnRestart(f.src.Rank)
	}
	f.distrust(why)
	f.position = position{}
	f.forget()
}

func (f *feed) state() worker.FeedState { return worker.FeedState(f.src.Rank.Feed.Load()) }

func (f *feed) setState(s worker.FeedState) { f.src.Rank.Feed.Store(uint32(s)) }

// flush publishes what has been counted since the last time.
func (f *feed) flush() {
	f.publish()
	f.src.Rank.Held.Store(int64(f.opt.Index.Held(f.src.Rank.Slot)))
	for name, n := range f.counts {
		if n != 0 {
			f.opt.Observer.FeedCounted(f.src.Rank.ID, name, n)
			f.counts[name] = 0
		}
	}
}
