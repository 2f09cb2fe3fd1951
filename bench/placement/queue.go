package placement

import (
	"container/heap"
	"math"
	"slices"
	"sync"
	"time"

	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// QueueOptions configure the admission queue in front of the engines, as the fields of the same names in
// package config do.
type QueueOptions struct {
	FIFO         bool              // in the order of arrival, and without regard to targets
	Classes      []admission.Class // at least one, the highest first
	EngineQueue  time.Duration
	AffinityWait time.Duration
	MaxWait      time.Duration
}

// queue is the router's admission queue. Its order, its forecasts and the rule by which a rank has
// capacity are the router's own; it decides for a request as package pd does.
//
// Requests wait on goroutines of their own, and are started on that of the dispatcher. Whatever reads or
// changes the run does so with mu.
type queue struct {
	*run
	opt        *QueueOptions
	controller *admission.Controller
	mu         sync.Mutex
	added      chan struct{} // the dispatcher has added an event
	freed      bool          // capacity has become free since the last event
	excluded   []*worker.Rank
	backlog    admission.Backlog // of the request that is looked at
}

// targetMargin is the part of a target that a forecast leaves unused.
const targetMargin = 0.1

// These are those of package pd.
const (
	overtakeMargin = 250 * time.Millisecond
	preferenceAge  = 20 * time.Millisecond
)

// playQueued plays the trace with a queue.
func (r *run) playQueued() {
	q := &queue{run: r, opt: r.o.Queue, added: make(chan struct{}, 1)}
	q.controller = admission.NewController(admission.Settings{Classes: r.o.Queue.Classes, Limits: admission.Limits{MaxRequests: 50_000, MaxTenants: 1000}}, q)
	r.queue = q
	r.scheduler.SetOnCapacity(func() { q.freed = true })
	for q.next() {
		if q.freed {
			q.freed = false
			q.controller.Wake()
		}
		r.o.Settle()
	}
}

// next waits for the next event and carries it out. It returns false if there is none any more.
func (q *queue) next() bool {
	for {
		q.mu.Lock()
		if len(q.events) == 0 {
			q.mu.Unlock()
			return false
		}
		wait := q.events[0].at - q.now()
		if wait <= 0 {
			heap.Pop(&q.events).(event).fn()
			q.mu.Unlock()
			return true
		}
		q.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-q.added:
			timer.Stop()
		}
	}
}

// arrive lets a request wait if no rank can start it. It returns false if one can. Called with mu.
func (q *queue) arrive(x *arrival) bool {
	if q.controller.IsEmpty() {
		q.backlog = admission.Backlog{}
		if q.hasCapacity(x) && q.choosesFree(x) {
			return false
		}
	}
	query := q.query(x)
	c, _ := q.scheduler.Preview(&query)
	todo := max(x.Prompt-c.CachedTokens, 1)
	w := &admission.Waiter{Class: q.opt.Classes[min(x.Class, len(q.opt.Classes)-1)].Name, Item: admission.Item{Pool: "model", Tenant: x.Tenant, Cost: int64(todo + schedule.ExpectedOutput(x.Output))}}
	s := &starter{q: q, arrival: x, waitSince: time.Now()}
	w.Starter = s
	now, wait := q.controller.Now(), q.opt.MaxWait
	w.Item.Due = now + int64(wait/2)
	switch target := q.o.Targets.First; {
	case q.opt.FIFO:
		w.Item.Due = now
	case target > 0:
		first, delay := q.scheduler.FirstTokenTime(c.Rank, todo)
		left := time.Duration((1-targetMargin)*float64(target)) - first
		start := left
		if q.controller.Forecast(w) == 0 {
			if start += delay; left < 0 {
				left = start
			}
		}
		w.Item.Due, w.Item.Firm = now+int64(left), true
		wait = min(wait, max(start, 0))
	}
	go s.wait(w, wait)
	return true
}

// starter is a request that waits.
type starter struct {
	q             *queue
	arrival       *arrival
	waitSince     time.Time
	affinitySince time.Time
}

// wait ends when the request has been dispatched or refused.
func (s *starter) wait(w *admission.Waiter, atMost time.Duration) {
	c := s.q.controller
	isLate := w.Item.Firm && max(c.Forecast(w), 0) > time.Duration(w.Item.Due-c.Now())
	if !isLate && c.Enqueue(w) == admission.WithinBounds && c.Wait(w, atMost) == admission.Dispatched {
		return
	}
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	s.q.open--
	if s.arrival.measured {
		s.q.refused++
	}
}

// TryStart implements admission.Starter.
func (s *starter) TryStart(backlog admission.Backlog, _ *time.Time) admission.Verdict {
	q := s.q
	q.mu.Lock()
	defer q.mu.Unlock()
	q.backlog = backlog
	if !q.hasCapacity(s.arrival) {
		return admission.NoCapacity
	}
	q.excluded = q.excluded[:0]
	for _, r := range q.ranks {
		if !q.isFree(s.arrival, r) {
			q.excluded = append(q.excluded, r)
		}
	}
	if s.prefersFullRank() {
		return admission.NotNow
	}
	c, ok := q.choose(s.arrival, q.excluded)
	if !ok {
		return admission.NotNow // a report has come between the two looks at its rank
	}
	q.send(s.arrival, c)
	if s.arrival.measured {
		q.waited++
	}
	select {
	case q.added <- struct{}{}:
	default:
	}
	return admission.Started
}

// choosesFree reports whether the rank with the lowest cost could start the request soon.
func (q *queue) choosesFree(x *arrival) bool {
	query := q.query(x)
	c, ok := q.scheduler.Preview(&query)
	return !ok || q.isFree(x, c.Rank)
}

func (q *queue) hasCapacity(x *arrival) bool {
	return slices.ContainsFunc(q.ranks, func(r *worker.Rank) bool { return q.isFree(x, r) })
}

func (q *queue) isFree(x *arrival, r *worker.Rank) bool {
	return q.scheduler.CanStart(r, schedule.WholeLeg, q.engineQueue(), x.Prompt, x.Output)
}

func (q *queue) engineQueue() schedule.EngineQueue {
	return schedule.EngineQueue{Time: q.opt.EngineQueue, Backlogged: q.backlog.Lasts}
}

// prefersFullRank reports whether the request waits for a rank without capacity that holds its prefix.
func (s *starter) prefersFullRank() bool {
	q := s.q
	query := q.query(s.arrival)
	best, ok := q.scheduler.Preview(&query)
	if !ok || q.opt.AffinityWait == 0 || best.CachedTokens == 0 || q.isFree(s.arrival, best.Rank) {
		return false
	}
	query.Excluded = q.excluded
	other, ok := q.scheduler.Preview(&query)
	if !ok || best.CachedTokens <= other.CachedTokens {
		return false
	}
	more := q.scheduler.PrefillTime(other.Rank, best.CachedTokens-other.CachedTokens)
	lost := more * time.Duration(other.Rank.Requests.Load())
	if overtakes := q.backlog.Overtaken > overtakeMargin || q.backlog.OvertakenAny > q.opt.AffinityWait+overtakeMargin; overtakes {
		lost = 0
	}
	there, elsewhere := s.firstTokenIn(&best), s.firstTokenIn(&other)
	if target := q.o.Targets.First; target > 0 {
		left := time.Duration((1-targetMargin)*float64(target)) - time.Since(s.waitSince)
		if elsewhere <= left && (there > left || left-elsewhere < 2*preferenceAge) {
			return false
		}
	}
	if there >= elsewhere+lost {
		return false
	}
	if s.affinitySince.IsZero() {
		s.affinitySince = time.Now()
	}
	return time.Since(s.affinitySince) < q.opt.AffinityWait
}

func (s *starter) firstTokenIn(c *schedule.Choice) time.Duration {
	return s.q.scheduler.StartIn(c.Rank) + s.q.scheduler.PrefillTime(c.Rank, max(s.arrival.Prompt-c.CachedTokens, 1))
}

// Enqueued implements admission.Observer.
func (q *queue) Enqueued(string, string) {}

// Dequeued implements admission.Observer.
func (q *queue) Dequeued(string, string, admission.Outcome, time.Duration, time.Duration) {}

// mixed is a load of many users: chats with log-normal lengths, half of each prompt one of 8 prefixes
// of its tenant, with Poisson arrivals at one request a second. The highest class offers high of the
// requests, three tenants of the next one two ninths of the others each, and the lowest class the rest.
func mixed(requests int, high float64, seed uint64) *Trace {
	b := newBuilder("mixed", seed)
	length := func(mean float64) int {
		const spread = 0.5
		return max(1, int(mean*math.Exp(spread*b.rng.NormFloat64()-spread*spread/2)))
	}
	tenants := []string{"interactive", "team-1", "team-2", "team-3", "batch"}
	prefixes := make([][]prompt, len(tenants))
	for i := range prefixes {
		for range 8 {
			prefixes[i] = append(prefixes[i], b.grow(prompt{}, length(300)))
		}
	}
	for i, at := 0, 0.0; i < requests; i++ {
		at += b.exponential(1)
		tenant, class := 0, 0
		if b.rng.Float64() >= high {
			if tenant, class = 1+b.rng.IntN(9)/2, 1; tenant >= 4 {
				tenant, class = 4, 2
			}
		}
		b.add(at, b.grow(prefixes[tenant][b.rng.IntN(8)], length(300)), length(32))
		last := &b.trace.Requests[i]
		last.Class, last.Tenant = class, tenants[tenant]
	}
	return &b.trace
}

// The load of each tenant that stays below its share in greedy, and a share of four tenants, as parts of
// capacity.
const quietLoad, greedyShare = 0.20, 0.25

// greedy is a load of three tenants that stay below their share and one that offers factor times its own,
// with the prompts of mixed, at one request a second. The greedy one has the lower class, which a queue with
// one class ignores.
func greedy(requests int, factor float64, seed uint64) *Trace {
	trace := mixed(requests, 3*quietLoad/(3*quietLoad+factor*greedyShare), seed)
	trace.Name = "greedy"
	for i := range trace.Requests {
		if x := &trace.Requests[i]; x.Class == 0 {
			x.Tenant = []string{"tenant-1", "tenant-2", "tenant-3"}[i%3]
		} else {
			x.Class, x.Tenant = 1, "greedy"
		}
	}
	return trace
}
