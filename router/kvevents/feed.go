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

	"sluice/dataplane/objpool"
	"sluice/dataplane/zmtp"
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
	source  Source
	options *Options
	poller  *zmtp.Poller
	limiter *catchUpLimiter

	mu       sync.Mutex
	wakeCh   chan struct{} // room for one; anybody rings
	ctx      context.Context
	cancel   context.CancelFunc
	helpers  sync.WaitGroup // those who make connections
	arrivals newConns       // has a lock of its own
	conns    []*publisherConn
	timer    *time.Timer
	timerAt  time.Time // when timer rings; zero: it does not
	pingAt   time.Time // when silent connections are looked at; zero: there are none

	stopping atomic.Bool
	done     chan struct{}

	log        *slog.Logger
	unreadable uint64 // messages, ever
	nextLogAt  time.Time

	*Applier
	position
	inbox          inbox // live messages that came while a replay went on
	connected      bool
	suspect        bool      // the connection was lost: the engine may have a new life
	retryAt        time.Time // of a replay that failed; zero: none is due
	backoff        time.Duration
	noConnectionAt time.Time // when it is said that there has been no connection yet; zero: there was one
	checkAt        time.Time // when the engine is asked whether a quiet end was the end
	checking       bool      // it is being asked
	resyncAt       time.Time // when all that the engine keeps is asked for, after a message that could not be read
	resyncs        int       // of this life
	failedResyncs  int       // of those, where something could not be read again
	resume         resumeState
	shared         sharedPosition
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
	f := &feed{source: src, options: opt, poller: set.poller, limiter: set.limiter, done: make(chan struct{}), wakeCh: make(chan struct{}, 1),
		log: opt.Log.With("rank", src.Rank.ID.String()), timer: time.NewTimer(time.Hour), inbox: inbox{maxBytes: opt.inboxBytes},
		Applier: NewApplier(opt.Index, src.Rank, src.Model, src.Engine)}
	f.timer.Stop()
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.Observer, f.OnClear, f.Uncredited = opt.IndexObserver, opt.OnClear, &set.uncredited
	f.noConnectionAt = time.Now().Add(opt.ReplayTimeout)
	if src.Resume != nil {
		f.startResume(src.Resume)
	}
	f.setState(worker.FeedSyncing)
	if src.ReplayEndpoint == "" && src.Resume == nil {
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
	f.source.Rank.CachedBlocks.Store(0)
	f.setState(worker.FeedNone)
}

func (f *feed) run() {
	defer close(f.done)
	f.mu.Lock()
	defer f.mu.Unlock()
	defer f.close()
	defer f.timer.Stop()
	for f.wait(); !f.stopping.Load(); f.wait() {
		f.step()
	}
}

// step does what there is to do.
func (f *feed) step() {
	f.watchConnection()
	f.drain()
	if f.connected && !f.known || isDue(f.retryAt) {
		f.startPosition()
	}
	if isDue(f.checkAt) {
		f.checkTail()
	}
	if isDue(f.resyncAt) {
		f.resync()
	}
	if isDue(f.resume.deadline) {
		f.dropUnverified()
	}
	if isDue(f.noConnectionAt) {
		f.warnNoConnection()
	}
	if isDue(f.pingAt) {
		f.ping()
	}
	f.flush()
}

// wait waits until there is something to do.
func (f *feed) wait() {
	for len(f.inbox.queue) == 0 {
		f.setTimer()
		f.mu.Unlock()
		rung := false
		select {
		case <-f.wakeCh:
			rung = true
		case <-f.timer.C:
		case <-f.ctx.Done():
			rung = true
		}
		f.mu.Lock()
		if rung {
			return
		}
		f.timerAt = time.Time{}
		if isDue(f.nextTime()) {
			return
		}
	}
}

// timerQuantum is what alarms are rounded up to that are further off than a second: those of
// many feeds then ring together and cost one wake-up.
const timerQuantum = 250 * time.Millisecond

var began = time.Now()

// setTimer sees to it that the timer rings when there is something to do. One that was set
// for earlier is left as it is: times move on with each message, and one alarm too many
// costs less than to set it for each.
func (f *feed) setTimer() {
	at := f.nextTime()
	if at.IsZero() || !f.timerAt.IsZero() && !at.Before(f.timerAt) {
		return
	}
	remaining := time.Until(at)
	if remaining > time.Second {
		since := time.Since(began)
		remaining = (since + remaining + timerQuantum).Truncate(timerQuantum) - since
	}
	f.timerAt = time.Now().Add(remaining)
	f.timer.Reset(remaining)
}

const (
	// maxInline is how many messages of one feed the poller applies before the others have
	// their turn, and maxInlineBytes what one of them may have: the rest is the goroutine's.
	maxInline      = 64
	maxInlineBytes = 256 << 10
)

// ready is called by the poller when a connection may have something to read. It applies
// the messages that come next and change nothing else.
func (f *feed) ready() {
	if !f.mu.TryLock() {
		f.wake() // the goroutine is at work
		return
	}
	defer f.mu.Unlock()
	if f.stopping.Load() {
		return
	}
	if !f.isSequential() || !f.applyNext() {
		f.wake()
	}
	f.flush()
	f.setTimer()
}

// isSequential says that nothing is under way but messages that follow one another.
func (f *feed) isSequential() bool {
	return f.known && f.hasLast && f.connected && !f.suspect && len(f.inbox.queue) == 0 &&
		!slices.ContainsFunc(f.conns, func(l *publisherConn) bool { return l.lost || l.Gone() })
}

// applyNext applies messages as long as each is the next. The first that is not waits for
// the goroutine; then it is false, as it is when there is more than enough.
func (f *feed) applyNext() bool {
	buf := f.acquireBuffer()
	defer f.releaseBuffer(buf)
	for range maxInline {
		m, ok := f.nextMessage(*buf)
		if !ok {
			return f.connected
		}
		seq, payload, ok := f.parseMessage(m)
		if !ok || seq != f.next || len(payload) > maxInlineBytes {
			f.inbox.push(m)
			return false
		}
		f.apply(seq, payload)
		f.deferTailCheck()
	}
	return false
}

func isDue(at time.Time) bool { return !at.IsZero() && !time.Now().Before(at) }

// nextTime is when there is something to do though nobody rings; zero: never.
func (f *feed) nextTime() (next time.Time) {
	for _, at := range [...]time.Time{f.retryAt, f.checkAt, f.resume.deadline, f.resyncAt, f.noConnectionAt, f.pingAt} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

// startPosition takes up a new position: from the replay's start where there is one,
// else with the next live message; until that comes, nothing says that the engine
// speaks here at all.
func (f *feed) startPosition() {
	resume := f.resume.pending
	if f.source.ReplayEndpoint == "" {
		if resume {
			f.dropUnverified()
		}
		f.known = true
		f.setState(worker.FeedSilent)
		return
	}
	f.resume = resumeState{}
	// A retry may be due while the connection is lost: what the index has is not believed
	// for that, and less than ever.
	f.catchUp(resume, resume || f.suspect)
}

func (f *feed) drain() {
	buf := f.acquireBuffer()
	defer f.releaseBuffer(buf)
	for range maxBurst {
		if f.stopping.Load() {
			return
		}
		m, ok := f.inbox.pop()
		if !ok {
			if m, ok = f.nextMessage(*buf); !ok {
				f.dropClosed()
				return
			}
		}
		f.handleLive(m)
		f.deferTailCheck()
	}
	f.wake() // there may be more
}

// deferTailCheck puts off the question whether that was all.
func (f *feed) deferTailCheck() {
	// While somebody has left a port of ours, another check is due, which no traffic
	// may put off.
	if f.source.ReplayEndpoint != "" && !f.suspect {
		f.checkAt = time.Now().Add(f.options.TailCheck)
	}
}

// nextMessage gives the next message of any connection.
func (f *feed) nextMessage(buf []byte) (zmtp.Message, bool) {
	for filled := true; filled; {
		for _, l := range f.conns {
			if m, ok := f.nextFrom(l); ok {
				return m, true
			}
		}
		filled = slices.ContainsFunc(f.conns, func(l *publisherConn) bool { return !l.Closed() && f.fillFrom(l, buf) })
	}
	return nil, false
}

// dropClosed forgets connections of which nothing is left to read.
func (f *feed) dropClosed() {
	f.conns = slices.DeleteFunc(f.conns, func(l *publisherConn) bool { return l.Closed() })
}

// readAhead reads what has come while a replay is under way, as far as there is room: a
// connection that nobody reads does not show that it is lost.
func (f *feed) readAhead(buf []byte) {
	for _, l := range f.conns {
		l.drained = false
		for !l.Closed() && !f.inbox.full() {
			if m, ok := f.nextFrom(l); ok {
				f.inbox.push(m)
			} else if !f.fillFrom(l, buf) {
				break
			}
		}
		l.Detach()
	}
}

// buffers are what feeds read into, while they do.
var buffers = objpool.Pool[[]byte]{New: func() *[]byte { b := make([]byte, readBytes); return &b }}

// acquireBuffer begins to read.
func (f *feed) acquireBuffer() *[]byte {
	for _, l := range f.conns {
		l.drained = false
	}
	return buffers.Get()
}

// releaseBuffer lets others use the buffer: nothing of it is looked at any more.
func (f *feed) releaseBuffer(b *[]byte) {
	for _, l := range f.conns {
		l.Detach()
	}
	buffers.Put(b)
}

// parseMessage takes a live message apart: topic, number, payload.
func (f *feed) parseMessage(m zmtp.Message) (seq uint64, payload []byte, ok bool) {
	if len(m) != 3 || len(m[1]) != 8 || f.source.Topic != "" && string(m[0]) != f.source.Topic {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(m[1]), m[2], true
}

// handleLive handles one message of the subscription.
func (f *feed) handleLive(frames zmtp.Message) {
	seq, payload, ok := f.parseMessage(frames)
	if !ok {
		f.counts["garbage"]++
		return
	}
	if !f.known {
		f.startPosition()
		if f.stopping.Load() {
			return
		}
		f.applyAfterCatchUp(seq, payload)
		return
	}
	switch {
	case !f.hasLast && f.next == 0 && !f.hasReplay():
		f.apply(seq, payload) // where to begin, as nobody can be asked
		if f.state() == worker.FeedSilent {
			f.markLive()
		}
	case seq == f.next:
		f.apply(seq, payload)
		if f.suspect && f.source.Bind && f.source.ReplayEndpoint == "" {
			// Nobody has come since somebody left a port of ours: it is the engine that
			// was there before, and another has left.
			f.suspect, f.connected = false, true
			f.setState(worker.FeedLive)
		}
	case seq > f.next:
		f.handleGap(seq, payload)
	case !f.isReplayedCopy(seq, payload):
		f.handleRestart(seq, payload)
	}
}

// isReplayedCopy says whether a message with a number below next is the live copy
// of one that came by replay, or was waiting here when a replay came that no longer
// reached back to it, rather than the beginning of a new life. In the second case
// only its time can tell: what a new life says is newer than all of the old.
func (f *feed) isReplayedCopy(seq uint64, payload []byte) bool {
	if len(f.replayed) > 0 && seq < f.replayedFrom {
		b, err := f.decoder.Reset(payload)
		return err == nil && b.Time < f.replayedTime
	}
	i := seq - f.replayedFrom
	return seq >= f.replayedFrom && i < uint64(len(f.replayed)) && f.replayed[i] == xxh3.Hash(payload)
}

// handleGap handles a number above the one waited for.
func (f *feed) handleGap(seq uint64, payload []byte) {
	f.counts["gaps"]++
	f.logSequence("kv events: gap", seq)
	if f.hasReplay() {
		f.catchUp(true, false)
	}
	if !f.stopping.Load() {
		f.applyAfterCatchUp(seq, payload)
	}
}

// handleRestart handles a number below the one waited for: a new life of the engine.
// What the old one held goes before anything new is applied.
func (f *feed) handleRestart(seq uint64, payload []byte) {
	f.logSequence("kv events: the engine has restarted", seq)
	f.newIncarnation()
	if f.hasReplay() {
		f.catchUp(false, false)
	}
	if !f.stopping.Load() {
		f.applyAfterCatchUp(seq, payload)
	}
}

// logSequence logs what a number led to, once a second at most: an engine may send any numbers,
// and the counters have all of them.
func (f *feed) logSequence(what string, seq uint64) {
	if now := time.Now(); !now.Before(f.nextLogAt) {
		f.nextLogAt = now.Add(time.Second)
		f.log.Info(what, "want", f.next, "got", seq)
	}
}

// applyAfterCatchUp applies a live message for which all that could be asked has been
// asked: what is still missing before it is lost.
func (f *feed) applyAfterCatchUp(seq uint64, payload []byte) {
	switch {
	case f.known && f.hasLast && seq < f.next:
		return // it came by replay
	case f.known && f.hasLast && seq > f.next:
		f.clearUntrusted("resets")
	}
	f.known = true
	f.apply(seq, payload)
	if f.retryAt.IsZero() {
		f.markLive()
	}
}

// markLive says that what the index holds of the rank is all the engine has told: live,
// where there is a connection by which it would be heard if that changed, else broken
// until there is one.
func (f *feed) markLive() {
	if f.connected || f.connections() > 0 {
		f.setState(worker.FeedLive)
	} else {
		f.setState(worker.FeedBroken)
	}
}

// hasReplay says whether there is a replay endpoint that is not known to fail.
func (f *feed) hasReplay() bool { return f.source.ReplayEndpoint != "" && f.retryAt.IsZero() }

// newIncarnation forgets the engine's old life.
func (f *feed) newIncarnation() {
	f.resetTrust("restarts")
	f.resyncs, f.failedResyncs = 0, 0
}

// resetTrust forgets all that was known, and counts why: what comes next is, or may be, of
// another life.
func (f *feed) resetTrust(reason string) {
	if f.options.OnRestart != nil {
		f.options.OnRestart(f.source.Rank)
	}
	f.clearUntrusted(reason)
	f.position = position{}
	f.resetEngine()
}

func (f *feed) state() worker.FeedState { return worker.FeedState(f.source.Rank.Feed.Load()) }

func (f *feed) setState(s worker.FeedState) { f.source.Rank.Feed.Store(uint32(s)) }

// flush publishes what has been counted since the last time.
func (f *feed) flush() {
	f.publish()
	f.source.Rank.CachedBlocks.Store(int64(f.options.Index.CachedBlocks(f.source.Rank.Slot)))
	for name, n := range f.counts {
		if n != 0 {
			f.options.Counters.AddFeedCount(f.source.Rank.ID, name, n)
			f.counts[name] = 0
		}
	}
}
