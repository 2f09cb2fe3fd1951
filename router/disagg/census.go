package disagg

import (
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/router/fleet"
	"sluice/router/worker"
)

// census is what must be looked up for a pool's requests: the block sizes of the
// ranks whose engines tell events, their models' names, and whether there is one whose blocks are
// guessed, wholly or meanwhile. It spares a request the walk over a thousand
// ranks, and where all feeds are live the hashing and the lookup for a guess that
// nobody would ask for.
type census struct {
	pool  *fleet.Pool
	at    time.Time
	sizes []int
	// bases are the names by which engines' events are salted. There is one, but for
	// engines of one model that list its names in another order.
	bases []string
	guess bool
}

const (
	// Pools up to censusFrom ranks are counted for each request; of larger ones a
	// count is good for censusFor: a feed's state reaches them that much later.
	censusFrom = 16
	censusFor  = 20 * time.Millisecond
)

// censuses are the last counts of some pools of the fleet's, by their addresses. A pool is
// replaced whenever the fleet's view is; the census keeps the one it is of, so no
// other can come to lie at its address.
type censuses [16]atomic.Pointer[census]

// of gives the census of a pool; room is memory for the sizes of one that is not
// kept.
func (c *censuses) of(pool *fleet.Pool, now time.Time, room *census) *census {
	if len(pool.Aggregated)+len(pool.Prefill)+len(pool.Decode) <= censusFrom {
		return room.count(pool)
	}
	slot := &c[uintptr(unsafe.Pointer(pool))/unsafe.Sizeof(*pool)%uintptr(len(c))]
	if known := slot.Load(); known != nil && known.pool == pool && now.Sub(known.at) < censusFor {
		return known
	}
	made := &census{pool: pool, at: now}
	slot.Store(made.count(pool))
	return made
}

// census is that of the request's pool. A pool of the request's own, with workers that it
// named, is counted for it alone: the next request's will lie at the same address.
func (q *request) census(now time.Time) *census {
	if q.pool == &q.own {
		return q.counted.count(q.pool)
	}
	return q.r.censuses.of(q.pool, now, &q.counted)
}

func (c *census) count(pool *fleet.Pool) *census {
	c.sizes, c.bases, c.guess = c.sizes[:0], c.bases[:0], false
	for _, ranks := range [...][]*worker.Rank{pool.Aggregated, pool.Prefill, pool.Decode} {
		for _, r := range ranks {
			feed := worker.FeedState(r.Feed.Load())
			if feed != worker.FeedLive {
				c.guess = true
			}
			if feed == worker.FeedNone {
				continue
			}
			if size := r.BlockSize(); size > 0 && !slices.Contains(c.sizes, size) {
				c.sizes = append(c.sizes, size)
			}
			if base := r.Worker.Info().Base; !slices.Contains(c.bases, base) {
				c.bases = append(c.bases, base)
			}
		}
	}
	return c
}
