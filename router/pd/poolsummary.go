package pd

import (
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/router/fleet"
	"sluice/router/worker"
)

// poolSummary is what must be looked up for a pool's requests: the block sizes of the
// ranks whose engines tell events, their models' names, and whether there is one whose blocks are
// guessed, wholly or meanwhile. It spares a request the walk over a thousand
// ranks, and where all feeds are live the hashing and the lookup for a guess that
// nobody would ask for.
type poolSummary struct {
	pool       *fleet.Pool
	takenAt    time.Time
	blockSizes []int
	// bases are the names by which engines' events are salted. There is one, but for
	// engines of one model that list its names in another order.
	baseModels  []string
	needsApprox bool
}

const (
	// Pools up to summaryMinRanks ranks are counted for each request; of larger ones a
	// count is good for summaryTTL: a feed's state reaches them that much later.
	summaryMinRanks = 16
	summaryTTL      = 20 * time.Millisecond
)

// poolSummaries are the last counts of some pools of the fleet's, by their addresses. A pool is
// replaced whenever the fleet's view is; the census keeps the one it is of, so no
// other can come to lie at its address.
type poolSummaries [16]atomic.Pointer[poolSummary]

// get gives the census of a pool; room is memory for the sizes of one that is not
// kept.
func (c *poolSummaries) get(pool *fleet.Pool, now time.Time, scratch *poolSummary) *poolSummary {
	if len(pool.Aggregated)+len(pool.Prefill)+len(pool.Decode) <= summaryMinRanks {
		return scratch.compute(pool)
	}
	slot := &c[uintptr(unsafe.Pointer(pool))/unsafe.Sizeof(*pool)%uintptr(len(c))]
	if known := slot.Load(); known != nil && known.pool == pool && now.Sub(known.takenAt) < summaryTTL {
		return known
	}
	made := &poolSummary{pool: pool, takenAt: now}
	slot.Store(made.compute(pool))
	return made
}

// poolSummary is that of the request's pool. A pool of the request's own, with workers that it
// named, is counted for it alone: the next request's will lie at the same address.
func (q *request) poolSummary(now time.Time) *poolSummary {
	if q.pool == &q.ownPool {
		return q.summary.compute(q.pool)
	}
	return q.r.poolSummaries.get(q.pool, now, &q.summary)
}

func (c *poolSummary) compute(pool *fleet.Pool) *poolSummary {
	c.blockSizes, c.baseModels, c.needsApprox = c.blockSizes[:0], c.baseModels[:0], false
	for _, ranks := range [...][]*worker.Rank{pool.Aggregated, pool.Prefill, pool.Decode} {
		for _, r := range ranks {
			feed := worker.FeedState(r.Feed.Load())
			if feed != worker.FeedLive {
				c.needsApprox = true
			}
			if feed == worker.FeedNone {
				continue
			}
			if size := r.BlockSize(); size > 0 && !slices.Contains(c.blockSizes, size) {
				c.blockSizes = append(c.blockSizes, size)
			}
			if base := r.Worker.Info().Base; !slices.Contains(c.baseModels, base) {
				c.baseModels = append(c.baseModels, base)
			}
		}
	}
	return c
}
