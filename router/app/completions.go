package app

import (
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/zmtp"
	"sluice/router/config"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/notify"
	"sluice/router/obs"
	"sluice/router/pd"
)

// completionBoard gives the runner the board on which LMCache's prefill workers
// tell that KV has been written; nil where no model is of that family.
//
// Connections belong to the process that has introduced itself on them, so a router that
// takes another's place is not given the socket: it waits until that one has let go
// (release), and requests that need the board wait with it, for bindTimeout at most.
type completionBoard struct {
	board     atomic.Pointer[notify.Listener] // nil: not bound yet
	bindDone  chan struct{}                   // closed when it is, or never will be
	stop      chan struct{}
	closeOnce sync.Once
	expected  atomic.Int64
}

const (
	// bindTimeout is how long a new router tries to bind what the old one holds.
	bindTimeout = 10 * time.Second
	// releaseTimeout is how long an old router goes on with what it waits for.
	releaseTimeout = 5 * time.Second
)

// newCompletionBoard binds the socket; where replaces says that another router may
// hold it yet, that is tried again in the background.
func newCompletionBoard(cfg *config.Config, w *kvtransfer.Watcher, replaces bool, log *slog.Logger) (*completionBoard, error) {
	if !cfg.UsesFamily("lmcache") {
		return nil, nil
	}
	n := &completionBoard{bindDone: make(chan struct{}), stop: make(chan struct{})}
	bind := func() error {
		board, err := notify.Listen(notify.Options{
			Endpoint: cfg.LMCache.NotifyEndpoint(), Networks: config.Prefixes(cfg.LMCache.Networks), TTL: cfg.LMCache.FinishedReqTTL, Sweep: cfg.LMCache.CleanupInterval,
			Report: w.HandleMessage, Log: log,
		})
		if err == nil {
			log.Info("LMCache's notifications are taken", "endpoint", board.Endpoint())
			n.board.Store(board)
			close(n.bindDone)
		}
		return err
	}
	err := bind()
	if err == nil || !replaces || !errors.Is(err, syscall.EADDRINUSE) {
		if err != nil {
			return nil, err
		}
		return n, nil
	}
	go n.bindLater(bind, cfg.Timeouts.Restart+bindTimeout, log)
	return n, nil
}

// bindLater binds once the router that is replaced has let go.
func (n *completionBoard) bindLater(bind func() error, limit time.Duration, log *slog.Logger) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(limit); ; {
		select {
		case <-n.stop:
			close(n.bindDone)
			return
		case <-tick.C:
		}
		err := bind()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			log.Error("LMCache's notifications are not taken: requests that wait for them fall back", "err", err)
			close(n.bindDone)
			return
		}
	}
}

// handOver lets go of the socket for the router that takes this one's place, as soon
// as nothing is waited for, or after releaseTimeout.
func (n *completionBoard) handOver() {
	if n == nil {
		return
	}
	idle := 0
	for end := time.Now().Add(releaseTimeout); idle < 5 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if idle++; n.expected.Load() > 0 {
			idle = 0
		}
	}
	n.close()
}

// stats are the board's; none while there is no board.
func (n *completionBoard) stats() notify.Stats {
	if b := n.board.Load(); b != nil {
		return b.Stats()
	}
	return notify.Stats{}
}

// exposeMetrics exposes the board's counters.
func (n *completionBoard) exposeMetrics(m *obs.Metrics) {
	if n == nil {
		return
	}
	for outcome, of := range map[string]func(notify.Stats) int64{
		"received":  func(s notify.Stats) int64 { return s.Received },
		"early":     func(s notify.Stats) int64 { return s.Early },
		"expired":   func(s notify.Stats) int64 { return s.Expired },
		"dropped":   func(s notify.Stats) int64 { return s.Dropped },
		"foreign":   func(s notify.Stats) int64 { return s.Foreign },
		"malformed": func(s notify.Stats) int64 { return s.Malformed },
	} {
		m.GaugeFunc(func() float64 { return float64(of(n.stats())) }, "sluice_kv_notifications_total", "outcome", outcome)
	}
	m.GaugeFunc(func() float64 { return float64(n.stats().Unclaimed) }, "sluice_kv_notifications_unmatched")
	exposeSocketMetrics(m, "lmcache", func() zmtp.Stats { return n.stats().Socket })
}

// runnerCompletions is what the runner takes; a nil pointer in an interface would not
// be nil there.
func (n *completionBoard) runnerCompletions() pd.Completions {
	if n == nil {
		return nil
	}
	return n
}

// Expect implements disagg.Completions.
func (n *completionBoard) Expect(id string, count int) pd.Expectation {
	board := n.board.Load()
	if board == nil {
		select {
		case <-n.bindDone:
			board = n.board.Load()
		case <-time.After(bindTimeout):
		}
		if board == nil {
			return closedExpectation{}
		}
	}
	t, err := board.Expect(id, count)
	if err != nil {
		return closedExpectation{} // the board is closing: nothing will tell
	}
	n.expected.Add(1)
	return &countedExpectation{Expectation: t, board: n}
}

func (n *completionBoard) close() {
	if n == nil {
		return
	}
	n.closeOnce.Do(func() { close(n.stop) })
	select {
	case <-n.bindDone:
		if b := n.board.Load(); b != nil {
			b.Close()
		}
	default: // bindLater may just have bound it; the process ends
	}
}

type countedExpectation struct {
	*notify.Expectation
	board *completionBoard
	once  sync.Once
}

// Cancel implements disagg.Expectation.
func (e *countedExpectation) Cancel() {
	e.once.Do(func() { e.board.expected.Add(-1) })
	e.Close()
}

// closedExpectation is an expectation on a board that is no more; the runner's own limit
// ends the wait.
type closedExpectation struct{}

func (closedExpectation) Done() <-chan struct{} { return nil }
func (closedExpectation) Cancel()               {}
