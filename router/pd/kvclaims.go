package pd

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/schedule"
	"sluice/router/worker"
)

// A waiting request whose KV fits into no rank lets smaller ones pass, so that it does not keep a fleet idle. They
// would take each block that becomes free: once it has waited for claimAfter, it claims one rank, which starts no
// other request of its class or a lower one until the KV fits. This is what the engine would do with it at the head of
// its queue, to one rank and not to all.

const (
	claimAfter = 250 * time.Millisecond
	// claimLasts is how long a claim holds after the last attempt to start its request.
	claimLasts = 2 * time.Second
)

// kvClaims has the claimed ranks, at most one for each queue.
type kvClaims struct {
	n      atomic.Int32 // len(byPool)
	mu     sync.Mutex
	byPool map[string]kvClaim
}

type kvClaim struct {
	owner *request
	class int
	rank  *worker.Rank
	until time.Time
}

// isOpen reports whether the request may start on a rank although others have claims.
func (c *kvClaims) isOpen(r *worker.Rank, q *request) bool {
	if c.n.Load() == 0 || q.class == nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now, open := time.Now(), true
	for pool, claim := range c.byPool {
		switch {
		case now.After(claim.until):
			delete(c.byPool, pool)
			c.n.Store(int32(len(c.byPool)))
		case claim.rank == r && claim.owner != q && claim.class <= q.class.index:
			open = false
		}
	}
	return open
}

// claim lets the request have a rank for itself. One of a lower class that has a rank of the same pool loses it.
func (c *kvClaims) claim(r *worker.Rank, q *request) {
	pool, now := q.queuePool(), time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, ok := c.byPool[pool]; ok && old.owner != q && old.class <= q.class.index && now.Before(old.until) {
		return
	}
	if c.byPool == nil {
		c.byPool = map[string]kvClaim{}
	}
	c.byPool[pool] = kvClaim{owner: q, class: q.class.index, rank: r, until: now.Add(claimLasts)}
	c.n.Store(int32(len(c.byPool)))
}

// renew prolongs the request's claim. It returns false if it has none on one of the ranks.
func (c *kvClaims) renew(q *request, ranks []*worker.Rank) bool {
	if c.n.Load() == 0 {
		return false
	}
	pool := q.queuePool()
	c.mu.Lock()
	defer c.mu.Unlock()
	claim, ok := c.byPool[pool]
	if !ok || claim.owner != q || !slices.Contains(ranks, claim.rank) {
		return false
	}
	claim.until = time.Now().Add(claimLasts)
	c.byPool[pool] = claim
	return true
}

// release ends the request's claim.
func (c *kvClaims) release(q *request) {
	if c.n.Load() == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for pool, claim := range c.byPool {
		if claim.owner == q {
			delete(c.byPool, pool)
		}
	}
	c.n.Store(int32(len(c.byPool)))
}

// lacksOnlyKV reports whether ranks have capacity for a smaller request.
func (q *request) lacksOnlyKV() bool {
	q.anySize = true
	defer func() { q.anySize = false }()
	return q.hasCapacity()
}

// yieldsToClaim reports whether only the claims of others keep the request from ranks.
func (q *request) yieldsToClaim() bool {
	if q.r.kvClaims.n.Load() == 0 {
		return false
	}
	q.ignoresClaims = true
	defer func() { q.ignoresClaims = false }()
	return q.hasCapacity()
}

// awaitKV notes that only the KV of the request fits nowhere. After claimAfter it claims the rank that lacks the fewest
// blocks.
func (q *request) awaitKV() {
	now := time.Now()
	if q.lacksKVSince.IsZero() {
		q.lacksKVSince = now
	}
	ranks := q.plan.Whole
	if q.plan.Family != nil {
		ranks = q.plan.Decode
	}
	if q.r.kvClaims.renew(q, ranks) || now.Sub(q.lacksKVSince) < claimAfter {
		return
	}
	var best *worker.Rank
	least := int64(0)
	for _, r := range ranks {
		if q.isExcluded(r) || q.settings.Fleet.HalfOpenBusy(r) {
			continue
		}
		if n := schedule.MissingKV(r, q.newKVTokens(r), q.maxTokens); best == nil || n < least {
			best, least = r, n
		}
	}
	if best != nil {
		q.r.kvClaims.claim(best, q)
	}
}

// newKVTokens returns how many tokens of the prompt need new blocks of a rank's KV: those that it does not hold on the
// GPU. Blocks that running requests use already take no others; those that none uses count as free in the engine's
// report, so a request that reuses many of them may find less room than expected, and then waits in the engine. The rest
// of a suspended stream has left its own blocks for others, and needs all of them.
func (q *request) newKVTokens(r *worker.Rank) int {
	if q.resumption != nil {
		return q.prompt.Count
	}
	size := r.BlockSize()
	for i := range q.overlaps {
		if o := &q.overlaps[i]; o.BlockSize == size {
			blocks := o.Overlap.Depth(r.Slot)
			if blocks > 0 && o.Overlap.AnyLowerTier() {
				host, disk := o.Overlap.LowerTiers(r.Slot)
				blocks -= host + disk
			}
			return max(q.prompt.Count-blocks*size, 0)
		}
	}
	return q.prompt.Count
}
