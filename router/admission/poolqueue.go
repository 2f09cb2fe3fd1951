package admission

// poolQueue holds the requests that compete for the same ranks: those of a base model, with two legs or with one.
type poolQueue struct {
	name    string
	classes []classQueue
	usage   usage
	lateSeq uint64
}

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
	it.queue, it.tenant = l, t
	t.usage.add(it)
	t.link(it)
	k.usage.add(it)
	l.usage.add(it)
	k.update(t, 1)
}

// next returns the head of the class whose turn it is.
func (l *poolQueue) next(classes []Class, now int64) *Item {
	for i := len(l.classes) - 1; i >= 0; i-- {
		if k := &l.classes[i]; classes[i].MinShare > 0 && k.credit > 0 && len(k.order) > 0 {
			return k.next(now)
		}
	}
	for i := range l.classes {
		if k := &l.classes[i]; len(k.order) > 0 {
			return k.next(now)
		}
	}
	return nil
}

// charge accounts a dispatch for the minimum shares. Every class that waits receives its share of the
// tokens. A class that goes first although a higher one waits pays for it from its credit.
func (l *poolQueue) charge(classes []Class, it *Item) {
	outOfOrder := false
	for i := range l.classes {
		k := &l.classes[i]
		if share := classes[i].MinShare; share > 0 && len(k.order) > 0 && (i != it.Class || outOfOrder) {
			k.credit += share * float64(it.Cost)
			if i == it.Class {
				k.credit -= float64(it.Cost)
			}
		}
		outOfOrder = outOfOrder || len(k.order) > 0
	}
}

// classQueue holds the requests of one class in one pool. Tenants without requests are remembered while
// they have been given more than the clock allows for, so that leaving and coming back does not cancel it.
type classQueue struct {
	tenants  map[string]*tenant
	overflow *tenant              // of requests whose own tenant has no turn; nil if there was none
	order    indexedHeap[*tenant] // those with a request that is neither deferred nor on hold
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
	at    int // in classQueue.order, if isReady
	// isReady: it has a request that is neither deferred nor on hold.
	isReady bool
	// isDisplaceable: it has a request that is not deferred. Then its places in byRequests and byBytes are
	// atRequests and atBytes.
	isDisplaceable      bool
	atRequests, atBytes int
	// isSettled: it has no requests, its weight is not counted, and it is in the idle list.
	isSettled bool
	prev      *tenant // in the idle list
	next      *tenant

	heap   indexedHeap[*Item] // by Due, then by arrival
	late   itemList           // in the order in which they became late
	onHold itemList           // in the order of arrival
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
	k.update(it.tenant, -1)
}

// restore puts a withdrawn request back.
func (k *classQueue) restore(it *Item) {
	k.usage.add(it)
	it.tenant.usage.add(it)
	it.tenant.link(it)
	k.update(it.tenant, 1)
}

// settle forgets what has no requests any more, after a request of t was withdrawn.
func (k *classQueue) settle(t *tenant) {
	if k.usage.requests == 0 { // nobody waits: the accounts start again
		clear(k.tenants)
		k.overflow, k.order, k.idle, k.weights, k.credit, k.clock = nil, k.order[:0], idleList{}, 0, 0, 0
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

// update follows a change of a tenant's requests: it has a turn if one is neither deferred nor on hold, and a
// place among those that may have to give up requests if one is not deferred. more is the change of their
// number, by which the tenant moves there.
func (k *classQueue) update(t *tenant, more int) {
	is := len(t.heap) > 0 || t.late.first != nil
	switch {
	case is == t.isReady:
	case is:
		k.turns++
		t.isReady, t.turn = true, k.turns
		k.order.push(t)
	default:
		t.isReady = false
		k.order.remove(t)
	}
	switch is = is || t.onHold.first != nil; {
	case is && !t.isDisplaceable:
		k.byRequests.push((*byRequests)(t))
		k.byBytes.push((*byBytes)(t))
	case !is && t.isDisplaceable:
		k.byRequests.remove((*byRequests)(t))
		k.byBytes.remove((*byBytes)(t))
	case is && more > 0:
		k.byRequests.up(t.atRequests)
		k.byBytes.up(t.atBytes)
	case is && more < 0:
		k.byRequests.down(t.atRequests)
		k.byBytes.down(t.atBytes)
	}
	t.isDisplaceable = is
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
	if t.isReady {
		k.order.fix(t)
	}
}

// next returns the head of the tenant that goes first; at least one tenant is ready.
func (k *classQueue) next(now int64) *Item { return k.order[0].head(now) }

// goesBefore is the order of the heap of tenants.
func (t *tenant) goesBefore(o *tenant) bool {
	return t.given < o.given || t.given == o.given && t.turn < o.turn
}

func (t *tenant) place() *int { return &t.at }

// ahead estimates how many tokens of the class are dispatched before a request that would be pushed now.
func (k *classQueue) ahead(it *Item, maxTenants int) int64 {
	given, own, weight := k.floor(), int64(0), float64(max(it.Weight, 1))
	tenant := k.find(it.Tenant, maxTenants)
	if tenant != nil {
		own, given, weight = tenant.usage.readyCost(), max(tenant.given, given), float64(tenant.weight)
	}
	// The request goes when its tenant has been given its other requests, and the others have as much.
	turn := given + (float64(own)+float64(max(it.Cost, 1))/2)/weight
	const most = 64 // tenants that are looked at; the others are taken to be like these
	looked, tokens := 0, 0.0
	for _, t := range k.order[:min(len(k.order), most)] {
		if t == tenant {
			continue
		}
		looked++
		tokens += min(max(turn-t.given, 0)*float64(t.weight), float64(t.usage.readyCost()))
	}
	if others := len(k.order) - most; others > 0 {
		tokens += tokens * float64(others) / float64(max(looked, 1))
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

// head returns the request of the tenant that is to start first, and moves those that are late.
func (t *tenant) head(now int64) *Item {
	for len(t.heap) > 0 {
		it := t.heap[0]
		if !it.Firm || it.Due >= now {
			return it
		}
		t.unlink(it)
		it.queue.lateSeq++
		it.lateSeq = it.queue.lateSeq
		t.linkLate(it)
	}
	return t.late.first
}

// maxLeaves bounds how many requests of a tenant worst looks at.
const maxLeaves = 64

// worst returns the request that would be dispatched last, nil if there is none or t is nil: the last one on
// hold, else the last late one, else the last of those that were added to the heap lately and are not due
// before others there.
func (t *tenant) worst() *Item {
	switch {
	case t == nil:
		return nil
	case t.onHold.last != nil:
		return t.onHold.last
	case t.late.last != nil:
		return t.late.last
	}
	var worst *Item
	for _, it := range t.heap[max(len(t.heap)/2, len(t.heap)-maxLeaves):] { // leaves
		if worst == nil || worst.goesBefore(it) {
			worst = it
		}
	}
	return worst
}

// goesBefore is the order of a tenant's heap.
func (it *Item) goesBefore(o *Item) bool {
	return it.Due < o.Due || it.Due == o.Due && it.seq < o.seq
}

func (it *Item) place() *int { return &it.index }

// link puts a request into the list of its state or into the heap.
func (t *tenant) link(it *Item) {
	switch {
	case it.OnHold:
		after := t.onHold.last
		for after != nil && after.seq > it.seq { // it returns from a displacement that has not happened
			after = after.prev
		}
		it.state = onHold
		t.onHold.insert(it, after)
	case it.lateSeq != 0:
		t.linkLate(it)
	default:
		it.state = onTime
		t.heap.push(it)
	}
}

// linkLate puts a request into the list of late ones: at the end, or near the front if it returns.
func (t *tenant) linkLate(it *Item) {
	it.state = late
	var after *Item
	if last := t.late.last; last == nil || last.lateSeq < it.lateSeq {
		after = last
	} else {
		for i := t.late.first; i != nil && i.lateSeq < it.lateSeq; i = i.next {
			after = i
		}
	}
	t.late.insert(it, after)
}

// unlink takes a request out of the heap or its list.
func (t *tenant) unlink(it *Item) {
	switch it.state {
	case onTime:
		t.heap.remove(it)
	case late:
		t.late.remove(it)
	case onHold:
		t.onHold.remove(it)
	}
	it.state = idle
}
