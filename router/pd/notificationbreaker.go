package pd

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// notificationBreakers are the prefill ranks whose completions were waited for in vain (Awaiter): a
// breaker for that alone, since their engines answer well. One that is silent so often in a
// row gets no more hand-overs but one now and then, to see whether it tells again. Where
// all tell, a request reads one counter.
type notificationBreakers struct {
	byRank sync.Map     // *worker.Rank -> *silence
	count  atomic.Int32 // of them
}

// notificationBreaker is of one rank. Requests that meet a change may see it a moment late.
type notificationBreaker struct {
	misses  atomic.Int32 // in a row
	retryAt atomic.Int64 // when it may be tried again, in ns since 1970
}

const (
	// notificationBreakerThreshold forgives what is lost while a router takes another's place.
	notificationBreakerThreshold = 2
	notificationBreakerRetry     = 10 * time.Second
)

// recordMiss notes that a rank's completion did not come in time.
func (s *notificationBreakers) recordMiss(r *worker.Rank, log *slog.Logger) {
	v, had := s.byRank.LoadOrStore(r, new(notificationBreaker))
	if !had {
		s.count.Add(1)
	}
	breaker := v.(*notificationBreaker)
	breaker.retryAt.Store(time.Now().Add(notificationBreakerRetry).UnixNano())
	if breaker.misses.Add(1) == notificationBreakerThreshold {
		log.Warn("a prefill worker does not tell that its KV has been written; it gets no hand-overs until it does, but one every "+notificationBreakerRetry.String(),
			"rank", r.ID.String(), "look", "pd_proxy_host and pd_proxy_port of the worker, lmcache.networks here; with pd_skip_proxy_notification pd.completion_timeout must be 0")
	}
	if r.Removed() { // and was forgotten before
		s.remove(r)
	}
}

// recordNotified notes that it came.
func (s *notificationBreakers) recordNotified(r *worker.Rank, log *slog.Logger) {
	if s.count.Load() == 0 {
		return
	}
	if breaker := s.remove(r); breaker != nil && breaker.misses.Load() >= notificationBreakerThreshold {
		log.Info("a prefill worker tells again that its KV has been written", "rank", r.ID.String())
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

// recordTrial notes that a silent rank gets a hand-over, so that no other does for a while.
func (s *notificationBreakers) recordTrial(r *worker.Rank) {
	if s.count.Load() == 0 {
		return
	}
	if v, ok := s.byRank.Load(r); ok {
		v.(*notificationBreaker).retryAt.Store(time.Now().Add(notificationBreakerRetry).UnixNano())
	}
}

// isOpen says whether a rank is silent, and not to be tried now.
func (s *notificationBreakers) isOpen(r *worker.Rank, now time.Time) bool {
	v, ok := s.byRank.Load(r)
	return ok && v.(*notificationBreaker).misses.Load() >= notificationBreakerThreshold && now.UnixNano() < v.(*notificationBreaker).retryAt.Load()
}

// OpenNotificationBreakers is how many prefill ranks get no hand-overs because they do not tell of them.
func (r *Runner) OpenNotificationBreakers() (n int) {
	r.notificationBreakers.byRank.Range(func(_, v any) bool {
		if v.(*notificationBreaker).misses.Load() >= notificationBreakerThreshold {
			n++
		}
		return true
	})
	return n
}

// notifyingCandidates are the candidates of a prefill leg without the silent ones, where the family
// waits for what they tell; all, where nothing else may be done.
func (q *request) notifyingCandidates(candidates []*worker.Rank) []*worker.Rank {
	if q.r.notificationBreakers.count.Load() == 0 || !q.pd.PlainDecode || q.pd.NotifyWait == 0 {
		return candidates
	}
	if _, waits := q.plan.Family.(CompletionWaiter); !waits {
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
		q.noteFallback("silent_prefill", "no prefill worker tells that its KV has been written")
	}
	return open
}
