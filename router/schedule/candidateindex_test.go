package schedule

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// onIndex makes a pool known, so that the next choice is made on its board.
func onIndex(t *testing.T, s *Scheduler, q *Query) *candidateIndex {
	t.Helper()
	for range 2 {
		c, _ := s.Choose(q)
		c.Reservation.Release()
	}
	x := s.indexes.find(q.Candidates)
	if x == nil {
		t.Fatal("no board was made")
	}
	return x
}

// rebuild lets the board see what engines report now.
func (x *candidateIndex) rebuild(s *Scheduler) {
	x.refreshed.Store(-int64(time.Hour))
	x.refresh(s, s.now())
}

func mustBeEmpty(t *testing.T, s *Scheduler, rs []*worker.Rank) {
	t.Helper()
	mustZero(t, rs)
	for _, r := range rs {
		for leg := range s.load.load {
			if left := s.load.load[leg][slotAt(r.Slot)].Load() - s.load.engineLoad[leg][slotAt(r.Slot)].Load(); left != 0 {
				t.Errorf("%v: %d ns left in the load counters for the %v leg", r.ID, left, LegKind(leg))
			}
		}
	}
}

// The board chooses what the plain way would, on the same random loads.
func TestIndexMatchesFullScan(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 1))
		rs := ranks(100 + rng.IntN(200))
		ix, guess := kvindex.New(kvindex.Options{}), kvindex.New(kvindex.Options{})
		toks := prompt(1600)
		for _, r := range rs {
			switch rng.IntN(6) {
			case 0:
				store(ix, r, toks, 16, 1+rng.IntN(100))
			case 1:
				store(guess, r, toks, 16, 1+rng.IntN(100))
			}
			r.Feed.Store(uint32(rng.IntN(4)))
		}
		var exact, approx kvindex.Overlap
		find(ix, &exact, toks, 16)
		find(guess, &approx, toks, 16)
		s := New(testOptions)
		var cached []*Reservation
		for _, r := range rs {
			for range rng.IntN(3) {
				c, _ := s.Choose(&Query{Leg: LegKind(rng.IntN(3)), Candidates: []*worker.Rank{r}, PromptTokens: 1 + rng.IntN(3000), MaxTokens: rng.IntN(900)})
				cached = append(cached, c.Reservation)
			}
			if rng.IntN(10) == 0 {
				r.Waiting.Store(int64(rng.IntN(6)))
			}
			if rng.IntN(10) == 0 {
				r.SetKVUsage(0.9 + rng.Float64()/10)
				r.Worker.SetInfo(&worker.Info{BlockSize: 16, TotalBlocks: 1000})
			}
		}
		for leg := range LegKind(3) {
			q := &Query{Leg: leg, Candidates: rs, Approx: &approx, ApproxBlockTokens: 16, PromptTokens: 1600, MaxTokens: 100}
			if seed%3 != 0 {
				q.Overlap = &exact
			}
			x := onIndex(t, s, q)
			x.rebuild(s)
			f := s.newChoiceContext(q)
			sc := &scratch{}
			rng := s.random()
			if !cheapestOf(&f, q, sc, &rng, false) {
				t.Fatal("nothing picked")
			}
			c, ok := s.Choose(q)
			if !ok || c.Cost > sc.best.cost+1e-4 || c.Cost < sc.best.cost-1e-4 {
				t.Errorf("seed %d, %v: the board takes %v at %v ms, the least is %v at %v ms", seed, leg, c.Rank.ID, c.Cost, sc.best.rank.ID, sc.best.cost)
			}
			c.Reservation.Release()
		}
		for _, r := range cached {
			r.Release()
		}
		mustBeEmpty(t, s, rs)
	}
}

func TestIndexBurstSpreads(t *testing.T) {
	for leg := range LegKind(3) {
		rs := ranks(100)
		s := New(testOptions)
		q := Query{Leg: leg, Candidates: rs, PromptTokens: 1000, MaxTokens: 100, Attempt: 1}
		onIndex(t, s, &q)
		var wg sync.WaitGroup
		res := make([][]*Reservation, 50)
		start := make(chan struct{})
		for g := range 50 {
			wg.Go(func() {
				<-start
				for i := range 40 {
					q := q
					q.RequestID = fmt.Sprint(g, "-", i)
					c, _ := s.Choose(&q)
					res[g] = append(res[g], c.Reservation)
				}
			})
		}
		close(start)
		wg.Wait()
		for _, r := range rs {
			if n := r.Requests.Load(); n < 18 || n > 22 {
				t.Errorf("%v: %v got %d of 2000, want 20 ± 10 %%", leg, r.ID, n)
			}
		}
		for _, rr := range res {
			for _, r := range rr {
				wg.Go(r.Release)
			}
		}
		wg.Wait()
		mustBeEmpty(t, s, rs)
	}
}

func TestIndexDrawsTies(t *testing.T) {
	rs := ranks(80)
	s := New(testOptions)
	q := &Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 100}
	onIndex(t, s, q)
	count := map[*worker.Rank]int{}
	draw := func(n int) {
		clear(count)
		for range n {
			c, _ := s.Choose(q)
			count[c.Rank]++
			c.Reservation.Release()
		}
	}
	draw(8000)
	for _, r := range rs {
		if count[r] < 50 || count[r] > 150 {
			t.Errorf("%v drawn %d times of 8000, want about 100", r.ID, count[r])
		}
	}
	for i, r := range rs {
		if i != 3 && i != 4 && i != 70 {
			addLoad(s, r, 1000)
		}
	}
	draw(3000)
	for _, i := range []int{3, 4, 70} {
		if n := count[rs[i]]; n < 800 || n > 1200 {
			t.Errorf("%v drawn %d times of 3000, want about 1000", rs[i].ID, n)
		}
	}
}

func TestIndexExcludes(t *testing.T) {
	rs := ranks(70)
	s := New(testOptions)
	q := &Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 100}
	onIndex(t, s, q)
	for i, r := range rs {
		if i > 1 {
			addLoad(s, r, 1000)
		}
	}
	q.Excluded = rs[:1]
	for range 20 {
		if c, _ := s.Choose(q); c.Rank != rs[1] {
			t.Fatalf("chose %v", c.Rank.ID)
		} else {
			c.Reservation.Release()
		}
	}
}

func TestIndexesAreBounded(t *testing.T) {
	s := New(testOptions)
	var pools [][]*worker.Rank
	for range maxIndexes + 20 {
		pools = append(pools, ranks(65))
	}
	for range 3 {
		for _, p := range pools {
			q := &Query{Candidates: p}
			for range 2 {
				c, ok := s.Choose(q)
				if !ok {
					t.Fatal("nothing chosen")
				}
				c.Reservation.Release()
			}
		}
	}
	if n := len(*s.indexes.indexes.Load()); n != maxIndexes {
		t.Errorf("%d boards are kept", n)
	}
	// Slots that are not the fleet's: all the same.
	odd := ranks(70)
	for _, r := range odd {
		r.Slot = 7
	}
	for range 3 {
		c, ok := s.Choose(&Query{Candidates: odd})
		if !ok {
			t.Fatal("nothing chosen")
		}
		c.Reservation.Release()
	}
	mustZero(t, odd)
}
