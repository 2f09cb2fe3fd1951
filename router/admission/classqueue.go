package admission

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

// removeIfEmpty forgets what has no requests any more, after a request of t was withdrawn.
func (k *classQueue) removeIfEmpty(t *tenant) {
	if k.usage.requests == 0 { // nobody waits: the accounts start again
		clear(k.tenants)
		k.overflow, k.idle, k.weights, k.clock = nil, idleList{}, 0, 0
		k.credit = min(k.credit, 0) // what the class owes it still owes when it comes back
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
