package pd

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// A waiting request whose KV fits into no rank lets smaller ones pass, so that it does not keep a fleet idle. They
// would take each block that becomes free: once it has waited for claimAfter, it claims one rank, which starts no
// other request of its class or a lower one until the KV fits. This is what the engine would do with it at the head of
// its queue, to one rank and not to all.
//
// A claim is given up if the rank does not come nearer to having the blocks, because long streams keep them or a
// higher class takes them: the requests that it keeps out would wait for nothing.

const (
	// claimAfter leaves time for blocks that become free in any case, as those of a request that just ends.
	claimAfter = 250 * time.Millisecond
	// claimLasts is how long a claim holds after the last attempt to start its request.
	claimLasts = 2 * time.Second
	// claimStalls is how long the rank may lack as many blocks as before until the claim is given up, and for how
	// long no request of its class or a lower one claims a rank of the model then.
	claimStalls = 3 * time.Second
)

// kvClaims has the claims of waiting requests: at most one for each model, so that the ranks are not all kept for
// large requests, and at most one for each rank.
type kvClaims struct {
	n    atomic.Int32 // len(list)
	mu   sync.Mutex
	list []kvClaim
}

// kvClaim is a claim, or, without owner and rank, the pause after one that was given up.
type kvClaim struct {
	model  string
	class  string // by name, since a reload can change the order
	owner  *request
	rank   *worker.Rank
	least  int64     // the fewest blocks that the rank has lacked
	fell   time.Time // when least fell last
	lapses time.Time
}

// binds reports whether the claim is one of another request of the same class as q or a higher one. A request that never
// waits, as the rest of a stream that moves, has no class and is bound by all.
func (k *kvClaim) binds(q *request) bool {
	if q.class == nil {
		return k.owner != q
	}
	class := q.settings.admission.class(k.class)
	return k.owner != q && class != nil && class.index <= q.class.index
}

// isOpen reports whether the request may start on a rank although others have claims.
func (c *kvClaims) isOpen(r *worker.Rank, q *request) bool {
	if c.n.Load() == 0 || q.settings.admission == nil {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if slices.ContainsFunc(c.list, func(k kvClaim) bool { return now.After(k.lapses) }) {
		c.delete(func(k *kvClaim) bool { return now.After(k.lapses) })
	}
	return !slices.ContainsFunc(c.list, func(k kvClaim) bool { return k.rank == r && k.binds(q) })
}

// owns reports whether the request has a claim on a rank.
func (c *kvClaims) owns(r *worker.Rank, q *request) bool {
	if c.n.Load() == 0 {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.list, func(k kvClaim) bool { return k.rank == r && k.owner == q })
}

// claim lets the request have a rank for itself that lacks some blocks. It returns false if another of its class or a
// higher one has a claim on that rank or on one of the same model, or, unless it is certain that the blocks become free,
// has given up one lately. Claims of lower classes there end.
func (c *kvClaims) claim(r *worker.Rank, q *request, missing int64, certain bool) bool {
	now, model := time.Now(), q.baseModel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.delete(func(k *kvClaim) bool { return now.After(k.lapses) })
	concerns := func(k *kvClaim) bool { return k.rank == r || k.model == model }
	if slices.ContainsFunc(c.list, func(k kvClaim) bool { return concerns(&k) && k.binds(q) && !(certain && k.owner == nil) }) {
		return false
	}
	c.delete(func(k *kvClaim) bool { return k.owner == q || concerns(k) })
	c.list = append(c.list, kvClaim{
		model: strings.Clone(model), class: q.class.Name, owner: q, rank: r, least: missing, fell: now, lapses: now.Add(claimLasts),
	})
	c.n.Store(int32(len(c.list)))
	return true
}

// renew prolongs the request's claim. It returns false if the request has none on one of the ranks, and given up as
// stalled if it was that now. missing returns how many blocks a rank lacks.
func (c *kvClaims) renew(q *request, ranks []*worker.Rank, missing func(*worker.Rank) int64) (renewed bool, stalled *worker.Rank) {
	if c.n.Load() == 0 {
		return false, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.list, func(k kvClaim) bool { return k.owner == q })
	if i < 0 || !slices.Contains(ranks, c.list[i].rank) {
		return false, nil
	}
	k, now := &c.list[i], time.Now()
	if n := missing(k.rank); n < k.least {
		k.least, k.fell = n, now
	}
	k.lapses = now.Add(claimLasts)
	if now.Sub(k.fell) >= claimStalls {
		stalled = k.rank
		k.owner, k.rank, k.lapses = nil, nil, now.Add(claimStalls)
	}
	return true, stalled
}

// keep lets the request have its claim for a longer time without attempts to start it.
func (c *kvClaims) keep(q *request, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.list {
		if k := &c.list[i]; k.owner == q {
			k.lapses = time.Now().Add(d)
		}
	}
}

// release ends the request's claim.
func (c *kvClaims) release(q *request) {
	if c.n.Load() == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.delete(func(k *kvClaim) bool { return k.owner == q })
}

// delete removes the claims for which del returns true. Called with mu.
func (c *kvClaims) delete(del func(*kvClaim) bool) {
	c.list = slices.DeleteFunc(c.list, func(k kvClaim) bool { return del(&k) })
	c.n.Store(int32(len(c.list)))
}

// whyFull is the verdict on a request that no rank has capacity for.
func (q *request) whyFull() admission.Verdict {
	switch {
	case q.lacksOnlyKV():
		q.awaitKV()
		return admission.NoRoom
	case len(q.excluded) > 0: // others of its group may use these ranks
		return admission.NotNow
	case q.yieldsToClaim(): // the one that has the claim must be tried
		return admission.NotNow
	}
	return admission.NoCapacity
}

// lacksOnlyKV reports whether ranks have capacity for a smaller request.
func (q *request) lacksOnlyKV() bool {
	q.anySize = true
	defer func() { q.anySize = false }()
	return q.hasCapacity()
}

// yieldsToClaim reports whether claims of others keep ranks from the request that have capacity for a smaller one: even if
// its own KV does not fit there either.
func (q *request) yieldsToClaim() bool {
	if q.r.kvClaims.n.Load() == 0 {
		return false
	}
	q.anySize, q.ignoresClaims = true, true
	defer func() { q.anySize, q.ignoresClaims = false, false }()
	return q.hasCapacity()
}

// awaitKV notes that only the KV of the request fits nowhere. After claimAfter it claims the rank that lacks the fewest
// blocks of those that it may use.
func (q *request) awaitKV() {
	now := time.Now()
	if q.lacksKVSince.IsZero() {
		q.lacksKVSince = now
	}
	ranks := q.kvRanks()
	missing := func(r *worker.Rank) int64 { return schedule.MissingKV(r, q.newKVTokens(r), q.maxTokens) }
	renewed, stalled := q.r.kvClaims.renew(q, ranks, missing)
	if stalled != nil {
		q.stalledAt, q.claimAgain = stalled, now.Add(2*claimStalls) // others of its class may have a claim first
	}
	if renewed || now.Sub(q.lacksKVSince) < claimAfter || now.Before(q.claimAgain) {
		return
	}
	var best *worker.Rank
	least := int64(math.MaxInt64)
	for _, r := range ranks {
		if q.isExcluded(r) || q.settings.Fleet.HalfOpenBusy(r) || !q.r.kvClaims.isOpen(r, q) {
			continue
		}
		if n := missing(r); n > 0 && (best == nil || best == q.stalledAt || n < least && r != q.stalledAt) {
			best, least = r, n
		}
	}
	if best != nil && q.r.kvClaims.claim(best, q, least, false) {
		q.settings.Scheduler.AddNote(q.req.RequestID, fmt.Sprintf("admission: its KV fits into no rank; %s, which lacks %d blocks, is kept for it", best.ID, least))
	}
}

// endKVWait ends what awaitKV has begun. A request that chooses its decode rank after its prefill keeps its claim until
// then: others would take the room meanwhile.
func (q *request) endKVWait() {
	if i := q.ownRank(q.plan.Decode); i >= 0 && q.isUndecided != nil && q.isFree(schedule.DecodeLeg, q.plan.Decode[i]) {
		q.r.kvClaims.keep(q, q.settings.Timeouts.Prefill)
	} else {
		q.r.kvClaims.release(q)
	}
	q.lacksKVSince, q.claimAgain, q.stalledAt = time.Time{}, time.Time{}, nil
}

// skipKept appends the candidates that are kept for others to a list of ranks that a leg leaves out.
func (q *request) skipKept(list []*worker.Rank, leg schedule.LegKind, candidates []*worker.Rank) []*worker.Rank {
	if leg == schedule.PrefillLeg || q.r.kvClaims.n.Load() == 0 {
		return list
	}
	for _, r := range candidates {
		if !slices.Contains(list, r) && !q.r.kvClaims.isOpen(r, q) {
			list = append(list, r)
		}
	}
	return list
}

// chooseDecode chooses the rank that is kept for the request, if that still has room, or else one of the candidates.
func (q *request) chooseDecode(leg schedule.LegKind, candidates []*worker.Rank) (schedule.Choice, bool) {
	if i := q.ownRank(candidates); i >= 0 && !q.isExcluded(candidates[i]) && q.isFree(leg, candidates[i]) {
		if c, ok := q.choose(leg, candidates[i:i+1]); ok {
			return c, true
		}
	}
	return q.choose(leg, candidates)
}

// ownRank returns the index of the rank that is kept for the request, -1 if there is none.
func (q *request) ownRank(ranks []*worker.Rank) int {
	if q.r.kvClaims.n.Load() == 0 {
		return -1
	}
	return slices.IndexFunc(ranks, func(r *worker.Rank) bool { return q.r.kvClaims.owns(r, q) })
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
