package disagg

import (
	"slices"
	"testing"
	"time"

	"sluice/router/fleet"
	"sluice/router/worker"
)

func poolOf(n int) *fleet.Pool {
	p := &fleet.Pool{Model: "m"}
	for range n {
		r := worker.New(worker.Spec{ID: "w", URL: "http://127.0.0.1:1", BlockSize: 16}).Ranks[0]
		r.Feed.Store(uint32(worker.FeedLive))
		p.Aggregated = append(p.Aggregated, r)
	}
	return p
}

func TestCensus(t *testing.T) {
	for _, n := range []int{censusFrom, censusFrom + 1} {
		var all censuses
		var room census
		p, now := poolOf(n), time.Now()
		if c := all.of(p, now, &room); c.guess || !slices.Equal(c.sizes, []int{16}) {
			t.Errorf("%d ranks, all live: guess %v, sizes %v", n, c.guess, c.sizes)
		}
		p.Aggregated[0].Feed.Store(uint32(worker.FeedSilent))
		p.Aggregated[1].EventBlockSize.Store(32)
		p.Aggregated[2].Feed.Store(uint32(worker.FeedNone))
		p.Aggregated[2].EventBlockSize.Store(64)
		if c, small := all.of(p, now.Add(censusFor-1), &room), n == censusFrom; c.guess != small {
			t.Errorf("%d ranks at once: guess %v", n, c.guess)
		}
		if c := all.of(p, now.Add(censusFor), &room); !c.guess || !slices.Equal(c.sizes, []int{16, 32}) {
			t.Errorf("%d ranks a while later: guess %v, sizes %v", n, c.guess, c.sizes)
		}
		if allocs := testing.AllocsPerRun(100, func() { all.of(p, now.Add(censusFor), &room) }); allocs != 0 {
			t.Errorf("%d ranks: %v allocations", n, allocs)
		}
		// Another pool at the same place of the table is not taken for it.
		for range 2 * len(all) {
			if c := all.of(poolOf(n), now.Add(censusFor), &room); c.guess {
				t.Fatal("another pool's census")
			}
		}
	}
}

// The pool of a request that names workers is its own, and the next one's lies in the same
// place.
func TestCensusOfNamedWorkers(t *testing.T) {
	q := &request{run: run{r: new(Runner)}}
	now := time.Now()
	q.own = *poolOf(censusFrom + 1)
	q.pool = &q.own
	if c := q.census(now); c.guess || !slices.Equal(c.sizes, []int{16}) {
		t.Errorf("all live: guess %v, sizes %v", c.guess, c.sizes)
	}
	q.own = *poolOf(censusFrom + 1)
	q.own.Aggregated[0].Feed.Store(uint32(worker.FeedSilent))
	q.own.Aggregated[1].EventBlockSize.Store(32)
	if c := q.census(now); !c.guess || !slices.Equal(c.sizes, []int{16, 32}) {
		t.Errorf("another's: guess %v, sizes %v", c.guess, c.sizes)
	}
	if allocs := testing.AllocsPerRun(100, func() { q.census(now) }); allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}
