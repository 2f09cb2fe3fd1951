package schedule

import (
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// Reservation is the load that one choice puts on a rank, counted in the rank's PrefillTokens,
// DecodeBlocks and Requests. PrefillDone and Release may be called from any goroutine, any number
// of times and in any order; only the first call of each has an effect. A nil Reservation has no
// load.
//
// The scheduler also learns the cost of work from it: a leg whose PrefillDone was called
// contributes its times at Release. Report passes what the engine reported and is called before
// Release.
type Reservation struct {
	s            *Scheduler
	rank         *worker.Rank
	leg          LegKind
	noPull       bool // see SetNoPull
	unseen       bool // the router does not see the first token
	alone        bool // no other request waited for its first token on the rank when it was reserved
	prompt       int32
	cached       int32 // predicted
	reported     int32 // by the engine, -1 unknown
	prefill      int64 // tokens
	blocks       int64
	work         int64    // block-steps
	ns           [2]int64 // of prefill and decode, as added to loadCounters
	tokensBefore int64    // tokens to prefill that were reserved before this one and not computed
	blocksBefore int64    // blocks that were reserved before this one
	computed     int64    // Rank.Computed at the first token

	depth     int32 // predicted blocks
	size      int32 // tokens per block
	generated int64
	pending   int64        // ns of work until the first token, as counted in Rank.PendingWork
	started   int64        // ns since the scheduler's start
	first     atomic.Int64 // ns since the scheduler's start; 0: no first token yet
	state     atomic.Uint32
}

const (
	prefillDone = 1 << iota
	released
)

// fill computes the load of f on t's rank.
func (res *Reservation) fill(s *Scheduler, f *choiceContext, t *candidateState) {
	res.s, res.rank, res.leg, res.prefill, res.blocks, res.work, res.ns = s, t.rank, f.leg, 0, 0, 0, [2]int64{}
	res.prompt, res.cached, res.reported, res.started = int32(f.promptKnown), t.cached, -1, f.now
	res.depth, res.size = t.depth, int32(sizeOf(t.rank))
	res.tokensBefore, res.blocksBefore, res.generated, res.noPull = uncomputed(t.rank, max(0, t.reserved), t.rank.Pending.Load(), int64(t.price[worker.Prefilling]), f.now), max(0, int64(t.blocks)), 0, false
	res.unseen, res.pending = f.unseen && f.leg == WholeLeg, int64(max(0, f.prompt-int(t.cached)))*int64(t.price[worker.Pulling])
	if f.leg != DecodeLeg {
		// Engines compute at least the last token of a fully cached prompt.
		res.prefill = int64(max(1, f.prompt-int(t.cached)))
		res.pending = res.prefill * int64(t.price[worker.Prefilling])
		res.ns[0] = int64(s.currentSettings().weights.queue * float64(res.prefill*int64(t.price[worker.Prefilling])))
	}
	if f.leg != PrefillLeg {
		res.blocks = int64(blocksFor(t.rank, f.prompt, f.output))
		res.work = res.blocks * int64(min(f.output, decodeSteps))
		res.ns[1] = int64(s.currentSettings().weights.decode * float64(res.work) * float64(t.price[worker.Decoding]) / decodeSteps)
	}
}

// reserve reserves t in res. It returns false, with nothing reserved, if the counter from which the
// cost was computed has changed since, unless force is set. That counter is swapped first, so a
// reader that sees the new Requests sees it too.
func (res *Reservation) reserve(s *Scheduler, f *choiceContext, t *candidateState, force bool) bool {
	res.fill(s, f, t)
	r := t.rank
	if force {
		s.load.add(r.Slot, res.ns[0], res.ns[1])
		res.publish()
		return true
	}
	if f.leg == DecodeLeg {
		if !r.DecodeBlocks.CompareAndSwap(int64(t.blocks), int64(t.blocks)+res.blocks) {
			return false
		}
	} else {
		if !r.PrefillTokens.CompareAndSwap(t.reserved, t.reserved+res.prefill) {
			return false
		}
		if res.blocks > 0 {
			r.DecodeBlocks.Add(res.blocks)
		}
	}
	if res.work > 0 {
		r.DecodeWork.Add(res.work)
	}
	res.begin()
	s.load.add(r.Slot, res.ns[0], res.ns[1])
	return true
}

// publish adds a reservation that is in loadCounters to the rank's counters.
func (res *Reservation) publish() {
	if res.prefill != 0 {
		res.rank.PrefillTokens.Add(res.prefill)
	}
	if res.blocks != 0 {
		res.rank.DecodeBlocks.Add(res.blocks)
		res.rank.DecodeWork.Add(res.work)
	}
	res.begin()
}

// Remaining returns how much longer the prefill is expected to take: the time for the tokens
// reserved before it on its rank and for its own, minus the time since the reservation. It is 0 or
// negative once that time has passed, and 0 without a prefill.
func (res *Reservation) Remaining() time.Duration {
	if res == nil || res.prefill == 0 {
		return 0
	}
	total := time.Duration(res.tokensBefore+res.prefill) * time.Duration(res.s.rates.price(res.rank, worker.Prefilling))
	return total - time.Duration(res.s.now()-res.started)
}

// PrefillDone removes the prefill work from the rank: the first token has arrived. Do not call it
// for a leg that failed.
func (res *Reservation) PrefillDone() {
	if res == nil || res.state.Or(prefillDone)&prefillDone != 0 {
		return
	}
	res.computed = res.rank.Computed.Add(res.prefill + res.correction())
	res.first.Store(res.s.now())
	res.releasePrefill(true)
}

func (res *Reservation) releasePrefill(hasFirstToken bool) {
	res.endPending(hasFirstToken)
	if res.prefill != 0 {
		res.rank.PrefillTokens.Add(-res.prefill)
		res.s.load.add(res.rank.Slot, -res.ns[0], 0)
	}
}

// Report passes what the engine reported for the leg, once: prompt tokens found in its cache, -1
// unknown, and generated tokens. Call it before Release, on the goroutine that calls Release first.
// The observer receives hits through it.
func (res *Reservation) Report(requestID string, cached, generated int) {
	if res == nil || res.state.Load()&released != 0 {
		return
	}
	if w := res.s.observer.Load(); w != nil && cached >= 0 && res.leg != DecodeLeg {
		size := int(res.size)
		(*w)(&Event{Kind: "hit", At: time.Now(), RequestID: requestID, Leg: res.leg, Rank: res.rank, Prompt: int(res.prompt), Cached: int(res.cached),
			Blocks: int(res.prompt) / size, Overlap: int(res.cached) / size, Reported: cached / size})
	}
	res.reported, res.generated = int32(max(-1, min(cached, int(res.prompt)))), int64(generated)
	if res.state.Load()&prefillDone != 0 {
		if more := res.correction(); more > 0 { // Rank.Computed never decreases
			res.rank.Computed.Add(more)
			res.computed += more
		}
	}
}

// correction returns how many more prompt tokens the engine computed than was predicted, by its report,
// such as tokens whose blocks it evicted after the choice. It is 0 without a report.
func (res *Reservation) correction() int64 {
	if res.leg == DecodeLeg || res.reported < 0 || res.prompt == 0 {
		return 0
	}
	return max(1, int64(res.prompt-res.reported)) - res.prefill
}

// SetNoPull declares that a decode leg does not, or not only, wait for pulled blocks before its
// first token: its prefill runs concurrently, or it computes the prompt itself. Call it before the
// leg is sent.
func (res *Reservation) SetNoPull() { res.noPull = true }

// IsReleased reports whether res is nil, unused or released, so that its memory may be reused.
func (res *Reservation) IsReleased() bool {
	return res == nil || res.s == nil || res.state.Load()&released != 0
}

// Release removes all load.
func (res *Reservation) Release() {
	if res == nil {
		return
	}
	old := res.state.Or(prefillDone | released)
	if old&released != 0 {
		return
	}
	if old&prefillDone == 0 {
		res.releasePrefill(false)
	}
	if res.blocks != 0 {
		res.rank.DecodeBlocks.Add(-res.blocks)
		res.rank.DecodeWork.Add(-res.work)
		res.s.load.add(res.rank.Slot, 0, -res.ns[1])
	}
	res.rank.Requests.Add(-1)
	if res.unseen {
		res.endUnseen()
	}
	res.s.notifyCapacity()
	if old&prefillDone != 0 {
		res.s.observe(res, res.s.now())
	}
}
