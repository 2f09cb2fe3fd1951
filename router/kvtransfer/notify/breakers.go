package notify

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// Breakers holds the prefill ranks whose notification did not arrive in time. A rank has such a breaker besides that
// of its health, because these engines answer HTTP requests well. A rank that misses breakerThreshold notifications
// in a row gets no more hand-overs, except a trial every breakerRetry. While no rank has missed a notification, a
// request reads only one counter. The zero value is ready; all methods may be called from any goroutine.
type Breakers struct {
	byRank sync.Map     // *worker.Rank -> *breaker
	count  atomic.Int32 // number of entries in byRank
}

// breaker is the state of one rank. A concurrent request may see a change late.
type breaker struct {
	misses  atomic.Int32 // consecutive
	retryAt atomic.Int64 // time of the next trial, in ns since 1970
}

const (
	// breakerThreshold tolerates the notifications that are lost while a new router
	// process takes over.
	breakerThreshold = 2
	breakerRetry     = 10 * time.Second
)

// RecordMiss records that a rank's completion notification did not arrive in time.
func (s *Breakers) RecordMiss(r *worker.Rank, log *slog.Logger) {
	v, had := s.byRank.LoadOrStore(r, new(breaker))
	if !had {
		s.count.Add(1)
	}
	b := v.(*breaker)
	b.retryAt.Store(time.Now().Add(breakerRetry).UnixNano())
	if b.misses.Add(1) == breakerThreshold {
		log.Warn("a prefill worker sends no notifications that its KV has been written; until it does, it gets no hand-overs except one every "+breakerRetry.String(),
			"rank", r.ID.String(), "hint", "pd_proxy_host and pd_proxy_port of the worker, lmcache.networks here; with pd_skip_proxy_notification pd.completion_timeout must be 0")
	}
	if r.Removed() { // WorkerRemoved may have run before
		s.remove(r)
	}
}

// RecordNotified records that a rank's completion notification arrived. It resets the rank's
// breaker.
func (s *Breakers) RecordNotified(r *worker.Rank, log *slog.Logger) {
	if s.count.Load() == 0 {
		return
	}
	if b := s.remove(r); b != nil && b.misses.Load() >= breakerThreshold {
		log.Info("a prefill worker sends notifications again", "rank", r.ID.String())
	}
}

func (s *Breakers) remove(r *worker.Rank) *breaker {
	v, had := s.byRank.LoadAndDelete(r)
	if !had {
		return nil
	}
	s.count.Add(-1)
	return v.(*breaker)
}

// RecordTrial records that a rank with an open breaker gets a trial hand-over, so that no other
// request tries it until the next retry time.
func (s *Breakers) RecordTrial(r *worker.Rank) {
	if s.count.Load() == 0 {
		return
	}
	if v, ok := s.byRank.Load(r); ok {
		v.(*breaker).retryAt.Store(time.Now().Add(breakerRetry).UnixNano())
	}
}

// IsOpen reports whether the breaker of a rank is open and no trial is due.
func (s *Breakers) IsOpen(r *worker.Rank, now time.Time) bool {
	v, ok := s.byRank.Load(r)
	return ok && v.(*breaker).misses.Load() >= breakerThreshold && now.UnixNano() < v.(*breaker).retryAt.Load()
}

// Remove forgets a rank that has left.
func (s *Breakers) Remove(r *worker.Rank) { s.remove(r) }

// IsEmpty reports whether no rank has missed a notification since its last one.
func (s *Breakers) IsEmpty() bool { return s.count.Load() == 0 }

// Open returns the number of ranks that get no hand-overs except trials.
func (s *Breakers) Open() (n int) {
	s.byRank.Range(func(_, v any) bool {
		if v.(*breaker).misses.Load() >= breakerThreshold {
			n++
		}
		return true
	})
	return n
}
