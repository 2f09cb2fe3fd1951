package admission

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
)

// Verdict says what became of an attempt to start a waiting request.
type Verdict uint8

// The verdicts.
const (
	Started    Verdict = iota // its rank is reserved
	NotNow                    // it cannot start now, but others of its Group may
	NoRoom                    // the same, because its KV fits nowhere; those that arrive do not wait for it
	NoCapacity                // no request of its Group can start now
)

// Starter starts a waiting request.
type Starter interface {
	// TryStart reserves a rank for the request if one can start it soon. backlog is that of its pool. emptySince
	// belongs to the Starters of the requests of its Pool and Group together, as long as any waits: since when they
	// have had no rank, zero if they have one. TryStart runs on the dispatcher's goroutine while the goroutine of the request waits, and
	// must not call the Controller, except for Wake.
	TryStart(backlog Backlog, emptySince *time.Time) Verdict
}

// Backlog says how the requests of a pool wait.
type Backlog struct {
	Lasts time.Duration // how long requests have waited without a break
	// Overtaken is how much longer than this request another of its Group has waited for capacity that goes after it,
	// because of the classes or the tenants' shares; 0 if none has, or if the backlog is shorter than minOvertaken.
	// Requests that could not start when they were last tried, although others could, count in OvertakenAny alone.
	Overtaken, OvertakenAny time.Duration
}

// minOvertaken is how long a backlog must last before Overtaken is determined.
const minOvertaken = 500 * time.Millisecond

// Outcome is the end of a wait.
type Outcome uint8

// The outcomes.
const (
	Waiting    Outcome = iota // it has not ended
	Dispatched                // TryStart has returned Started
	Displaced                 // another request with a larger claim has the place
	Gone                      // the client disconnected
	Expired                   // the longest wait is over
	numOutcomes
)

// Outcomes are the ends of a wait.
var Outcomes = [...]Outcome{Dispatched, Displaced, Gone, Expired}

var outcomeNames = [numOutcomes]string{"waiting", "dispatched", "displaced", "client_gone", "timeout"}

// String returns the outcome as it appears in metrics.
func (o Outcome) String() string { return outcomeNames[o] }

// Hold keeps a request from being started. session.Wait implements it.
type Hold interface {
	// OnReady makes the Hold call a function once, when the request may start: at once, or later from any
	// goroutine, under any lock but that of a Controller.
	OnReady(func())
}

// Waiter is a request that waits. The caller sets Class, Starter, Hold and the fields of Item except Class,
// Arrived, OnHold and Waiter.
type Waiter struct {
	Item    Item
	Class   string // name; the default class if it does not exist any more
	Starter Starter
	// Hold keeps the request in the queue, within the same bounds, whatever capacity there is; nil if
	// nothing does.
	Hold Hold

	// Forecast is how long the request was expected to wait when it was enqueued, -1 if unknown. Waited
	// is how long it has waited, once Wait has returned.
	Forecast, Waited time.Duration
	// Position is the Queue.Position with which the request was enqueued.
	Position int
	// Bound is the bound for which the request was displaced, once Wait has returned Displaced.
	Bound Bound

	outcome  Outcome // guarded by Controller.mu until done
	panicked any     // what TryStart panicked with
	done     chan struct{}
}

// tryStart is Starter.TryStart. A panic of it belongs to the request: Wait passes it on.
func (w *Waiter) tryStart(backlog Backlog) (v Verdict) {
	since := &w.Item.lane.group.emptySince
	defer func() {
		if w.panicked = recover(); w.panicked != nil {
			v = Started
		}
	}()
	return w.Starter.TryStart(backlog, since)
}

// Observer counts what a Controller does with requests that are not suspended streams. Its methods must neither block nor allocate.
type Observer interface {
	// Enqueued counts a request that begins to wait.
	Enqueued(class, tenant string)
	// Dequeued counts a request that has ended to wait. forecast is -1 if there was none.
	Dequeued(class, tenant string, outcome Outcome, waited, forecast time.Duration)
}

// Settings configure a Controller.
type Settings struct {
	Classes []Class // at least one, the highest first
	// Default is the index of the class for requests whose class does not exist.
	Default int
	Limits  Limits
}

// Controller lets requests wait in a Queue. It is safe for concurrent use. One goroutine dispatches
// while any request waits.
type Controller struct {
	observer Observer
	clock    monotime.Clock
	waiting  atomic.Int64
	disabled atomic.Bool // see Disable; changed with mu
	wake     chan struct{}

	// releasedMu is not mu, because release is called under locks that the dispatcher takes under mu.
	releasedMu sync.Mutex
	released   []*Waiter // whose hold ends in the next round

	mu        sync.Mutex
	settings  Settings
	queue     *Queue
	running   bool
	rates     map[string]*rateMeter // by pool
	displaced []*Item
	pools     []string // memory of round
}

const (
	// pollInterval is how often the dispatcher looks for capacity that nothing has reported: an engine
	// has worked off its queue, or a worker has come.
	pollInterval = 10 * time.Millisecond
	// maxDeferred bounds how many requests of a pool that cannot start now are tried in a round from the
	// first on, and how many behind those of earlier rounds; maxPassed, how many of earlier rounds are passed
	// over for that; and maxFull, for how many groups of requests no rank has capacity.
	maxDeferred, maxPassed, maxFull = 16, 1024, 64
	// maxRates bounds the number of pools whose rate is remembered.
	maxRates = 1024
)

// NewController returns a Controller without waiting requests.
func NewController(s Settings, o Observer) *Controller {
	return &Controller{observer: o, clock: monotime.StartClock(), wake: make(chan struct{}, 1), settings: s,
		queue: NewQueue(s.Classes, s.Limits), rates: map[string]*rateMeter{}}
}

// now is the Controller's clock, in ns.
func (c *Controller) now() int64 { return int64(c.clock.Now()) }

// Now returns the time on the clock of Item.Due.
func (c *Controller) Now() int64 { return c.now() }

// IsEmpty reports whether no request waits. It takes no lock.
func (c *Controller) IsEmpty() bool { return c.waiting.Load() == 0 }

// Waiting returns the number of waiting requests.
func (c *Controller) Waiting() int { return int(c.waiting.Load()) }

// IsIdle reports whether no request of a pool waits for capacity; those on hold do not. It takes a lock
// only if any request waits.
func (c *Controller) IsIdle(pool string) bool {
	if c.IsEmpty() {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.isIdle(pool)
}

// Wake makes the dispatcher look for capacity. It never blocks, and does next to nothing if no request
// waits.
func (c *Controller) Wake() {
	if c.IsEmpty() {
		return
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Forecast returns how long a request that would be enqueued now is expected to wait, -1 if that is not
// known.
func (c *Controller) Forecast(w *Waiter) time.Duration {
	if c.IsEmpty() {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.forecast(w)
}

func (c *Controller) forecast(w *Waiter) time.Duration {
	w.Item.Class = c.classIndex(w.Class)
	ahead := c.queue.Ahead(&w.Item)
	if ahead == 0 {
		return 0
	}
	now, rate := c.now(), 0.0
	if m := c.rates[w.Item.Pool]; m != nil {
		rate = m.perSecond(now, rateWindow)
	}
	if rate <= 0 {
		return -1
	}
	seconds := float64(ahead) / rate
	// What will arrive meanwhile in higher classes, and of tenants behind their share, goes before it
	// too. The rate of its own tenant includes that.
	if t := c.queue.tenantOf(&w.Item); t != nil {
		if own := t.rate.perSecond(now, tenantRateWindow); own > 0 {
			seconds = max(seconds, float64(t.usage.readyCost(w.Item.Cost))/own)
		}
	}
	return time.Duration(min(seconds, 24*3600) * float64(time.Second))
}

func (c *Controller) classIndex(name string) int {
	for i := range c.settings.Classes {
		if c.settings.Classes[i].Name == name {
			return i
		}
	}
	return c.settings.Default
}

// Enqueue adds a request. If it returns WithinBounds, Wait must follow. Otherwise the request does not
// wait. How long a request on hold waits is not forecast.
func (c *Controller) Enqueue(w *Waiter) Bound {
	c.mu.Lock()
	if w.Forecast = c.forecast(w); w.Hold != nil {
		w.Item.OnHold, w.Forecast = true, -1
	}
	w.Position = c.queue.Position(&w.Item)
	w.Item.Waiter, w.Item.Arrived = w, c.now()
	w.done, w.outcome = make(chan struct{}, 1), Waiting
	if c.disabled.Load() {
		w.outcome = Dispatched
		w.done <- struct{}{}
		c.mu.Unlock()
		if !w.Item.Suspended {
			c.observer.Enqueued(w.Class, w.Item.Tenant)
		}
		return WithinBounds
	}
	var bound Bound
	c.displaced, bound = c.queue.Push(&w.Item, c.displaced[:0])
	for i, it := range c.displaced {
		c.displace(it, it.exceeded)
		c.displaced[i] = nil
	}
	if bound != WithinBounds {
		c.mu.Unlock()
		return bound
	}
	c.waiting.Store(int64(c.queue.Len()))
	if !w.Item.OnHold {
		c.becomesReady(w)
	}
	start := !c.running
	c.running = true
	c.mu.Unlock()
	if !w.Item.Suspended {
		c.observer.Enqueued(w.Class, w.Item.Tenant)
	}
	if start {
		go c.dispatch()
	}
	c.Wake()
	if w.Hold != nil {
		w.Hold.OnReady(func() { c.release(w) })
	}
	return WithinBounds
}

// becomesReady notes since when the request waits for capacity. If it is the only one of its pool and tenant, it starts
// the clocks of the rates at which they are served. Called with mu.
func (c *Controller) becomesReady(w *Waiter) {
	w.Item.since = c.now()
	c.rate(w.Item.Pool).begin(c.now())
	if t := w.Item.tenant; t.usage.ready() == 1 {
		t.rate.resume(c.now())
	}
}

// release ends the hold of a request in the next round.
func (c *Controller) release(w *Waiter) {
	c.releasedMu.Lock()
	c.released = append(c.released, w)
	c.releasedMu.Unlock()
	c.Wake()
}

// endHolds makes requests ready for which release was called. Called with mu.
func (c *Controller) endHolds() {
	c.releasedMu.Lock()
	released := c.released
	c.released = nil
	c.releasedMu.Unlock()
	for _, w := range released {
		if w.Item.IsQueued() && w.Item.OnHold {
			c.queue.Release(&w.Item)
			c.becomesReady(w)
		}
	}
}

// Wait waits until the request was dispatched or removed, or at most the given time.
func (c *Controller) Wait(w *Waiter, atMost time.Duration) Outcome {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-w.done:
	case <-timer.C:
		c.Cancel(w, Expired)
		<-w.done
	}
	w.Waited = time.Duration(c.now() - w.Item.Arrived)
	if !w.Item.Suspended {
		c.observer.Dequeued(w.Class, w.Item.Tenant, w.outcome, w.Waited, w.Forecast)
	}
	if w.panicked != nil {
		panic(w.panicked)
	}
	return w.outcome
}

// Cancel ends the wait of a request with the given outcome, unless it has ended. It may be called at
// any time after Enqueue.
func (c *Controller) Cancel(w *Waiter, outcome Outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w.Item.IsQueued() {
		c.queue.Remove(&w.Item)
		c.end(w, outcome)
	}
}

// end signals the end of a wait. The request has left the queue. Called with mu.
func (c *Controller) end(w *Waiter, outcome Outcome) {
	c.waiting.Store(int64(c.queue.Len()))
	if c.queue.isIdle(w.Item.Pool) {
		if m := c.rates[w.Item.Pool]; m != nil {
			m.end(c.now())
		}
	}
	w.outcome = outcome
	w.done <- struct{}{}
	if c.queue.Len() == 0 { // the dispatcher ends
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// displace ends the wait of a request that has left the queue because of a bound. Called with mu.
func (c *Controller) displace(it *Item, b Bound) {
	it.Waiter.Bound = b
	c.end(it.Waiter, Displaced)
}

// Reload replaces the settings. Waiting requests keep their order and go to the class of the same name; those
// that exceed the new bounds are displaced.
func (c *Controller) Reload(s Settings) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.disabled.Store(false)
	old := c.queue
	c.settings, c.queue = s, NewQueue(s.Classes, s.Limits)
	old.moveTo(c.queue, func(it *Item) int { return c.classIndex(it.Waiter.Class) }, c.displace)
	c.waiting.Store(int64(c.queue.Len()))
}

// Disable ends all waits as dispatched, without trying to start the requests, until the next Reload. Otherwise
// those that wait would starve behind requests that have no queue.
func (c *Controller) Disable() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.disabled.Store(true)
	for _, it := range c.queue.Drain() {
		c.end(it.Waiter, Dispatched)
	}
}

// IsDisabled reports whether no request waits, see Disable.
func (c *Controller) IsDisabled() bool { return c.disabled.Load() }

// dispatch starts requests until none waits.
func (c *Controller) dispatch() {
	timer := time.NewTimer(pollInterval)
	defer timer.Stop()
	for c.round() {
		timer.Reset(pollInterval)
		select {
		case <-c.wake:
		case <-timer.C:
		}
	}
}

// round starts the requests that can start now. It returns false if none waits any more; then the
// dispatcher ends.
func (c *Controller) round() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endHolds()
	c.pools = c.queue.Pools(c.pools)
	for _, pool := range c.pools {
		c.dispatchPool(pool)
	}
	if c.queue.Len() == 0 {
		c.running = false
		return false
	}
	return true
}

// dispatchPool starts the requests of a pool in their order. After maxFull groups without capacity, the next
// round goes on with the others: however many there are, each is tried within some rounds. After maxDeferred
// requests that cannot start now although others may, those that earlier rounds have tried are passed over,
// so that the ones behind them get the ranks that they do not want. Called with mu, which it releases between
// two requests, so that arrivals and disconnects need not wait for all of them.
func (c *Controller) dispatchPool(pool string) {
	defer func() { c.queue.EndRound() }()
	for deferred, passed, full := 0, 0, 0; full < maxFull; {
		now := c.now()
		it := c.queue.Next(pool, now)
		if it == nil || passed == maxPassed {
			c.queue.EndSweep(pool)
			c.queue.endPass(pool)
			return
		}
		if deferred >= maxDeferred && it.wasTried() {
			c.queue.Defer(it)
			passed++
			continue
		}
		if deferred == 2*maxDeferred {
			c.queue.EndSweep(pool)
			return
		}
		backlog := Backlog{Lasts: c.rate(pool).busyFor(now)}
		if backlog.Lasts >= minOvertaken {
			any, others := it.lane.group.longestSince(now)
			backlog.OvertakenAny, backlog.Overtaken = time.Duration(max(it.since-any, 0)), time.Duration(max(it.since-others, 0))
		}
		switch v := it.Waiter.tryStart(backlog); v {
		case Started:
			it.tenant.rate.add(c.now(), it.Cost, tenantRateWindow)
			c.queue.Take(it)
			c.rate(pool).add(c.now(), it.Cost, rateWindow)
			c.end(it.Waiter, Dispatched)
		case NotNow, NoRoom:
			it.setTried()
			it.letsPass = true
			c.queue.setNoRoom(it, v == NoRoom)
			c.queue.Defer(it)
			deferred++
		default:
			it.letsPass = false
			c.queue.setNoRoom(it, false)
			c.queue.SetFull(it)
			full++
		}
		c.mu.Unlock()
		c.mu.Lock()
	}
}

// rate returns the meter of a pool. Called with mu.
func (c *Controller) rate(pool string) *rateMeter {
	m := c.rates[pool]
	if m == nil {
		if len(c.rates) >= maxRates {
			clear(c.rates)
		}
		m = &rateMeter{}
		m.begin(c.now())
		c.rates[pool] = m
	}
	return m
}
