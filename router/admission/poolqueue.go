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
	t.poolName = l.name
	it.queue, it.tenant = l, t
	t.usage.add(it)
	t.link(it)
	k.usage.add(it)
	l.usage.add(it)
	k.updateReady(t)
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
	tenants map[string]*tenant
	order   indexedHeap[*tenant] // those with a request that is neither deferred nor on hold
	idle    idleList             // those without requests
	usage   usage
	weights int64 // of the tenants with requests
	credit  float64
	// clock is what a tenant of weight 1 that always had requests has been given. mean is the mean cost
	// of the requests dispatched lately.
	clock float64
	mean  float64
	turns uint64 // places given so far
}

// tenant holds the requests of one tenant in one class of a pool.
type tenant struct {
	name     string
	poolName string
	weight   int
	// given is what the tenant has been given, in tokens by weight, on the scale of the class's clock:
	// below the clock it is behind its share. The tenant that is furthest behind goes first, and of
	// equals the one that has had its place longest.
	given float64
	turn  uint64
	usage usage
	rate  rateMeter
	at    int // in the heap, if isReady
	// isReady: it has a request that is neither deferred nor on hold.
	isReady bool
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
	t := k.tenants[it.Tenant]
	if t == nil {
		name := it.Tenant
		if maxTenants > 0 && len(k.tenants) >= maxTenants && !k.dropIdle() {
			name = Overflow
			t = k.tenants[name]
		}
		if t == nil {
			t = &tenant{name: name, isSettled: true, given: k.floor()}
			k.tenants[name] = t
			k.idle.add(t)
		}
	}
	weight := it.Weight
	if t.name == Overflow && it.Tenant != Overflow {
		weight = 1
	}
	if t.isSettled {
		k.idle.remove(t)
		t.given = max(t.given, k.floor())
	} else {
		k.weights -= int64(t.weight)
	}
	k.weights += int64(weight)
	t.weight, t.isSettled = weight, false
	return t
}

// savedRequests bounds what a tenant that uses less than its share may use later, ahead of others, in
// requests of the mean cost: enough for the bursts of a tenant that stays below its share, and little
// beside a queue of the length at which the order matters.
const savedRequests = 32

// floor is how far behind the clock a tenant can be that has had no requests.
func (k *classQueue) floor() float64 { return k.clock - savedRequests*k.mean }

// dropIdle forgets the tenant that has been idle longest.
func (k *classQueue) dropIdle() bool {
	t := k.idle.first
	if t == nil {
		return false
	}
	k.forget(t)
	return true
}

func (k *classQueue) forget(t *tenant) {
	k.idle.remove(t)
	delete(k.tenants, t.name)
}

// withdraw takes a request that is in no heap or list any more out of the counts.
func (k *classQueue) withdraw(it *Item) {
	k.usage.remove(it)
	it.tenant.usage.remove(it)
	k.updateReady(it.tenant)
}

// restore puts a withdrawn request back.
func (k *classQueue) restore(it *Item) {
	k.usage.add(it)
	it.tenant.usage.add(it)
	it.tenant.link(it)
	k.updateReady(it.tenant)
}

// settle forgets what has no requests any more, after a request of t was withdrawn.
func (k *classQueue) settle(t *tenant) {
	if k.usage.requests == 0 { // nobody waits: the accounts start again
		clear(k.tenants)
		k.order, k.idle, k.weights, k.credit, k.clock = k.order[:0], idleList{}, 0, 0, 0
		return
	}
	if t.usage.requests == 0 && !t.isSettled && k.tenants[t.name] == t {
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

// updateReady counts the tenant as ready if it has a request that is neither deferred nor on hold.
func (k *classQueue) updateReady(t *tenant) {
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
}

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
func (k *classQueue) ahead(it *Item) int64 {
	given, own, weight := k.floor(), int64(0), float64(max(it.Weight, 1))
	if t := k.tenants[it.Tenant]; t != nil {
		own, given, weight = t.usage.readyCost(), max(t.given, given), float64(t.weight)
	}
	// The request goes when its tenant has been given its other requests, and the others have as much.
	turn := given + (float64(own)+float64(max(it.Cost, 1))/2)/weight
	const most = 64 // tenants that are looked at; the others are taken to be like these
	looked, tokens := 0, 0.0
	for _, t := range k.order[:min(len(k.order), most)] {
		if t.name == it.Tenant {
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

// longest returns the tenant with the most waiting tokens by weight that has a request to give up.
func (k *classQueue) longest() *tenant {
	var best *tenant
	for _, t := range k.tenants {
		if !t.isReady && t.onHold.first == nil {
			continue
		}
		if best == nil || longer(t, best) {
			best = t
		}
	}
	return best
}

// longer reports whether a has more waiting tokens by weight than b; the name decides between equals.
func longer(a, b *tenant) bool {
	x, y := a.usage.cost*int64(b.weight), b.usage.cost*int64(a.weight)
	return x > y || x == y && a.name < b.name
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

// worst returns the request that would be dispatched last: the last one on hold, else the last late
// one, else about the last of the heap.
func (t *tenant) worst() *Item {
	if t.onHold.last != nil {
		return t.onHold.last
	}
	if t.late.last != nil {
		return t.late.last
	}
	var worst *Item
	for _, it := range t.heap[len(t.heap)/2:] { // the leaves
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
