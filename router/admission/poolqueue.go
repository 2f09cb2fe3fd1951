package admission

import (
	"math"
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
	pass    uint32 // over the requests that cannot start now although others may; from 1
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
	// longest and longestOther are the results of longestSince at longestAt.
	longest, longestOther, longestAt int64
}

const (
	longestAge = int64(20 * time.Millisecond) // of a result of longestSince
	maxAged    = 64                           // requests of a tenant that longestSince looks at
)

// longestSince returns since when the request has waited for capacity that has waited longest: of all, and of those that
// do not let others pass; math.MaxInt64 if there is none. It may be longestAge old.
func (g *group) longestSince(now int64) (all, others int64) {
	if g.longestAt > 0 && now-g.longestAt < longestAge {
		return g.longest, g.longestOther
	}
	g.longest, g.longestOther, g.longestAt = math.MaxInt64, math.MaxInt64, now
	for _, lanes := range g.ready {
		for _, n := range lanes {
			for it, looked := n.tenant.ages.oldest, 0; it != nil && looked < maxAged; it, looked = it.newer, looked+1 {
				if it.lane != n || it.state == onHold {
					continue
				}
				if g.longest = min(g.longest, it.since); it.letsPass {
					continue
				}
				if g.longestOther = min(g.longestOther, it.since); it.since == it.Arrived {
					break // those that arrived later have waited less
				}
			}
		}
	}
	return g.longest, g.longestOther
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
	l := &poolQueue{name: name, pass: 1, classes: make([]classQueue, classes)}
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

// removeIfEmpty forgets a lane without requests, and its group if that has no other.
func (l *poolQueue) removeIfEmpty(n *lane) {
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
// tokens. A class that goes first although a higher one waits pays for it from its credit. What it owes then, it
// repays from its share also while none of its requests waits: otherwise one client that sends a large request
// at a time would get much more than the share.
func (l *poolQueue) charge(classes []Class, it *Item) {
	outOfOrder := false
	for i := range l.classes {
		k, waits := &l.classes[i], l.first(i) != nil
		if share := classes[i].MinShare; share > 0 && (waits || k.credit < 0) && (i != it.Class || outOfOrder) {
			k.credit += share * float64(it.Cost)
			if i == it.Class {
				k.credit -= float64(it.Cost)
			}
			if !waits {
				k.credit = min(k.credit, 0)
			}
		}
		outOfOrder = outOfOrder || waits
	}
}

// ahead estimates how many tokens of a class are dispatched before a request that would be pushed now.
func (l *poolQueue) ahead(it *Item, maxTenants int) int64 {
	k := &l.classes[it.Class]
	given, own, weight := k.floor(), int64(0), float64(max(it.Weight, 1))
	tenant := k.find(it.Tenant, maxTenants)
	if tenant != nil {
		own, given, weight = tenant.usage.readyCost(it.Cost), max(tenant.given, given), float64(tenant.weight)
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
			tokens += min(max(turn-n.tenant.given, 0)*float64(n.tenant.weight), float64(n.usage.readyCost(it.Cost)))
		}
	}
	if others > most {
		tokens += tokens * float64(others-most) / float64(max(looked, 1))
	}
	return own + int64(tokens)
}

// linkLate puts a request into the list of late ones: at the end, or near the front if it returns.
func (l *lane) linkLate(it *Item) {
	it.state = late
	var after *Item
	if last := l.late.last; last == nil || last.lateSeq < it.lateSeq {
		after = last
	} else {
		// It returns to its place near the front, or comes from another Queue in the order of arrival.
		for front, back := l.late.first, last; ; front, back = front.next, back.prev {
			if front.lateSeq >= it.lateSeq {
				after = front.prev
				break
			}
			if back.lateSeq < it.lateSeq {
				after = back
				break
			}
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
