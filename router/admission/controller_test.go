package admission

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// gate is a Starter that starts as long as free places are left.
type gate struct {
	free    *atomic.Int64
	verdict Verdict // while none is free
	tries   int
}

func (g *gate) TryStart(Backlog, *time.Time) Verdict {
	g.tries++
	if g.free.Add(-1) < 0 {
		g.free.Add(1)
		return g.verdict
	}
	return Started
}

// counts is an Observer.
type counts struct {
	mu       sync.Mutex
	enqueued int
	outcomes [numOutcomes]int
}

func (c *counts) Enqueued(class, tenant string) {
	c.mu.Lock()
	c.enqueued++
	c.mu.Unlock()
}

func (c *counts) Dequeued(class, tenant string, o Outcome, waited, forecast time.Duration) {
	c.mu.Lock()
	c.outcomes[o]++
	c.mu.Unlock()
}

func TestControllerDispatchesAsCapacityComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var o counts
		c := NewController(Settings{Classes: []Class{{Name: "high"}, {Name: "low"}}, Default: 1}, &o)
		var free atomic.Int64
		var mu sync.Mutex
		var order []string
		wait := func(name, class string, atMost time.Duration) *Waiter {
			w := &Waiter{Class: class, Starter: &gate{free: &free, verdict: NoCapacity}, Item: Item{Pool: "m", Cost: 100}}
			if b := c.Enqueue(w); b != WithinBounds {
				t.Fatalf("Enqueue returned bound %d", b)
			}
			go func() {
				out := c.Wait(w, atMost)
				mu.Lock()
				order = append(order, name+" "+out.String())
				mu.Unlock()
			}()
			synctest.Wait()
			return w
		}
		wait("low", "low", time.Minute)
		wait("unknown", "removed", time.Minute)
		gone := wait("gone", "high", time.Minute)
		wait("brief", "high", 50*time.Millisecond)
		wait("high", "high", time.Minute)
		if c.Waiting() != 5 || c.IsIdle("m") || !c.IsIdle("n") || c.IsEmpty() {
			t.Errorf("%d wait, pool m idle %v, pool n idle %v; want 5, false, true", c.Waiting(), c.IsIdle("m"), c.IsIdle("n"))
		}
		if v := c.Classes(); v[0].Requests != 3 || v[1].Requests != 2 || v[1].Tokens != 200 {
			t.Errorf("classes %+v; want 3 requests of high and 2 of low with 200 tokens", v)
		}
		if v := c.View(); len(v.Pools) != 2 || v.Pools[0].Pool != "m" || v.Pools[0].Class != "high" || v.Pools[1].Requests != 2 || len(v.Tenants) != 2 || v.Tenants[1].Tokens != 200 {
			t.Errorf("pools %+v; want m with classes high and low, and one tenant with 200 tokens", v)
		}
		c.Cancel(gone, Gone)
		c.Cancel(gone, Gone)
		time.Sleep(100 * time.Millisecond)
		if v := c.Classes(); v[1].Oldest != 100*time.Millisecond {
			t.Errorf("the oldest of low has waited %v; want 100ms", v[1].Oldest)
		}
		for range 3 {
			free.Add(1)
			c.Wake()
			synctest.Wait()
		}
		mu.Lock()
		want := "[gone client_gone brief timeout high dispatched low dispatched unknown dispatched]"
		if got := fmt.Sprint(order); got != want {
			t.Errorf("ends of the waits: %s; want %s", got, want)
		}
		mu.Unlock()
		if !c.IsEmpty() || o.enqueued != 5 || o.outcomes != [numOutcomes]int{Dispatched: 3, Gone: 1, Expired: 1} {
			t.Errorf("%d wait, enqueued %d, outcomes %v", c.Waiting(), o.enqueued, o.outcomes)
		}
	}) // the dispatcher has ended, else synctest reports it
}

// Requests that cannot start now do not hold up those behind them, however many they are, and keep their order.
func TestDeferredRequestsLetOthersPass(t *testing.T) {
	for _, n := range []int{1, maxDeferred, 300, maxPassed} {
		synctest.Test(t, func(t *testing.T) {
			c := NewController(Settings{Classes: []Class{{}}}, new(counts))
			var none, free atomic.Int64
			ends := make(chan int)
			for i := range n {
				w := &Waiter{Starter: &gate{free: &none, verdict: NotNow}, Item: Item{Pool: "m", Due: int64(i)}}
				c.Enqueue(w)
				go func() {
					if out := c.Wait(w, time.Hour); out != Dispatched {
						t.Errorf("one that could not start ended %s; want dispatched", out)
					}
					ends <- i
				}()
			}
			other := &Waiter{Starter: &gate{free: &free, verdict: NotNow}, Item: Item{Pool: "m", Due: int64(n)}}
			c.Enqueue(other)
			free.Add(1)
			if out := c.Wait(other, 2*time.Minute); out != Dispatched || other.Waited > time.Duration(n/maxDeferred+2)*pollInterval {
				t.Errorf("the request behind %d that cannot start ended %s after %v; want it dispatched within as many rounds as they need", n, out, other.Waited)
			}
			synctest.Wait() // else a round in progress may find the capacity in the middle
			none.Add(1)
			if first := <-ends; first != 0 {
				t.Errorf("of %d that could not start, number %d went first; want 0", n, first)
			}
			none.Add(int64(n))
			for range n - 1 {
				<-ends
			}
		})
	}
}

// Requests for whose ranks there is no capacity hold up none of other groups, in however many groups they are,
// and each group is tried again and again.
func TestFullGroupsLetOthersPass(t *testing.T) {
	for _, groups := range []int{1, 5, maxFull, 4*maxFull + 7} {
		synctest.Test(t, func(t *testing.T) {
			c := NewController(Settings{Classes: []Class{{Name: "high"}, {Name: "low"}}}, new(counts))
			free := make([]atomic.Int64, groups+1)
			ended := make(chan Outcome)
			for i := range 500 {
				w := &Waiter{Class: "high", Starter: &gate{free: &free[i%groups], verdict: NoCapacity}, Item: Item{Pool: "m", Group: fmt.Sprint(i % groups), Tenant: fmt.Sprint(i % 7)}}
				c.Enqueue(w)
				go func() { ended <- c.Wait(w, time.Hour) }()
			}
			synctest.Wait()
			time.Sleep(time.Second)
			free[groups].Add(1)
			other := &Waiter{Class: "low", Starter: &gate{free: &free[groups], verdict: NoCapacity}, Item: Item{Pool: "m", Tenant: "other"}}
			if f := c.Forecast(other); f != 0 && groups <= maxGroups {
				t.Errorf("%d groups: the forecast for a request of another group is %v; want 0", groups, f)
			}
			c.Enqueue(other)
			if out := c.Wait(other, time.Minute); out != Dispatched || other.Waited > 10*pollInterval {
				t.Errorf("%d groups: a request of another group ended %s after %v; want it dispatched at once", groups, out, other.Waited)
			}
			for i := range groups {
				before := time.Now()
				free[i].Add(1)
				c.Wake()
				if out := <-ended; out != Dispatched || time.Since(before) > 10*pollInterval {
					t.Errorf("%d groups: the first of group %d ended %s %v after a place was free", groups, i, out, time.Since(before))
				}
			}
			for i := range free {
				free[i].Add(1000)
			}
			for range 500 - groups {
				<-ended
			}
		})
	}
}

// The requests of a group share the time since when they have had no rank, as long as any of them waits.
func TestEmptySinceIsSharedByGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{}}}, new(counts))
		ends := map[string]time.Duration{}
		var mu sync.Mutex
		began := time.Now()
		enqueue := func(name, group string, s Starter) {
			w := &Waiter{Starter: s, Item: Item{Pool: "m", Group: group}}
			c.Enqueue(w)
			go func() {
				c.Wait(w, time.Minute)
				mu.Lock()
				defer mu.Unlock()
				ends[name] = time.Since(began).Round(100 * time.Millisecond)
			}()
		}
		var none atomic.Int64
		enqueue("others", "", &gate{free: &none, verdict: NoCapacity})
		enqueue("lost 1", "lost", lostStarter{})
		enqueue("lost 2", "lost", lostStarter{})
		time.Sleep(10 * time.Second)
		enqueue("lost later", "lost", lostStarter{})
		time.Sleep(time.Minute)
		want := map[string]time.Duration{"others": time.Minute, "lost 1": 5 * time.Second, "lost 2": 5 * time.Second, "lost later": 15 * time.Second}
		mu.Lock()
		if fmt.Sprint(ends) != fmt.Sprint(want) {
			t.Errorf("the waits ended at %v; want %v", ends, want)
		}
		mu.Unlock()
		time.Sleep(time.Minute)
	})
}

// lostStarter is a request whose ranks are lost.
type lostStarter struct{}

func (lostStarter) TryStart(_ Backlog, emptySince *time.Time) Verdict {
	if emptySince.IsZero() {
		*emptySince = time.Now()
	}
	if time.Since(*emptySince) < 5*time.Second {
		return NoCapacity
	}
	return Started
}

type panicking struct{}

func (panicking) TryStart(Backlog, *time.Time) Verdict { panic("a fault of one request") }

// A panic ends the request that it belongs to, on its own goroutine, and no other.
func TestPanicBelongsToItsRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{}}}, new(counts))
		var free atomic.Int64
		free.Add(1)
		faulty := &Waiter{Starter: panicking{}, Item: Item{Pool: "m"}}
		other := &Waiter{Starter: &gate{free: &free, verdict: NoCapacity}, Item: Item{Pool: "m"}}
		c.Enqueue(faulty)
		c.Enqueue(other)
		func() {
			defer func() {
				if got := recover(); got != "a fault of one request" {
					t.Errorf("Wait panicked with %v; want the panic of TryStart", got)
				}
			}()
			c.Wait(faulty, time.Second)
		}()
		if out := c.Wait(other, time.Second); out != Dispatched {
			t.Errorf("the other request ended %s; want dispatched", out)
		}
	})
}

// The forecast follows from the measured rate.
func TestForecast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{}}}, new(counts))
		var free atomic.Int64
		waiter := func() *Waiter {
			return &Waiter{Starter: &gate{free: &free, verdict: NoCapacity}, Item: Item{Pool: "m", Cost: 100}}
		}
		var wg sync.WaitGroup
		enqueue := func() {
			w := waiter()
			c.Enqueue(w)
			wg.Go(func() { c.Wait(w, time.Hour) })
		}
		for range 100 {
			enqueue()
		}
		if f := c.Forecast(waiter()); f >= 0 {
			t.Errorf("the forecast without a rate is %v; want none", f)
		}
		for range 50 { // 1,000 tokens a second
			time.Sleep(100 * time.Millisecond)
			free.Add(1)
			c.Wake()
			enqueue()
		}
		f := c.Forecast(waiter()) // 100 requests are ahead
		if f < 9*time.Second || f > 11*time.Second {
			t.Errorf("the forecast is %v; want 10s", f)
		}
		free.Add(1000)
		c.Wake()
		wg.Wait()
		if f := c.Forecast(waiter()); f != 0 {
			t.Errorf("the forecast of an empty queue is %v; want 0", f)
		}
	})
}

// A stall of the engines hardly changes the forecast, during it and after it.
func TestForecastAfterStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{}}}, new(counts))
		var free atomic.Int64
		var wg sync.WaitGroup
		enqueue := func() {
			w := &Waiter{Starter: &gate{free: &free, verdict: NoCapacity}, Item: Item{Pool: "m", Cost: 100}}
			c.Enqueue(w)
			wg.Go(func() { c.Wait(w, time.Hour) })
		}
		for range 100 {
			enqueue()
		}
		run := func(d time.Duration) {
			for range d / (100 * time.Millisecond) { // 1,000 tokens a second
				time.Sleep(100 * time.Millisecond)
				free.Add(1)
				c.Wake()
				enqueue()
			}
		}
		want := func(when string, atMost time.Duration) {
			t.Helper()
			if f := c.Forecast(&Waiter{Item: Item{Pool: "m", Cost: 100}}); f < 9*time.Second || f > atMost {
				t.Errorf("%s: the forecast is %v; want 10s to %v", when, f, atMost)
			}
		}
		run(30 * time.Second)
		want("before the stall", 11*time.Second)
		time.Sleep(5 * time.Minute)
		want("in the stall", 30*time.Second)
		run(time.Second)
		want("a second after it", 30*time.Second)
		run(20 * time.Second)
		want("20 s after it", 13*time.Second)
		free.Add(1000)
		c.Wake()
		wg.Wait()
	})
}

// The rate of dispatches that come less often than the window is long is measured too, also where several come
// at once.
func TestRateOfRareDispatches(t *testing.T) {
	for _, atOnce := range []int{1, 5} {
		var m rateMeter
		now := int64(0)
		m.begin(now)
		for range 10 {
			now += int64(30 * time.Second)
			for range atOnce {
				m.add(now, 300, rateWindow)
			}
		}
		now += int64(15 * time.Second)
		if rate, want := m.perSecond(now, rateWindow), float64(10*atOnce); rate < want/2 || rate > want*3/2 {
			t.Errorf("%d of 300 tokens every 30 s: %.1f tokens a second; want about %.0f", atOnce, rate, want)
		}
	}
}

func TestReloadWithWaitingRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{Name: "a"}, {Name: "b"}}}, new(counts))
		var free atomic.Int64
		var displaced, dispatched atomic.Int64
		for i := range 10 {
			w := &Waiter{Class: string("ab"[i%2]), Starter: &gate{free: &free, verdict: NoCapacity}, Item: Item{Pool: "m"}}
			c.Enqueue(w)
			go func() {
				switch c.Wait(w, time.Minute) {
				case Displaced:
					displaced.Add(1)
				case Dispatched:
					dispatched.Add(1)
				}
			}()
		}
		synctest.Wait()
		c.Reload(Settings{Classes: []Class{{Name: "b"}, {Name: "c"}}, Default: 1, Limits: Limits{MaxRequests: 6}})
		synctest.Wait()
		if v := c.Classes(); v[0].Requests != 5 || v[1].Requests != 1 || displaced.Load() != 4 {
			t.Errorf("classes %+v, %d displaced; want the 5 of b, 1 of a in c, and 4 displaced", v, displaced.Load())
		}
		free.Add(100)
		c.Wake()
		synctest.Wait()
		if dispatched.Load() != 6 || !c.IsEmpty() {
			t.Errorf("%d were dispatched, %d wait; want 6 and none", dispatched.Load(), c.Waiting())
		}
	})
}

// Arrivals, ends of work, disconnects and reloads at once: every wait ends once, and nothing is left.
func TestControllerConcurrently(t *testing.T) {
	var o counts
	classes := []Class{{Name: "a", MinShare: 0.1}, {Name: "b", MinShare: 0.1}, {Name: "c", MinShare: 0.1}}
	c := NewController(Settings{Classes: classes, Limits: Limits{MaxRequests: 200}}, &o)
	var free atomic.Int64
	free.Add(3)
	var wg sync.WaitGroup
	var refused atomic.Int64
	const clients, requests = 64, 100
	for i := range clients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			for range requests {
				w := &Waiter{Class: string("abcd"[rng.IntN(4)]), Starter: &gate{free: &free, verdict: Verdict(1 + rng.IntN(2))},
					Item: Item{Pool: string("xy"[rng.IntN(2)]), Tenant: string("pqr"[rng.IntN(3)]), Cost: rng.Int64N(100), Due: rng.Int64N(1e9), Firm: rng.IntN(2) == 0}}
				if c.Enqueue(w) != WithinBounds {
					refused.Add(1)
					continue
				}
				if rng.IntN(8) == 0 {
					wg.Go(func() { c.Cancel(w, Gone) })
				}
				if c.Wait(w, time.Duration(rng.IntN(20))*time.Millisecond) == Dispatched {
					free.Add(1)
					c.Wake()
				}
				if rng.IntN(200) == 0 {
					c.Reload(Settings{Classes: classes[:1+rng.IntN(3)], Limits: Limits{MaxRequests: 10 + rng.IntN(100)}})
				}
			}
		})
	}
	wg.Wait()
	ended := 0
	for _, n := range o.outcomes {
		ended += n
	}
	if o.outcomes[Waiting] != 0 || ended != o.enqueued || ended+int(refused.Load()) != clients*requests || !c.IsEmpty() || c.queue.Len() != 0 || free.Load() != 3 {
		t.Errorf("enqueued %d, ended %v, refused %d, %d wait, %d places free; want all of %d to end once and 3 places", o.enqueued, o.outcomes, refused.Load(), c.Waiting(), free.Load(), clients*requests)
	}
}

// TestViewHasZeros: a view has the number of requests on hold also where it is zero, so that the console has a
// column for it.
func TestViewHasZeros(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{Name: "default"}}}, new(counts))
		w := &Waiter{Class: "default", Starter: &gate{free: new(atomic.Int64), verdict: NoCapacity}, Item: Item{Pool: "m", Cost: 100}}
		c.Enqueue(w)
		text, err := json.Marshal(c.View())
		if n := strings.Count(string(text), `"requests":1,"on_hold":0`); err != nil || n != 3 {
			t.Errorf("%s, %v: want no requests on hold in the class, the pool and the tenant", text, err)
		}
		c.Cancel(w, Gone)
		c.Wait(w, time.Second)
	})
}

// hold is a Hold that ends when the test says so.
type hold struct{ ready func() }

func (h *hold) OnReady(f func()) { h.ready = f }

// Requests on hold count in the bounds and in what waits, leave when their clients do, survive a reload, and
// delay no others. When a hold ends, the request starts in its order of arrival.
func TestRequestsOnHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		settings := Settings{Classes: []Class{{Name: "high"}, {Name: "low"}}, Limits: Limits{MaxRequests: 20}}
		c := NewController(settings, new(counts))
		var free atomic.Int64
		free.Store(100)
		enqueue := func(class string) (*Waiter, *hold, Bound) {
			h := new(hold)
			w := &Waiter{Class: class, Starter: &gate{free: &free, verdict: NoCapacity}, Hold: h, Item: Item{Pool: "m", Cost: 100}}
			b := c.Enqueue(w)
			return w, h, b
		}
		var waiters []*Waiter
		var holds []*hold
		for range 20 { // more than a round passes over
			w, h, b := enqueue("low")
			if b != WithinBounds {
				t.Fatalf("Enqueue returned bound %d", b)
			}
			waiters, holds = append(waiters, w), append(holds, h)
		}
		if _, _, b := enqueue("low"); b != AllRequests {
			t.Errorf("the request beyond the bound: %d; want %d", b, AllRequests)
		}
		if _, h, b := enqueue("high"); b != WithinBounds {
			t.Errorf("a request of a higher class: %d; want the place of a lower one", b)
		} else {
			waiters, holds = append(waiters, nil), append(holds, h)
		}
		if out := c.Wait(waiters[19], time.Second); out != Displaced {
			t.Errorf("the last of the lower class ended %s; want displaced", out)
		}
		if v := c.View(); v.Classes[1].Requests != 19 || v.Classes[1].OnHold != 19 || v.Pools[1].OnHold != 19 || v.Tenants[1].OnHold != 19 || v.Tenants[1].Late != 0 {
			t.Errorf("%+v; want 19 of the lower class on hold", v)
		}
		c.Cancel(waiters[0], Gone)
		if out := c.Wait(waiters[0], time.Second); out != Gone {
			t.Errorf("the one whose client has left ended %s", out)
		}
		// Others pass, without a forecast of what is on hold.
		if !c.IsIdle("m") {
			t.Error("requests on hold wait for capacity")
		}
		other := &Waiter{Class: "low", Starter: &gate{free: &free}, Item: Item{Pool: "m", Cost: 100}}
		if c.Enqueue(other); other.Forecast != 0 || other.Position != 1 {
			t.Errorf("behind requests on hold: forecast %v, place %d; want 0 and 1", other.Forecast, other.Position)
		}
		if out := c.Wait(other, time.Second); out != Dispatched {
			t.Errorf("a request behind those on hold ended %s", out)
		}
		if out := c.Wait(waiters[1], time.Second); out != Expired {
			t.Errorf("the one that has waited too long ended %s", out)
		}
		c.Reload(settings)
		if v := c.Classes(); v[1].OnHold != 17 {
			t.Errorf("%d are on hold after a reload; want 17", v[1].OnHold)
		}
		holds[0].ready() // it has left
		for i := 2; i < 19; i++ {
			holds[i].ready()
			if out := c.Wait(waiters[i], time.Second); out != Dispatched {
				t.Fatalf("request %d ended %s after its hold", i, out)
			}
		}
		c.Reload(Settings{Classes: settings.Classes, Limits: Limits{MaxRequests: 1}})
		holds[20].ready()
		synctest.Wait()
		if !c.IsEmpty() {
			t.Errorf("%d wait", c.Waiting())
		}
	})
}

// backlogGate is a Starter that notes the backlog of its pool.
type backlogGate struct {
	free, lasts, overtaken *atomic.Int64
}

func (g backlogGate) TryStart(backlog Backlog, _ *time.Time) Verdict {
	if g.free.Add(-1) < 0 {
		g.free.Add(1)
		return NoCapacity
	}
	g.lasts.Store(int64(backlog.Lasts))
	g.overtaken.Store(int64(backlog.Overtaken))
	return Started
}

// TestBacklog: a Starter learns for how long requests of its pool have waited without a break, and how much longer than
// its request another of the group has waited that it overtakes.
func TestBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewController(Settings{Classes: []Class{{Name: "high"}, {Name: "low"}}, Limits: Limits{MaxRequests: 10, MaxTenants: 10}}, &counts{})
		var free, lasts, overtaken, none atomic.Int64
		var wg sync.WaitGroup
		enqueue := func(class, group string, s Starter, hold Hold) {
			w := &Waiter{Class: class, Item: Item{Pool: "m", Group: group, Tenant: "t", Cost: 1}, Starter: s, Hold: hold}
			if c.Enqueue(w) != WithinBounds {
				t.Error("the queue is full")
				return
			}
			wg.Go(func() { c.Wait(w, time.Hour) })
		}
		wait := func(class string) { enqueue(class, "", backlogGate{&free, &lasts, &overtaken}, nil) }
		start := func(wantLasts, wantOvertaken time.Duration, when string) {
			t.Helper()
			free.Add(1)
			c.Wake()
			synctest.Wait()
			if free.Load() != 0 {
				t.Fatalf("%s: nothing started", when)
			}
			if got := time.Duration(lasts.Load()); got < wantLasts || got > wantLasts+20*time.Millisecond {
				t.Errorf("%s, the pool is backlogged for %v; want about %v", when, got, wantLasts)
			}
			if got := time.Duration(overtaken.Load()); got < wantOvertaken-20*time.Millisecond || got > wantOvertaken+20*time.Millisecond {
				t.Errorf("%s, it overtakes one that has waited %v longer; want about %v", when, got, wantOvertaken)
			}
		}
		wait("low")
		time.Sleep(2 * time.Second)
		wait("high")
		time.Sleep(2 * time.Second)
		start(4*time.Second, 2*time.Second, "after 4 s, with one of a higher class since 2 s")
		time.Sleep(time.Second)
		start(5*time.Second, 0, "when the older one is started a second later")
		wg.Wait()
		time.Sleep(time.Minute)
		wait("low")
		time.Sleep(100 * time.Millisecond)
		wait("high")
		start(100*time.Millisecond, 0, "in a short backlog")
		start(100*time.Millisecond, 0, "and its other request")
		wg.Wait()

		// Requests of another group, one that could not start when it was last tried although others could, and the
		// time on hold do not count.
		held := new(hold)
		enqueue("low", "other", &gate{free: &none, verdict: NoCapacity}, nil)
		enqueue("high", "", &gate{free: &none, verdict: NotNow}, nil)
		enqueue("low", "", backlogGate{&free, &lasts, &overtaken}, held)
		time.Sleep(3 * time.Second)
		held.ready()
		wait("high")
		time.Sleep(time.Second)
		start(4*time.Second, 0, "beside others")
		start(4*time.Second, 0, "after a hold")
		none.Add(2)
		wg.Wait()
	})
}
