package pd

import (
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/router/fleet"
	"sluice/router/worker"
)

// poolSummary holds what a lookup needs to know about a pool: the block sizes and base model names
// of the ranks with event feeds, and whether any rank's cache must be predicted by the approximate
// index. It saves requests an iteration over up to a thousand ranks. If all feeds are live, it also
// saves them the hashing and lookup for the approximate index.
type poolSummary struct {
	pool       *fleet.Pool
	takenAt    time.Time
	blockSizes []int
	// baseModels are the model names that salt the block hashes of the engines' events. There is
	// more than one only if engines of the same model list its names in different orders.
	baseModels  []string
	needsApprox bool
}

const (
	// Pools of up to summaryMinRanks ranks are summarised for each request. The summary of a larger
	// pool is valid for summaryTTL, which delays the effect of a feed's state change.
	summaryMinRanks = 16
	summaryTTL      = 20 * time.Millisecond
)

// poolSummaries caches the summaries of some of the fleet's pools by address. A new view of the
// fleet has new pools. A summary keeps its pool alive, so no other pool can get the same address.
type poolSummaries [16]atomic.Pointer[poolSummary]

// get returns the summary of a pool. It computes the summary of a small pool in scratch and does
// not cache it.
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

// poolSummary returns the summary of the request's pool. It never caches the summary of ownPool,
// which depends on the request's headers: the next request's pool has the same address.
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
