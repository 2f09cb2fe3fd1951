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

// Source describes where one rank's events come from.
type Source struct {
	Rank           *worker.Rank
	Model          string // part of the block hashes
	Engine         string // "vllm" or "sglang" selects the decoder; "" detects it
	Endpoint       string // PUB, "tcp://host:port"; a host of "*" is already replaced
	Bind           bool   // the engine connects: the feed binds Endpoint
	ReplayEndpoint string // ROUTER; "" if the engine has none
	Topic          string
	// Resume is the position of a previous router, whose blocks of the rank are already in the
	// index. They are dropped if the engine cannot prove by replay that it is the same incarnation,
	// or no longer keeps the messages since.
	Resume *Position
}

// Options configures a Feeds. Zero values select the defaults.
type Options struct {
	Index         kvindex.Index
	Log           *slog.Logger
	Counters      CounterSink
	IndexObserver IndexObserver      // receives what is applied; nil: none
	OnClear       func(worker.Slot)  // called before everything known of a rank is dropped; nil: none
	OnRestart     func(*worker.Rank) // called before a rank is cleared because its engine is, or may be, a new incarnation; nil: none
	MaxFrame      int                // bytes of one message; larger ones are dropped and counted [32 MiB]
	ReplayTimeout time.Duration      // the longest wait for one message of a replay [5s]
	RetryMin      time.Duration      // the first wait after a failed replay; doubles up to RetryMax [1s]
	RetryMax      time.Duration      // [30s]
	TailCheck     time.Duration      // silence after which the engine is asked whether it has published more [5s]

	maxIdleTimeouts time.Duration // how many ReplayTimeouts a catch-up continues without new messages [defaultMaxIdleTimeouts]
	inboxBytes      int           // bytes of an inbox [defaultInboxBytes]
}

// CounterSink counts. Its methods must be safe for concurrent use.
type CounterSink interface {
	// AddFeedCount adds n to a counter of one rank; counter is one of Counters.
	AddFeedCount(id worker.ID, counter string, n int)
}

// Counters are the names with which AddFeedCount is called.
var Counters = []string{
	"batches",          // messages applied, live and replayed
	"stored",           // blocks new in the index
	"duplicate",        // stored blocks that were already in the index
	"orphans",          // stores dropped because their parent is unknown
	"removed",          // blocks removed
	"unknown_removed",  // removals of blocks that the index does not have
	"cleared",          // the engine cleared its cache
	"ignored",          // events not indexed: other group or medium, no tokens, skipped blocks, unknown kind
	"gaps",             // live messages whose sequence number was above the expected one
	"resyncs",          // full replays after an unreadable message
	"tail_checks",      // requests after a burst for messages that did not arrive
	"replays",          // replays requested, including tail checks
	"replayed_batches", // batches received by replay
	"replay_failures",  // replays that failed or were incomplete
	"restarts",         // new incarnations of the engine; the previous one's blocks were dropped
	"resets",           // times the rank's blocks were dropped because they could not be trusted
	"malformed",        // messages or events that could not be read
	"oversize",         // messages above MaxFrame
	"remote",           // events of blocks on another machine, not indexed
	"unknown_locality", // stores in storage that may be another machine's because the event has no locality; not indexed
	"wrong_rank",       // batches of another rank, not applied
}

// Feeds runs the subscriptions of a fleet: per rank one goroutine and one descriptor, two
// descriptors during a replay or if the endpoint is bound, and one poller for all. Its methods may
// be called from any goroutine.
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

// NewFeeds returns an empty set of feeds.
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

// Uncredited returns the counts of blocks that are credited to no rank.
func (f *Feeds) Uncredited() *UncreditedBlocks { return &f.uncredited }

// Start subscribes to one rank. A second Start of the same rank replaces the first. It returns an
// error if the endpoint is invalid. If the engine does not answer yet, or the endpoint cannot be
// bound yet, Start succeeds and the feed retries.
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
		return fmt.Errorf("kvevents: cannot subscribe to %q: another Start of rank %q is in progress", src.Endpoint, src.Rank.ID)
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

// Stop ends a rank's feed and clears the rank in the index. It returns when the feed's goroutine
// has ended.
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
