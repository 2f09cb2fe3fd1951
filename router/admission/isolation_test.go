package admission

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// fleetModel is a Queue before engines whose batches have a fixed number of places, in virtual time. A request
// holds a place from its dispatch to its end; its first token comes a step after the dispatch.
type fleetModel struct {
	q      *Queue
	places int
	now    time.Duration
	events eventHeap
	first  map[string][]time.Duration // by tenant: from arrival to the first token
}

type event struct {
	at  time.Duration
	run func()
}

type eventHeap []event

func (h eventHeap) Len() int           { return len(h) }
func (h eventHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h eventHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x any)        { *h = append(*h, x.(event)) }
func (h *eventHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	*h = old[:len(old)-1]
	return e
}

const (
	modelPlaces  = 64
	modelService = 600 * time.Millisecond // mean time in a batch
	modelFirst   = 40 * time.Millisecond
	modelTarget  = 1350 * time.Millisecond
)

// offered is the load of one tenant, in shares of what the engines can do.
type offered struct {
	tenant string
	class  int
	share  float64
}

// runFleet offers loads for a time and returns the model.
func runFleet(classes []Class, loads []offered, seed uint64, duration time.Duration) *fleetModel {
	m := &fleetModel{q: NewQueue(classes, Limits{MaxTenants: 100}), places: modelPlaces, first: map[string][]time.Duration{}}
	capacity := modelPlaces / modelService.Seconds()
	for i, o := range loads {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		var arrive func()
		next := func() {
			heap.Push(&m.events, event{m.now + time.Duration(rng.ExpFloat64()/(o.share*capacity)*1e9), arrive})
		}
		arrive = func() {
			size := math.Exp(0.5*rng.NormFloat64() - 0.125)
			arrived, service := m.now, time.Duration(size*float64(modelService))
			it := &Item{Pool: "m", Class: o.class, Tenant: o.tenant, Cost: int64(400 * size), Due: int64(m.now + modelTarget), Firm: true, Arrived: int64(m.now)}
			it.Waiter = &Waiter{Starter: startFunc(func() {
				m.first[o.tenant] = append(m.first[o.tenant], m.now+modelFirst-arrived)
				heap.Push(&m.events, event{m.now + service, func() { m.places++ }})
			})}
			// What cannot start in time is refused, as by the runner.
			if float64(m.q.Ahead(it)) < 400*capacity*modelTarget.Seconds() {
				m.q.Push(it, nil)
			}
			next()
		}
		next()
	}
	for len(m.events) > 0 {
		e := heap.Pop(&m.events).(event)
		if m.now = e.at; m.now > duration {
			break
		}
		e.run()
		for m.places > 0 {
			it := m.q.Next("m", int64(m.now))
			if it == nil {
				break
			}
			m.q.Take(it)
			m.places--
			it.Waiter.Starter.TryStart(Backlog{}, nil)
		}
	}
	return m
}

type startFunc func()

func (f startFunc) TryStart(Backlog, *time.Time) Verdict { f(); return Started }

// p99 returns the p99 of the first tokens of tenants, over several runs together.
func p99(classes []Class, loads []offered, tenants ...string) (all []time.Duration) {
	first := map[string][]time.Duration{}
	for seed := range uint64(4) {
		m := runFleet(classes, loads, seed, 250*time.Second)
		for _, tenant := range tenants {
			first[tenant] = append(first[tenant], m.first[tenant]...)
		}
	}
	for _, tenant := range tenants {
		slices.Sort(first[tenant])
		all = append(all, first[tenant][len(first[tenant])*99/100])
	}
	return all
}

// A tenant that offers ten times its share hardly delays those that stay below theirs.
func TestQuietTenantsAreNotDelayed(t *testing.T) {
	loads := []offered{{"a", 0, 0.2}, {"b", 0, 0.2}, {"c", 0, 0.2}, {"greedy", 0, 0.25}}
	before := p99(make([]Class, 1), loads, "a", "b", "c")
	loads[3].share *= 10
	after := p99(make([]Class, 1), loads, "a", "b", "c")
	for i := range before {
		t.Logf("%s: p99 %v while another tenant offers its share, %v while that offers ten times as much", loads[i].tenant, before[i], after[i])
		if after[i] > before[i]*5/4 {
			t.Errorf("%s: the p99 rises from %v to %v; want at most a quarter more", loads[i].tenant, before[i], after[i])
		}
	}
}

// Three times what the engines can do hardly delays the highest class.
func TestHighestClassIsNotDelayed(t *testing.T) {
	classes := []Class{{Name: "high"}, {Name: "normal"}, {Name: "low", MinShare: 0.05}}
	loads := []offered{{"high", 0, 0.3}, {"x", 1, 0.6}, {"y", 1, 0.6}, {"z", 1, 0.6}, {"batch", 2, 0.9}}
	alone, loaded := p99(classes, loads[:1], "high"), p99(classes, loads, "high")
	t.Logf("p99 %v alone, %v at three times the capacity", alone[0], loaded[0])
	if limit := alone[0]*6/5 + 100*time.Millisecond; loaded[0] > limit {
		t.Errorf("the p99 of the highest class rises from %v to %v; want at most %v", alone[0], loaded[0], limit)
	}
}
