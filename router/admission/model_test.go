package admission

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

// model is the Queue's order written plainly: one list, searched from end to end. It decides which
// class goes first, which request of a tenant goes first, and what is in the queue. Of the turns of
// tenants it checks that they are fair.
type model struct {
	t        testing.TB
	classes  []Class
	limits   Limits
	items    []*Item // in the order of arrival
	late     map[*Item]int
	lateness int
	deferred map[*Item]bool
	full     map[[2]string]bool   // pools and groups for which no rank has capacity
	credit   map[string][]float64 // by pool
	// served is what each tenant of a pool and class was given, by weight, since it and its rivals
	// all have had requests without a break.
	served map[string]map[string]float64
	// spread is the largest fair difference in served.
	spread map[string]float64
	// apart is how far the tenants' accounts were apart when served began.
	apart map[string]float64
	// span is how far they are apart where next has looked last.
	span float64
}

func newModel(t testing.TB, classes []Class, limits Limits) *model {
	return &model{t: t, classes: classes, limits: limits, late: map[*Item]int{}, deferred: map[*Item]bool{}, full: map[[2]string]bool{}, credit: map[string][]float64{}, served: map[string]map[string]float64{}, spread: map[string]float64{}, apart: map[string]float64{}}
}

func (m *model) creditOf(pool string) []float64 {
	if m.credit[pool] == nil {
		m.credit[pool] = make([]float64, len(m.classes))
	}
	return m.credit[pool]
}

func (m *model) count(is func(*Item) bool) (n int) {
	for _, it := range m.items {
		if is(it) {
			n++
		}
	}
	return n
}

// mayStart reports whether a request may be dispatched now.
func (m *model) mayStart(it *Item) bool {
	return !m.deferred[it] && !it.OnHold && !m.full[[2]string{it.Pool, it.Group}]
}

func (m *model) ready(pool string, class int) bool {
	return m.count(func(it *Item) bool { return it.Pool == pool && it.Class == class && m.mayStart(it) }) > 0
}

// class returns the class that goes first, -1 if nothing can.
func (m *model) class(pool string) int {
	for i := len(m.classes) - 1; i >= 0; i-- {
		if m.classes[i].MinShare > 0 && m.creditOf(pool)[i] > 0 && m.ready(pool, i) {
			return i
		}
	}
	for i := range m.classes {
		if m.ready(pool, i) {
			return i
		}
	}
	return -1
}

// head returns the request of a tenant that goes first.
func (m *model) head(pool string, class int, tenant string, now int64) (head *Item) {
	for _, it := range m.items {
		if it.Pool != pool || it.Class != class || it.Tenant != tenant || !m.mayStart(it) {
			continue
		}
		if head == nil || m.less(it, head, now) {
			head = it
		}
	}
	return head
}

func (m *model) isLate(it *Item, now int64) bool { return m.late[it] > 0 || it.Firm && it.Due < now }

func (m *model) less(a, b *Item, now int64) bool {
	x, y := m.isLate(a, now), m.isLate(b, now)
	switch {
	case x != y:
		return y
	case !x:
		return a.Due < b.Due || a.Due == b.Due && a.seq < b.seq
	case m.late[a] > 0 && m.late[b] > 0:
		return m.late[a] < m.late[b]
	case m.late[a] > 0 || m.late[b] > 0:
		return m.late[a] > 0
	}
	return a.Due < b.Due || a.Due == b.Due && a.seq < b.seq // they become late in this order
}

// next checks what the Queue returned.
func (m *model) next(q *Queue, pool string, now int64) *Item {
	got := q.Next(pool, now)
	class := m.class(pool)
	if class < 0 {
		if got != nil {
			m.t.Fatalf("pool %s: Next returned a request; want none, nothing is ready", pool)
		}
		return nil
	}
	if got == nil || got.Class != class {
		m.t.Fatalf("pool %s: Next returned %s; want one of class %d", pool, show(got), class)
	}
	if want := m.head(pool, class, got.Tenant, now); want != got {
		m.t.Fatalf("pool %s: Next returned %s; want %s of this tenant", pool, show(got), show(want))
	}
	m.span = m.accountsApart(pool, class)
	// What the Queue found late stays late, in this order.
	var found []*Item
	for _, l := range got.tenant.lanes {
		for it := l.late.first; it != nil; it = it.next {
			if m.late[it] == 0 {
				if !m.isLate(it, now) {
					m.t.Fatalf("pool %s: %s is late at %d; want it on time", pool, show(it), now)
				}
				found = append(found, it)
			}
		}
	}
	slices.SortFunc(found, func(a, b *Item) int { return cmp.Compare(a.lateSeq, b.lateSeq) })
	for _, it := range found {
		m.lateness++
		m.late[it] = m.lateness
	}
	return got
}

func (m *model) take(it *Item) {
	credit, higher := m.creditOf(it.Pool), false
	for i, class := range m.classes {
		waits := m.ready(it.Pool, i)
		if class.MinShare > 0 && (waits || credit[i] < 0) && (i != it.Class || higher) {
			credit[i] += class.MinShare * float64(it.Cost)
			if i == it.Class {
				credit[i] -= float64(it.Cost)
			}
			if !waits {
				credit[i] = min(credit[i], 0)
			}
		}
		higher = higher || m.ready(it.Pool, i)
	}
	m.account(it)
	m.remove(it)
}

// account checks that the tenants which have had requests since the last change of their set were given
// equal parts, by weight, beside what one had saved before and another owed.
func (m *model) account(it *Item) {
	key := fmt.Sprint(it.Pool, it.Class)
	served := m.served[key]
	if served == nil {
		served = map[string]float64{}
		m.served[key] = served
		m.apart[key] = m.span
	}
	served[it.Tenant] += float64(it.Cost) / float64(it.Weight)
	least, most := math.Inf(1), 0.0
	for _, other := range m.items {
		if other.Pool == it.Pool && other.Class == it.Class && m.mayStart(other) {
			least, most = min(least, served[other.Tenant]), max(most, served[other.Tenant])
		}
	}
	// A tenant may be a turn and a request ahead, and another a turn and a request behind.
	if bound := 4*m.spread[key] + m.apart[key]; most-least > bound {
		m.t.Fatalf("pool %s, class %d: one tenant was given %.0f tokens by weight, another that waited as long %.0f; want at most %.0f apart", it.Pool, it.Class, most, least, bound)
	}
}

// accountsApart returns how far the accounts of the waiting tenants of a pool and class are apart, in tokens
// by weight.
func (m *model) accountsApart(pool string, class int) float64 {
	least, most := math.Inf(1), math.Inf(-1)
	for _, it := range m.items {
		if it.Pool == pool && it.Class == class && !it.OnHold {
			least, most = min(least, it.tenant.given), max(most, it.tenant.given)
		}
	}
	return most - least
}

// changed starts the accounts of a pool and class again: a tenant came or went, or was deferred.
func (m *model) changed(it *Item) { m.served[fmt.Sprint(it.Pool, it.Class)] = nil }

// changedAll does so for all classes of a pool.
func (m *model) changedAll(pool string) {
	for class := range m.classes {
		m.served[fmt.Sprint(pool, class)] = nil
	}
}

// endSweep lets all requests of a pool be tried again.
func (m *model) endSweep(pool string) {
	maps.DeleteFunc(m.full, func(g [2]string, _ bool) bool { return g[0] == pool })
	m.changedAll(pool)
}

func (m *model) push(it *Item) {
	key := fmt.Sprint(it.Pool, it.Class)
	m.spread[key] = max(m.spread[key], float64(it.Cost))
	if m.mayStart(it) && m.head(it.Pool, it.Class, it.Tenant, 0) == nil {
		m.changed(it)
	}
	m.items = append(m.items, it)
}

// taken returns how much of a bound the waiting requests take for which is returns true.
func (m *model) taken(bound Bound, gone []*Item, is func(*Item) bool) (n int64) {
	for _, it := range m.items {
		if is(it) && !slices.Contains(gone, it) {
			n += bound.takenBy(it)
		}
	}
	return n
}

// exceeded returns the bound that a request exceeds when gone have left.
func (m *model) exceeded(it *Item, gone []*Item) Bound {
	class := m.classes[it.Class]
	for _, b := range [...]struct {
		bound Bound
		most  int64
	}{{ClassRequests, int64(class.MaxRequests)}, {ClassBytes, class.MaxBytes}, {AllRequests, int64(m.limits.MaxRequests)}, {AllBytes, m.limits.MaxBytes}} {
		taken := m.taken(b.bound, gone, func(o *Item) bool { return !b.bound.isOfClass() || o.Class == it.Class })
		if b.most > 0 && taken+b.bound.takenBy(it) > b.most {
			return b.bound
		}
	}
	return WithinBounds
}

// displaced returns which requests one displaces, or the bound by which it is refused.
func (m *model) displaced(it *Item) (gone []*Item, bound Bound) {
	for bound = m.exceeded(it, gone); bound != WithinBounds; bound = m.exceeded(it, gone) {
		v := m.victim(it, bound, gone)
		if v == nil || len(gone) >= maxDisplaced {
			return nil, bound
		}
		gone = append(gone, v)
	}
	return gone, WithinBounds
}

// victim returns the request that one displaces because of a bound.
func (m *model) victim(it *Item, bound Bound, gone []*Item) *Item {
	counts := func(o *Item) bool { return !bound.isOfClass() || o.Class == it.Class }
	inPool := func(pool string) int64 {
		return m.taken(bound, gone, func(o *Item) bool { return o.Pool == pool && counts(o) })
	}
	largest := it.Pool
	for _, o := range m.items {
		if d := inPool(o.Pool) - inPool(largest); d > 0 || d == 0 && o.Pool < largest {
			largest = o.Pool
		}
	}
	inClass := func(pool string, class int) int64 {
		return m.taken(bound, gone, func(o *Item) bool { return o.Pool == pool && o.Class == class })
	}
	keeps := func(pool string, class int) float64 { return m.classes[class].MinShare * float64(inPool(pool)) }
	// lowest searches the classes of a pool from the lowest on.
	lowest := func(pool string, is func(class int) bool) *Item {
		for class := len(m.classes) - 1; class >= 0; class-- {
			if is(class) && (bound.isOfClass() || float64(inClass(pool, class)) > keeps(pool, class)) {
				if v := m.last(pool, class, m.most(pool, class, bound, gone), gone); v != nil {
					return v
				}
			}
		}
		return nil
	}
	if largest != it.Pool {
		if v := lowest(largest, func(class int) bool { return !bound.isOfClass() || class == it.Class }); v != nil && inPool(largest)-bound.takenBy(v) >= inPool(it.Pool)+bound.takenBy(it) {
			return v
		}
	}
	if !bound.isOfClass() {
		isBelow := float64(inClass(it.Pool, it.Class)+bound.takenBy(it)) <= keeps(it.Pool, it.Class)
		if v := lowest(it.Pool, func(class int) bool { return class > it.Class || isBelow && class != it.Class }); v != nil {
			return v
		}
	}
	tenant := m.most(it.Pool, it.Class, bound, gone)
	v := m.last(it.Pool, it.Class, tenant, gone)
	if v == nil || tenant == it.Tenant {
		return nil
	}
	ofTenant := func(tenant string) int64 {
		return m.taken(bound, gone, func(o *Item) bool { return o.Pool == it.Pool && o.Class == it.Class && o.Tenant == tenant })
	}
	if (ofTenant(tenant)-bound.takenBy(v))*int64(it.Weight) < (ofTenant(it.Tenant)+bound.takenBy(it))*int64(v.Weight) {
		return nil
	}
	return v
}

// most returns the tenant that takes the most of a bound by weight.
func (m *model) most(pool string, class int, bound Bound, gone []*Item) (most string) {
	share := 0.0
	for _, it := range m.items {
		if it.Pool != pool || it.Class != class || slices.Contains(gone, it) {
			continue
		}
		taken := float64(m.taken(bound, gone, func(o *Item) bool { return o.Pool == pool && o.Class == class && o.Tenant == it.Tenant })) / float64(it.Weight)
		if most == "" || taken > share || taken == share && it.Tenant < most {
			most, share = it.Tenant, taken
		}
	}
	return most
}

// last returns the request of a tenant that goes last.
func (m *model) last(pool string, class int, tenant string, gone []*Item) (last *Item) {
	for _, it := range m.items {
		if it.Pool != pool || it.Class != class || it.Tenant != tenant || slices.Contains(gone, it) {
			continue
		}
		if last == nil || it.OnHold && !last.OnHold || it.OnHold == last.OnHold && (it.OnHold || m.isAfter(it, last)) {
			last = it
		}
	}
	return last
}

// isAfter reports whether a goes after b by what the Queue has found late so far.
func (m *model) isAfter(a, b *Item) bool {
	switch x, y := m.late[a], m.late[b]; {
	case x != y:
		return x > y
	case a.Due != b.Due:
		return a.Due > b.Due
	}
	return a.seq > b.seq
}

func (m *model) release(q *Queue, it *Item) {
	isFirst := it.OnHold && m.head(it.Pool, it.Class, it.Tenant, 0) == nil
	if q.Release(it); isFirst {
		m.changed(it)
	}
	if it.OnHold {
		m.t.Fatalf("%s is on hold; want it released", show(it))
	}
}

// reload moves all requests to a new Queue with the same settings, which changes nothing: neither their order
// nor what tenants and classes have been given.
func (m *model) reload(q *Queue) *Queue {
	given := map[*Item]float64{}
	for _, it := range m.items {
		given[it] = it.tenant.given
	}
	to := NewQueue(m.classes, m.limits)
	q.moveTo(to, func(it *Item) int { return it.Class }, func(it *Item, b Bound) {
		m.t.Fatalf("%s was displaced by a reload that changes nothing (bound %d)", show(it), b)
	})
	for _, it := range m.items {
		if floor := to.pools[it.Pool].classes[it.Class].floor(); it.tenant.given != max(given[it], floor) {
			m.t.Fatalf("the tenant of %s was given %.0f before a reload, %.0f after it", show(it), given[it], it.tenant.given)
		}
		m.endSweep(it.Pool)
	}
	clear(m.full)
	return to
}

func (m *model) remove(it *Item) {
	for i := range m.items {
		if m.items[i] == it {
			m.items = append(m.items[:i:i], m.items[i+1:]...)
			break
		}
	}
	delete(m.late, it)
	delete(m.deferred, it)
	pool, class, tenant := it.Pool, it.Class, it.Tenant
	if m.count(func(o *Item) bool { return o.Pool == pool && o.Class == class && o.Tenant == tenant && m.mayStart(o) }) == 0 {
		m.changed(it)
	}
	if m.count(func(o *Item) bool { return o.Pool == pool && o.Class == class }) == 0 {
		m.creditOf(pool)[class] = min(m.creditOf(pool)[class], 0)
	}
	if m.count(func(o *Item) bool { return o.Pool == pool }) == 0 {
		delete(m.credit, pool)
	}
	group := it.Group
	if m.count(func(o *Item) bool { return o.Pool == pool && o.Group == group }) == 0 {
		delete(m.full, [2]string{pool, group}) // the group is forgotten
	}
}

func show(it *Item) string {
	if it == nil {
		return "nothing"
	}
	return fmt.Sprintf("request %d (pool %s, group %q, class %d, tenant %s, due %d)", it.seq, it.Pool, it.Group, it.Class, it.Tenant, it.Due)
}

// check compares the contents and the counts.
func (m *model) check(q *Queue) {
	var bytes int64
	perClass := make([]usage, len(m.classes))
	pools, groups := map[string]bool{}, map[[2]string]bool{}
	for _, it := range m.items {
		if !it.IsQueued() {
			m.t.Fatalf("%s is not in the queue", show(it))
		}
		bytes += it.Bytes
		perClass[it.Class].add(it)
		pools[it.Pool] = true
		groups[[2]string{it.Pool, it.Group}] = true
	}
	if q.Len() != len(m.items) || q.Bytes() != bytes || len(q.pools) != len(pools) {
		m.t.Fatalf("%d requests, %d bytes, %d pools; want %d, %d, %d", q.Len(), q.Bytes(), len(q.pools), len(m.items), bytes, len(pools))
	}
	n := 0
	for _, l := range q.pools {
		n += len(l.groups)
	}
	if n != len(groups) {
		m.t.Fatalf("%d groups; want %d", n, len(groups))
	}
	oldest := make([]*Item, len(m.classes))
	for _, it := range m.items {
		if oldest[it.Class] == nil {
			oldest[it.Class] = it
		}
	}
	first := map[*tenant]*Item{}
	for _, it := range m.items {
		if first[it.tenant] == nil {
			first[it.tenant] = it
		}
	}
	for t, want := range first {
		if t.ages.oldest != want {
			m.t.Fatalf("tenant %s: the oldest is %s; want %s", t.name, show(t.ages.oldest), show(want))
		}
	}
	for i, want := range perClass {
		if q.Oldest(i) != oldest[i] {
			m.t.Fatalf("class %d: the oldest is %s; want %s", i, show(q.Oldest(i)), show(oldest[i]))
		}
		if q.perClass[i] != want {
			m.t.Fatalf("class %d: %+v; want %+v", i, q.perClass[i], want)
		}
	}
}

// history runs one random history of up to steps operations.
func history(t testing.TB, rng *rand.Rand, steps int) {
	classes := make([]Class, 1+rng.IntN(3))
	for i := range classes {
		classes[i].Name = fmt.Sprint(i)
		if rng.IntN(2) == 0 {
			classes[i].MinShare = float64(rng.IntN(4)) / 10
		}
		if rng.IntN(4) == 0 {
			classes[i].MaxRequests = 1 + rng.IntN(10)
		}
		if rng.IntN(4) == 0 {
			classes[i].MaxBytes = int64(1 + rng.IntN(100))
		}
	}
	limits := Limits{MaxTenants: 3 + rng.IntN(3)} // the tenants are 3: overflow has its own test
	if rng.IntN(2) == 0 {
		limits.MaxRequests = 1 + rng.IntN(20)
	}
	if rng.IntN(4) == 0 {
		limits.MaxBytes = int64(1 + rng.IntN(200))
	}
	q, m := NewQueue(classes, limits), newModel(t, classes, limits)
	weights := map[string]int{"a": 1, "b": 1 + rng.IntN(4), "c": 1}
	now := int64(0)
	pools, groups := []string{"x", "y"}[:1+rng.IntN(2)], []string{"", "a", "b"}[:1+rng.IntN(3)]
	var displaced []*Item
	for range steps {
		now += int64(rng.IntN(3))
		pool := pools[rng.IntN(len(pools))]
		switch op := rng.IntN(13); {
		case op < 5:
			tenant := string("abc"[rng.IntN(3)])
			it := &Item{Pool: pool, Class: rng.IntN(len(classes)), Tenant: tenant, Weight: weights[tenant], Cost: 1 + rng.Int64N(20), Bytes: rng.Int64N(10), Due: now + rng.Int64N(30), Firm: rng.IntN(2) == 0}
			if rng.IntN(8) == 0 {
				it.Cost *= 20
			}
			it.OnHold = rng.IntN(4) == 0
			it.Group = groups[rng.IntN(len(groups))]
			want, wantBound := m.displaced(it)
			var bound Bound
			displaced, bound = q.Push(it, displaced[:0])
			if bound != wantBound || !slices.Equal(displaced, want) {
				t.Fatalf("%s: bound %d, %d displaced; want bound %d, %d displaced", show(it), bound, len(displaced), wantBound, len(want))
			}
			for _, d := range displaced {
				if d.IsQueued() {
					t.Fatalf("%s was displaced, but is queued", show(d))
				}
				m.remove(d)
			}
			if bound == WithinBounds {
				m.push(it)
			} else if it.IsQueued() {
				t.Fatalf("%s was refused, but is queued", show(it))
			}
			if n := classes[it.Class].MaxRequests; n > 0 && q.perClass[it.Class].requests > n || limits.MaxRequests > 0 && q.Len() > limits.MaxRequests ||
				limits.MaxBytes > 0 && q.Bytes() > limits.MaxBytes {
				t.Fatalf("a bound is exceeded: %d requests, %d bytes", q.Len(), q.Bytes())
			}
		case op < 8:
			if it := m.next(q, pool, now); it != nil {
				if again := q.Next(pool, now); again != it {
					t.Fatalf("Next returned %s, then %s", show(it), show(again))
				}
				q.Take(it)
				m.take(it)
			}
		case op < 9:
			if len(m.items) > 0 {
				it := m.items[rng.IntN(len(m.items))]
				q.Remove(it)
				q.Remove(it)
				m.remove(it)
			}
		case op < 10:
			if len(m.items) > 0 {
				m.release(q, m.items[rng.IntN(len(m.items))])
			}
		case op < 11: // every group is tried again
			q.EndSweep(pool)
			m.endSweep(pool)
		case op < 12:
			q = m.reload(q)
		default: // a round in which some cannot start
			for range 1 + rng.IntN(6) {
				it := m.next(q, pool, now)
				if it == nil {
					break
				}
				if rng.IntN(3) == 0 {
					q.Take(it)
					m.take(it)
					continue
				}
				if rng.IntN(2) == 0 {
					q.SetFull(it)
					m.full[[2]string{it.Pool, it.Group}] = true
					m.changedAll(it.Pool)
					continue
				}
				q.Defer(it)
				m.deferred[it] = true
				m.changed(it)
				if rng.IntN(4) == 0 {
					q.Remove(it)
					m.remove(it)
				}
			}
			q.EndRound()
			for it := range m.deferred {
				m.changed(it)
			}
			clear(m.deferred)
		}
		m.check(q)
	}
	// Nothing is starved: what is left is dispatched, each once.
	if rng.IntN(2) == 0 {
		if all := q.Drain(); len(all) != len(m.items) {
			t.Fatalf("Drain returned %d requests; want %d", len(all), len(m.items))
		} else {
			for i := range all {
				if all[i] != m.items[i] || all[i].IsQueued() {
					t.Fatalf("Drain returned %s at place %d; want %s", show(all[i]), i, show(m.items[i]))
				}
			}
		}
		return
	}
	for _, it := range m.items {
		m.release(q, it)
	}
	for _, pool := range pools {
		q.EndSweep(pool)
		m.endSweep(pool)
		for it := m.next(q, pool, now); it != nil; it = m.next(q, pool, now) {
			q.Take(it)
			m.take(it)
		}
	}
	if m.check(q); q.Len() != 0 {
		t.Fatalf("%d requests are left", q.Len())
	}
}

// TestQueueAgainstModel compares the Queue with a plain model over random histories: 10^6 with
// SLUICE_SOAK=1.
func TestQueueAgainstModel(t *testing.T) {
	n := 5_000
	switch {
	case os.Getenv("SLUICE_SOAK") != "":
		n = 1_000_000
	case testing.Short():
		n = 500
	}
	for i := range n {
		rng := rand.New(rand.NewPCG(uint64(i), 1))
		func() {
			defer func() {
				if t.Failed() {
					t.Logf("history %d", i)
				}
			}()
			history(t, rng, 10+rng.IntN(60))
		}()
	}
}
