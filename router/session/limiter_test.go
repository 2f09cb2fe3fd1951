package session

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sluice/bench/testwait"
)

type meter Capacity

func (m meter) Capacity() Capacity { return Capacity(m) }

type meterFunc func() Capacity

func (f meterFunc) Capacity() Capacity { return f() }

// limiterTest runs turns of sessions whose prompts have a number of tokens, on a pool of a size.
type limiterTest struct {
	*testing.T
	table *Table
	size  int64
}

func newLimiterTest(t *testing.T, opt Options, size int64) *limiterTest {
	opt.LimitActive = true
	return &limiterTest{t, NewTable(opt), size}
}

// begin starts a turn. Its prompt shares nothing with other sessions.
func (l *limiterTest) begin(tenant, id string, tokens int) (Turn, *Wait) {
	u := l.table.Begin(l.table.KeyOf(tenant, []byte(id)), tenant, SluiceSession, false)
	w := l.table.Start(&u, Request{Pool: "m", Tokens: tokens, Meter: meter{Tokens: l.size, Occupancy: -1}})
	if w == nil {
		l.table.Observe(&u, nil, 16, tokens, false)
	}
	return u, w
}

// turn runs a turn that need not wait.
func (l *limiterTest) turn(tenant, id string, tokens int) {
	l.Helper()
	u, w := l.begin(tenant, id, tokens)
	if w != nil {
		l.Fatalf("%s waits", id)
	}
	l.table.End(&u, Result{OK: true, Cached: -1, Prompt: tokens})
}

// limit makes the pool limited, as evidence does.
func (l *limiterTest) limit() {
	l.table.mu.Lock()
	defer l.table.mu.Unlock()
	p := l.table.poolOf("m")
	p.beginLimit()
	p.waitedAt = time.Now()
}

// ready returns a channel that is closed when the turn may go on.
func ready(w *Wait) <-chan struct{} {
	c := make(chan struct{})
	w.OnReady(func() { close(c) })
	return c
}

// isReady is called at most once after another OnReady.
func isReady(w *Wait) bool {
	synctest.Wait()
	select {
	case <-ready(w):
		return true
	default:
		return false
	}
}

// start ends a wait that must be over, and the turn.
func (l *limiterTest) start(u *Turn, w *Wait, tokens int) {
	l.Helper()
	if !isReady(w) {
		l.Fatal("it still waits")
	}
	w.End(Started)
	l.table.Observe(u, nil, 16, tokens, false)
	l.table.End(u, Result{OK: true, Cached: -1, Prompt: tokens})
}

// Of a pool of 1,000 tokens sessions may use 850. A third session of 400 waits until one of the others
// is finished, or has not been used for Hold.
func TestSessionsWaitForSpace(t *testing.T) {
	for _, how := range []string{"finish", "hold", "expired wait", "client gone", "reload", "drain"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLimiterTest(t, Options{Hold: 10 * time.Second, MaxWait: time.Minute}, 1000)
				l.turn("", "a", 400)
				l.limit()
				b, wb := l.begin("", "b", 400)
				if wb != nil {
					t.Fatal("the second session waits")
				}
				c, wc := l.begin("", "c", 400)
				if wc == nil {
					t.Fatal("the third session does not wait")
				}
				if st := l.table.Stats(); st.Active != 2 || st.Waiting != 1 || st.Limited != 1 || st.Limit != 850 || st.Need != 800 {
					t.Errorf("%+v", st)
				}
				l.turn("", "a", 410) // an active session goes on
				if isReady(wc) {
					t.Fatal("the third session does not wait")
				}
				began, want := time.Now(), Started
				switch how {
				case "finish":
					l.table.Finish(l.table.KeyOf("", []byte("a")))
				case "hold":
					<-ready(wc)
					if took := time.Since(began); took != time.Second { // its turns follow each other at once
						t.Errorf("a place was free after %v, want a tenth of Hold", took)
					}
				case "reload":
					l.table.SetOptions(Options{})
				case "drain":
					l.table.Drain()
				case "expired wait":
					want = Overran
					l.table.SetOptions(Options{LimitActive: true, Hold: time.Hour})
					if got := wc.Longest(); got != time.Minute {
						t.Errorf("it waits for %v, want MaxWait", got)
					}
					wc.Overrun()
				case "client gone":
					want = Left
				}
				if want == Started {
					l.start(&c, wc, 400)
				} else {
					wc.End(want)
					l.table.End(&c, Result{})
				}
				l.table.End(&b, Result{OK: true, Prompt: 400})
				st := l.table.Stats()
				if st.Waiting != 0 || st.Counts.Waits[want] != 1 {
					t.Errorf("afterwards: %+v", st)
				}
				if active := map[string]int{"finish": 2, "hold": 2, "expired wait": 3, "client gone": 2, "reload": 3, "drain": 3}[how]; st.Active != active {
					t.Errorf("%d sessions are active, want %d", st.Active, active)
				}
				time.Sleep(2 * time.Hour)
				if st := l.table.Stats(); st.Sessions != 0 || st.Active != 0 || st.Need != 0 || l.table.timer != nil {
					t.Errorf("hours later: %+v", st)
				}
			})
		})
	}
}

// A session that waits is passed by no other: the tenant with the fewest active sessions is next, then
// the session that began first, however much it needs.
func TestOrderOfWaitingSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiterTest(t, Options{Hold: time.Hour, MaxWait: time.Hour}, 1000)
		l.turn("x", "x1", 400)
		l.turn("x", "x2", 400)
		l.limit()
		begin := func(tenant, id string, tokens int) (*Turn, *Wait) {
			u, w := l.begin(tenant, id, tokens)
			if w == nil {
				t.Fatalf("%s does not wait", id)
			}
			return &u, w
		}
		x3, w3 := begin("x", "x3", 500)
		x4, w4 := begin("x", "x4", 10)
		y1, v1 := begin("y", "y1", 300)
		l.table.Finish(l.table.KeyOf("x", []byte("x1")))
		if isReady(w3) || isReady(w4) || !isReady(v1) {
			t.Fatal("the first place is not y1's")
		}
		l.start(y1, v1, 300)
		if isReady(w4) {
			t.Error("x4 has passed x3")
		}
		l.table.Finish(l.table.KeyOf("y", []byte("y1")))
		l.table.Finish(l.table.KeyOf("x", []byte("x2")))
		if !isReady(w3) || !isReady(w4) {
			t.Error("x3 and x4 fit now")
		}
		l.start(x3, w3, 500)
		l.start(x4, w4, 10)
	})
}

// When the prompts of active sessions have grown, those that began last wait at their next turn,
// and go on before new ones.
func TestGrownSessionsYield(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiterTest(t, Options{Hold: time.Minute, MaxWait: time.Hour}, 1000)
		for _, id := range []string{"a", "b", "c"} {
			l.turn("", id, 250)
		}
		l.limit()
		l.turn("", "a", 450) // 950 of 850
		l.turn("", "b", 300)
		c, wc := l.begin("", "c", 260)
		if wc == nil {
			t.Fatal("c does not wait")
		}
		d, wd := l.begin("", "d", 100)
		if wd == nil || isReady(wc) {
			t.Fatal("d has passed c")
		}
		l.turn("", "a", 460)
		l.turn("", "b", 310)
		l.table.Finish(l.table.KeyOf("", []byte("a")))
		l.start(&c, wc, 260)
		l.start(&d, wd, 100)
		// A session that is alone may need more than there is.
		l.table.Finish(l.table.KeyOf("", []byte("b")))
		l.table.Finish(l.table.KeyOf("", []byte("c")))
		l.table.Finish(l.table.KeyOf("", []byte("d")))
		l.turn("", "e", 5000)
		l.turn("", "e", 6000)
	})
}

// Higher classes get places first, then the order is that of the tenants.
func TestOrderOfClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiterTest(t, Options{Hold: time.Hour}, 1000)
		l.turn("x", "x1", 800)
		l.limit()
		var waits []*Wait
		for i, class := range []int{1, 1, 0} {
			u := l.table.Begin(l.table.KeyOf("y", fmt.Append(nil, i)), "y", SluiceSession, false)
			w := l.table.Start(&u, Request{Pool: "m", Class: class, Tokens: 400, Meter: meter{Tokens: l.size, Occupancy: -1}})
			if w == nil {
				t.Fatalf("turn %d does not wait", i)
			}
			waits = append(waits, w)
		}
		u := l.table.Begin(l.table.KeyOf("z", []byte("z")), "z", SluiceSession, false)
		if w := l.table.Start(&u, Request{Pool: "m", Class: 1, Tokens: 400, CannotWait: true, Meter: meter{Tokens: l.size, Occupancy: -1}}); w != nil {
			t.Error("a turn that cannot wait waits")
		}
		l.table.Finish(l.table.KeyOf("x", []byte("x1")))
		if isReady(waits[0]) || isReady(waits[1]) || !isReady(waits[2]) {
			t.Error("the place is not that of the highest class")
		}
		for _, w := range waits {
			w.End(Refused)
		}
		if st := l.table.Stats(); st.Waiting != 0 || st.Counts.Waits != [NumWaits]uint64{Started: 1, Refused: 2} {
			t.Errorf("afterwards: %+v", st)
		}
	})
}

// Turns of one session wait together, and start together.
func TestTurnsOfOneSessionStartTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiterTest(t, Options{Hold: time.Hour}, 1000)
		l.turn("", "a", 800)
		l.limit()
		_, first := l.begin("", "b", 400)
		_, second := l.begin("", "b", 400)
		if first == nil || second == nil {
			t.Fatal("a turn does not wait")
		}
		second.Overrun()
		if !isReady(first) || !isReady(second) {
			t.Error("a turn of an active session waits")
		}
		if how, _ := first.End(Left); how != Started {
			t.Errorf("the first turn ended %s; want started", how)
		}
		if st := l.table.Stats(); st.Waiting != 0 || st.Counts.Waits != [NumWaits]uint64{Started: 1, Overran: 1} {
			t.Errorf("afterwards: %+v", st)
		}
	})
}

// Only a loss of KV by sessions that are active makes the limit, and only if they need more than there
// is, as far as that is known.
func TestEvidence(t *testing.T) {
	for _, c := range []struct {
		name     string
		capacity Capacity
		pause    time.Duration
		cached   int // of 1,024 tokens that are expected
		busy     float64
		off      bool
		limited  bool
	}{
		{"loss", Capacity{Tokens: 20_000, Occupancy: -1, Ranks: 1}, time.Second, 300, 1, false, true},
		{"loss, caches full", Capacity{Tokens: 20_000, Occupancy: 0.97, Ranks: 1}, time.Second, 300, 1, false, true},
		{"loss, size unknown", Capacity{Occupancy: -1, Ranks: 1}, time.Second, 300, 1, false, true},
		{"loss, ranks idle", Capacity{Tokens: 20_000, Occupancy: -1, Ranks: 1}, time.Second, 300, 0.5, false, false},
		{"no loss", Capacity{Tokens: 20_000, Occupancy: 1, Ranks: 1}, time.Second, 1000, 1, false, false},
		{"enough KV", Capacity{Tokens: 100_000, Occupancy: -1, Ranks: 1}, time.Second, 0, 1, false, false},
		{"caches not full", Capacity{Tokens: 20_000, Occupancy: 0.5, Ranks: 1}, time.Second, 0, 1, false, false},
		{"not active between turns", Capacity{Tokens: 20_000, Occupancy: -1, Ranks: 1}, time.Minute, 0, 1, false, false},
		{"cached tokens not reported", Capacity{Tokens: 20_000, Occupancy: -1, Ranks: 1}, time.Second, -1, 1, false, false},
		{"off", Capacity{Tokens: 20_000, Occupancy: -1, Ranks: 1}, time.Second, 0, 1, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tb := NewTable(Options{Hold: 30 * time.Second, LimitActive: !c.off})
				c.capacity.PerToken = time.Duration(c.busy * c.busy * 20_000)
				for round := range 3 {
					for i := range 32 {
						time.Sleep(10 * time.Millisecond)
						id := fmt.Sprint(i)
						u := tb.Begin(tb.KeyOf("", []byte(id)), "", SluiceSession, false)
						if w := tb.Start(&u, Request{Pool: "m", Tokens: 1100, Meter: meter(c.capacity)}); w != nil {
							w.Overrun()
						}
						tb.Observe(&u, blocksOf(0, i+1, 64+4*round), 16, 1024+64*round, false)
						tb.End(&u, Result{OK: true, Cached: c.cached, Prompt: 1024 + 64*round})
					}
					time.Sleep(c.pause)
				}
				if st := tb.Stats(); (st.Limited == 1) != c.limited {
					t.Errorf("limited %v, want %v: %+v", st.Limited == 1, c.limited, st)
				}
			})
		})
	}
}

// rankModel is an engine with a cache of whole sessions that computes one prompt after another.
type rankModel struct {
	computed int           // tokens
	speed    int           // tokens a second
	queued   int           // tokens to compute, by the estimate at the choice
	turns    chan struct{} // a lock: a bubble's time stands still while a goroutine waits for a mutex
	size     int
	used     int
	sessions map[int]int // cached tokens
	lru      []int
}

// choose returns the rank that starts a prompt first, as the router's cost does.
func choose(ranks []*rankModel, id, prompt int) (best *rankModel, missing int) {
	least := math.MaxInt
	for _, m := range ranks {
		if n := m.queued + prompt - min(m.sessions[id], prompt); n < least || n == least && m.used < best.used {
			best, least, missing = m, n, prompt-min(m.sessions[id], prompt)
		}
	}
	return best, missing
}

func (m *rankModel) turn(id, prompt int, mu *sync.Mutex) (cached int) {
	m.turns <- struct{}{}
	defer func() { <-m.turns }()
	mu.Lock()
	cached = min(m.sessions[id], prompt)
	mu.Unlock()
	time.Sleep(time.Duration(prompt-cached) * time.Second / time.Duration(m.speed))
	mu.Lock()
	defer mu.Unlock()
	m.computed += prompt - cached
	m.lru = append(slices.DeleteFunc(m.lru, func(o int) bool { return o == id }), id)
	m.used += prompt - m.sessions[id]
	m.sessions[id] = prompt
	for m.used > m.size && len(m.lru) > 1 {
		m.used -= m.sessions[m.lru[0]]
		delete(m.sessions, m.lru[0])
		m.lru = m.lru[1:]
	}
	return cached
}

// 64 agents of 20 to 60 turns on four ranks, whose KV holds a third of what they need.
func runAgents(t *testing.T, speed int, limit bool) (hitShare float64, took time.Duration, st Stats) {
	synctest.Test(t, func(t *testing.T) {
		const agents, ranks = 64, 4
		rnd := rand.New(rand.NewPCG(1, 1))
		tb := NewTable(Options{LimitActive: limit, Hold: 20 * time.Second, MaxWait: 10 * time.Minute})
		size := agents * 12_000 / 3 / ranks
		models := make([]*rankModel, ranks)
		for i := range models {
			models[i] = &rankModel{speed: speed, turns: make(chan struct{}, 1), size: size, sessions: map[int]int{}}
		}
		var mu sync.Mutex
		capacity := func() Capacity {
			mu.Lock()
			defer mu.Unlock()
			c := Capacity{Tokens: int64(size * ranks), Occupancy: -1, PerToken: time.Second / time.Duration(speed), Ranks: ranks}
			for _, m := range models {
				c.Computed += int64(m.computed)
			}
			return c
		}
		began := time.Now()
		var wg sync.WaitGroup
		prompted, cachedAll := 0, 0
		for id := range agents {
			turns, seed := 20+rnd.IntN(41), rnd.Uint64()
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(seed, 2))
				key, prompt := tb.KeyOf("", fmt.Append(nil, id)), 1500+rnd.IntN(1000)
				for i := range turns {
					u := tb.Begin(key, "", SluiceSession, i == turns-1)
					if w := tb.Start(&u, Request{Pool: "m", Tokens: prompt, Meter: meterFunc(capacity)}); w != nil {
						timer := time.AfterFunc(w.Longest(), w.Overrun)
						<-ready(w)
						timer.Stop()
					}
					tb.Observe(&u, blocksOf(0, id+1, prompt/16), 16, prompt, false)
					mu.Lock()
					rank, missing := choose(models, id, prompt)
					rank.queued += missing
					mu.Unlock()
					cached := rank.turn(id, prompt, &mu)
					mu.Lock()
					rank.queued -= missing
					mu.Unlock()
					time.Sleep(time.Duration(rnd.ExpFloat64() * float64(time.Second))) // the answer
					tb.End(&u, Result{OK: true, Cached: cached, Prompt: prompt, Output: 50})
					mu.Lock()
					prompted, cachedAll = prompted+prompt, cachedAll+cached
					mu.Unlock()
					prompt += 100 + rnd.IntN(500)
					time.Sleep(time.Duration(rnd.ExpFloat64() * 2 * float64(time.Second))) // the tool
				}
			})
		}
		wg.Wait()
		hitShare, took, st = float64(cachedAll)/float64(prompted), time.Since(began), tb.Stats()
	})
	return hitShare, took, st
}

// The limit of active sessions raises the share of cached tokens. Where the ranks are busy, it ends the
// work of all sessions much earlier; where they have time to compute prompts again, not much later.
func TestLimitAgainstThrashing(t *testing.T) {
	for _, c := range []struct {
		speed int     // tokens a second of a rank
		hits  float64 // least gain
		time  float64 // longest time, of that without a limit
	}{{3000, 0.3, 0.7}, {8000, 0.25, 0.95}, {20_000, 0.1, 1.4}, {100_000, -0.05, 1.1}} {
		var gains, times []float64 // of three tries: goroutines run in another order each time
		for range 3 {
			without, slow, _ := runAgents(t, c.speed, false)
			with, fast, st := runAgents(t, c.speed, true)
			t.Logf("%d tokens a second: %.0f %% of the tokens cached, %.0f %% with the limit; all done after %v, %v with the limit; waits %v",
				c.speed, 100*without, 100*with, slow.Round(time.Second), fast.Round(time.Second), st.Counts.Waits)
			gains, times = append(gains, with-without), append(times, fast.Seconds()/slow.Seconds())
			if st.Sessions != 0 || st.Active != 0 || st.Need != 0 || st.Waiting != 0 {
				t.Errorf("afterwards: %+v", st)
			}
		}
		if testwait.Median(gains...) < c.hits || testwait.Median(times...) > c.time {
			t.Errorf("want %.0f points more cached, and at most %.2f of the time", 100*c.hits, c.time)
		}
	}
}

// A place is held for several of the session's usual pauses, at most for Hold: a session that ends
// without saying so holds it no longer than it has to.
func TestHoldFollowsPauses(t *testing.T) {
	for pause, want := range map[time.Duration]time.Duration{time.Millisecond: 6 * time.Second, 2 * time.Second: 12 * time.Second, 40 * time.Second: time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			l := newLimiterTest(t, Options{Hold: time.Minute}, 1000)
			for range 20 {
				l.turn("", "a", 100)
				time.Sleep(pause)
			}
			l.turn("", "a", 100)
			time.Sleep(want - time.Nanosecond)
			if l.table.Stats().Active != 1 {
				t.Errorf("pauses of %v: not held for %v", pause, want)
			}
			time.Sleep(time.Nanosecond)
			if l.table.Stats().Active != 0 {
				t.Errorf("pauses of %v: held for more than %v", pause, want)
			}
		})
	}
}
