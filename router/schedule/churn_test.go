package schedule

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"sluice/router/worker"
)

// Pools come and go, slots are given to new ranks, loads and feeds change, while
// choices are made: each choice is one of its candidates, and in the end nothing is
// left booked, by the ranks' counters and by the load counters.
func TestChoicesWhileRanksComeAndGo(t *testing.T) {
	const slots = 300
	opt := testOptions
	opt.Explain = 64
	s := New(opt)
	all := ranks(slots)
	var mu sync.Mutex
	var pool atomic.Pointer[[]*worker.Rank]
	change := func(rng *rand.Rand) {
		mu.Lock()
		defer mu.Unlock()
		next := make([]*worker.Rank, 0, slots)
		for i := range slots {
			if rng.IntN(4) > 0 {
				next = append(next, all[i])
			}
		}
		rng.Shuffle(len(next), func(i, j int) { next[i], next[j] = next[j], next[i] })
		pool.Store(&next)
	}
	change(rand.New(rand.NewPCG(0, 0)))
	var choosers, churn sync.WaitGroup
	stop := make(chan struct{})
	churn.Go(func() {
		rng := rand.New(rand.NewPCG(1, 1))
		for {
			select {
			case <-stop:
				return
			default:
			}
			change(rng)
			for range 20 {
				r := all[rng.IntN(slots)]
				r.Waiting.Store(int64(rng.IntN(4)))
				r.Feed.Store(uint32(rng.IntN(4)))
				r.SetKVUsage(rng.Float64())
				s.Forget(r.Slot)
			}
		}
	})
	toks := prompt(640)
	keys := keysOf(toks)
	for g := range 4 {
		choosers.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(g)))
			var cached []*Reservation
			for i := range 3000 {
				c := *pool.Load()
				q := &Query{Leg: LegKind(rng.IntN(3)), Candidates: c, PromptTokens: 640, MaxTokens: rng.IntN(400), Keys: keys, KeyTokens: 16, RequestID: string(rune('a' + i%20)), Attempt: 1}
				if rng.IntN(8) == 0 {
					q.Session = rng.Uint64() | 1
				}
				got, ok := s.Choose(q)
				if !ok || !slices.Contains(c, got.Rank) {
					t.Errorf("chose %v, no candidate", got.Rank)
					return
				}
				cached = append(cached, got.Reservation)
				if len(cached) > 50 {
					k := rng.IntN(len(cached))
					cached[k].PrefillDone()
					cached[k].Release()
					cached = slices.Delete(cached, k, k+1)
				}
			}
			for _, r := range cached {
				r.Release()
			}
		})
	}
	choosers.Wait()
	close(stop)
	churn.Wait()
	for _, r := range all { // loads reported by engines are not reservations
		r.Waiting.Store(0)
		r.SetKVUsage(0)
	}
	mustBeEmpty(t, s, all)
}

// A rank without a feed that can be trusted is shown as unknown, not as empty.
func TestUnknownOverlapIsShown(t *testing.T) {
	rs := ranks(5)
	for i, f := range []worker.FeedState{worker.FeedNone, worker.FeedSyncing, worker.FeedLive, worker.FeedBroken, worker.FeedSilent} {
		rs[i].Feed.Store(uint32(f))
	}
	s := New(testOptions)
	s.Choose(&Query{Candidates: rs, PromptTokens: 100, RequestID: "a", Attempt: 1})
	for _, x := range decode(t, s, "a").Decisions[0].Shown {
		if want := x.Feed != "live"; x.Unknown != want {
			t.Errorf("feed %s: unknown %v", x.Feed, x.Unknown)
		}
	}
}
