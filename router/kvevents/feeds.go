package kvevents

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"sluice/dataplane/zmtp"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Source is where one rank's events come from.
type Source struct {
	Rank           *worker.Rank
	Model          string // salts the hashes
	Engine         string // "vllm", "sglang": chooses the decoder; "" is found out
	Endpoint       string // PUB, "tcp://host:port"; "*" hosts replaced already
	Bind           bool   // the engine connects: the feed binds Endpoint
	ReplayEndpoint string // ROUTER; "" when the engine has none
	Topic          string
	// Resume is where an earlier router left off; the rank's blocks of then are in
	// the index already. They are dropped when the engine cannot prove by replay
	// that it is the same, or no longer keeps what came since.
	Resume *Position
}

// Options of a Feeds; zero values mean the default.
type Options struct {
	Index         kvindex.Index
	Log           *slog.Logger
	Counters      CounterSink
	IndexObserver IndexObserver      // sees what is applied; nil: nobody
	OnClear       func(worker.Slot)  // called before all that is known of a rank is dropped; nil: nobody
	OnRestart     func(*worker.Rank) // called before a rank is cleared because its engine has, or may have, a new life; nil: nobody
	MaxFrame      int                // bytes of one message; larger ones are dropped and counted [32 MiB]
	ReplayTimeout time.Duration      // the longest wait for one message of a replay [5s]
	RetryMin      time.Duration      // first wait after a failed replay; doubles to RetryMax [1s]
	RetryMax      time.Duration      // [30s]
	TailCheck     time.Duration      // quiet after which the engine is asked whether that was all [5s]

	maxIdleTimeouts time.Duration // ReplayTimeouts that a catch-up goes on in which nothing new comes [defaultMaxIdleTimeouts]
	inboxBytes      int           // bytes that an inbox takes [defaultInboxBytes]
}

// CounterSink counts; methods must be safe for concurrent use.
type CounterSink interface {
	// AddFeedCount adds n to a named counter of one rank, one of Counters.
	AddFeedCount(id worker.ID, counter string, n int)
}

// Counters are the names that AddFeedCount is called with.
var Counters = []string{
	"batches",          // messages applied, live and replayed
	"stored",           // blocks new in the index
	"repeated",         // blocks stored that were there
	"orphans",          // stores whose parent is unknown, dropped
	"removed",          // blocks removed
	"unknown_removed",  // removals of what was not held
	"cleared",          // the engine cleared its cache
	"ignored",          // events not indexed: other group or medium, no tokens, skipped blocks, unknown kind
	"gaps",             // live sequence numbers missed
	"resyncs",          // replays of all there is, after a message that could not be read
	"tail_checks",      // questions after a burst whether it was all
	"replays",          // replays asked for, tail checks included
	"replayed_batches", // batches that came by replay
	"replay_failures",  // replays that did not come, or not to an end
	"restarts",         // new lives of the engine seen; what the old one held was dropped
	"resets",           // drops of what was held because it could not be trusted
	"garbage",          // messages or events that could not be read
	"oversize",         // messages over MaxFrame
	"remote",           // events of blocks that another machine holds, not indexed
	"unlocated",        // stores in storage that may be another machine's, as the engine does not say whose; not indexed
	"wrong_rank",       // batches of another rank, not applied
}

// Feeds runs the subscriptions of a fleet: a goroutine and a descriptor a rank, two while
// a replay is under way or where the endpoint is bound, and one poller for all of them. Its
// methods may be called from any goroutine.
type Feeds struct {
	opt     Options
	poller  *zmtp.Poller
	limiter *catchUpLimiter
	err     error // why there is no poller

	uncredited UncreditedBlocks

	mu     sync.Mutex
	feeds  map[worker.ID]*feed
	closed bool
}

type discardCounters struct{}

func (discardCounters) AddFeedCount(worker.ID, string, int) {}

// NewFeeds makes an empty set of feeds.
func NewFeeds(opt Options) *Feeds {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Counters == nil {
		opt.Counters = discardCounters{}
	}
	opt.MaxFrame = orDefault(opt.MaxFrame, 32<<20)
	opt.ReplayTimeout = orDefault(opt.ReplayTimeout, 5*time.Second)
	opt.RetryMin = orDefault(opt.RetryMin, time.Second)
	opt.RetryMax = max(orDefault(opt.RetryMax, 30*time.Second), opt.RetryMin)
	opt.TailCheck = orDefault(opt.TailCheck, 5*time.Second)
	opt.inboxBytes = orDefault(opt.inboxBytes, defaultInboxBytes)
	opt.maxIdleTimeouts = orDefault(opt.maxIdleTimeouts, defaultMaxIdleTimeouts)
	f := &Feeds{opt: opt, limiter: newCatchUpLimiter(), feeds: make(map[worker.ID]*feed)}
	f.poller, f.err = zmtp.NewPoller()
	return f
}

func orDefault[T int | time.Duration](v, or T) T {
	if v <= 0 {
		return or
	}
	return v
}

// Uncredited counts blocks that are credited to no rank.
func (f *Feeds) Uncredited() *UncreditedBlocks { return &f.uncredited }

// Start subscribes to one rank; a second Start of the same rank replaces the
// first. It returns an error for an endpoint that cannot be one; an engine that is not
// there yet is no error, the feed waits for it.
func (f *Feeds) Start(src Source) error {
	if src.Rank == nil {
		return fmt.Errorf("kvevents: cannot subscribe to %q: the source names no rank", src.Endpoint)
	}
	f.Stop(src.Rank.ID)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.err != nil {
		return fmt.Errorf("kvevents: cannot subscribe to %q: %w", src.Endpoint, closedIfNil(f.err))
	}
	if f.feeds[src.Rank.ID] != nil {
		return fmt.Errorf("kvevents: cannot subscribe to %q: another Start of rank %s is under way", src.Endpoint, src.Rank.ID)
	}
	fd, err := newFeed(f, src)
	if err != nil {
		return fmt.Errorf("kvevents: cannot subscribe to %q: %w", src.Endpoint, err)
	}
	f.feeds[src.Rank.ID] = fd
	go fd.run()
	return nil
}

func closedIfNil(err error) error {
	if err == nil {
		return fmt.Errorf("the feeds are closed")
	}
	return err
}

// Stop ends a rank's feed and clears the rank in the index; it returns when
// the feed's goroutine has ended.
func (f *Feeds) Stop(id worker.ID) {
	f.mu.Lock()
	fd := f.feeds[id]
	delete(f.feeds, id)
	f.mu.Unlock()
	if fd != nil {
		fd.stop()
	}
}

// ReleaseBound stops the feeds whose endpoints this process binds, so that the process that
// replaces it can bind them. The ranks' blocks are dropped from the index.
func (f *Feeds) ReleaseBound() {
	f.mu.Lock()
	var bound []*feed
	for id, fd := range f.feeds {
		if fd.source.Bind {
			bound = append(bound, fd)
			delete(f.feeds, id)
		}
	}
	f.mu.Unlock()
	var all sync.WaitGroup
	for _, fd := range bound {
		all.Go(fd.stop)
	}
	all.Wait()
}

// Close stops all feeds.
func (f *Feeds) Close() {
	f.mu.Lock()
	feeds := f.feeds
	f.feeds = make(map[worker.ID]*feed)
	first := !f.closed
	f.closed = true
	f.mu.Unlock()
	var all sync.WaitGroup
	for _, fd := range feeds {
		all.Go(fd.stop)
	}
	all.Wait()
	if first && f.poller != nil {
		f.poller.Close()
	}
}
