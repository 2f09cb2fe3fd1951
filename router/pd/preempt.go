package pd

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/monotime"
	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Preemption: a waiting request that no rank can start has streams of lower classes suspended. Each
// leaves its engine between two events, which frees its KV and its place there, waits in the admission
// queue, and goes on by the mechanism of a migration.

const (
	// maxAsked bounds how many suspensions one waiting request may ask for.
	maxAsked = 16
	// A request looks for streams again after searchPause, or after askPause if it has asked some: they
	// leave at their next event.
	searchPause = 50 * time.Millisecond
	askPause    = 250 * time.Millisecond
	// limitPoll is how often a stream that has been suspended for too long looks for a rank below its
	// load limits.
	limitPoll = 20 * time.Millisecond
	// Streams that have waited for max_wait are one tenant of the highest class, with the largest weight that a
	// tenant may have, so that they go before other requests.
	overdueTenant = "(suspended streams)"
	overdueWeight = 1000
)

// preemptible is what preemption needs of a stream that may be suspended.
type preemptible struct {
	class  *admissionClass
	tenant string
	weight int
	tokens int // of the prompt

	// What follows is guarded by migratableStreams.mu.

	rank        *worker.Rank
	since       monotime.Time // when the stream began on rank
	suspensions int
	ask         *preemption // of the request that wants the stream suspended; nil if none does
}

// isPreemptible reports whether a stream of the request may be suspended for requests of higher classes.
func (q *request) isPreemptible() bool {
	s := q.settings.admission
	return s != nil && s.preempts && q.class != nil && q.class.index > 0
}

func (q *request) newPreemptible() *preemptible {
	return &preemptible{class: q.class, tenant: q.tenant, weight: q.weight, tokens: q.prompt.Count}
}

// preemptible returns what preemption needs of the stream, nil if it is never suspended.
func (s *streamState) preemptible() *preemptible {
	if s.migration == nil || s.migration.extra == nil {
		return nil
	}
	return s.migration.extra.preemptible
}

// preemption is what a waiting request has asked of streams.
type preemption struct {
	class string // of the request
	pool  string // for whose ranks it waits; streams suspended for it wait for them too, behind it
	ended atomic.Bool

	// The dispatcher alone uses what follows.

	began, next time.Time // when it first found no capacity, and when it may ask again
	asked       int
}

// end withdraws what the request has asked for. p may be nil.
func (p *preemption) end() {
	if p != nil {
		p.ended.Store(true)
	}
}

// preempt asks for the suspension of streams of lower classes, on the rank where the fewest
// suffice. It runs on the dispatcher's goroutine when no rank can start the request.
func (q *request) preempt() {
	s := q.settings.admission
	if s == nil || !s.preempts || q.prefillOnly || q.class.index == len(s.classes)-1 || q.r.migratable.preemptible.Load() == 0 {
		return
	}
	now := time.Now()
	if q.preemption == nil {
		q.preemption = &preemption{class: q.class.Name, pool: q.queuePool(), began: now}
	}
	p := q.preemption
	if p.asked >= maxAsked || now.Before(p.next) {
		return
	}
	p.next = now.Add(searchPause)
	leg, ranks := schedule.WholeLeg, q.plan.Whole
	if q.plan.Family != nil {
		if !q.anyFree(schedule.PrefillLeg, q.nextSelected(q.plan.Prefill)) {
			return // streams hold nothing of a prefill rank
		}
		leg, ranks = schedule.DecodeLeg, q.plan.Decode
	}
	var chosen []*streamState
	var from *worker.Rank
	lacks := int64(0) // blocks
	for _, r := range ranks {
		need, ok := q.shortage(leg, r, now.Sub(p.began))
		if !ok {
			continue
		}
		if list := q.r.migratable.victims(r, q, need); len(list) > 0 && (chosen == nil || len(list) < len(chosen)) {
			chosen, from, lacks = list, r, need.blocks
		}
	}
	if len(chosen) == 0 {
		return
	}
	if lacks > 0 && !q.r.kvClaims.claim(from, q, lacks, true) {
		return // others would take what they leave
	}
	p.next = now.Add(askPause)
	p.asked += len(chosen)
	q.r.migratable.ask(from, chosen, p)
	q.settings.Scheduler.AddNote(q.req.RequestID, fmt.Sprintf("admission: the suspension of %s of lower classes on %s was requested", pluralize(len(chosen), "stream", "streams"), from.ID))
}

// shortage is what must become free on a rank before it can start a request.
type shortage struct {
	requests int64
	blocks   int64 // of KV
}

// shortage returns what a rank lacks to start the leg. ok is false if the end of streams there would not
// help. waited is how long the request has found no capacity.
func (q *request) shortage(leg schedule.LegKind, r *worker.Rank, waited time.Duration) (n shortage, ok bool) {
	s := q.settings
	if q.isExcluded(r) || s.Fleet.HasLimits() && s.Fleet.HalfOpenBusy(r) || !q.r.kvClaims.isOpen(r, q) {
		return n, false
	}
	if s.Fleet.HasLimits() {
		if n.requests = s.Fleet.ExcessRequests(r); n.requests == 0 && s.Fleet.AtCapacity(r) {
			return n, false // at its bound of prompt tokens
		}
	}
	n.blocks = schedule.MissingKV(r, q.newKVTokens(r), q.maxTokens)
	isFull := s.Scheduler.IsBatchFull(r, q.engineQueue())
	if isFull || schedule.UnderPressure(r) {
		n.requests = max(n.requests, 1)
	}
	if !isFull && leg == schedule.WholeLeg && s.Scheduler.IsQueueFull(r, q.engineQueue()) {
		// The prompts queued there are computed within that time, unless the engine has no place in its
		// batch for them.
		if r.Waiting.Load() <= 0 || waited < 2*s.admission.EngineQueue {
			return n, false
		}
		n.requests = max(n.requests, 1)
	}
	return n, n.requests > 0 || n.blocks > 0
}

// victims returns the streams on a rank to suspend for a request that lacks n: those of the lowest class,
// of these the ones that have been suspended least often, of these the ones that began last. It returns nil
// if all of them together are not enough, so that no stream is suspended without effect.
func (m *migratableStreams) victims(r *worker.Rank, q *request, n shortage) (list []*streamState) {
	s := q.settings.admission
	m.mu.Lock()
	defer m.mu.Unlock()
	streams := m.byWorker[r.Worker]
	rankOf := func(p *preemptible) int { // of its class, by the configuration of the request
		if c := s.class(p.class.Name); c != nil {
			return c.index
		}
		return -1
	}
	for stream, p := range streams {
		switch {
		case p == nil || p.rank != r || rankOf(p) <= q.class.index:
		case p.ask != nil && !p.ask.ended.Load():
		case p.suspensions >= s.MaxPreemptions, p.suspensions > 0 && p.since.Since() < s.PreemptionInterval:
		default:
			list = append(list, stream)
		}
	}
	slices.SortFunc(list, func(a, b *streamState) int {
		x, y := streams[a], streams[b]
		return cmp.Or(cmp.Compare(rankOf(y), rankOf(x)), cmp.Compare(x.suspensions, y.suspensions), cmp.Compare(y.since, x.since))
	})
	for i, stream := range list {
		if i >= maxAsked-q.preemption.asked {
			return nil
		}
		n.requests--
		n.blocks -= schedule.KVBlocks(r, streams[stream].tokens)
		if n.requests <= 0 && n.blocks <= 0 {
			return list[:i+1]
		}
	}
	return nil
}

// ask asks for the suspension of streams of one rank for p.
func (m *migratableStreams) ask(r *worker.Rank, list []*streamState, p *preemption) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range list {
		if v := m.byWorker[r.Worker][s]; v != nil { // else it has ended or left meanwhile
			v.ask = p
			s.migration.RequestMigration()
		}
	}
}

// takeAsk returns for which request the stream is to be suspended, once; nil if for none.
func (m *migratableStreams) takeAsk(p *preemptible) (ask *preemption) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ask, p.ask = p.ask, nil
	return ask
}

// suspend removes a stream that leaves its engine from the index, until relocate.
func (m *migratableStreams) suspend(s *streamState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delete(s)
	s.preemptible().suspensions++
}

// suspension is one suspension of a stream.
type suspension struct {
	of    *preemptible
	by    *preemption
	from  *worker.Rank
	leave func()    // ends the engine's work on the stream
	left  time.Time // when the stream left its engine; zero if it has not
	took  time.Duration
}

// beginSuspension decides what becomes of a stream that was asked to leave its healthy engine: it is
// suspended, it stays because nobody needs its place any more, or, with neither, it moves.
func (s *streamState) beginSuspension(leave func()) (pause *suspension, stays bool) {
	p := s.preemptible()
	if p == nil {
		return nil, false
	}
	by := s.settings.r.migratable.takeAsk(p)
	if state, _ := s.rank.Worker.State(); by == nil || state != worker.Ready {
		return nil, false
	}
	if by.ended.Load() || leave == nil {
		return nil, true
	}
	return &suspension{of: p, by: by, from: s.rank, leave: leave}, false
}

// awaitResumption makes the stream s leave its engine and lets q, the request for its rest, wait until a
// rank can start it. What a client has begun to receive is not given up for want of capacity: after the
// longest wait of its class, or if it must leave the queue, the stream waits before all other requests, and
// after the same time once more it goes on as soon as a rank is below its load limits. It returns false if
// the stream does not go on; if it is still on its engine, it stays there.
func (q *request) awaitResumption(s *streamState, pause *suspension) bool {
	p, c := pause.of, q.r.admission
	q.class, q.tenant, q.weight = p.class, p.tenant, p.weight
	if q.settings.admission == nil {
		return false
	}
	if q.plan.Family != nil && !q.expectsHandover() {
		q.plan.useDecodeOnly("")
	}
	w := q.newSuspendedWaiter(pause)
	q.suspendedFor, q.yieldUntil = pause.by, time.Now().Add(askPause)
	if c.Enqueue(w) != admission.WithinBounds {
		s.addNote("not suspended: the queue is full")
		return false
	}
	pause.left = time.Now()
	q.r.migratable.suspend(s)
	schedule.FreeKV(s.rank, schedule.KVBlocks(s.rank, q.prompt.Count))
	pause.leave()
	s.endHealthyLeg("suspended")
	q.settings.Observer.StreamSuspended(p.class.Name, p.tenant)

	deadline := q.legDeadline
	outcome := q.waitSuspended(w, deadline)
	if outcome != admission.Dispatched && outcome != admission.Gone {
		w := q.newSuspendedWaiter(pause)
		w.Class, w.Item.Tenant, w.Item.Weight = q.settings.admission.classes[0].Name, overdueTenant, overdueWeight
		if outcome = admission.Expired; c.Enqueue(w) == admission.WithinBounds {
			outcome = q.waitSuspended(w, deadline)
		}
	}
	if outcome != admission.Dispatched && outcome != admission.Gone && !q.awaitLimit(deadline) {
		outcome = admission.Gone
	}
	pause.took = time.Since(pause.left)
	q.refreshCandidates()
	return outcome != admission.Gone && !q.x.ClientGone() && time.Now().Before(deadline)
}

// newSuspendedWaiter returns the rest of a suspended stream as a request that waits for the ranks of the request
// that it was suspended for.
func (q *request) newSuspendedWaiter(pause *suspension) *admission.Waiter {
	w := q.newWaiter()
	w.Item.Pool, w.Item.Suspended = pause.by.pool, true
	w.Item.Due, w.Item.Firm = math.MinInt64, false // before requests of its tenant that have not begun
	return w
}

// waitSuspended waits for at most the longest wait of the stream's class.
func (q *request) waitSuspended(w *admission.Waiter, deadline time.Time) admission.Outcome {
	c := q.r.admission
	q.x.OnClientGone(func() { c.Cancel(w, admission.Gone) })
	defer q.x.OnClientGone(nil)
	defer q.endKVWait()
	return c.Wait(w, max(min(q.class.wait, time.Until(deadline)), 0))
}

// yields reports whether the rest of a suspended stream waits for the request that it was suspended for. The
// dispatcher may have tried that one just before the stream left its engine, and try the stream just after.
func (q *request) yields() bool {
	return q.suspendedFor != nil && !q.suspendedFor.ended.Load() && time.Now().Before(q.yieldUntil)
}

// awaitLimit waits until a candidate of the first leg is below its load limits. It returns false if the
// client has disconnected or the deadline has passed.
func (q *request) awaitLimit(deadline time.Time) bool {
	tick := time.NewTicker(limitPoll)
	defer tick.Stop()
	for !q.x.ClientGone() && time.Now().Before(deadline) {
		// First, too: a rank below its limits can be one that this request would take beyond them.
		<-tick.C
		q.refreshCandidates()
		candidates := q.candidates(q.firstLeg())
		if len(candidates) == 0 {
			return true // what follows waits for a worker
		}
		for _, r := range candidates {
			if !q.settings.Fleet.AtCapacity(r) {
				return true
			}
		}
	}
	return false
}

// expectsHandover is prefersHandover for a request that has no rank yet.
func (q *request) expectsHandover() bool {
	if q.plan.Traits.NoDecodeOnly || !q.pd.DecodeOnlyFallback || q.choosesJointly() {
		return true
	}
	query := q.newQuery(schedule.WholeLeg, q.plan.Decode)
	query.RequestID = ""
	c, ok := q.settings.Scheduler.Preview(&query)
	return ok && len(q.plan.Prefill) > 0 && q.prompt.Count-c.CachedTokens >= q.settings.Migration.HandoverTokens
}

// end counts the end of the suspension, if there was one.
func (u *suspension) end(s *streamState, resumed, clientGone bool) {
	if u.left.IsZero() {
		return
	}
	outcome := "failed"
	switch {
	case resumed:
		outcome = "resumed"
	case clientGone:
		outcome = "client_gone"
	case !time.Now().Before(s.migration.deadline.Time()):
		outcome = "deadline"
	}
	s.settings.Observer.StreamResumed(u.of.class.Name, outcome, u.took)
	s.entry.AddPreemption(u.took)
	if !resumed {
		s.addNote(fmt.Sprintf("suspended for a request of class %s and not resumed: %s", u.by.class, outcome))
	}
}

// log reports that the stream goes on.
func (u *suspension) log(s *streamState, open []*apiformat.ChoiceState) {
	generated := 0
	for _, o := range open {
		generated += o.Delivered
	}
	s.addNote(fmt.Sprintf("suspended: %s after %d tokens, for a request of class %s; %s continues it after %s", u.from.ID, generated, u.by.class, s.rank.ID, u.took.Round(time.Millisecond)))
	s.settings.Log.Info("stream was suspended", "request", s.requestID, "previous_rank", u.from.ID.String(), "rank", s.rank.ID.String(), "tokens", generated, "cause", "preemption")
}
