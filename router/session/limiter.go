package session

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// Thrash protection. A pool of ranks serves one model. A session is active in its pool from the start
// of a turn until its place is free (holdOf), at the latest Options.Hold after the turn's end. While the pool is not limited, every turn starts
// at once, and the ends of turns show whether the KV of active sessions survives between their turns.
// If much of it does not, the active sessions need more KV than the pool has, and its ranks compute
// prompts all the time, the pool becomes limited: a session that is not active waits until the active
// ones leave space for it, in the admission queue (see Wait). A limit that leaves ranks idle grows again: a prompt that is computed twice
// costs little on a rank that has nothing else to do.
const (
	// A window of evidence: enough turns, and enough time for evictions to show.
	windowTurns = 16
	windowTime  = 250 * time.Millisecond
	// lossAt is the share of the expected tokens below which evictions hurt, keptAt the one from
	// which there is space for more.
	lossAt = 0.8
	keptAt = 0.95
	// fill is the share of the pool's KV that active sessions may need: their prompts grow while they
	// run, and ranks are not equally full.
	fill = 0.85
	// busyAt is the share of the time in which ranks compute prompts from which computing one again
	// delays others, idleAt the one below which ranks have time for it.
	busyAt = 0.9
	idleAt = 0.75
	// shrink and grow change the limit of a pool by the evidence, floor is the smallest share of the
	// KV, or of what the active sessions needed, that it becomes.
	shrink, grow, floor = 0.9, 1.07, 0.25
	// idleFactor is the share of the limit below which a pool that nobody waits for is no longer
	// limited.
	idleFactor = 0.7
)

// Capacity is the KV of the ranks that compute the prompts of a pool.
type Capacity struct {
	Tokens int64 // that fit; 0 unknown
	// Occupancy is the largest share of KV blocks that a rank reports as used or cached, -1 if none
	// reports it.
	Occupancy float64
	// Computed are the prompt tokens that the ranks were expected to compute so far, PerToken is the
	// mean time of one with what a prompt takes besides, and Ranks their number: together the share of the time in which they compute prompts.
	Computed int64
	PerToken time.Duration
	Ranks    int
}

// fullAt is the occupancy from which engines evict.
const fullAt = 0.85

// busyFor returns the share of a time for which tokens of prompts kept the ranks busy.
func (c *Capacity) busyFor(tokens int64, took time.Duration) float64 {
	return float64(tokens) * float64(c.PerToken) / float64(took) / float64(max(c.Ranks, 1))
}

// capacityAge is how long a pool's Capacity is used.
const capacityAge = 100 * time.Millisecond

// limited is the part of a Session that belongs to its pool's limit.
type limited struct {
	pool   *pool // of the last turn; nil: none yet
	active bool
	need   int64   // tokens counted in pool.need; 0 if not active
	waits  []*Wait // its turns that wait; none while it is active
	// While it is active without a turn in progress, it is in pool.idle until heldUntil, at place.
	held      bool
	place     int
	endedAt   time.Time // of its last turn
	heldUntil time.Time
	gap       time.Duration // average time between its turns; 0 unknown
}

// pool is the sessions that use one model.
type pool struct {
	active   map[*Session]struct{}
	need     int64 // tokens of KV that only these use, together
	idle     idleQueue
	waiting  waitQueue
	limit    int64 // tokens; 0: not limited
	floor    int64 // the least limit
	capacity Capacity
	gap      time.Duration // average pause between turns
	busy     float64       // the share of the time in which ranks computed prompts in the last window
	computed int64         // Capacity.Computed at the window's start
	work     int64         // tokens computed for turns of sessions since, as the engines report: blocks may be evicted after the choice
	measured time.Time     // capacity
	waitedAt time.Time     // the last time that a turn had to wait

	expected, cached int64 // tokens of the window
	turns            int
	since            time.Time
}

// WaitEnd is how a wait for a place ended.
type WaitEnd uint8

// The ends of a wait.
const (
	Started WaitEnd = iota // there was space
	Overran                // the turn has waited long enough, and goes on without space
	Left                   // the client disconnected
	Refused                // the request was refused

	NumWaits
)

var waitNames = [NumWaits]string{"started", "overran", "client_gone", "refused"}

// String returns the end's name in metrics.
func (e WaitEnd) String() string {
	if e < NumWaits {
		return waitNames[e]
	}
	return ""
}

// Wait is a turn that waits until its session is active. The Table decides only when: the request waits
// in the admission queue, on hold, within the bounds of that queue. Exactly one call of End must follow.
type Wait struct {
	table   *Table
	session *Session
	class   int
	tokens  int64 // what the session is expected to need
	began   time.Time
	longest time.Duration
	place   int // in the heap of its tenant; -1: the wait has ended

	// What follows is set before the wait ends.

	onReady func()
	how     WaitEnd
	took    time.Duration
}

// OnReady sets a function that is called once, when the turn may go on: at once if it may already. It is
// called with the Table's lock, so it must not block or call the Table.
func (w *Wait) OnReady(f func()) {
	w.table.mu.Lock()
	defer w.table.mu.Unlock()
	if w.place < 0 {
		f()
	} else {
		w.onReady = f
	}
}

// Longest returns Options.MaxWait as it was when the wait began.
func (w *Wait) Longest() time.Duration { return w.longest }

// Overrun lets a turn that still waits go on without space.
func (w *Wait) Overrun() {
	w.table.mu.Lock()
	defer w.table.mu.Unlock()
	if w.place >= 0 {
		w.table.endWait(w, Overran)
		w.table.admit(w.session.pool)
	}
}

// End ends the wait if the turn still waits; it does not go on then. End returns how the wait has ended and
// how long it was.
func (w *Wait) End(how WaitEnd) (WaitEnd, time.Duration) {
	t := w.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if w.place >= 0 {
		t.endWait(w, how)
		t.admit(w.session.pool)
	}
	return w.how, w.took
}

// endWait ends the wait of a turn. Its session is active then if the turn goes on.
func (t *Table) endWait(w *Wait, how WaitEnd) {
	s := w.session
	s.pool.waiting.remove(w)
	s.waits = slices.DeleteFunc(s.waits, func(o *Wait) bool { return o == w })
	t.counts.Waits[how]++
	w.how, w.took = how, time.Since(w.began)
	if how == Started || how == Overran {
		t.activate(s, w.tokens)
		if w.onReady != nil {
			w.onReady()
		}
	}
}

// Request is what Start must know of a turn.
type Request struct {
	Pool   string // the model
	Class  int    // of the admission queue, 0 the highest: higher ones get places first
	Tokens int    // estimate of the prompt's length; 0 unknown
	// CannotWait says that the turn starts at once, also without space.
	CannotWait bool
	Meter      Meter
}

// Meter reports a pool's Capacity. It is called at most once per capacityAge and pool, and must not
// block.
type Meter interface {
	Capacity() Capacity
}

// Start returns nil if a turn may start now, else a Wait. The session is active then, or when the
// function of Wait.OnReady is called. Turns without session always start.
func (t *Table) Start(u *Turn, req Request) *Wait {
	s := u.session
	if s == nil {
		return nil
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.poolOf(req.Pool)
	if s.pool != p && len(s.waits) > 0 {
		return nil // other turns wait for another model
	}
	if s.pool != p {
		t.deactivate(s)
		s.pool = p
	}
	p.measure(req.Meter, now)
	t.releaseIdle(p, now)
	s.learnGap(now)
	p.relax(t, now)
	if p.limit == 0 || req.CannotWait || s.active && !p.mustYield(s) {
		t.activate(s, int64(req.Tokens))
		return nil
	}
	t.deactivate(s)
	w := &Wait{table: t, session: s, class: req.Class, tokens: int64(req.Tokens), began: now, longest: t.opt.MaxWait}
	if next := p.waiting.next(); p.hasSpace(w) && (next == nil || w.before(next)) {
		t.activate(s, w.tokens)
		return nil
	}
	p.waiting.add(w)
	s.waits = append(s.waits, w)
	p.waitedAt = now
	t.arm(now)
	return w
}

// maxPools bounds the pools: the models of the fleet.
const maxPools = 4096

func (t *Table) poolOf(name string) *pool {
	p := t.pools[name]
	if p == nil {
		if len(t.pools) >= maxPools {
			name = "" // shared by all further models
		}
		if p = t.pools[name]; p == nil {
			p = &pool{active: make(map[*Session]struct{})}
			t.pools[name] = p
		}
	}
	return p
}

func (p *pool) measure(m Meter, now time.Time) {
	if m != nil && (p.measured.IsZero() || now.Sub(p.measured) >= capacityAge) {
		p.capacity, p.measured = m.Capacity(), now
	}
}

// ownNeed returns the tokens of KV that a session needs and shares with no other.
func (s *Session) ownNeed(estimate int64) int64 {
	if s.tokens == 0 {
		return estimate
	}
	return int64(max(s.tokens-s.shared, 0))
}

// activate makes a session active with a turn in progress.
func (t *Table) activate(s *Session, estimate int64) {
	p := s.pool
	if !s.active {
		s.active = true
		p.active[s] = struct{}{}
		s.tenant.active++
	}
	p.idle.remove(s)
	t.recount(s, estimate)
	for len(s.waits) > 0 { // other turns of the session need no other place
		t.endWait(s.waits[0], Started)
	}
}

// recount counts what an active session needs now.
func (t *Table) recount(s *Session, estimate int64) {
	if s.active {
		n := s.ownNeed(estimate)
		s.pool.need += n - s.need
		s.need = n
	}
}

// deactivate frees the place of a session. Turns in progress continue.
func (t *Table) deactivate(s *Session) {
	if !s.active {
		return
	}
	p := s.pool
	p.idle.remove(s)
	delete(p.active, s)
	p.need -= s.need
	s.active, s.need, s.cachedIn = false, 0, time.Time{}
	s.tenant.active--
	t.admit(p)
}

// hold keeps the place of a session whose last turn in progress has ended.
func (t *Table) hold(s *Session, now time.Time) {
	if s.active && !s.held {
		s.endedAt, s.heldUntil = now, now.Add(t.holdOf(s))
		heap.Push(&s.pool.idle, s)
		t.recount(s, 0)
	}
}

// releaseIdle frees the places that were held long enough.
func (t *Table) releaseIdle(p *pool, now time.Time) {
	for s := p.idle.first(); s != nil && !now.Before(s.heldUntil); s = p.idle.first() {
		t.deactivate(s)
	}
}

const (
	// holdGaps is for how many of the usual pauses of a session its place is held: most sessions end
	// without saying so, and then hold a place for nothing.
	holdGaps = 6
	// leastHold is the least such time, as a share of Options.Hold.
	leastHold = 10
	// gapMemory is the weight of the past in the average pause.
	gapMemory = 0.7
)

// holdOf returns how long the place of a session is held after a turn.
func (t *Table) holdOf(s *Session) time.Duration {
	gap := s.gap
	if gap == 0 {
		gap = s.pool.gap
	}
	if gap == 0 {
		return t.opt.Hold
	}
	return min(max(holdGaps*gap, t.opt.Hold/leastHold), t.opt.Hold)
}

// learnGap learns the pause before a turn of a session that is still active.
func (s *Session) learnGap(now time.Time) {
	if s.active && s.held {
		pause := max(now.Sub(s.endedAt), 1)
		for _, gap := range [...]*time.Duration{&s.gap, &s.pool.gap} {
			if *gap == 0 {
				*gap = pause
			}
			*gap = time.Duration(gapMemory*float64(*gap) + (1-gapMemory)*float64(pause))
		}
	}
}

// idleQueue is a heap of the active sessions without a turn in progress, by the time until which their
// places are held. It is not a list, because sessions pause for different times.
type idleQueue []*Session

func (q idleQueue) first() *Session {
	if len(q) == 0 {
		return nil
	}
	return q[0]
}

func (q *idleQueue) remove(s *Session) {
	if s.held {
		heap.Remove(q, s.place)
	}
}

// Len, Less, Swap, Push and Pop implement heap.Interface.
func (q idleQueue) Len() int           { return len(q) }
func (q idleQueue) Less(i, j int) bool { return q[i].heldUntil.Before(q[j].heldUntil) }

func (q idleQueue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

func (q *idleQueue) Push(x any) {
	s := x.(*Session)
	s.held, s.place = true, len(*q)
	*q = append(*q, s)
}

func (q *idleQueue) Pop() any {
	s := (*q)[len(*q)-1]
	(*q)[len(*q)-1] = nil
	*q, s.held = (*q)[:len(*q)-1], false
	return s
}

// mustYield reports whether an active session whose prompts have grown must wait for its next turn:
// the sessions that began before it need the space.
func (p *pool) mustYield(s *Session) bool {
	if s.running > 1 || p.need <= p.limit || len(p.active) == 1 {
		return false
	}
	before := int64(0)
	for o := range p.active {
		if o.order < s.order {
			before += o.need
		}
	}
	return before > 0 && before+s.need > p.limit
}

// hasSpace reports whether the session of a turn may become active.
func (p *pool) hasSpace(w *Wait) bool {
	return p.limit == 0 || len(p.active) == 0 || p.need+w.session.ownNeed(w.tokens) <= p.limit
}

// admit starts the turns for which there is space. The next one is of the highest class, of these of the
// tenant with the fewest active sessions, of these of the session that began first. It is not passed by
// one that needs less.
func (t *Table) admit(p *pool) {
	for {
		w := p.waiting.next()
		if w == nil || !p.hasSpace(w) {
			return
		}
		t.endWait(w, Started)
	}
}

// waitQueue has the turns of a pool that wait, by tenant: the order among tenants changes with each
// session that becomes active.
type waitQueue struct {
	byTenant map[*tenant]*waitHeap
	n        int
}

func (q *waitQueue) add(w *Wait) {
	h := q.byTenant[w.session.tenant]
	if h == nil {
		h = new(waitHeap)
		if q.byTenant == nil {
			q.byTenant = make(map[*tenant]*waitHeap)
		}
		q.byTenant[w.session.tenant] = h
	}
	heap.Push(h, w)
	q.n++
}

func (q *waitQueue) remove(w *Wait) {
	h := q.byTenant[w.session.tenant]
	heap.Remove(h, w.place)
	if q.n--; len(*h) == 0 {
		delete(q.byTenant, w.session.tenant)
	}
}

// next returns the turn that gets the next place, nil if none waits.
func (q *waitQueue) next() (first *Wait) {
	for _, h := range q.byTenant {
		if w := (*h)[0]; first == nil || w.before(first) {
			first = w
		}
	}
	return first
}

func (w *Wait) before(o *Wait) bool {
	return cmp.Or(cmp.Compare(w.class, o.class), cmp.Compare(w.session.tenant.active, o.session.tenant.active), cmp.Compare(w.session.order, o.session.order)) < 0
}

// waitHeap is a heap of the turns of a tenant.
type waitHeap []*Wait

// Len, Less, Swap, Push and Pop implement heap.Interface.
func (h waitHeap) Len() int           { return len(h) }
func (h waitHeap) Less(i, j int) bool { return h[i].before(h[j]) }

func (h waitHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}

func (h *waitHeap) Push(x any) {
	w := x.(*Wait)
	w.place = len(*h)
	*h = append(*h, w)
}

func (h *waitHeap) Pop() any {
	w := (*h)[len(*h)-1]
	(*h)[len(*h)-1] = nil
	*h, w.place = (*h)[:len(*h)-1], -1
	return w
}

// observe takes a turn as evidence: of expected tokens that the session had left on its rank, cached
// were still there.
func (p *pool) observe(t *Table, expected, cached int64, now time.Time) {
	if p.turns == 0 {
		p.since, p.computed, p.work = now, p.capacity.Computed, 0
	}
	p.expected, p.cached, p.turns = p.expected+expected, p.cached+cached, p.turns+1
	if p.turns < windowTurns || now.Sub(p.since) < windowTime {
		return
	}
	kept := float64(p.cached) / float64(p.expected)
	p.busy = p.capacity.busyFor(max(p.capacity.Computed-p.computed, p.work), now.Sub(p.since))
	p.expected, p.cached, p.turns = 0, 0, 0
	if !t.opt.LimitActive {
		return
	}
	switch {
	case p.limit == 0:
		if kept < lossAt && p.busy >= busyAt && p.isOvercommitted() && !t.draining {
			p.beginLimit()
		}
	case kept < lossAt && p.busy >= busyAt:
		p.limit = max(int64(float64(p.limit)*shrink), p.floor)
	case (kept > keptAt || kept >= lossAt && p.busy < idleAt) && p.waiting.n > 0:
		p.limit = int64(float64(p.limit)*grow) + 1
	}
	t.admit(p)
}

// isOvercommitted reports whether the active sessions need more KV than there is, as far as that is
// known. Sessions may lose KV for other reasons: an engine has restarted, or caches nothing.
func (p *pool) isOvercommitted() bool {
	c := p.capacity
	if c.Occupancy >= 0 && c.Occupancy < fullAt {
		return false
	}
	return c.Tokens <= 0 || float64(p.need) > fill*float64(c.Tokens)
}

func (p *pool) beginLimit() {
	size := float64(p.need)
	p.limit = int64(size * shrink)
	if p.capacity.Tokens > 0 {
		size = float64(p.capacity.Tokens)
		p.limit = int64(size * fill)
	}
	p.limit, p.floor = max(p.limit, 1), max(int64(size*floor), 1)
}

// relax ends the limit of a pool that has not been needed for as long as a place is held.
func (p *pool) relax(t *Table, now time.Time) {
	if p.limit > 0 && p.waiting.n == 0 && now.Sub(p.waitedAt) >= t.opt.Hold && float64(p.need) < idleFactor*float64(p.limit) {
		p.limit = 0
	}
}

// arm sets the timer to the time at which the first place becomes free for a turn that waits. There is
// no timer while nobody waits.
func (t *Table) arm(now time.Time) {
	var at time.Time
	for _, p := range t.pools {
		if p.waiting.n == 0 {
			continue
		}
		if s := p.idle.first(); s != nil && (at.IsZero() || s.heldUntil.Before(at)) {
			at = s.heldUntil
		}
	}
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	if !at.IsZero() {
		t.timer = time.AfterFunc(max(at.Sub(now), 0), t.releaseHeld)
	}
}

func (t *Table) releaseHeld() {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.pools {
		t.releaseIdle(p, now)
		t.admit(p)
	}
	t.arm(now)
}
