package kvevents

import (
	"context"
	"encoding/binary"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/reuse"
	"sluice/nixl/zmtp"
	"sluice/router/worker"
)

// feed is one rank's subscription. Its fields belong to whoever holds mu, but for those that
// say otherwise. That is the goroutine of run, while it does not sleep: it does all that
// may take time. What comes in its turn is applied by the poller (ready), which costs no
// change of goroutines; for all else it rings the bell.
//
// What it believes is kept in position: next is the sequence number it waits
// for, and everything before it in this life of the engine has been applied, or
// the rank was cleared since. That last clause is what makes the index safe after
// losses: after a clear, a block enters only by a store whose whole chain has
// been seen since, so the index may know too little, never what is gone.
type feed struct {
	src    Source
	opt    *Options
	poller *zmtp.Poller
	pace   *pace

	mu       sync.Mutex
	bell     chan struct{} // room for one; anybody rings
	ctx      context.Context
	cancel   context.CancelFunc
	helpers  sync.WaitGroup // those who make connections
	came     arrivals       // has a lock of its own
	acceptor *zmtp.Acceptor // of an endpoint that is bound
	lines    []*line
	timer    *time.Timer
	alarm    time.Time // when timer rings; zero: it does not
	pingAt   time.Time // when silent connections are looked at; zero: there are none

	stopping atomic.Bool
	done     chan struct{}

	log        *slog.Logger
	unreadable uint64 // messages, ever
	sayAgain   time.Time

	*Applier
	position
	waiting   inbox // live messages that came while a replay went on
	connected bool
	suspect   bool      // the connection was lost: the engine may have a new life
	retryAt   time.Time // of a replay that failed; zero: none is due
	backoff   time.Duration
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

// maxBurst is how many messages are handled between looks at anything else.
const maxBurst = 1024

func newFeed(set *Feeds, src Source) (*feed, error) {
	opt := &set.opt
	f := &feed{src: src, opt: opt, poller: set.poller, pace: set.pace, done: make(chan struct{}), bell: make(chan struct{}, 1),
		log: opt.Log.With("rank", src.Rank.ID.String()), timer: time.NewTimer(time.Hour), waiting: inbox{most: opt.ahead},
		Applier: NewApplier(opt.Index, src.Rank, src.Model, src.Engine)}
	f.timer.Stop()
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.Tap, f.OnClear, f.Elsewhere = opt.Tap, opt.OnClear, &set.elsewhere
	f.unheardAt = time.Now().Add(opt.ReplayTimeout)
	if src.Resume != nil {
		f.resume(src.Resume)
	}
	f.setState(worker.FeedSyncing)
	if src.Replay == "" && src.Resume == nil {
		f.setState(worker.FeedSilent)
	}
	if err := f.open(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// stop ends the goroutine, waits for it and clears the rank. It is called once.
func (f *feed) stop() {
	f.stopping.Store(true)
	f.cancel()
	<-f.done
	f.clear()
	f.src.Rank.Held.Store(0)
	f.setState(worker.FeedNone)
}

func (f *feed) run() {
	defer close(f.done)
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.close()
	defer f.timer.Stop()
	for f.sleep(); !f.stopping.Load(); f.sleep() {
		f.step()
	}
}

// step does what there is to do.
func (f *feed) step() {
	f.watchConnection()
	f.drain()
	if f.connected && !f.known || due(f.retryAt) {
		f.begin()
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
	if due(f.pingAt) {
		f.ping()
	}
	f.flush()
}

// sleep waits until there is something to do.
func (f *feed) sleep() {
	for len(f.waiting.queue) == 0 {
		f.setAlarm()
		f.mu.Unlock()
		rung := false
		select {
		case <-f.bell:
			rung = true
		case <-f.timer.C:
		case <-f.ctx.Done():
			rung = true
		}
		f.mu.Lock()
		if rung {
			return
		}
		f.alarm = time.Time{}
		if due(f.nextTime()) {
			return
		}
	}
}

// alarmQuantum is what alarms are rounded up to that are further off than a second: those of
// many feeds then ring together and cost one wake-up.
const alarmQuantum = 250 * time.Millisecond

var began = time.Now()

// setAlarm sees to it that the timer rings when there is something to do. One that was set
// for earlier is left as it is: times move on with each message, and one alarm too many
// costs less than to set it for each.
func (f *feed) setAlarm() {
	at := f.nextTime()
	if at.IsZero() || !f.alarm.IsZero() && !at.Before(f.alarm) {
		return
	}
	left := time.Until(at)
	if left > time.Second {
		since := time.Since(began)
		left = (since + left + alarmQuantum).Truncate(alarmQuantum) - since
	}
	f.alarm = time.Now().Add(left)
	f.timer.Reset(left)
}

const (
	// atOnce is how many messages of one feed the poller applies before the others have
	// their turn, and lightBytes what one of them may have: the rest is the goroutine's.
	atOnce     = 64
	lightBytes = 256 << 10
)

// ready is called by the poller when a connection may have something to read. It applies
// the messages that come next and change nothing else.
func (f *feed) ready() {
	if !f.mu.TryLock() {
		f.ring() // the goroutine is at work
		return
	}
	defer f.mu.Unlock()
	if f.stopping.Load() {
		return
	}
	if !f.quiet() || !f.applyNext() {
		f.ring()
	}
	f.flush()
	f.setAlarm()
}

// quiet says that nothing is under way but messages that follow one another.
func (f *feed) quiet() bool {
	return f.known && f.hasLast && f.connected && !f.suspect && len(f.waiting.queue) == 0 &&
		!slices.ContainsFunc(f.lines, func(l *line) bool { return l.lost || l.Gone() })
}

// applyNext applies messages as long as each is the next. The first that is not waits for
// the goroutine; then it is false, as it is when there is more than enough.
func (f *feed) applyNext() bool {
	buf := f.borrow()
	defer f.giveBack(buf)
	for range atOnce {
		m, ok := f.nextMessage(*buf)
		if !ok {
			return f.connected
		}
		seq, payload, ok := f.read(m)
		if !ok || seq != f.next || len(payload) > lightBytes {
			f.waiting.put(m)
			return false
		}
		f.apply(seq, payload)
		f.heardLive()
	}
	return false
}

func due(at time.Time) bool { return !at.IsZero() && !time.Now().Before(at) }

// nextTime is when there is something to do though nobody rings; zero: never.
func (f *feed) nextTime() (next time.Time) {
	for _, at := range [...]time.Time{f.retryAt, f.checkAt, f.resuming.by, f.resyncAt, f.unheardAt, f.pingAt} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
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
	buf := f.borrow()
	defer f.giveBack(buf)
	for range maxBurst {
		if f.stopping.Load() {
			return
		}
		m, ok := f.waiting.take()
		if !ok {
			if m, ok = f.nextMessage(*buf); !ok {
				f.dropClosed()
				return
			}
		}
		f.live(m)
		f.heardLive()
	}
	f.ring() // there may be more
}

// heardLive puts off the question whether that was all.
func (f *feed) heardLive() {
	// While somebody has left a port of ours, another check is due, which no traffic
	// may put off.
	if f.src.Replay != "" && !f.suspect {
		f.checkAt = time.Now().Add(f.opt.TailCheck)
	}
}

// nextMessage gives the next message of any connection.
func (f *feed) nextMessage(buf []byte) (zmtp.Message, bool) {
	for filled := true; filled; {
		for _, l := range f.lines {
			if m, ok := f.nextOf(l); ok {
				return m, true
			}
		}
		filled = slices.ContainsFunc(f.lines, func(l *line) bool { return !l.Closed() && f.fillFrom(l, buf) })
	}
	return nil, false
}

// dropClosed forgets connections of which nothing is left to read.
func (f *feed) dropClosed() {
	f.lines = slices.DeleteFunc(f.lines, func(l *line) bool { return l.Closed() })
}

// readAhead reads what has come while a replay is under way, as far as there is room: a
// connection that nobody reads does not show that it is lost.
func (f *feed) readAhead(buf []byte) {
	for _, l := range f.lines {
		l.dry = false
		for !l.Closed() && !f.waiting.full() {
			if m, ok := f.nextOf(l); ok {
				f.waiting.put(m)
			} else if !f.fillFrom(l, buf) {
				break
			}
		}
		l.Park()
	}
}

// buffers are what feeds read into, while they do.
var buffers = reuse.Pool[[]byte]{New: func() *[]byte { b := make([]byte, readBytes); return &b }}

// borrow begins to read.
func (f *feed) borrow() *[]byte {
	for _, l := range f.lines {
		l.dry = false
	}
	return buffers.Get()
}

// giveBack lets others use the buffer: nothing of it is looked at any more.
func (f *feed) giveBack(b *[]byte) {
	for _, l := range f.lines {
		l.Park()
	}
	buffers.Put(b)
}

// read takes a live message apart: topic, number, payload.
func (f *feed) read(m zmtp.Message) (seq uint64, payload []byte, ok bool) {
	if len(m) != 3 || len(m[1]) != 8 || f.src.Topic != "" && string(m[0]) != f.src.Topic {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(m[1]), m[2], true
}

// live handles one message of the subscription.
func (f *feed) live(frames zmtp.Message) {
	seq, payload, ok := f.read(frames)
	if !ok {
		f.counts["garbage"]++
		return
	}
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
	if f.connected || f.connections() > 0 {
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
