package admission

import "time"

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
	ages  ageList
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

// goesBefore is the order of the heap of tenants.
func (t *tenant) goesBefore(o *tenant) bool {
	return t.given < o.given || t.given == o.given && t.turn < o.turn
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

// oldestWait returns how long the first of the tenant's requests has waited.
func (t *tenant) oldestWait(now int64) time.Duration {
	if t.ages.oldest == nil {
		return 0
	}
	return time.Duration(now - t.ages.oldest.Arrived)
}

// countLate returns how many requests of the tenant are late.
func (t *tenant) countLate() int {
	n := t.usage.ready()
	for _, l := range t.lanes {
		n -= len(l.heap)
	}
	return n
}
