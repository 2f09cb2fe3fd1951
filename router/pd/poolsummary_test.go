package pd

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

func TestPoolSummary(t *testing.T) {
	for _, n := range []int{summaryMinRanks, summaryMinRanks + 1} {
		var all poolSummaries
		var buf poolSummary
		p, now := poolOf(n), time.Now()
		if c := all.get(p, now, &buf); c.needsApprox || !slices.Equal(c.blockSizes, []int{16}) {
			t.Errorf("%d ranks, all live: guess %v, sizes %v", n, c.needsApprox, c.blockSizes)
		}
		p.Aggregated[0].Feed.Store(uint32(worker.FeedSilent))
		p.Aggregated[1].EventBlockSize.Store(32)
		p.Aggregated[2].Feed.Store(uint32(worker.FeedNone))
		p.Aggregated[2].EventBlockSize.Store(64)
		if c, small := all.get(p, now.Add(summaryTTL-1), &buf), n == summaryMinRanks; c.needsApprox != small {
			t.Errorf("%d ranks at once: guess %v", n, c.needsApprox)
		}
		if c := all.get(p, now.Add(summaryTTL), &buf); !c.needsApprox || !slices.Equal(c.blockSizes, []int{16, 32}) {
			t.Errorf("%d ranks a while later: guess %v, sizes %v", n, c.needsApprox, c.blockSizes)
		}
		if allocs := testing.AllocsPerRun(100, func() { all.get(p, now.Add(summaryTTL), &buf) }); allocs != 0 {
			t.Errorf("%d ranks: %v allocations", n, allocs)
		}
		// A pool in the same slot of the cache must not get another pool's summary.
		for range 2 * len(all) {
			if c := all.get(poolOf(n), now.Add(summaryTTL), &buf); c.needsApprox {
				t.Fatal("the summary of another pool")
			}
		}
	}
}

// TestPoolSummaryOfSelectedWorkers checks that the pool of a request that names workers gets its
// own summary, although the next request's pool has the same address.
func TestPoolSummaryOfSelectedWorkers(t *testing.T) {
	q := &request{runState: runState{r: new(Runner), settings: new(settings)}}
	now := time.Now()
	q.ownPool = *poolOf(summaryMinRanks + 1)
	q.pool = &q.ownPool
	if c := q.poolSummary(now); c.needsApprox || !slices.Equal(c.blockSizes, []int{16}) {
		t.Errorf("all live: guess %v, sizes %v", c.needsApprox, c.blockSizes)
	}
	q.ownPool = *poolOf(summaryMinRanks + 1)
	q.ownPool.Aggregated[0].Feed.Store(uint32(worker.FeedSilent))
	q.ownPool.Aggregated[1].EventBlockSize.Store(32)
	if c := q.poolSummary(now); !c.needsApprox || !slices.Equal(c.blockSizes, []int{16, 32}) {
		t.Errorf("another's: guess %v, sizes %v", c.needsApprox, c.blockSizes)
	}
	if allocs := testing.AllocsPerRun(100, func() { q.poolSummary(now) }); allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}
