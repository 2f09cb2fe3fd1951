package admission

import (
	"slices"
	"time"
)

// maxGroups bounds the groups of a pool that are tried separately; the others share one.
const maxGroups = 256

// maxSpareLanes bounds the emptied lanes that a pool keeps for its next ones, and maxSpareHeap the requests for which
// they keep space.
const maxSpareLanes, maxSpareHeap = 64, 64

// poolQueue holds the requests that compete for the same ranks: those of a base model, with two legs or with one.
type poolQueue struct {
	name    string
	classes []classQueue
	groups  []*group // those with requests
	spare   []*lane  // emptied, for the next ones: most tenants have few requests and come back
	usage   usage
	lateSeq uint64
}

// group has the requests of a pool that may use the same ranks.
type group struct {
	name  string
	lanes int                  // its lanes in all classes
	ready []indexedHeap[*lane] // by class: those with a request that is neither deferred nor on hold
	// isFull says that none of its requests can start in this sweep; wasFull, that none could when one was
	// last tried.
	isFull, wasFull bool
	emptySince      time.Time // see Starter
}

// lane holds the requests of one tenant in one group and class of a pool.
type lane struct {
	tenant  *tenant
	group   *group
	usage   usage
	heap    indexedHeap[*Item] // by Due, then by arrival
	late    itemList           // in the order in which they became late
	isReady bool               // it is in group.ready
	at      int                // in that heap
}

// goesBefore is the order of the lanes of a group and class, each of another tenant.
func (l *lane) goesBefore(o *lane) bool { return l.tenant.goesBefore(o.tenant) }

func (l *lane) place() *int { return &l.at }

func newPoolQueue(name string, classes int) *poolQueue {
	l := &poolQueue{name: name, classes: make([]classQueue, classes)}
	for i := range l.classes {
		l.classes[i].tenants = map[string]*tenant{}
	}
	return l
}

func (l *poolQueue) insert(it *Item, maxTenants int) {
	k := &l.classes[it.Class]
	t := k.tenantFor(it, maxTenants)
	it.queue, it.tenant, it.lane = l, t, l.laneFor(t, l.groupFor(it.Group))
	t.usage.add(it)
	it.lane.usage.add(it)
	k.usage.add(it)
	l.usage.add(it)
	k.link(it)
	k.updateClaim(t, 1)
}

// groupFor returns the group of a name. Those of the names beyond maxGroups share one, but for "".
func (l *poolQueue) groupFor(name string) *group {
	for range 2 {
		for _, g := range l.groups {
			if g.name == name {
				return g
			}
		}
		if name == "" || len(l.groups) < maxGroups {
			break
		}
		name = Overflow
	}
	g := &group{name: name, ready: make([]indexedHeap[*lane], len(l.classes))}
	l.groups = append(l.groups, g)
	return g
}

// settle forgets a lane without requests, and its group if that has no other.
func (l *poolQueue) settle(n *lane) {
	t, g := n.tenant, n.group
	if n.usage.requests > 0 || t == nil { // nil: its last two requests have left together
		return
	}
	i := slices.Index(t.lanes, n)
	t.lanes = slices.Delete(t.lanes, i, i+1)
	if g.lanes--; g.lanes == 0 {
		i = slices.Index(l.groups, g)
		l.groups = slices.Delete(l.groups, i, i+1)
	}
	if *n = (lane{heap: n.heap}); cap(n.heap) > maxSpareHeap {
		n.heap = nil
	}
	if len(l.spare) < maxSpareLanes {
		l.spare = append(l.spare, n)
	}
}

// laneFor returns the lane of a tenant in a group.
func (l *poolQueue) laneFor(t *tenant, g *group) (n *lane) {
	for _, n := range t.lanes {
		if n.group == g {
			return n
		}
	}
	if last := len(l.spare) - 1; last >= 0 {
		n, l.spare[last] = l.spare[last], nil
		l.spare = l.spare[:last]
	} else {
		n = new(lane)
	}
	n.tenant, n.group = t, g
	t.lanes = append(t.lanes, n)
	g.lanes++
	return n
}

// next returns the head of the class whose turn it is, nil if no request can start.
func (l *poolQueue) next(classes []Class, now int64) *Item {
	for i := len(l.classes) - 1; i >= 0; i-- {
		if classes[i].MinShare > 0 && l.classes[i].credit > 0 {
			if t := l.first(i); t != nil {
				return t.head(now)
			}
		}
	}
	for i := range l.classes {
		if t := l.first(i); t != nil {
			return t.head(now)
		}
	}
	return nil
}

// first returns the tenant of a class that goes first, nil if none has a request that can start.
func (l *poolQueue) first(class int) (t *tenant) {
	for _, g := range l.groups {
		if ready := g.ready[class]; !g.isFull && len(ready) > 0 && (t == nil || ready[0].tenant.goesBefore(t)) {
			t = ready[0].tenant
		}
	}
	return t
}

// passesAll reports whether all requests that wait for capacity are of other groups than the named one, for
// which no rank had any.
func (l *poolQueue) passesAll(name string) bool {
	for _, g := range l.groups {
		if (!g.wasFull || g.name == name) && g.isWaiting() {
			return false
		}
	}
	return true
}

// isWaiting reports whether a request of the group is neither deferred nor on hold.
func (g *group) isWaiting() bool {
	for _, lanes := range g.ready {
		if len(lanes) > 0 {
			return true
		}
	}
	return false
}

// endSweep lets all groups be tried again.
func (l *poolQueue) endSweep() {
	for _, g := range l.groups {
		g.isFull = false
	}
}

// charge accounts a dispatch for the minimum shares. Every class that waits receives its share of the
// tokens. A class that goes first although a higher one waits pays for it from its credit.
func (l *poolQueue) charge(classes []Class, it *Item) {
	outOfOrder := false
	for i := range l.classes {
		k, waits := &l.classes[i], l.first(i) != nil
		if share := classes[i].MinShare; share > 0 && waits && (i != it.Class || outOfOrder) {
			k.credit += share * float64(it.Cost)
			if i == it.Class {
				k.credit -= float64(it.Cost)
			}
		}
		outOfOrder = outOfOrder || waits
	}
}

// classQueue holds the requests of one class in one pool. Tenants without requests are remembered while
// they have been given more than the clock allows for, so that leaving and coming back does not cancel it.
type classQueue struct {
	tenants  map[string]*tenant
	overflow *tenant // of requests whose own tenant has no turn; nil if there was none
	// Those with a request that is not deferred, by what they take of the queue's bounds.
	byRequests indexedHeap[*byRequests]
	byBytes    indexedHeap[*byBytes]
	idle       idleList // those without requests
	usage      usage
	weights    int64 // of the tenants with requests
	credit     float64
	// clock is what a tenant of weight 1 that always had requests has been given. mean is the mean cost
	// of the requests dispatched lately.
	clock float64
	mean  float64
	turns uint64 // places given so far
}

// tenant holds the requests of one tenant in one class of a pool.
type tenant struct {
	name   string
	weight int
	// given is what the tenant has been given, in tokens by weight, on the scale of the class's clock:
	// below the clock it is behind its share. The tenant that is furthest behind goes first, and of
	// equals the one that has had its place longest.
	given float64
	turn  uint64
	usage usage
	rate  rateMeter
	lanes []*lane // those with requests
	ready int     // of lanes: those with a request that is neither deferred nor on hold
	// isDisplaceable: it has a request that is not deferred. Then its places in byRequests and byBytes are
	// atRequests and atBytes.
	isDisplaceable      bool
	atRequests, atBytes int
	// isSettled: it has no requests, its weight is not counted, and it is in the idle list.
	isSettled bool
	prev      *tenant // in the idle list
	next      *tenant

	onHold itemList // in the order of arrival
}

// itemList is a list of requests of one tenant.
type itemList struct{ first, last *Item }

// insert puts a request behind after, or first if that is nil.
func (l *itemList) insert(it, after *Item) {
	it.prev = after
	if after == nil {
		it.next, l.first = l.first, it
	} else {
		it.next, after.next = after.next, it
	}
	if it.next == nil {
		l.last = it
	} else {
		it.next.prev = it
	}
}

// appendTo appends the requests of the list.
func (l *itemList) appendTo(all []*Item) []*Item {
	for it := l.first; it != nil; it = it.next {
		all = append(all, it)
	}
	return all
}

func (l *itemList) remove(it *Item) {
	if it.prev == nil {
		l.first = it.next
	} else {
		it.prev.next = it.next
	}
	if it.next == nil {
		l.last = it.prev
	} else {
		it.next.prev = it.prev
	}
	it.prev, it.next = nil, nil
}

// idleList has the tenants without requests; the one that has been idle longest is first.
type idleList struct{ first, last *tenant }

func (l *idleList) add(t *tenant) {
	t.prev, t.next = l.last, nil
	if l.last == nil {
		l.first = t
	} else {
		l.last.next = t
	}
	l.last = t
}

func (l *idleList) remove(t *tenant) {
	if t.prev == nil {
		l.first = t.next
	} else {
		t.prev.next = t.next
	}
	if t.next == nil {
		l.last = t.prev
	} else {
		t.next.prev = t.prev
	}
	t.prev, t.next = nil, nil
}

// tenantFor returns the tenant of a request; it creates it if the table allows that.
func (k *classQueue) tenantFor(it *Item, maxTenants int) *tenant {
	t := k.find(it.Tenant, maxTenants)
	if t == nil {
		t = &tenant{name: it.Tenant, isSettled: true, given: k.floor()}
		switch idle := k.longestIdle(); {
		case !k.isFull(maxTenants):
			k.tenants[t.name] = t
		case idle != nil:
			k.forget(idle)
			k.tenants[t.name] = t
		default:
			t.name, k.overflow = Overflow, t
		}
		k.idle.add(t)
	}
	weight := it.Weight
	if t == k.overflow {
		weight = 1
	}
	if t.isSettled {
		k.idle.remove(t)
		t.given = max(t.given, k.floor())
	} else {
		k.weights -= int64(t.weight)
	}
	k.weights += int64(weight)
	k.setWeight(t, weight)
	t.isSettled = false
	return t
}

// find returns the tenant to which a request of a tenant of that name would be added, nil if it would be a
// new one.
func (k *classQueue) find(name string, maxTenants int) *tenant {
	t := k.tenants[name]
	if t == nil && k.isFull(maxTenants) && k.longestIdle() == nil {
		return k.overflow
	}
	return t
}

func (k *classQueue) isFull(maxTenants int) bool {
	return maxTenants > 0 && len(k.tenants) >= maxTenants
}

// longestIdle returns the tenant with a turn of its own that has been idle longest, nil if none is.
func (k *classQueue) longestIdle() *tenant {
	t := k.idle.first
	if t != nil && t == k.overflow {
		t = t.next
	}
	return t
}

// all yields the tenants.
func (k *classQueue) all(yield func(*tenant) bool) {
	for _, t := range k.tenants {
		if !yield(t) {
			return
		}
	}
	if k.overflow != nil {
		yield(k.overflow)
	}
}

// savedRequests bounds what a tenant that uses less than its share may use later, ahead of others, in
// requests of the mean cost: enough for the bursts of a tenant that stays below its share, and little
// beside a queue of the length at which the order matters.
const savedRequests = 32

// floor is how far behind the clock a tenant can be that has had no requests.
func (k *classQueue) floor() float64 { return k.clock - savedRequests*k.mean }

func (k *classQueue) forget(t *tenant) {
	k.idle.remove(t)
	if t == k.overflow {
		k.overflow = nil
	} else {
		delete(k.tenants, t.name)
	}
}

// withdraw takes a request that is in no heap or list any more out of the counts.
func (k *classQueue) withdraw(it *Item) {
	k.usage.remove(it)
	it.tenant.usage.remove(it)
	it.lane.usage.remove(it)
	k.updateClaim(it.tenant, -1)
}

// restore puts a withdrawn request back.
func (k *classQueue) restore(it *Item) {
	k.usage.add(it)
	it.tenant.usage.add(it)
	it.lane.usage.add(it)
	k.link(it)
	k.updateClaim(it.tenant, 1)
}

// settle forgets what has no requests any more, after a request of t was withdrawn.
func (k *classQueue) settle(t *tenant) {
	if k.usage.requests == 0 { // nobody waits: the accounts start again
		clear(k.tenants)
		k.overflow, k.idle, k.weights, k.credit, k.clock = nil, idleList{}, 0, 0, 0
		return
	}
	if t.usage.requests == 0 && !t.isSettled && (t == k.overflow || k.tenants[t.name] == t) {
		k.weights -= int64(t.weight)
		t.isSettled = true
		k.idle.add(t)
	}
	for range 2 { // a new tenant would begin where these are
		if t := k.idle.first; t != nil && t.given <= k.floor() {
			k.forget(t)
		}
	}
}

// updateReady counts the lane as ready if it has a request that is neither deferred nor on hold.
func (k *classQueue) updateReady(l *lane, class int) {
	is := len(l.heap) > 0 || l.late.first != nil
	switch {
	case is == l.isReady:
	case is:
		if l.tenant.ready == 0 {
			k.turns++
			l.tenant.turn = k.turns
		}
		l.tenant.ready++
		l.isReady = true
		l.group.ready[class].push(l)
	default:
		l.tenant.ready--
		l.isReady = false
		l.group.ready[class].remove(l)
	}
}

// updateClaim follows a change of a tenant's requests: the tenant has a place among those that may have to give up
// requests if one is not deferred. more is the change of their number, by which it moves there.
func (k *classQueue) updateClaim(t *tenant, more int) {
	switch is := t.ready > 0 || t.onHold.first != nil; {
	case is && !t.isDisplaceable:
		t.isDisplaceable = true
		k.byRequests.push((*byRequests)(t))
		k.byBytes.push((*byBytes)(t))
	case !is && t.isDisplaceable:
		t.isDisplaceable = false
		k.byRequests.remove((*byRequests)(t))
		k.byBytes.remove((*byBytes)(t))
	case is && more > 0:
		k.byRequests.up(t.atRequests)
		k.byBytes.up(t.atBytes)
	case is && more < 0:
		k.byRequests.down(t.atRequests)
		k.byBytes.down(t.atBytes)
	}
}

// setWeight changes the weight of a tenant that may have requests.
func (k *classQueue) setWeight(t *tenant, weight int) {
	if t.weight == weight {
		return
	}
	if t.weight = weight; t.isDisplaceable {
		k.byRequests.fix((*byRequests)(t))
		k.byBytes.fix((*byBytes)(t))
	}
}

// byRequests and byBytes order tenants by what they take of a bound, by weight: the one that takes the most
// goes first, of equals the one whose name does.
type (
	byRequests tenant
	byBytes    tenant
)

func (t *byRequests) goesBefore(o *byRequests) bool {
	return takesMore(int64(t.usage.requests)*int64(o.weight), int64(o.usage.requests)*int64(t.weight), t.name, o.name)
}

func (t *byRequests) place() *int { return &t.atRequests }

func (t *byBytes) goesBefore(o *byBytes) bool {
	return takesMore(t.usage.bytes*int64(o.weight), o.usage.bytes*int64(t.weight), t.name, o.name)
}

func (t *byBytes) place() *int { return &t.atBytes }

func takesMore(a, b int64, name, other string) bool { return a > b || a == b && name < other }

// charge accounts a dispatch for the tenant.
func (k *classQueue) charge(it *Item) {
	t := it.tenant
	if k.mean == 0 {
		k.mean = float64(it.Cost)
	}
	k.mean += (float64(it.Cost) - k.mean) / 64
	k.clock = max(k.clock, t.given)
	t.given = max(t.given, k.floor()) + float64(it.Cost)/float64(t.weight)
	k.turns++
	t.turn = k.turns
	for _, l := range t.lanes {
		if l.isReady {
			l.group.ready[it.Class].fix(l)
		}
	}
}

// goesBefore is the order of the heap of tenants.
func (t *tenant) goesBefore(o *tenant) bool {
	return t.given < o.given || t.given == o.given && t.turn < o.turn
}

// ahead estimates how many tokens of a class are dispatched before a request that would be pushed now.
func (l *poolQueue) ahead(it *Item, maxTenants int) int64 {
	k := &l.classes[it.Class]
	given, own, weight := k.floor(), int64(0), float64(max(it.Weight, 1))
	tenant := k.find(it.Tenant, maxTenants)
	if tenant != nil {
		own, given, weight = tenant.usage.readyCost(), max(tenant.given, given), float64(tenant.weight)
	}
	// The request goes when its tenant has been given its other requests, and the others have as much.
	turn := given + (float64(own)+float64(max(it.Cost, 1))/2)/weight
	const most = 64 // tenants that are looked at; the others are taken to be like these
	looked, others, tokens := 0, 0, 0.0
	for _, g := range l.groups {
		others += len(g.ready[it.Class])
		for _, n := range g.ready[it.Class] {
			if looked == most {
				break
			}
			if n.tenant == tenant {
				continue
			}
			looked++
			tokens += min(max(turn-n.tenant.given, 0)*float64(n.tenant.weight), float64(n.usage.readyCost()))
		}
	}
	if others > most {
		tokens += tokens * float64(others-most) / float64(max(looked, 1))
	}
	return own + int64(tokens)
}

// largest returns the tenant that takes the most of a bound by weight and has a request to give up, nil if
// there is none.
func (k *classQueue) largest(bound Bound) *tenant {
	switch {
	case len(k.byRequests) == 0:
		return nil
	case bound.inBytes():
		return (*tenant)(k.byBytes[0])
	}
	return (*tenant)(k.byRequests[0])
}

// rival returns a request of the tenant that takes the most of a bound by weight, if that is more than the
// tenant of it would take with it, nil otherwise.
func (k *classQueue) rival(it *Item, bound Bound, maxTenants int) *Item {
	t, own := k.largest(bound), k.find(it.Tenant, maxTenants)
	v := t.worst()
	if v == nil || t == own {
		return nil
	}
	taken, weight := bound.takenBy(it), int64(it.Weight)
	if own != nil {
		taken += bound.taken(&own.usage)
		if own == k.overflow {
			weight = 1
		}
	}
	if (bound.taken(&t.usage)-bound.takenBy(v))*weight < taken*int64(t.weight) {
		return nil
	}
	return v
}

// head returns the request of the tenant that is to start first, of those whose group may start one, and
// moves those that are late.
func (t *tenant) head(now int64) *Item {
	for {
		var first, late *Item
		for _, l := range t.lanes {
			if l.group.isFull {
				continue
			}
			if len(l.heap) > 0 && (first == nil || l.heap[0].goesBefore(first)) {
				first = l.heap[0]
			}
			if it := l.late.first; it != nil && (late == nil || it.lateSeq < late.lateSeq) {
				late = it
			}
		}
		switch {
		case first == nil:
			return late
		case !first.Firm || first.Due >= now:
			return first
		}
		first.lane.unlink(first)
		first.queue.lateSeq++
		first.lateSeq = first.queue.lateSeq
		first.lane.linkLate(first)
	}
}

// maxLeaves bounds how many requests of a heap worst looks at.
const maxLeaves = 64

// worst returns the request that would be dispatched last, nil if there is none or t is nil: the last one on
// hold, else the last late one, else the last of those that were added to the heaps lately and are not due
// before others there.
func (t *tenant) worst() *Item {
	switch {
	case t == nil:
		return nil
	case t.onHold.last != nil:
		return t.onHold.last
	}
	var late, worst *Item
	for _, l := range t.lanes {
		if it := l.late.last; it != nil && (late == nil || late.lateSeq < it.lateSeq) {
			late = it
		}
		for _, it := range l.heap[max(len(l.heap)/2, len(l.heap)-maxLeaves):] { // leaves
			if worst == nil || worst.goesBefore(it) {
				worst = it
			}
		}
	}
	if late != nil {
		return late
	}
	return worst
}

// goesBefore is the order of a tenant's heap.
func (it *Item) goesBefore(o *Item) bool {
	return it.Due < o.Due || it.Due == o.Due && it.seq < o.seq
}

func (it *Item) place() *int { return &it.index }

// link puts a request into the list of its state or into the heap of its lane.
func (k *classQueue) link(it *Item) {
	switch l := it.lane; {
	case it.OnHold:
		after := it.tenant.onHold.last
		for after != nil && after.seq > it.seq { // it returns from a displacement that has not happened
			after = after.prev
		}
		it.state = onHold
		it.tenant.onHold.insert(it, after)
	case it.lateSeq != 0:
		l.linkLate(it)
	default:
		it.state = onTime
		l.heap.push(it)
	}
	k.updateReady(it.lane, it.Class)
}

// unlink takes a request out of the heap or its list.
func (k *classQueue) unlink(it *Item) {
	it.lane.unlink(it)
	k.updateReady(it.lane, it.Class)
}

// linkLate puts a request into the list of late ones: at the end, or near the front if it returns.
func (l *lane) linkLate(it *Item) {
	it.state = late
	var after *Item
	if last := l.late.last; last == nil || last.lateSeq < it.lateSeq {
		after = last
	} else {
		for i := l.late.first; i != nil && i.lateSeq < it.lateSeq; i = i.next {
			after = i
		}
	}
	l.late.insert(it, after)
}

// unlink takes a request out of the heap or its list. Unless one takes its place there, updateReady follows.
func (l *lane) unlink(it *Item) {
	switch it.state {
	case onTime:
		l.heap.remove(it)
	case late:
		l.late.remove(it)
	case onHold:
		l.tenant.onHold.remove(it)
	}
	it.state = idle
}

// countLate returns how many requests of the tenant are late.
func (t *tenant) countLate() int {
	n := t.usage.ready()
	for _, l := range t.lanes {
		n -= len(l.heap)
	}
	return n
}
