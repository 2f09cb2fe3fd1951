package schedule

import (
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// turnsOf returns the keys of a prompt that grows: the first n blocks of 16 tokens of one of many
// contexts.
func turnsOf(context, n int) []blockhash.Seq {
	tokens := prompt(16 * n)
	tokens[0] = uint32(1_000_000 + context)
	return blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), tokens, 16)
}

// useAt places a prompt of n blocks on a slot, with all but the last few blocks cached.
func useAt(u *reuseTable, slot worker.Slot, keys []blockhash.Seq, cached int, now time.Duration) {
	r := u.at(int64(now))
	r.find(nil, keys)
	r.place(slot, keys, 16*len(keys), 16*cached)
}

// known makes a table that has seen prompts come again after a second each.
func known() (u *reuseTable, now time.Duration) {
	u = newReuseTable()
	for i := range minReuses {
		useAt(u, 4000, turnsOf(-1, 40+i), 40+i-1, now)
		now += time.Second
	}
	useAt(u, 4000, turnsOf(-1, 40+minReuses), 40, now)
	return u, now
}

// A context counts once, however many of its turns are placed, and counts half after the half-life.
func TestLiveTokensCountAContextOnce(t *testing.T) {
	u, now := known()
	for n := 100; n <= 120; n += 2 {
		useAt(u, 1, turnsOf(1, n), n-2, now)
		now += 100 * time.Millisecond
	}
	live := func(after time.Duration) float64 {
		r := u.at(int64(now + after))
		return r.liveTokens(1)
	}
	// The first turn had 98 blocks cached from elsewhere: it is not known who else uses them.
	if got := live(0); got < 16*20 || got > 16*24 {
		t.Errorf("%v tokens used lately, want those of 22 blocks", got)
	}
	useAt(u, 2, turnsOf(2, 100), 0, now)
	for n := 102; n <= 120; n += 2 {
		useAt(u, 2, turnsOf(2, n), n-2, now)
	}
	r := u.at(int64(now))
	if got := r.liveTokens(2); math.Abs(got-16*120) > 16 {
		t.Errorf("%v tokens used lately, want %d", got, 16*120)
	}
	half := time.Duration(float64(tick) / r.decay)
	later := u.at(int64(now + half))
	if got := later.liveTokens(2); math.Abs(got-16*60) > 16*2 {
		t.Errorf("%v tokens after the half-life of %v, want half", got, half)
	}
}

// What leaves a cache that is full of contexts in use will be asked for again; what leaves one whose
// contexts have ended will not. Before reuse has been seen, every token counts.
func TestDisplacedTokensCountByTheirUse(t *testing.T) {
	r := newReuseTable().at(0)
	if got := r.displaced(1, 1000, 20_000); got != 1000 {
		t.Errorf("%v of 1000 count while nothing is known", got)
	}
	u, now := known()
	for i := range 10 {
		useAt(u, 1, turnsOf(100+i, 120), 0, now) // 19,200 tokens
		useAt(u, 2, turnsOf(200+i, 120), 0, now-time.Minute)
		useAt(u, 3, turnsOf(300+i, 60), 0, now)
	}
	r = u.at(int64(now))
	busy, ended, half := r.displaced(1, 1000, 20_000), r.displaced(2, 1000, 20_000), r.displaced(3, 1000, 20_000)
	if ended > 1 || half <= ended || busy < 3*half {
		t.Errorf("of 1000 displaced tokens count %v where all are in use, %v where half are, %v where none is", busy, half, ended)
	}
	u.forget(1)
	if got := r.displaced(1, 1000, 20_000); got != 0 {
		t.Errorf("%v count after a restart", got)
	}
}

// A new context goes to the rank whose cache holds ended ones, although both caches are full and
// equally loaded.
func TestNewContextsAvoidCachesInUse(t *testing.T) {
	for _, n := range []int{3, 64} {
		synctest.Test(t, func(t *testing.T) {
			rs := withCaches(n, 1000)
			for _, r := range rs {
				r.CachedBlocks.Store(1000)
			}
			s := New(placed(0.5, 4))
			choose := func(at []*worker.Rank, keys []blockhash.Seq) *worker.Rank {
				c, _ := s.Choose(&Query{Leg: WholeLeg, Candidates: at, PromptTokens: 16 * len(keys), MaxTokens: 16, Keys: keys, KeyTokens: 16, Attempt: 1})
				c.Reservation.Release()
				return c.Rank
			}
			// Eight contexts on each rank but the last end; those of the others go on.
			for turn := range 20 {
				for i, r := range rs {
					if i == n-1 && turn > 2 {
						continue
					}
					for k := range 8 {
						choose([]*worker.Rank{r}, turnsOf(10*i+k, 80+2*turn))
					}
				}
				time.Sleep(time.Second)
			}
			time.Sleep(2 * time.Second)
			if n > maxAllRecorded {
				onIndex(t, s, &Query{Leg: WholeLeg, Candidates: rs, PromptTokens: 1600}).rebuild(s)
			}
			for i := range 3 {
				if r := choose(rs, turnsOf(10_000+i, 100)); r != rs[n-1] {
					t.Errorf("%d ranks: a new context goes to %v, want %v", n, r.ID, rs[n-1].ID)
				}
			}
		})
	}
}

// Concurrent choices may lose a hint, but nothing else. (Run with the race detector.)
func TestReuseTableIsSafe(t *testing.T) {
	u, began := known()
	contexts := make([][]blockhash.Seq, 7)
	for i := range contexts {
		contexts[i] = turnsOf(i, 40)
	}
	start := time.Now()
	now := func() time.Duration { return began + time.Since(start) }
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				useAt(u, worker.Slot(i%3), contexts[(g+i)%len(contexts)], i%20, now())
			}
		})
	}
	wg.Wait()
	r := u.at(int64(now()))
	for s := range worker.Slot(3) {
		// Four choices for the same context can at worst all count it.
		if got := r.liveTokens(s); math.IsNaN(got) || got <= 0 || got > 4*7*40*16 {
			t.Errorf("slot %d: %v tokens used lately", s, got)
		}
	}
}

func TestReuseTableDoesNotAllocate(t *testing.T) {
	u, now := known()
	keys := turnsOf(5, 200)
	dst := make([]usedPrompt, 0, maxReused)
	if n := testing.AllocsPerRun(100, func() {
		r := u.at(int64(now))
		r.find(dst, keys)
		r.displaced(3, 100, 1000)
		r.place(3, keys, 3200, 100)
	}); n != 0 {
		t.Errorf("%v allocations per choice", n)
	}
}
