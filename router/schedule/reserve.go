package schedule

import (
	"sync/atomic"

	"sluice/router/worker"
)

// Reservation is the load one choice put on a rank, counted in the rank's
// PrefillTokens, DecodeBlocks and Requests. Its methods may be called from any
// goroutine, any number of times and in any order; only the first call of each
// counts. A nil Reservation holds nothing.
type Reservation struct {
	rank    *worker.Rank
	prefill int64
	blocks  int64
	state   atomic.Uint32
}

const (
	prefillDone = 1 << iota
	released
)

// reserve books t in res. It returns false, with nothing booked, when the
// counter that the cost was made from has moved since, unless force is set.
// That counter is swapped first, so whoever sees the new Requests sees it too.
func (res *Reservation) reserve(f *frame, t *term, force bool) bool {
	r := t.rank
	res.rank, res.prefill, res.blocks = r, 0, 0
	if f.leg != DecodeLeg {
		// Engines compute at least the last token of a prompt they hold whole.
		res.prefill = int64(max(1, f.prompt-int(t.cached)))
	}
	if f.leg != PrefillLeg {
		res.blocks = int64(blocksFor(r, f.prompt, f.output))
	}
	if f.leg == DecodeLeg {
		if force {
			r.DecodeBlocks.Add(res.blocks)
		} else if !r.DecodeBlocks.CompareAndSwap(int64(t.blocks), int64(t.blocks)+res.blocks) {
			return false
		}
	} else {
		if force {
			r.PrefillTokens.Add(res.prefill)
		} else if !r.PrefillTokens.CompareAndSwap(t.reserved, t.reserved+res.prefill) {
			return false
		}
		if res.blocks > 0 {
			r.DecodeBlocks.Add(res.blocks)
		}
	}
	r.Requests.Add(1)
	return true
}

// PrefillDone takes the prefill work off the rank: its first token has come.
func (r *Reservation) PrefillDone() {
	if r == nil || r.state.Or(prefillDone)&prefillDone != 0 {
		return
	}
	r.rank.PrefillTokens.Add(-r.prefill)
}

// Release takes everything off.
func (r *Reservation) Release() {
	if r == nil {
		return
	}
	old := r.state.Or(prefillDone | released)
	if old&released != 0 {
		return
	}
	if old&prefillDone == 0 {
		r.rank.PrefillTokens.Add(-r.prefill)
	}
	r.rank.DecodeBlocks.Add(-r.blocks)
	r.rank.Requests.Add(-1)
}
