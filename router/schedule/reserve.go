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
	ledger  *ledger
	rank    *worker.Rank
	prefill int64
	blocks  int64
	state   atomic.Uint32
}

const (
	prefillDone = 1 << iota
	released
)

// fill sets what t's rank will carry for f.
func (res *Reservation) fill(l *ledger, f *frame, t *term) {
	res.ledger, res.rank, res.prefill, res.blocks = l, t.rank, 0, 0
	if f.leg != DecodeLeg {
		// Engines compute at least the last token of a prompt they hold whole.
		res.prefill = int64(max(1, f.prompt-int(t.cached)))
	}
	if f.leg != PrefillLeg {
		res.blocks = int64(blocksFor(t.rank, f.prompt, f.output))
	}
}

// reserve books t in res. It returns false, with nothing booked, when the
// counter that the cost was made from has moved since, unless force is set.
// That counter is swapped first, so whoever sees the new Requests sees it too.
func (res *Reservation) reserve(l *ledger, f *frame, t *term, force bool) bool {
	res.fill(l, f, t)
	r := t.rank
	if force {
		l.add(r.Slot, res.prefill, res.blocks)
		res.show()
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
	r.Requests.Add(1)
	l.add(r.Slot, res.prefill, res.blocks)
	return true
}

// show puts a reservation that is in the ledger into the rank's counters.
func (res *Reservation) show() {
	if res.prefill != 0 {
		res.rank.PrefillTokens.Add(res.prefill)
	}
	if res.blocks != 0 {
		res.rank.DecodeBlocks.Add(res.blocks)
	}
	res.rank.Requests.Add(1)
}

// PrefillDone takes the prefill work off the rank: its first token has come.
func (r *Reservation) PrefillDone() {
	if r == nil || r.state.Or(prefillDone)&prefillDone != 0 {
		return
	}
	r.dropPrefill()
}

func (r *Reservation) dropPrefill() {
	if r.prefill != 0 {
		r.rank.PrefillTokens.Add(-r.prefill)
		r.ledger.add(r.rank.Slot, -r.prefill, 0)
	}
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
		r.dropPrefill()
	}
	if r.blocks != 0 {
		r.rank.DecodeBlocks.Add(-r.blocks)
		r.ledger.add(r.rank.Slot, 0, -r.blocks)
	}
	r.rank.Requests.Add(-1)
}
