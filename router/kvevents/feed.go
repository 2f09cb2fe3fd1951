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

	"sluice/dataplane/backoff"
	"sluice/dataplane/monotime"
	"sluice/dataplane/objpool"
	"sluice/dataplane/zmtp"
	"sluice/router/worker"
)

// feed is one rank's subscription. mu guards its fields unless stated otherwise. The goroutine of
// run holds mu except while it sleeps, and does everything that may take time. Messages in sequence
// are applied by the poller (ready), which saves a goroutine switch; for everything else the poller
// wakes the goroutine.
//
// The feed's knowledge is its position: next is the expected sequence number, and every earlier
// message of this incarnation of the engine was applied, or the rank was cleared since. The second
// case makes the index safe after losses: after a clear, a block enters only by a store whose whole
// chain was seen since, so the index may lack blocks but never contains removed ones.
type feed struct {
	source  Source
	options *Options
	poller  *zmtp.Poller
	limiter *catchUpLimiter

	mu       sync.Mutex
	wakeCh   chan struct{} // capacity 1; any goroutine may send
	ctx      context.Context
	cancel   context.CancelFunc
	helpers  sync.WaitGroup // goroutines that make connections
	arrivals newConns       // has its own lock
	conns    []*publisherConn
	timer    *time.Timer
	timerAt  time.Time // when timer fires; zero: it is not set
	pingAt   time.Time // when silent connections are pinged; zero: there are none

	stopping atomic.Bool
	done     chan struct{}

	log        *slog.Logger
	unreadable uint64 // number of unreadable messages since the start
	nextLogAt  time.Time

	*Applier
	position
	inbox          inbox // live messages that arrived during a replay
	connected      bool
	suspect        bool            // the connection was lost: the engine may be another incarnation
	retryAt        time.Time       // when a failed replay is retried; zero: none is due
	retry          backoff.Backoff // of replays
	noConnectionAt time.Time       // when a missing first connection is logged; zero: there was a connection
	checkAt        time.Time       // when the engine is asked whether it has published more
	checking       bool            // a tail check is running
	resyncAt       time.Time       // when a resync after an unreadable message is due
	resyncs        int             // in this incarnation
	failedResyncs  int             // of these, how many met an unreadable message again
	resume         resumeState
	shared         sharedPosition
}

type position struct {
	known    bool
	next     uint64
	lastHash uint64 // of message next-1, if hasLast
	hasLast  bool
	// replayed are the hashes of replayed messages that may still arrive live; the first has number
	// replayedFrom.
	replayedFrom uint64
	replayed     []uint64
	replayedTime float64 // time of the first, by the engine's clock
}

// maxBurst is the number of messages that are handled before anything else is checked.
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
	f.source.Rank.SetCachedBlocks(0, 0)
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

// step does everything that is due.
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

// wait waits until something is due.
func (f *feed) wait() {
	for len(f.inbox.queue) == 0 {
		f.setTimer()
		f.mu.Unlock()
		timeIsUp := false
		select {
		case <-f.wakeCh:
			timeIsUp = true
		case <-f.timer.C:
		case <-f.ctx.Done():
			timeIsUp = true
		}
		f.mu.Lock()
		if timeIsUp {
			return
		}
		f.timerAt = time.Time{}
		if isDue(f.nextTime()) {
			return
		}
	}
}

// timerQuantum is the multiple to which deadlines more than a second away are rounded up, so that
// the timers of many feeds fire together and cost one wake-up.
const timerQuantum = 250 * time.Millisecond

// setTimer makes the timer fire when something is due. A timer that fires earlier is not changed:
// deadlines move with each message, and one superfluous wake-up costs less than setting the timer
// per message.
func (f *feed) setTimer() {
	at := f.nextTime()
	if at.IsZero() || !f.timerAt.IsZero() && !at.Before(f.timerAt) {
		return
	}
	remaining := time.Until(at)
	if remaining > time.Second {
		since := monotime.Uptime()
		remaining = (since + remaining + timerQuantum).Truncate(timerQuantum) - since
	}
	f.timerAt = time.Now().Add(remaining)
	f.timer.Reset(remaining)
}

const (
	// maxInline is the number of messages of one feed that the poller applies before other feeds
	// get their turn; maxInlineBytes is the largest such message. The goroutine handles the rest.
	maxInline      = 64
	maxInlineBytes = 256 << 10
)

// ready is called by the poller when a connection may have data. It applies messages in sequence
// and does nothing else.
func (f *feed) ready() {
	if !f.mu.TryLock() {
		f.wake() // the goroutine is active
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

// isSequential reports whether the feed is in its normal state, in which messages arrive in
// sequence.
func (f *feed) isSequential() bool {
	return f.known && f.hasLast && f.connected && !f.suspect && len(f.inbox.queue) == 0 &&
		!slices.ContainsFunc(f.conns, func(l *publisherConn) bool { return l.lost || l.Gone() })
}

// applyNext applies messages as long as each has the expected number. It returns false if the
// goroutine has to continue: the next message is out of sequence or there are too many.
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

// nextTime returns when something is due without a wake-up; zero: never.
func (f *feed) nextTime() (next time.Time) {
	for _, at := range [...]time.Time{f.retryAt, f.checkAt, f.resume.deadline, f.resyncAt, f.noConnectionAt, f.pingAt} {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

// startPosition establishes a position: from the start of the replay if there is a replay endpoint,
// otherwise from the next live message. Until that arrives, nothing shows that the engine publishes
// here at all.
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
	// A retry may be due while the connection is lost: it does not make the index trustworthy.
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

// deferTailCheck postpones the tail check.
func (f *feed) deferTailCheck() {
	// After a peer has left a bound port another check is due, which traffic must not postpone.
	if f.source.ReplayEndpoint != "" && !f.suspect {
		f.checkAt = time.Now().Add(f.options.TailCheck)
	}
}

// nextMessage returns the next message of any connection.
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

// dropClosed removes lost connections without unread data.
func (f *feed) dropClosed() {
	f.conns = slices.DeleteFunc(f.conns, func(l *publisherConn) bool { return l.Closed() })
}

// readAhead reads available data during a replay, up to the inbox's bound: a connection that is not
// read does not show that it is lost.
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

// buffers are the read buffers, which feeds borrow while they read.
var buffers = objpool.Pool[[]byte]{New: func() *[]byte { b := make([]byte, readBytes); return &b }}

// acquireBuffer borrows a buffer.
func (f *feed) acquireBuffer() *[]byte {
	for _, l := range f.conns {
		l.drained = false
	}
	return buffers.Get()
}

// releaseBuffer returns the buffer. Nothing refers to its content any more.
func (f *feed) releaseBuffer(b *[]byte) {
	for _, l := range f.conns {
		l.Detach()
	}
	buffers.Put(b)
}

// parseMessage splits a live message into topic, number and payload.
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
		f.counts["malformed"]++
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
		f.apply(seq, payload) // the position starts here, because there is no replay
		if f.state() == worker.FeedSilent {
			f.markLive()
		}
	case seq == f.next:
		f.apply(seq, payload)
		if f.suspect && f.source.Bind && f.source.ReplayEndpoint == "" {
			// No peer has connected since one left the bound port: this message is from the same
			// engine as before, and another peer has left.
			f.suspect, f.connected = false, true
			f.setState(worker.FeedLive)
		}
	case seq > f.next:
		f.handleGap(seq, payload)
	case !f.isReplayedCopy(seq, payload):
		f.handleRestart(seq, payload)
	}
}

// isReplayedCopy reports whether a message with a number below next is the live copy of a replayed
// message, rather than the start of a new incarnation. It may also have been waiting here when a
// replay arrived that no longer reached back to it. Then only its time can tell: messages of a new
// incarnation are newer than all of the old.
func (f *feed) isReplayedCopy(seq uint64, payload []byte) bool {
	if len(f.replayed) > 0 && seq < f.replayedFrom {
		b, err := f.decoder.Reset(payload)
		return err == nil && b.Time < f.replayedTime
	}
	i := seq - f.replayedFrom
	return seq >= f.replayedFrom && i < uint64(len(f.replayed)) && f.replayed[i] == xxh3.Hash(payload)
}

// handleGap handles a number above the expected one.
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

// handleRestart handles a number below the expected one: a new incarnation of the engine. The
// previous one's blocks are dropped before anything new is applied.
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

// logSequence logs the effect of a sequence number, at most once per second: an engine may send any
// numbers, and the counters count all of them.
func (f *feed) logSequence(what string, seq uint64) {
	if now := time.Now(); !now.Before(f.nextLogAt) {
		f.nextLogAt = now.Add(time.Second)
		f.log.Info(what, "expected_sequence", f.next, "sequence", seq)
	}
}

// applyAfterCatchUp applies a live message after a catch-up: earlier messages that are still
// missing are lost.
func (f *feed) applyAfterCatchUp(seq uint64, payload []byte) {
	switch {
	case f.known && f.hasLast && seq < f.next:
		return // it was replayed
	case f.known && f.hasLast && seq > f.next:
		f.clearUntrusted("resets")
	}
	f.known = true
	f.apply(seq, payload)
	if f.retryAt.IsZero() {
		f.markLive()
	}
}

// markLive records that the index contains all that the engine has published: the state is live if
// there is a connection that would deliver changes, otherwise broken until there is one.
func (f *feed) markLive() {
	if f.connected || f.connections() > 0 {
		f.setState(worker.FeedLive)
	} else {
		f.setState(worker.FeedBroken)
	}
}

// hasReplay reports whether there is a replay endpoint and its last use has not failed.
func (f *feed) hasReplay() bool { return f.source.ReplayEndpoint != "" && f.retryAt.IsZero() }

// newIncarnation drops the engine's previous incarnation.
func (f *feed) newIncarnation() {
	f.resetTrust("restarts")
	f.resyncs, f.failedResyncs = 0, 0
}

// resetTrust drops everything known and counts the reason: the following messages belong, or may
// belong, to another incarnation.
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

// flush publishes the counts since the last call.
func (f *feed) flush() {
	f.publish()
	f.source.Rank.SetCachedBlocks(int64(f.options.Index.CachedBlocks(f.source.Rank.Slot)), int64(f.counts["removed"]))
	for name, n := range f.counts {
		if n != 0 {
			f.options.Counters.AddFeedCount(f.source.Rank.ID, name, n)
			f.counts[name] = 0
		}
	}
}
