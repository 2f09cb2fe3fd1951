package admission

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// push adds a request and fails the test if a bound is reached.
func push(t testing.TB, q *Queue, it *Item) *Item {
	t.Helper()
	if displaced, bound := q.Push(it, nil); bound != WithinBounds || len(displaced) > 0 {
		t.Fatalf("Push displaced %d requests and returned bound %d; want neither", len(displaced), bound)
	}
	return it
}

// serve dispatches from a pool, and calls refill after each request, until it has dispatched that many tokens. It returns
// the tokens by tenant and by class.
func serve(q *Queue, tokens int64, refill func(it *Item)) (tenants map[string]int64, classes map[int]int64) {
	tenants, classes = map[string]int64{}, map[int]int64{}
	for tokens > 0 {
		it := q.Next("m", 0)
		q.Take(it)
		tenants[it.Tenant] += it.Cost
		classes[it.Class] += it.Cost
		tokens -= it.Cost
		refill(it)
	}
	return tenants, classes
}

// Backlogged tenants are given tokens by their weights, whatever the size and the number of their
// requests.
func TestTenantsByWeight(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	q := NewQueue(make([]Class, 1), Limits{})
	weights := map[string]int{"small": 1, "large": 1, "many": 1, "heavy": 3}
	costs := map[string]int64{"small": 100, "large": 9000, "many": 500, "heavy": 800}
	add := func(tenant string) {
		push(t, q, &Item{Pool: "m", Tenant: tenant, Weight: weights[tenant], Cost: costs[tenant]/2 + rng.Int64N(costs[tenant])})
	}
	for tenant := range weights {
		for range 20 {
			add(tenant)
		}
	}
	for range 1000 {
		add("many")
	}
	const tokens = 6_000_000
	got, _ := serve(q, tokens, func(it *Item) { add(it.Tenant) })
	var sum, squares float64
	for tenant, weight := range weights {
		want := tokens / 6 * float64(weight)
		if math.Abs(float64(got[tenant])-want) > 0.02*want {
			t.Errorf("%s was given %d tokens; want %.0f", tenant, got[tenant], want)
		}
		x := float64(got[tenant]) / float64(weight)
		sum, squares = sum+x, squares+x*x
	}
	if jain := sum * sum / 4 / squares; jain < 0.98 {
		t.Errorf("Jain's index is %.4f; want at least 0.98", jain)
	}
}

// A tenant with one large request at a time gains nothing by having none in between.
func TestDebtOutlivesRequests(t *testing.T) {
	q := NewQueue(make([]Class, 1), Limits{})
	for range 50 {
		push(t, q, &Item{Pool: "m", Tenant: "steady", Cost: 100})
	}
	push(t, q, &Item{Pool: "m", Tenant: "large", Cost: 10_000})
	got, _ := serve(q, 1_000_000, func(it *Item) {
		push(t, q, &Item{Pool: "m", Tenant: it.Tenant, Cost: it.Cost})
	})
	if share := float64(got["large"]) / 1_000_000; share < 0.45 || share > 0.55 {
		t.Errorf("the tenant with one request at a time was given %.0f %% of the tokens; want half", 100*share)
	}
}

// A tenant that has been given more than its share owes it after a reload too, also while it has no requests.
func TestDebtOutlivesReload(t *testing.T) {
	for _, hasRequest := range []bool{true, false} {
		q := NewQueue([]Class{{Name: "a"}}, Limits{})
		for range 20 {
			push(t, q, &Item{Pool: "m", Tenant: "steady", Cost: 100})
		}
		q.Take(push(t, q, &Item{Pool: "m", Tenant: "large", Cost: 1000}))
		if hasRequest {
			push(t, q, &Item{Pool: "m", Tenant: "large", Cost: 1000})
		}
		to := NewQueue([]Class{{Name: "new"}, {Name: "a"}}, Limits{})
		q.moveTo(to, func(*Item) int { return 1 }, func(it *Item, b Bound) { t.Errorf("%s was displaced, bound %d", show(it), b) })
		if !hasRequest {
			push(t, to, &Item{Pool: "m", Class: 1, Tenant: "large", Cost: 1000})
		}
		for n := range 9 {
			it := to.Next("m", 0)
			if it.Tenant != "steady" {
				t.Fatalf("after %d requests of the other tenant one of the tenant that owes 1000 tokens was next; want 10", n)
			}
			to.Take(it)
		}
	}
}

// Late requests keep their order over a reload, and those that become late after it go behind them.
func TestLateOrderOutlivesReload(t *testing.T) {
	q := NewQueue([]Class{{Name: "a"}}, Limits{})
	item := func(due int64) *Item { return &Item{Pool: "m", Cost: 1, Due: due, Firm: true} }
	var want []*Item
	for _, due := range []int64{30, 10, 20} {
		want = append(want, push(t, q, item(due)))
	}
	q.Next("m", 15) // the second is late
	q.Next("m", 25) // the third too
	q.Next("m", 35)
	to := NewQueue([]Class{{Name: "a"}}, Limits{})
	q.moveTo(to, func(*Item) int { return 0 }, func(it *Item, b Bound) { t.Errorf("%s was displaced, bound %d", show(it), b) })
	want = []*Item{want[1], want[2], want[0], push(t, to, item(5)), push(t, to, item(6))}
	for i, it := range want {
		got := to.Next("m", 100)
		if got != it {
			t.Fatalf("at place %d is %s; want %s", i, show(got), show(it))
		}
		to.Take(got)
	}
}

// The highest class goes first, and a lower one with a minimum share is given that share.
func TestMinimumShare(t *testing.T) {
	q := NewQueue([]Class{{Name: "high"}, {Name: "middle"}, {Name: "low", MinShare: 0.1}}, Limits{})
	add := func(class int) { push(t, q, &Item{Pool: "m", Class: class, Cost: int64(100 * (1 + class))}) }
	for class := range 3 {
		for range 5 {
			add(class)
		}
	}
	const tokens = 1_000_000
	_, got := serve(q, tokens, func(it *Item) { add(it.Class) })
	if low := float64(got[2]) / tokens; math.Abs(low-0.1) > 0.002 {
		t.Errorf("the class with a share of 10 %% was given %.2f %%", 100*low)
	}
	if got[1] != 0 {
		t.Errorf("a class without a share was given %d tokens while a higher one waited", got[1])
	}
	// Requests that it was given while no other class waited are not charged.
	for it := q.Next("m", 0); it != nil; it = q.Next("m", 0) {
		q.Take(it)
	}
	for range 5000 {
		add(2)
		q.Take(q.Next("m", 0))
	}
	for range 5 {
		add(0)
		add(2)
	}
	_, got = serve(q, 10_000, func(it *Item) { add(it.Class) })
	if got[2] < 700 {
		t.Errorf("after it was alone, the class was given %d of 10,000 tokens; want about 1,000", got[2])
	}
}

// A class that has one large request at a time is given no more than its share either: it repays what each has
// taken while none waits, and a reload does not cancel that.
func TestMinimumShareOfFewLargeRequests(t *testing.T) {
	for _, c := range []struct {
		users  int
		reload bool
	}{{1, false}, {1, true}, {3, false}, {30, false}} {
		q := NewQueue([]Class{{Name: "high"}, {Name: "low", MinShare: 0.05}}, Limits{})
		low := func() { push(t, q, &Item{Pool: "m", Class: 1, Cost: 10_000}) }
		for range 100 {
			push(t, q, &Item{Pool: "m", Cost: 100})
		}
		for range c.users {
			low()
		}
		var tokens [2]float64
		var back []int // when the clients of the low class send their next requests
		for i := range 100_000 {
			for len(back) > 0 && back[0] <= i {
				back = back[1:]
				low()
			}
			if c.reload && i%7 == 0 {
				to := NewQueue(q.classes, q.limits)
				q.moveTo(to, func(it *Item) int { return it.Class }, func(it *Item, b Bound) { t.Fatal("displaced by a reload") })
				q = to
			}
			it := q.Next("m", 0)
			q.Take(it)
			if tokens[it.Class] += float64(it.Cost); it.Class == 0 {
				push(t, q, &Item{Pool: "m", Cost: 100})
			} else {
				back = append(back, i+20)
			}
		}
		if share := tokens[1] / (tokens[0] + tokens[1]); share > 0.055 || share < 0.04 {
			t.Errorf("%+v: the class with a share of 5 %% was given %.1f %%", c, 100*share)
		}
	}
}

// Requests that wait until their KV fits are not ahead of those that arrive.
func TestAheadWithoutRoom(t *testing.T) {
	q := NewQueue([]Class{{Name: "default"}}, Limits{})
	large, small := &Item{Pool: "m", Cost: 10_000}, &Item{Pool: "m", Cost: 100}
	push(t, q, large)
	push(t, q, small)
	ahead := func() int64 { return q.Ahead(&Item{Pool: "m", Cost: 100}) }
	for _, c := range []struct {
		noRoom bool
		want   int64
	}{{false, 10_100}, {true, 100}, {true, 100}, {false, 10_100}, {true, 100}} {
		if q.setNoRoom(large, c.noRoom); ahead() != c.want {
			t.Errorf("no room %v: %d tokens are ahead; want %d", c.noRoom, ahead(), c.want)
		}
	}
	if n := q.Ahead(&Item{Pool: "m", Cost: 6000}); n != 10_100 {
		t.Errorf("%d tokens are ahead of a request that is nearly as large as the one without room; want 10100", n)
	}
	q.Remove(large)
	if ahead() != 100 || q.total.roomCost != 0 || q.perClass[0].roomCost != 0 {
		t.Errorf("after it has left: %d tokens ahead, %+v in all, %+v of the class; want 100 and none without room", ahead(), q.total, q.perClass[0])
	}
}

// A request that can still start in time goes before those that cannot, and those keep their order.
func TestLateRequestsGoBehind(t *testing.T) {
	q := NewQueue(make([]Class, 1), Limits{})
	var got []int64
	for _, due := range []int64{50, 10, 90, 20, 70} {
		push(t, q, &Item{Pool: "m", Due: due, Firm: true, Bytes: due})
	}
	push(t, q, &Item{Pool: "m", Due: 15, Bytes: 15}) // has no target: it is never late
	for now := int64(40); q.Len() > 0; now++ {
		it := q.Next("m", now)
		got = append(got, it.Bytes)
		q.Take(it)
	}
	if want := []int64{15, 50, 70, 90, 10, 20}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("dispatched in the order of due times %v; want %v", got, want)
	}
}

func TestTenantTableIsBounded(t *testing.T) {
	q := NewQueue(make([]Class, 1), Limits{MaxTenants: 10})
	for i := range 1000 {
		push(t, q, &Item{Pool: "m", Tenant: fmt.Sprint("t", i), Cost: 10})
	}
	if n := len(q.pools["m"].groups[0].ready[0]); n != 11 {
		t.Errorf("1,000 tenants have %d turns; want 10 and one for the others", n)
	}
	got, _ := serve(q, 110, func(it *Item) {})
	for i := range 10 {
		if name := fmt.Sprint("t", i); got[name] != 10 {
			t.Errorf("%s was given %d of the first 110 tokens; want 10", name, got[name])
		}
	}
}

// A full queue makes space for a higher class, and within a class for a tenant with less waiting.
func TestDisplacement(t *testing.T) {
	q := NewQueue(make([]Class, 2), Limits{MaxRequests: 10})
	for i := range 10 {
		push(t, q, &Item{Pool: "m", Class: 1, Tenant: "flood", Cost: 100, Due: int64(i)})
	}
	for _, c := range []struct {
		it      Item
		bound   Bound
		leaving int64 // Due of the displaced request, -1: none
	}{
		{Item{Pool: "m", Class: 1, Tenant: "flood", Cost: 100}, AllRequests, -1},
		{Item{Pool: "m", Class: 1, Tenant: "other", Cost: 100}, WithinBounds, 9},
		{Item{Pool: "m", Class: 0, Tenant: "any", Cost: 100}, WithinBounds, 8},
		{Item{Pool: "elsewhere", Class: 0, Cost: 1}, WithinBounds, 7},
		{Item{Pool: "elsewhere", Class: 1, Cost: 1}, WithinBounds, 6},
		{Item{Pool: "m", Class: 1, Tenant: "flood", Cost: 1}, AllRequests, -1},
	} {
		it := c.it
		displaced, bound := q.Push(&it, nil)
		if bound != c.bound || (c.leaving >= 0) != (len(displaced) == 1) || len(displaced) == 1 && displaced[0].Due != c.leaving {
			t.Errorf("%+v: bound %d, displaced %d; want bound %d, the request due at %d", c.it, bound, len(displaced), c.bound, c.leaving)
		}
		if q.Len() != 10 {
			t.Errorf("%d requests; want 10", q.Len())
		}
	}
}

// floodQueue offers several times what is dispatched for a while, and returns how many requests of each class,
// tenant and pool were offered, and how many of them had to leave. It dispatches a request of each pool in
// turn.
func floodQueue(q *Queue, steps int, offer func(step int) []*Item) (offered, left map[string]int) {
	offered, left = map[string]int{}, map[string]int{}
	count := func(in map[string]int, it *Item) { in[fmt.Sprint(it.Pool, " ", it.Class, " ", it.Tenant)]++ }
	for step := range steps {
		for _, it := range offer(step) {
			count(offered, it)
			displaced, bound := q.Push(it, nil)
			if bound != WithinBounds {
				displaced = append(displaced, it)
			}
			for _, d := range displaced {
				count(left, d)
			}
		}
		for _, pool := range q.Pools(nil) {
			if it := q.Next(pool, 0); it != nil {
				q.Take(it)
			}
		}
	}
	return offered, left
}

// The lowest class keeps its minimum share while requests of higher classes fill the queue, by number or by
// the size of their bodies.
func TestMinimumShareInFullQueue(t *testing.T) {
	for _, limits := range []Limits{{MaxRequests: 200}, {MaxBytes: 200 * 1000}} {
		q := NewQueue([]Class{{Name: "high"}, {Name: "middle"}, {Name: "low", MinShare: 0.1}}, limits)
		const steps = 20_000
		offered, left := floodQueue(q, steps, func(step int) (list []*Item) {
			for i := range 6 {
				list = append(list, &Item{Pool: "m", Class: i % 3, Cost: 100, Bytes: 1000})
			}
			return list
		})
		served := offered["m 2 "] - left["m 2 "] - q.perClass[2].requests
		if share := float64(served) / steps; share < 0.095 || share > 0.105 {
			t.Errorf("bounds %+v: the lowest class was given %.1f %% of the requests served; want 10 %%", limits, 100*share)
		}
		if n := q.perClass[2].requests; n > 20 {
			t.Errorf("bounds %+v: %d requests of the lowest class wait; want at most its share, 20", limits, n)
		}
	}
}

// A flood of one model displaces and refuses no request of another, whatever its class, by no bound.
func TestFloodOfOnePool(t *testing.T) {
	for _, c := range []struct {
		name   string
		class  Class
		limits Limits
	}{
		{"requests", Class{}, Limits{MaxRequests: 100}},
		{"bytes", Class{}, Limits{MaxBytes: 100_000}},
		{"requests of the class", Class{MaxRequests: 100}, Limits{}},
		{"bytes of the class", Class{MaxBytes: 100_000}, Limits{}},
	} {
		q := NewQueue([]Class{c.class, c.class}, c.limits)
		offered, left := floodQueue(q, 3000, func(step int) (list []*Item) {
			for range 5 {
				list = append(list, &Item{Pool: "flood", Class: step % 2, Tenant: "x", Cost: 5, Bytes: 1000})
			}
			if step%60 < 30 { // 30 requests, of which about one is served in each step
				list = append(list, &Item{Pool: "quiet", Class: 1, Tenant: "y", Cost: 4000, Bytes: 1000}, &Item{Pool: "rare", Class: 1, Tenant: "y", Cost: 4000, Bytes: 1000})
			}
			return list
		})
		for _, key := range []string{"quiet 1 y", "rare 1 y"} {
			if offered[key] == 0 || left[key] > 0 {
				t.Errorf("%s: %d of %d requests (%s) had to leave; want none", c.name, left[key], offered[key], key)
			}
		}
	}
}

// A tenant with many small requests takes no space of one with few large ones.
func TestTenantsShareTheSpace(t *testing.T) {
	q := NewQueue(make([]Class, 1), Limits{MaxRequests: 100})
	offered, left := floodQueue(q, 3000, func(step int) (list []*Item) {
		for range 5 {
			list = append(list, &Item{Pool: "m", Tenant: "small", Cost: 5})
		}
		if step == 500 {
			for range 20 {
				list = append(list, &Item{Pool: "m", Tenant: "large", Cost: 4000})
			}
		}
		return list
	})
	if left["m 0 large"] > 0 {
		t.Errorf("%d of %d requests of the tenant with large ones had to leave; want none", left["m 0 large"], offered["m 0 large"])
	}
}

// The weight of a tenant's last request counts for the requests that it has to give up.
func TestWeightChanges(t *testing.T) {
	q := NewQueue(make([]Class, 1), Limits{MaxRequests: 10})
	for i := range 10 {
		push(t, q, &Item{Pool: "m", Tenant: []string{"a", "a", "a", "b", "b"}[i%5], Weight: 1, Cost: 1})
	}
	q.Remove(q.Oldest(0)) // of a
	push(t, q, &Item{Pool: "m", Tenant: "a", Weight: 10, Cost: 1})
	if displaced, bound := q.Push(&Item{Pool: "m", Tenant: "c", Cost: 1}, nil); bound != WithinBounds || displaced[0].Tenant != "b" {
		t.Errorf("bound %d, displaced %+v; want one request of b, which has fewer but takes more by weight", bound, displaced)
	}
}

// A tenant whose name is that by which all others are shown has a turn of its own.
func TestTenantNamedAsOverflow(t *testing.T) {
	c := NewController(Settings{Classes: make([]Class, 1), Limits: Limits{MaxTenants: 3}}, new(counts))
	for _, tenant := range []string{Overflow, "a", "b", "c", "d"} {
		push(t, c.queue, &Item{Pool: "m", Tenant: tenant, Cost: 10})
	}
	shown := map[string]int{}
	for _, v := range c.View().Tenants {
		shown[v.Tenant] += v.Requests
	}
	if shown[`"other"`] != 1 || shown["other"] != 2 {
		t.Errorf("requests by tenant: %v; want 1 of the tenant \"other\" and 2 of tenants without a turn", shown)
	}
	if all := c.queue.Drain(); len(all) != 5 {
		t.Errorf("Drain returned %d requests; want 5", len(all))
	}
}

// The estimate of what goes before a request is what goes before it, if nothing else arrives.
func TestAhead(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		q := NewQueue([]Class{{}, {}}, Limits{})
		for range 300 {
			push(t, q, &Item{Pool: "m", Class: rng.IntN(2), Tenant: string("abcd"[rng.IntN(4)]), Cost: 80 + rng.Int64N(40)})
		}
		it := &Item{Pool: "m", Class: rng.IntN(2), Tenant: string("abcde"[rng.IntN(5)]), Cost: 100}
		it.Due = math.MaxInt64 // behind its tenant's others
		estimate := q.Ahead(it)
		push(t, q, it)
		actual := int64(0)
		for next := q.Next("m", 0); next != it; next = q.Next("m", 0) {
			q.Take(next)
			actual += next.Cost
		}
		if d := estimate - actual; d > 1500 || d < -1500 {
			t.Fatalf("class %d, tenant %s: %d tokens were expected ahead; there were %d", it.Class, it.Tenant, estimate, actual)
		}
	}
}

// TestItemSize bounds the memory of a waiting request: its Item, its places in the heap and the tables.
func TestItemSize(t *testing.T) {
	if n := unsafe.Sizeof(Item{}); n > 256 {
		t.Errorf("an Item has %d bytes; want at most 256", n)
	}
}

// TestReturningTenantAllocatesNothing lets a tenant with one request at a time come back again and again.
func TestReturningTenantAllocatesNothing(t *testing.T) {
	q := NewQueue([]Class{{}}, Limits{MaxTenants: 8})
	push(t, q, &Item{Pool: "m", Tenant: "other", Due: 1})
	it, displaced := new(Item), []*Item(nil)
	if n := testing.AllocsPerRun(100, func() {
		*it = Item{Pool: "m", Tenant: "returning"}
		displaced, _ = q.Push(it, displaced[:0])
		q.Take(it)
	}); n > 0 {
		t.Errorf("%v allocations for a request of a tenant without others; want 0", n)
	}
}

// BenchmarkFullQueue pushes requests into a full queue with 50,000 waiting, of 3 classes, 1,000 tenants and
// 20 pools; each displaces another one.
func BenchmarkFullQueue(b *testing.B) {
	const waiting = 50_000
	for _, pools := range []int{1, 20} {
		b.Run(fmt.Sprint(pools, " pools"), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(5, 6))
			q := NewQueue([]Class{{}, {}, {MinShare: 0.1}}, Limits{MaxRequests: waiting, MaxTenants: 1024})
			set := func(it *Item, tenant string) *Item {
				*it = Item{Pool: fmt.Sprint("m", rng.IntN(pools)), Class: rng.IntN(3), Tenant: tenant, Cost: 100 + rng.Int64N(4000), Due: rng.Int64N(1_000_000), Firm: true}
				return it
			}
			for i := range waiting { // one tenant has half of all
				tenant := "flood"
				if i%2 == 0 {
					tenant = fmt.Sprint("tenant-", rng.IntN(1000))
				}
				push(b, q, set(new(Item), tenant))
			}
			it := new(Item)
			var displaced []*Item
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				set(it, fmt.Sprint("tenant-", rng.IntN(1000))).Class = 1
				b.StartTimer()
				displaced, _ = q.Push(it, displaced[:0])
				b.StopTimer()
				if len(displaced) != 1 {
					b.Fatalf("%d requests were displaced; want 1", len(displaced))
				}
				q.Remove(it)
				push(b, q, displaced[0])
				b.StartTimer()
			}
		})
	}
}

// BenchmarkQueue enqueues and dispatches one request while 50,000 wait, of 3 classes and 1,000 tenants.
func BenchmarkQueue(b *testing.B) {
	const waiting = 50_000
	rng := rand.New(rand.NewPCG(5, 6))
	q := NewQueue([]Class{{MinShare: 0.1}, {MinShare: 0.1}, {MinShare: 0.1}}, Limits{MaxRequests: waiting + 1, MaxTenants: 1024})
	tenants := make([]string, 1000)
	for i := range tenants {
		tenants[i] = fmt.Sprint("tenant-", i)
	}
	items := make([]Item, waiting)
	free := make([]*Item, 0, waiting)
	set := func(it *Item, now int64) {
		*it = Item{Pool: "m", Class: rng.IntN(3), Tenant: tenants[rng.IntN(len(tenants))], Cost: 100 + rng.Int64N(4000), Due: now + rng.Int64N(1_000_000), Firm: true}
	}
	for i := range items {
		set(&items[i], 0)
		push(b, q, &items[i])
	}
	b.ReportAllocs()
	var displaced []*Item
	now := int64(0)
	for b.Loop() {
		now += 10
		it := q.Next("m", now)
		q.Take(it)
		free = append(free[:0], it)
		set(free[0], now)
		displaced, _ = q.Push(free[0], displaced[:0])
	}
	b.ReportMetric(float64(unsafe.Sizeof(Item{})+unsafe.Sizeof(&Item{})), "B/waiting")
}

// TestManyWait: 50,000 requests wait in a Controller with at most 2 KiB each, goroutines aside, and leave it
// when they are cancelled.
func TestManyWait(t *testing.T) {
	const requests = 50_000
	c := NewController(Settings{Classes: []Class{{Name: "high"}, {Name: "low"}}, Limits: Limits{MaxRequests: requests, MaxBytes: 1 << 40, MaxTenants: 1024}}, new(counts))
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before, goroutines := heap(), runtime.NumGoroutine()
	waiters := make([]*Waiter, requests)
	var started, ended sync.WaitGroup
	var gone atomic.Int64
	for i := range waiters {
		w := &Waiter{Class: []string{"high", "low"}[i%2], Starter: neverStarts{}}
		w.Item = Item{Pool: "m", Tenant: fmt.Sprint(i % 1000), Cost: 100, Bytes: 1000, Due: int64(i)}
		waiters[i] = w
		started.Add(1)
		ended.Go(func() {
			if bound := c.Enqueue(w); bound != WithinBounds {
				t.Errorf("request %d: %v", i, bound)
			}
			started.Done()
			if c.Wait(w, time.Hour) == Gone {
				gone.Add(1)
			}
		})
	}
	started.Wait()
	each := (heap() - before) / requests
	t.Logf("%d requests wait, with %d bytes each; %d goroutines beside theirs", requests, each, runtime.NumGoroutine()-goroutines-requests)
	if each > 2048 {
		t.Errorf("a waiting request takes %d bytes; want at most 2048", each)
	}
	if n := runtime.NumGoroutine() - goroutines - requests; n > 10 {
		t.Errorf("%d goroutines beside those of the requests; want that of the dispatcher", n)
	}
	began := time.Now()
	for _, w := range waiters {
		c.Cancel(w, Gone)
	}
	ended.Wait()
	t.Logf("all left within %v", time.Since(began))
	if gone.Load() != requests || !c.IsEmpty() {
		t.Errorf("%d of %d requests left, the queue is empty: %v", gone.Load(), requests, c.IsEmpty())
	}
}

// neverStarts has no rank with capacity.
type neverStarts struct{}

func (neverStarts) TryStart(Backlog, *time.Time) Verdict { return NoCapacity }
