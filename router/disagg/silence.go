package disagg

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// silences are the prefill ranks whose completions were waited for in vain (Awaiter): a
// breaker for that alone, since their engines answer well. One that is silent so often in a
// row gets no more hand-overs but one now and then, to see whether it tells again. Where
// all tell, a request reads one counter.
type silences struct {
	of    sync.Map     // *worker.Rank -> *silence
	count atomic.Int32 // of them
}

// silence is of one rank. Requests that meet a change may see it a moment late.
type silence struct {
	misses atomic.Int32 // in a row
	next   atomic.Int64 // when it may be tried again, in ns since 1970
}

const (
	// silentAfter forgives what is lost while a router takes another's place.
	silentAfter = 2
	silentRest  = 10 * time.Second
)

// missed notes that a rank's completion did not come in time.
func (s *silences) missed(r *worker.Rank, log *slog.Logger) {
	v, had := s.of.LoadOrStore(r, new(silence))
	if !had {
		s.count.Add(1)
	}
	one := v.(*silence)
	one.next.Store(time.Now().Add(silentRest).UnixNano())
	if one.misses.Add(1) == silentAfter {
		log.Warn("a prefill worker does not tell that its KV has been written; it gets no hand-overs until it does, but one every "+silentRest.String(),
			"rank", r.ID.String(), "look", "pd_proxy_host and pd_proxy_port of the worker, lmcache.networks here; with pd_skip_proxy_notification pd.notify_wait must be 0")
	}
	if r.Left() { // and was forgotten before
		s.forget(r)
	}
}

// told notes that it came.
func (s *silences) told(r *worker.Rank, log *slog.Logger) {
	if s.count.Load() == 0 {
		return
	}
	if one := s.forget(r); one != nil && one.misses.Load() >= silentAfter {
		log.Info("a prefill worker tells again that its KV has been written", "rank", r.ID.String())
	}
}

func (s *silences) forget(r *worker.Rank) *silence {
	v, had := s.of.LoadAndDelete(r)
	if !had {
		return nil
	}
	s.count.Add(-1)
	return v.(*silence)
}

// tried notes that a silent rank gets a hand-over, so that no other does for a while.
func (s *silences) tried(r *worker.Rank) {
	if s.count.Load() == 0 {
		return
	}
	if v, ok := s.of.Load(r); ok {
		v.(*silence).next.Store(time.Now().Add(silentRest).UnixNano())
	}
}

// out says whether a rank is silent, and not to be tried now.
func (s *silences) out(r *worker.Rank, now time.Time) bool {
	v, ok := s.of.Load(r)
	return ok && v.(*silence).misses.Load() >= silentAfter && now.UnixNano() < v.(*silence).next.Load()
}

// Silent is how many prefill ranks get no hand-overs because they do not tell of them.
func (r *Runner) Silent() (n int) {
	r.silences.of.Range(func(_, v any) bool {
		if v.(*silence).misses.Load() >= silentAfter {
			n++
		}
		return true
	})
	return n
}

// telling are the candidates of a prefill leg without the silent ones, where the family
// waits for what they tell; all, where nothing else may be done.
func (q *request) telling(candidates []*worker.Rank) []*worker.Rank {
	if q.r.silences.count.Load() == 0 || !q.pd.PlainDecode || q.pd.NotifyWait == 0 {
		return candidates
	}
	if _, waits := q.plan.Family.(Awaiter); !waits {
		return candidates
	}
	now := time.Now()
	kept := make([]*worker.Rank, 0, len(candidates))
	for _, c := range candidates {
		if !q.r.silences.out(c, now) {
			kept = append(kept, c)
		}
	}
	if len(kept) == 0 && len(candidates) > 0 {
		q.fellBack("silent_prefill", "no prefill worker tells that its KV has been written")
	}
	return kept
}
