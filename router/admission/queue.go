package admission

import (
	"cmp"
	"slices"
)

// Class configures one priority class. Zero bounds mean that only those of the Queue apply.
type Class struct {
	Name string
	// MinShare is the fraction of dispatched tokens that the class gets at least while it has waiting
	// requests, and of the space in a full queue that other classes leave to it, 0…0.9; the shares of all
	// classes are at most 0.9 together.
	MinShare float64
	// MaxRequests and MaxBytes bound the waiting requests of the class and their bodies.
	MaxRequests int
	MaxBytes    int64
}

// Limits bound a Queue.
type Limits struct {
	MaxRequests int
	MaxBytes    int64
	// MaxTenants bounds the tenants of a class in a pool that have a turn of their own; the others
	// share the turn of the tenant Overflow.
	MaxTenants int
}

// Overflow is how the tenants are shown that share one turn because there are more than Limits.MaxTenants.
// NoTenant is how metrics show requests without a tenant.
const (
	Overflow = "other"
	NoTenant = "none"
)

// ShownTenant returns the name of a tenant for metrics and the admin API. A tenant whose name is Overflow or
// NoTenant, or begins with a quotation mark, is shown in quotation marks.
func ShownTenant(name string) string {
	if name == Overflow || name == NoTenant || len(name) > 0 && name[0] == '"' {
		return `"` + name + `"`
	}
	return name
}

// Item is one waiting request. The caller sets the exported fields before Push and leaves them alone
// until the Item has left the Queue. Its zero value besides these is ready for use.
type Item struct {
	Pool string
	// Group names the ranks that may start the request, among those of its Pool: where no rank can start
	// one request, none can start another of the same Group that goes after it.
	Group  string
	Class  int // index of the class
	Tenant string
	Weight int   // of the tenant; below 1: 1. The last Item of a tenant decides.
	Cost   int64 // tokens to compute, at least 1
	Bytes  int64
	// Due orders the requests of a tenant: the latest start, in ns of the caller's clock, by which
	// the target of the request is met. If Firm, the request is late when Due has passed, and goes
	// behind those that are not.
	Due  int64
	Firm bool
	// Arrived is when the request began to wait, by the same clock.
	Arrived int64
	// Suspended says that the Item is a stream that was suspended for a request of a higher class.
	Suspended bool
	// OnHold says that the request may not start yet, whatever capacity there is. It counts in all
	// bounds, and is displaced before others of its tenant, but Next does not return it before
	// Queue.Release, which alone changes the field after Push.
	OnHold bool
	// Waiter is the caller's.
	Waiter *Waiter

	queue    *poolQueue
	tenant   *tenant
	lane     *lane
	seq      uint64 // order of arrival
	since    int64  // when it began to wait for capacity: when it arrived, or its hold ended
	lateSeq  uint64 // order in which the pool's requests became late; 0: it is not late
	index    int    // in the lane's heap
	state    itemState
	exceeded Bound // for which the request was displaced
	deferred bool
	pass     uint32 // the poolQueue.pass in which it was last tried and deferred
	letsPass bool   // it could not start when it was last tried, although others of its Group could
	noRoom   bool   // so, because its KV did not fit
	prev     *Item  // of the tenant's late requests, or of those on hold
	next     *Item
	older    *Item // of the tenant
	newer    *Item
}

type itemState uint8

const (
	idle   itemState = iota // not in a Queue
	onTime                  // in the lane's heap
	late                    // in the lane's list of late requests
	onHold                  // in the tenant's list of requests on hold
)

// IsQueued reports whether the Item is in a Queue.
func (it *Item) IsQueued() bool { return it.state != idle || it.deferred }

// usage counts waiting requests.
type usage struct {
	requests  int
	suspended int // of requests
	onHold    int // of requests
	bytes     int64
	cost      int64
	holdCost  int64 // of cost, of the requests on hold
	noRoom    int   // of requests, those that wait until their KV fits, and let smaller ones pass meanwhile
	roomCost  int64 // of cost, of these
}

// ready returns the number of requests that are not on hold.
func (u *usage) ready() int { return u.requests - u.onHold }

// readyCost returns the cost of what is dispatched before a request of that cost, as ranks have capacity: of all requests
// that are not on hold. Those without room do not count if they are more than twice as large on average.
func (u *usage) readyCost(cost int64) int64 {
	n := u.cost - u.holdCost
	if u.noRoom > 0 && u.roomCost/int64(u.noRoom) > 2*cost {
		n -= u.roomCost
	}
	return n
}

func (u *usage) hold(it *Item, sign int) {
	if it.OnHold {
		u.onHold += sign
		u.holdCost += int64(sign) * it.Cost
	}
	if it.noRoom {
		u.noRoom += sign
		u.roomCost += int64(sign) * it.Cost
	}
}

func (u *usage) add(it *Item) {
	u.requests++
	u.bytes += it.Bytes
	u.cost += it.Cost
	u.hold(it, 1)
	if it.Suspended {
		u.suspended++
	}
}

func (u *usage) remove(it *Item) {
	u.requests--
	u.bytes -= it.Bytes
	u.cost -= it.Cost
	u.hold(it, -1)
	if it.Suspended {
		u.suspended--
	}
}

// Queue holds waiting requests. It is not safe for concurrent use.
type Queue struct {
	classes  []Class
	limits   Limits
	pools    map[string]*poolQueue
	total    usage
	perClass []usage
	seq      uint64
	deferred []*Item
}

// NewQueue returns an empty Queue. classes are in order, the highest first, and there is at least one.
func NewQueue(classes []Class, limits Limits) *Queue {
	return &Queue{classes: slices.Clone(classes), limits: limits, pools: map[string]*poolQueue{}, perClass: make([]usage, len(classes))}
}

// ageList has the requests of a tenant in the order of arrival.
type ageList struct{ oldest, newest *Item }

func (l *ageList) insert(it *Item) {
	after := l.newest
	for after != nil && after.seq > it.seq {
		after = after.older
	}
	it.older = after
	if after == nil {
		it.newer, l.oldest = l.oldest, it
	} else {
		it.newer, after.newer = after.newer, it
	}
	if it.newer == nil {
		l.newest = it
	} else {
		it.newer.older = it
	}
}

func (l *ageList) remove(it *Item) {
	if it.older == nil {
		l.oldest = it.newer
	} else {
		it.older.newer = it.newer
	}
	if it.newer == nil {
		l.newest = it.older
	} else {
		it.newer.older = it.older
	}
	it.older, it.newer = nil, nil
}

// Oldest returns the request of a class that arrived first, nil if none waits.
func (q *Queue) Oldest(class int) (oldest *Item) {
	for _, l := range q.pools {
		for t := range l.classes[class].all {
			if it := t.ages.oldest; it != nil && (oldest == nil || it.seq < oldest.seq) {
				oldest = it
			}
		}
	}
	return oldest
}

// Len returns the number of waiting requests.
func (q *Queue) Len() int { return q.total.requests }

// Bytes returns the sum of the Bytes of waiting requests.
func (q *Queue) Bytes() int64 { return q.total.bytes }

// ClassUsage returns how many requests of a class wait, and their bytes and tokens.
func (q *Queue) ClassUsage(class int) (requests int, bytes, cost int64) {
	u := q.perClass[class]
	return u.requests, u.bytes, u.cost
}

// Bound says which bound a request would exceed.
type Bound uint8

// The bounds.
const (
	WithinBounds  Bound = iota
	ClassRequests       // Class.MaxRequests
	ClassBytes          // Class.MaxBytes
	AllRequests         // Limits.MaxRequests
	AllBytes            // Limits.MaxBytes
)

// isOfClass reports whether the bound is one of a class.
func (b Bound) isOfClass() bool { return b == ClassRequests || b == ClassBytes }

// inBytes reports whether the bound is one of bytes.
func (b Bound) inBytes() bool { return b == ClassBytes || b == AllBytes }

// taken returns what u takes of the bound.
func (b Bound) taken(u *usage) int64 {
	if b.inBytes() {
		return u.bytes
	}
	return int64(u.requests)
}

// takenBy returns what one request takes of the bound.
func (b Bound) takenBy(it *Item) int64 {
	if b.inBytes() {
		return it.Bytes
	}
	return 1
}

// takenIn returns what a pool takes of the bound; class is the one of the bound if it is one of a class.
func (b Bound) takenIn(l *poolQueue, class int) int64 {
	if b.isOfClass() {
		return b.taken(&l.classes[class].usage)
	}
	return b.taken(&l.usage)
}

// exceeded returns the bound that u and one more request exceed.
func exceeded(u *usage, it *Item, requests int, bytes int64, byRequests, byBytes Bound) Bound {
	switch {
	case requests > 0 && u.requests >= requests:
		return byRequests
	case bytes > 0 && u.bytes+it.Bytes > bytes:
		return byBytes
	}
	return WithinBounds
}

func (q *Queue) exceeded(it *Item) Bound {
	class := &q.classes[it.Class]
	if b := exceeded(&q.perClass[it.Class], it, class.MaxRequests, class.MaxBytes, ClassRequests, ClassBytes); b != WithinBounds {
		return b
	}
	return exceeded(&q.total, it, q.limits.MaxRequests, q.limits.MaxBytes, AllRequests, AllBytes)
}

// Push adds a request. If a bound is reached, requests that have a smaller claim leave the queue (victim),
// and are appended to displaced. If none has, bound says why the request was not added; then nothing is
// displaced.
func (q *Queue) Push(it *Item, displaced []*Item) (_ []*Item, bound Bound) {
	it.Cost, it.Weight = max(it.Cost, 1), max(it.Weight, 1)
	before := len(displaced)
	for bound = q.exceeded(it); bound != WithinBounds; bound = q.exceeded(it) {
		victim := q.victim(it, bound)
		if victim == nil || len(displaced)-before >= maxDisplaced {
			for _, d := range displaced[before:] {
				q.restore(d)
			}
			return displaced[:before], bound
		}
		q.withdraw(victim)
		victim.exceeded = bound
		displaced = append(displaced, victim)
	}
	for _, d := range displaced[before:] {
		q.finishRemoval(d)
	}
	q.seq++
	it.seq = q.seq
	q.insert(it)
	return displaced, WithinBounds
}

// maxDisplaced bounds how many requests one request may displace.
const maxDisplaced = 16

// insert puts an Item with a sequence number into its pool.
func (q *Queue) insert(it *Item) {
	l := q.pools[it.Pool]
	if l == nil {
		l = newPoolQueue(it.Pool, len(q.classes))
		q.pools[it.Pool] = l
	}
	l.insert(it, q.limits.MaxTenants)
	q.total.add(it)
	q.perClass[it.Class].add(it)
	it.tenant.ages.insert(it)
}

// Remove takes a request out of the Queue without dispatching it. It does nothing if the request is
// not in it.
func (q *Queue) Remove(it *Item) {
	if it.IsQueued() {
		q.withdraw(it)
		q.finishRemoval(it)
	}
}

// withdraw takes a request out of its tenant and out of all counts. finishRemoval or restore follows.
func (q *Queue) withdraw(it *Item) {
	if it.deferred {
		it.deferred = false // EndRound drops it from the list
	} else {
		it.queue.classes[it.Class].unlink(it)
	}
	q.total.remove(it)
	q.perClass[it.Class].remove(it)
	it.queue.usage.remove(it)
	it.queue.classes[it.Class].withdraw(it)
}

// restore puts a withdrawn request back as if nothing had happened.
func (q *Queue) restore(it *Item) {
	q.total.add(it)
	q.perClass[it.Class].add(it)
	it.queue.usage.add(it)
	it.queue.classes[it.Class].restore(it)
}

// finishRemoval ends the removal of a withdrawn request: what has no request any more is forgotten.
func (q *Queue) finishRemoval(it *Item) {
	l, t := it.queue, it.tenant
	t.ages.remove(it)
	l.removeIfEmpty(it.lane)
	l.classes[it.Class].removeIfEmpty(t)
	it.queue, it.tenant, it.lane = nil, nil, nil
	if l.usage.requests == 0 {
		delete(q.pools, l.name)
	}
}

// Release lets a request on hold be dispatched in its order of arrival. It does nothing if the request
// is not in the Queue, or not on hold.
func (q *Queue) Release(it *Item) {
	if it.state != onHold {
		return
	}
	l, k := it.queue, &it.queue.classes[it.Class]
	k.unlink(it)
	for _, u := range [...]*usage{&q.total, &q.perClass[it.Class], &l.usage, &k.usage, &it.tenant.usage, &it.lane.usage} {
		u.hold(it, -1)
	}
	it.OnHold = false
	k.link(it)
	k.updateClaim(it.tenant, 0)
}

// isIdle reports whether no request of a pool waits for capacity.
func (q *Queue) isIdle(pool string) bool {
	l := q.pools[pool]
	return l == nil || l.usage.ready() == 0
}

// Next returns the request of a pool that is to be dispatched next, nil if none waits or all are
// deferred, on hold or of full groups. now decides which requests are late. Until the Queue changes, it
// returns the same request again.
func (q *Queue) Next(name string, now int64) *Item {
	l := q.pools[name]
	if l == nil {
		return nil
	}
	return l.next(q.classes, now)
}

// Take removes a request that Next returned because it was dispatched, and charges its tenant and its
// class.
func (q *Queue) Take(it *Item) {
	it.lane.group.wasFull = false
	it.queue.charge(q.classes, it)
	it.queue.classes[it.Class].charge(it)
	q.withdraw(it)
	q.finishRemoval(it)
}

// Defer sets a request that Next returned aside until EndRound, because it cannot start now although
// others of its pool may. It keeps its place.
func (q *Queue) Defer(it *Item) {
	k := &it.queue.classes[it.Class]
	k.unlink(it)
	k.updateClaim(it.tenant, 0)
	it.deferred = true
	q.deferred = append(q.deferred, it)
}

// SetFull makes Next pass over the requests of the same Group as one that it returned until EndSweep, because
// no rank can start that one now.
func (q *Queue) SetFull(it *Item) {
	it.lane.group.isFull, it.lane.group.wasFull = true, true
}

// EndSweep ends the effect of SetFull in a pool.
func (q *Queue) EndSweep(pool string) {
	if l := q.pools[pool]; l != nil {
		l.endSweep()
	}
}

// setNoRoom notes whether a request waits until its KV fits: then smaller ones that arrive are not behind it.
func (q *Queue) setNoRoom(it *Item, is bool) {
	if it.noRoom == is {
		return
	}
	n, cost := 1, it.Cost
	if it.noRoom = is; !is {
		n, cost = -1, -cost
	}
	for _, u := range []*usage{&q.total, &q.perClass[it.Class], &it.queue.usage, &it.queue.classes[it.Class].usage, &it.tenant.usage, &it.lane.usage} {
		u.noRoom += n
		u.roomCost += cost
	}
}

// wasTried reports whether the request was tried and deferred in this pass over its pool, and setTried notes that
// it was.
func (it *Item) wasTried() bool { return it.pass == it.queue.pass }
func (it *Item) setTried()      { it.pass = it.queue.pass }

// endPass lets all deferred requests of a pool be tried again.
func (q *Queue) endPass(pool string) {
	if l := q.pools[pool]; l != nil {
		l.pass++
	}
}

// EndRound puts deferred requests back.
func (q *Queue) EndRound() {
	for i, it := range q.deferred {
		if it.deferred {
			it.deferred = false
			k := &it.queue.classes[it.Class]
			k.link(it)
			k.updateClaim(it.tenant, 0)
		}
		q.deferred[i] = nil
	}
	q.deferred = q.deferred[:0]
}

// victim returns the request that gives up its place for it because a bound is reached, nil if none has a
// smaller claim. The rules, in this order:
//
//   - Pools have equal parts of a bound. If one pool takes more of it than the request's own would with the
//     request, a request of that pool leaves, so that a flood of one model takes no space of the others.
//   - Within a pool, requests of lower classes leave, the lowest class first. But a class keeps the part of
//     the pool's space that is its MinShare, and a request of a class that has less than that part takes
//     the place of one of a higher class too.
//   - Within a class, one of the tenant leaves that takes the most by weight, if that is more than the
//     request's own tenant would take.
//
// The work does not grow with the number of waiting requests.
func (q *Queue) victim(it *Item, bound Bound) *Item {
	own, taken := q.pools[it.Pool], bound.takenBy(it)
	if own != nil {
		taken += bound.takenIn(own, it.Class)
	}
	if l := q.largest(it.Class, bound); l != nil && l != own {
		if v := q.surplusOf(l, it, bound); v != nil && bound.takenIn(l, it.Class)-bound.takenBy(v) >= taken {
			return v
		}
	}
	if own == nil {
		return nil
	}
	if !bound.isOfClass() {
		k := &own.classes[it.Class]
		isBelowShare := float64(bound.taken(&k.usage)+bound.takenBy(it)) <= q.classes[it.Class].MinShare*float64(bound.taken(&own.usage))
		if v := q.lowest(own, it.Class, isBelowShare, bound); v != nil {
			return v
		}
	}
	return own.classes[it.Class].rival(it, bound, q.limits.MaxTenants)
}

// largest returns the pool that takes the most of a bound, nil if there is none.
func (q *Queue) largest(class int, bound Bound) (most *poolQueue) {
	for _, l := range q.pools {
		if most == nil {
			most = l
			continue
		}
		if d := bound.takenIn(l, class) - bound.takenIn(most, class); d > 0 || d == 0 && l.name < most.name {
			most = l
		}
	}
	return most
}

// surplusOf returns the request that a pool other than that of it gives up first.
func (q *Queue) surplusOf(l *poolQueue, it *Item, bound Bound) *Item {
	if bound.isOfClass() {
		return l.classes[it.Class].largest(bound).worst()
	}
	return q.lowest(l, -1, true, bound)
}

// lowest returns a request of the lowest class of a pool, except class, that takes more of a bound than its
// part of the pool's space; nil if there is none. Higher classes than class count only if all is set.
func (q *Queue) lowest(l *poolQueue, class int, all bool, bound Bound) *Item {
	space := float64(bound.taken(&l.usage))
	for i := len(l.classes) - 1; i >= 0 && (all || i > class); i-- {
		k := &l.classes[i]
		if i == class || float64(bound.taken(&k.usage)) <= q.classes[i].MinShare*space {
			continue
		}
		if v := k.largest(bound).worst(); v != nil {
			return v
		}
	}
	return nil
}

// tenantOf returns the tenant of a request that would be pushed now, nil if it has no waiting requests.
func (q *Queue) tenantOf(it *Item) *tenant {
	if l := q.pools[it.Pool]; l != nil {
		if t := l.classes[it.Class].find(it.Tenant, q.limits.MaxTenants); t != nil && t.usage.requests > 0 {
			return t
		}
	}
	return nil
}

// Pools returns the names of the pools that have waiting requests, sorted.
func (q *Queue) Pools(into []string) []string {
	into = into[:0]
	for name := range q.pools {
		into = append(into, name)
	}
	slices.Sort(into)
	return into
}

// Drain removes all requests and returns them in the order of arrival.
func (q *Queue) Drain() []*Item {
	q.EndRound()
	var all []*Item
	for _, l := range q.pools {
		for i := range l.classes {
			for t := range l.classes[i].all {
				all = t.onHold.appendTo(all)
				for _, n := range t.lanes {
					all = n.late.appendTo(append(all, n.heap...))
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b *Item) int { return cmp.Compare(a.seq, b.seq) })
	for _, it := range all {
		q.Remove(it)
	}
	return all
}

// Position returns the place in the queue of its pool of a request that would be pushed now, from 1, if all waiting
// requests of its class and of higher classes were dispatched before it. Turns of tenants and targets
// may let it start earlier.
func (q *Queue) Position(it *Item) int {
	n := 1
	if l := q.pools[it.Pool]; l != nil {
		for i := range it.Class + 1 {
			n += l.classes[i].usage.ready()
		}
	}
	return n
}

// Ahead estimates how many tokens are dispatched before a request that would be pushed now: all of
// the higher classes, its own tenant's, and the turns that other tenants of its class have meanwhile. It is
// 0 if all requests that wait are of other groups, for which no rank had capacity.
func (q *Queue) Ahead(it *Item) int64 {
	l := q.pools[it.Pool]
	if l == nil {
		return 0
	}
	if l.passesAll(it.Group) {
		return 0
	}
	tokens, lower := int64(0), 0.0
	for i := range l.classes {
		switch {
		case i < it.Class:
			tokens += l.classes[i].usage.readyCost(it.Cost)
		case i > it.Class && l.classes[i].usage.ready() > 0:
			lower += q.classes[i].MinShare
		}
	}
	tokens += l.ahead(it, q.limits.MaxTenants)
	return int64(float64(tokens) / (1 - min(lower, 0.9)))
}
