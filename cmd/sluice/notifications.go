package main

import (
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/nixl/notify"
	"sluice/nixl/zmtp"
	"sluice/router/config"
	"sluice/router/disagg"
	"sluice/router/obs"
	"sluice/router/transfers"
)

// notifications gives the runner the board on which LMCache's prefill workers
// tell that KV has been written; nil where no model is of that family.
//
// Connections belong to the process that has introduced itself on them, so a router that
// takes another's place is not given the socket: it waits until that one has let go
// (release), and requests that need the board wait with it, for bindTime at most.
type notifications struct {
	board   atomic.Pointer[notify.Board] // nil: not bound yet
	bound   chan struct{}                // closed when it is, or never will be
	stop    chan struct{}
	stopped sync.Once
	waits   atomic.Int64
}

const (
	// bindTime is how long a new router tries to bind what the old one holds.
	bindTime = 10 * time.Second
	// releaseTime is how long an old router goes on with what it waits for.
	releaseTime = 5 * time.Second
)

// newNotifications binds the socket; where replaces says that another router may
// hold it yet, that is tried again in the background.
func newNotifications(cfg *config.Config, w *transfers.Watch, replaces bool, log *slog.Logger) (*notifications, error) {
	if !cfg.UsesFamily("lmcache") {
		return nil, nil
	}
	n := &notifications{bound: make(chan struct{}), stop: make(chan struct{})}
	bind := func() error {
		board, err := notify.Listen(notify.Options{
			Endpoint: cfg.LMCache.NotifyEndpoint(), Networks: config.Prefixes(cfg.LMCache.Networks), TTL: cfg.LMCache.FinishedReqTTL, Sweep: cfg.LMCache.CleanupInterval,
			Report: w.Frame, Log: log,
		})
		if err == nil {
			log.Info("LMCache's notifications are taken", "endpoint", board.Endpoint())
			n.board.Store(board)
			close(n.bound)
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
	go n.bindLater(bind, cfg.Timeouts.Restart+bindTime, log)
	return n, nil
}

// bindLater binds once the router that is replaced has let go.
func (n *notifications) bindLater(bind func() error, limit time.Duration, log *slog.Logger) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(limit); ; {
		select {
		case <-n.stop:
			close(n.bound)
			return
		case <-tick.C:
		}
		err := bind()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			log.Error("LMCache's notifications are not taken: requests that wait for them fall back", "err", err)
			close(n.bound)
			return
		}
	}
}

// release lets go of the socket for the router that takes this one's place, as soon
// as nothing is waited for, or after releaseTime.
func (n *notifications) release() {
	if n == nil {
		return
	}
	quiet := 0
	for end := time.Now().Add(releaseTime); quiet < 5 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if quiet++; n.waits.Load() > 0 {
			quiet = 0
		}
	}
	n.close()
}

// stats are the board's; none while there is no board.
func (n *notifications) stats() notify.Stats {
	if b := n.board.Load(); b != nil {
		return b.Stats()
	}
	return notify.Stats{}
}

// watch exposes the board's counters.
func (n *notifications) watch(m *obs.Metrics) {
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
		m.Func(func() float64 { return float64(of(n.stats())) }, "sluice_kv_notifications_total", "outcome", outcome)
	}
	m.Func(func() float64 { return float64(n.stats().Unclaimed) }, "sluice_kv_notifications_unclaimed")
	watchSocket(m, "lmcache", func() zmtp.Stats { return n.stats().Socket })
}

// completions is what the runner takes; a nil pointer in an interface would not
// be nil there.
func (n *notifications) completions() disagg.Completions {
	if n == nil {
		return nil
	}
	return n
}

// Expect implements disagg.Completions.
func (n *notifications) Expect(id string, count int) disagg.Expectation {
	board := n.board.Load()
	if board == nil {
		select {
		case <-n.bound:
			board = n.board.Load()
		case <-time.After(bindTime):
		}
		if board == nil {
			return never{}
		}
	}
	t, err := board.Expect(id, count)
	if err != nil {
		return never{} // the board is closing: nothing will tell
	}
	n.waits.Add(1)
	return &expectation{Ticket: t, of: n}
}

func (n *notifications) close() {
	if n == nil {
		return
	}
	n.stopped.Do(func() { close(n.stop) })
	select {
	case <-n.bound:
		if b := n.board.Load(); b != nil {
			b.Close()
		}
	default: // bindLater may just have bound it; the process ends
	}
}

type expectation struct {
	*notify.Ticket
	of   *notifications
	once sync.Once
}

// Forget implements disagg.Expectation.
func (e *expectation) Forget() {
	e.once.Do(func() { e.of.waits.Add(-1) })
	e.Close()
}

// never is an expectation on a board that is no more; the runner's own limit
// ends the wait.
type never struct{}

func (never) Done() <-chan struct{} { return nil }
func (never) Forget()               {}
