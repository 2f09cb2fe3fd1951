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
		if k := &l.classes[i]; classes[i].MinShare > 0 && k.credit > 0 && k.ready > 0 {
			return k.next(now)
		}
	}
	for i := range l.classes {
		if k := &l.classes[i]; k.ready > 0 {
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
		if share := classes[i].MinShare; share > 0 && k.ready > 0 && (i != it.Class || outOfOrder) {
			k.credit += share * float64(it.Cost)
			if i == it.Class {
				k.credit -= float64(it.Cost)
			}
		}
		outOfOrder = outOfOrder || k.ready > 0
	}
}

// classQueue holds the requests of one class in one pool. Its tenants are in a ring; the cursor is the one
// whose turn it is. Tenants without requests stay in the ring while they are in debt, so that leaving
// and coming back does not cancel it.
type classQueue struct {
	tenants map[string]*tenant
	cursor  *tenant
	usage   usage
	ready   int   // tenants with a request that is not deferred
	weights int64 // of the tenants with requests
	credit  float64
}

// tenant holds the requests of one tenant in one class of a pool.
type tenant struct {
	name     string
	poolName string
	weight   int
	deficit  int64 // tokens that it may still use in this turn; negative: debt
	usage    usage
	isReady  bool
	// isSettled: it has no requests, and its weight is not counted.
	isSettled bool
	prev      *tenant // in the ring
	next      *tenant

	heap     []*Item // by Due, then by arrival
	late     *Item   // list in the order in which they became late
	lateLast *Item
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
			t = &tenant{name: name, isSettled: true}
			k.tenants[name] = t
			k.enterRing(t)
		}
	}
	weight := it.Weight
	if t.name == Overflow && it.Tenant != Overflow {
		weight = 1
	}
	if !t.isSettled {
		k.weights -= int64(t.weight)
	}
	k.weights += int64(weight)
	t.weight, t.isSettled = weight, false
	return t
}

// dropIdle removes one tenant that is only remembered for its debt.
func (k *classQueue) dropIdle() bool {
	if k.cursor == nil {
		return false
	}
	for t, first := k.cursor, true; first || t != k.cursor; t, first = t.next, false {
		if t.usage.requests == 0 {
			k.leaveRing(t)
			return true
		}
	}
	return false
}

// enterRing puts a tenant behind all others.
func (k *classQueue) enterRing(t *tenant) {
	if k.cursor == nil {
		t.prev, t.next = t, t
		k.cursor, t.deficit = t, 1 // its turn has begun
		return
	}
	t.prev, t.next = k.cursor.prev, k.cursor
	t.prev.next, t.next.prev = t, t
}

func (k *classQueue) leaveRing(t *tenant) {
	delete(k.tenants, t.name)
	switch {
	case t.next == t:
		k.cursor = nil
	case k.cursor == t:
		k.cursor = t.next
		k.cursor.deficit += k.quantum(k.cursor)
		fallthrough
	default:
		t.prev.next, t.next.prev = t.next, t.prev
	}
	t.prev, t.next = nil, nil
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
	if k.usage.requests == 0 { // nobody waits: the turns start again
		clear(k.tenants)
		k.cursor, k.weights, k.ready, k.credit = nil, 0, 0, 0
		return
	}
	if t.usage.requests == 0 && !t.isSettled && k.tenants[t.name] == t {
		k.weights -= int64(t.weight)
		if t.isSettled = true; t.deficit >= 0 {
			k.leaveRing(t)
		}
	}
}

// updateReady counts the tenant as ready if it has a request that is not deferred.
func (k *classQueue) updateReady(t *tenant) {
	if is := len(t.heap) > 0 || t.late != nil; is != t.isReady {
		t.isReady = is
		if is {
			k.ready++
		} else {
			k.ready--
		}
	}
}

// quantum is what a tenant receives for a turn: the mean cost of the class's waiting requests, so that
// a turn is about one request.
func (k *classQueue) quantum(t *tenant) int64 {
	return max(k.usage.cost/int64(max(k.usage.requests, 1)), 1) * int64(t.weight)
}

// next returns the head of the tenant whose turn it is; at least one tenant is ready.
func (k *classQueue) next(now int64) *Item {
	for visited := 0; ; visited++ {
		t := k.cursor
		if t.isReady && t.deficit > 0 {
			return t.head(now)
		}
		if t.usage.requests == 0 && t.deficit >= 0 {
			k.leaveRing(t) // its debt is paid; the next tenant's turn has begun
			continue
		}
		if !t.isReady && t.deficit > 0 && t.usage.requests > 0 {
			t.deficit = min(t.deficit, k.quantum(t)) // its requests are deferred: it saves one turn at most
		}
		if visited > len(k.tenants) {
			k.skipTurns()
			visited = 0
		}
		k.cursor = t.next
		k.cursor.deficit += k.quantum(k.cursor)
	}
}

// skipTurns adds as many turns to all tenants as it takes, less one, until the first of those that are
// ready has a positive deficit. It keeps a turn of expensive requests from taking many passes.
func (k *classQueue) skipTurns() {
	turns := int64(-1)
	for t, first := k.cursor, true; first || t != k.cursor; t, first = t.next, false {
		if q := k.quantum(t); t.isReady && (turns < 0 || -t.deficit/q < turns) {
			turns = max(-t.deficit/q, 0)
		}
	}
	if turns <= 0 {
		return
	}
	for t, first := k.cursor, true; first || t != k.cursor; t, first = t.next, false {
		if t.isReady {
			t.deficit += turns * k.quantum(t)
		} else {
			t.deficit = min(t.deficit+turns*k.quantum(t), max(t.deficit, k.quantum(t)))
		}
	}
}

// longest returns the tenant with the most waiting tokens by weight that has a request to give up.
func (k *classQueue) longest() *tenant {
	var best *tenant
	for _, t := range k.tenants {
		if !t.isReady {
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
	return t.late
}

// worst returns the request that would be dispatched last: the last late one, else about the last of
// the heap.
func (t *tenant) worst() *Item {
	if t.lateLast != nil {
		return t.lateLast
	}
	var worst *Item
	for _, it := range t.heap[len(t.heap)/2:] { // the leaves
		if worst == nil || before(worst, it) {
			worst = it
		}
	}
	return worst
}

func before(a, b *Item) bool {
	return a.Due < b.Due || a.Due == b.Due && a.seq < b.seq
}

// link puts a request into the heap or, if it was late before, into the list.
func (t *tenant) link(it *Item) {
	if it.lateSeq != 0 {
		t.linkLate(it)
		return
	}
	it.state, it.index = onTime, len(t.heap)
	t.heap = append(t.heap, it)
	t.up(it.index)
}

// linkLate puts a request into the list of late ones: at the end, or near the front if it returns.
func (t *tenant) linkLate(it *Item) {
	it.state = late
	var after *Item
	if last := t.lateLast; last == nil || last.lateSeq < it.lateSeq {
		after = last
	} else {
		for i := t.late; i != nil && i.lateSeq < it.lateSeq; i = i.next {
			after = i
		}
	}
	it.prev = after
	if after == nil {
		it.next, t.late = t.late, it
	} else {
		it.next, after.next = after.next, it
	}
	if it.next == nil {
		t.lateLast = it
	} else {
		it.next.prev = it
	}
}

// unlink takes a request out of the heap or the list.
func (t *tenant) unlink(it *Item) {
	switch it.state {
	case onTime:
		last := len(t.heap) - 1
		i := it.index
		if i != last {
			t.heap[i] = t.heap[last]
			t.heap[i].index = i
		}
		t.heap[last] = nil
		t.heap = t.heap[:last]
		if i != last && !t.down(i) {
			t.up(i)
		}
	case late:
		if it.prev == nil {
			t.late = it.next
		} else {
			it.prev.next = it.next
		}
		if it.next == nil {
			t.lateLast = it.prev
		} else {
			it.next.prev = it.prev
		}
		it.prev, it.next = nil, nil
	}
	it.state = idle
}

func (t *tenant) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !before(t.heap[i], t.heap[parent]) {
			return
		}
		t.swap(i, parent)
		i = parent
	}
}

func (t *tenant) down(i int) (moved bool) {
	for {
		child := 2*i + 1
		if child >= len(t.heap) {
			return moved
		}
		if right := child + 1; right < len(t.heap) && before(t.heap[right], t.heap[child]) {
			child = right
		}
		if !before(t.heap[child], t.heap[i]) {
			return moved
		}
		t.swap(i, child)
		i, moved = child, true
	}
}

func (t *tenant) swap(i, j int) {
	h := t.heap
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
