package pd

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/pd/family"
	"sluice/router/worker"
)

// notificationBreakers holds the prefill ranks whose completion notification did not arrive in time
// (CompletionWaiter). It is a breaker of its own because these engines answer HTTP requests well. A
// rank that misses notificationBreakerThreshold notifications in a row gets no more hand-overs,
// except a trial every notificationBreakerRetry. While no rank has missed a notification, a request
// reads only one counter.
type notificationBreakers struct {
	byRank sync.Map     // *worker.Rank -> *notificationBreaker
	count  atomic.Int32 // number of entries in byRank
}

// notificationBreaker is the state of one rank. A concurrent request may see a change late.
type notificationBreaker struct {
	misses  atomic.Int32 // consecutive
	retryAt atomic.Int64 // time of the next trial, in ns since 1970
}

const (
	// notificationBreakerThreshold tolerates the notifications that are lost while a new router
	// process takes over.
	notificationBreakerThreshold = 2
	notificationBreakerRetry     = 10 * time.Second
)

// recordMiss records that a rank's completion notification did not arrive in time.
func (s *notificationBreakers) recordMiss(r *worker.Rank, log *slog.Logger) {
	v, had := s.byRank.LoadOrStore(r, new(notificationBreaker))
	if !had {
		s.count.Add(1)
	}
	breaker := v.(*notificationBreaker)
	breaker.retryAt.Store(time.Now().Add(notificationBreakerRetry).UnixNano())
	if breaker.misses.Add(1) == notificationBreakerThreshold {
		log.Warn("a prefill worker sends no notifications that its KV has been written; until it does, it gets no hand-overs except one every "+notificationBreakerRetry.String(),
			"rank", r.ID.String(), "hint", "pd_proxy_host and pd_proxy_port of the worker, lmcache.networks here; with pd_skip_proxy_notification pd.completion_timeout must be 0")
	}
	if r.Removed() { // WorkerRemoved may have run before
		s.remove(r)
	}
}

// recordNotified records that a rank's completion notification arrived. It resets the rank's
// breaker.
func (s *notificationBreakers) recordNotified(r *worker.Rank, log *slog.Logger) {
	if s.count.Load() == 0 {
		return
	}
	if breaker := s.remove(r); breaker != nil && breaker.misses.Load() >= notificationBreakerThreshold {
		log.Info("a prefill worker sends notifications again", "rank", r.ID.String())
	}
}

func (s *notificationBreakers) remove(r *worker.Rank) *notificationBreaker {
	v, had := s.byRank.LoadAndDelete(r)
	if !had {
		return nil
	}
	s.count.Add(-1)
	return v.(*notificationBreaker)
}

// recordTrial records that a rank with an open breaker gets a trial hand-over, so that no other
// request tries it until the next retry time.
func (s *notificationBreakers) recordTrial(r *worker.Rank) {
	if s.count.Load() == 0 {
		return
	}
	if v, ok := s.byRank.Load(r); ok {
		v.(*notificationBreaker).retryAt.Store(time.Now().Add(notificationBreakerRetry).UnixNano())
	}
}

// isOpen reports whether the breaker of a rank is open and no trial is due.
func (s *notificationBreakers) isOpen(r *worker.Rank, now time.Time) bool {
	v, ok := s.byRank.Load(r)
	return ok && v.(*notificationBreaker).misses.Load() >= notificationBreakerThreshold && now.UnixNano() < v.(*notificationBreaker).retryAt.Load()
}

// OpenNotificationBreakers returns the number of prefill ranks that get no hand-overs because they
// send no completion notifications.
func (r *Runner) OpenNotificationBreakers() (n int) {
	r.notificationBreakers.byRank.Range(func(_, v any) bool {
		if v.(*notificationBreaker).misses.Load() >= notificationBreakerThreshold {
			n++
		}
		return true
	})
	return n
}

// notifyingCandidates returns the candidates of a prefill leg without the ranks whose breaker is
// open. It returns all of them if the family does not wait for notifications or the configuration
// forbids that decode runs alone.
func (q *request) notifyingCandidates(candidates []*worker.Rank) []*worker.Rank {
	if q.r.notificationBreakers.count.Load() == 0 || !q.pd.DecodeOnlyFallback || q.pd.CompletionTimeout == 0 {
		return candidates
	}
	if _, waits := q.plan.Family.(family.CompletionWaiter); !waits {
		return candidates
	}
	now := time.Now()
	open := make([]*worker.Rank, 0, len(candidates))
	for _, c := range candidates {
		if !q.r.notificationBreakers.isOpen(c, now) {
			open = append(open, c)
		}
	}
	if len(open) == 0 && len(candidates) > 0 {
		q.noteFallback("notifications_missing", "no prefill worker sends notifications that its KV has been written")
	}
	return open
}
