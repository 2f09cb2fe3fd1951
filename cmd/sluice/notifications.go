package main

import (
	"log/slog"

	"sluice/nixl/notify"
	"sluice/router/config"
	"sluice/router/disagg"
	"sluice/router/obs"
	"sluice/router/transfers"
)

// notifications gives the runner the board on which LMCache's prefill workers
// tell that KV has been written; nil where no model is of that family.
type notifications struct{ board *notify.Board }

func newNotifications(cfg *config.Config, w *transfers.Watch, log *slog.Logger) (*notifications, error) {
	if !cfg.UsesFamily("lmcache") {
		return nil, nil
	}
	board, err := notify.Listen(notify.Options{
		Endpoint: cfg.LMCache.NotifyEndpoint(), TTL: cfg.LMCache.FinishedReqTTL, Sweep: cfg.LMCache.CleanupInterval,
		Report: w.Frame, Log: log,
	})
	if err != nil {
		return nil, err
	}
	log.Info("LMCache's notifications are taken", "endpoint", board.Endpoint())
	return &notifications{board}, nil
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
		m.Func(func() float64 { return float64(of(n.board.Stats())) }, "sluice_kv_notifications_total", "outcome", outcome)
	}
	m.Func(func() float64 { return float64(n.board.Stats().Unclaimed) }, "sluice_kv_notifications_unclaimed")
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
	t, err := n.board.Expect(id, count)
	if err != nil {
		return never{} // the board is closing: nothing will tell
	}
	return expectation{t}
}

func (n *notifications) close() {
	if n != nil {
		n.board.Close()
	}
}

type expectation struct{ *notify.Ticket }

// Forget implements disagg.Expectation.
func (e expectation) Forget() { e.Close() }

// never is an expectation on a board that is no more; the runner's own limit
// ends the wait.
type never struct{}

func (never) Done() <-chan struct{} { return nil }
func (never) Forget()               {}
