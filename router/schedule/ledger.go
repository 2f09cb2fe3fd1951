package schedule

import (
	"sync/atomic"

	"sluice/router/worker"
)

// ledger is the load of this scheduler's reservations once more, as the cost in
// nanoseconds that it adds to each leg, by slot and side by side: a choice among
// a thousand ranks reads 8 KB here instead of two cache lines of every Rank. The
// Rank's counters remain what the world sees.
//
// Memory order: a booking from the ledger swaps the entry that the cost was made
// from, so of two choices that saw the same least load one has to look again;
// all else is added and subtracted, and read as an estimate. What a board's
// refresh saw of an engine is in the entries too: slow remembers how much, so
// that the next refresh, of whichever board, adds the difference.
type ledger struct {
	perToken, perBlock int64                            // ns
	load               [3][worker.MaxSlots]atomic.Int64 // by Leg
	slow               [3][worker.MaxSlots]atomic.Int64 // of load: waiting requests, crowding
}

const (
	nsPerMS = 1e6
	// crowd puts a rank behind every other without overflowing a sum.
	crowd = 1 << 50
)

func newLedger(w *weights) *ledger {
	return &ledger{perToken: int64(w.queue * nsPerMS), perBlock: int64(w.decode * nsPerMS)}
}

// at is a slot as an index that needs no bounds check.
func at(s worker.Slot) int { return int(s) & (worker.MaxSlots - 1) }

// add books tokens to prefill and blocks, or takes them off when negative.
func (l *ledger) add(s worker.Slot, tokens, blocks int64) {
	i := at(s)
	if tokens != 0 {
		l.load[PrefillLeg][i].Add(tokens * l.perToken)
	}
	if blocks != 0 {
		l.load[DecodeLeg][i].Add(blocks * l.perBlock)
	}
	l.load[Whole][i].Add(tokens*l.perToken + blocks*l.perBlock)
}

// swap books as add does if the load of the leg is still what was seen, and
// says whether.
func (l *ledger) swap(leg Leg, s worker.Slot, seen, tokens, blocks int64) bool {
	i := at(s)
	t, b := tokens*l.perToken, blocks*l.perBlock
	switch leg {
	case PrefillLeg:
		if !l.load[PrefillLeg][i].CompareAndSwap(seen, seen+t) {
			return false
		}
		l.load[Whole][i].Add(t)
	case DecodeLeg:
		if !l.load[DecodeLeg][i].CompareAndSwap(seen, seen+b) {
			return false
		}
		l.load[Whole][i].Add(b)
	default:
		if !l.load[Whole][i].CompareAndSwap(seen, seen+t+b) {
			return false
		}
		l.load[PrefillLeg][i].Add(t)
		l.load[DecodeLeg][i].Add(b)
	}
	return true
}

// refresh sets what engines add to the load of a slot, in ns.
func (l *ledger) refresh(s worker.Slot, waiting int64, crowded bool) {
	for leg := range l.slow {
		v := waiting
		if crowded && Leg(leg) != PrefillLeg {
			v += crowd
		}
		if old := l.slow[leg][at(s)].Swap(v); old != v {
			l.load[leg][at(s)].Add(v - old)
		}
	}
}
