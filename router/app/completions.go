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

// completionBoard owns the socket on which LMCache prefill workers report that KV has been
// written, and lets the runner wait for these notifications. It is nil if no model uses the
// lmcache family.
//
// A hot restart does not pass the socket to the new process, because each connection is bound
// to the process that did the ZMQ handshake. The new process retries to bind the address until
// the old one closes its socket (release). Requests that need the board wait for the bind, for
// at most bindTimeout.
type completionBoard struct {
	board     atomic.Pointer[notify.Listener] // nil until the socket is bound
	bindDone  chan struct{}                   // closed once the socket is bound or the router has given up
	stop      chan struct{}
	closeOnce sync.Once
	expected  atomic.Int64
}

const (
	// bindTimeout is how long a new process tries to bind an address that the old one still uses.
	bindTimeout = 10 * time.Second
	// releaseTimeout is how long a replaced process keeps its sockets open for the
	// notifications that its requests still expect.
	releaseTimeout = 5 * time.Second
)

// newCompletionBoard binds the socket. If replaces is true, the process being replaced may
// still use the address; newCompletionBoard then retries in the background.
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
			log.Info("receiving LMCache's notifications", "endpoint", board.Endpoint())
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

// bindLater retries bind until it succeeds, the limit passes or the board is closed.
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
			log.Error("cannot receive LMCache's notifications; requests that wait for them fall back", "error", err)
			close(n.bindDone)
			return
		}
	}
}

// release closes the socket so that the new process can bind the address. It first waits
// until no request has expected a notification for 50 ms, for at most releaseTimeout.
func (n *completionBoard) release() {
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

// stats returns the counters of the listener, or zeros while the socket is not bound.
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
		"received":           func(s notify.Stats) int64 { return s.Received },
		"early":              func(s notify.Stats) int64 { return s.Early },
		"expired":            func(s notify.Stats) int64 { return s.Expired },
		"dropped":            func(s notify.Stats) int64 { return s.Dropped },
		"not_a_notification": func(s notify.Stats) int64 { return s.OtherType },
		"malformed":          func(s notify.Stats) int64 { return s.Malformed },
	} {
		m.GaugeFunc(func() float64 { return float64(of(n.stats())) }, "sluice_kv_notifications_total", "outcome", outcome)
	}
	m.GaugeFunc(func() float64 { return float64(n.stats().Unmatched) }, "sluice_kv_notifications_unmatched")
	exposeSocketMetrics(m, "lmcache", func() zmtp.Stats { return n.stats().Socket })
}

// runnerCompletions returns n as the runner's interface. It returns a nil interface for a nil
// n, because an interface that contains a nil pointer is not nil.
func (n *completionBoard) runnerCompletions() pd.Completions {
	if n == nil {
		return nil
	}
	return n
}

// Expect implements pd.Completions. It blocks for at most bindTimeout while the socket is
// not bound.
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
		return closedExpectation{} // the listener is closing: no notification will arrive
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
	default: // bindLater may bind the socket after this; the end of the process closes it
	}
}

type countedExpectation struct {
	*notify.Expectation
	board *completionBoard
	once  sync.Once
}

// Cancel implements pd.Expectation.
func (e *countedExpectation) Cancel() {
	e.once.Do(func() { e.board.expected.Add(-1) })
	e.Close()
}

// closedExpectation is the expectation that Expect returns if there is no listener. It is
// never done; the runner's own timeout ends the wait.
type closedExpectation struct{}

func (closedExpectation) Done() <-chan struct{} { return nil }
func (closedExpectation) Cancel()               {}
