package schedule

import (
	"sync/atomic"

	"sluice/router/worker"
)

// loadCounters is the load of this scheduler's reservations once more, as the cost in
// nanoseconds that it adds to each leg, by slot and side by side: a choice among
// a thousand ranks reads a few lines here instead of two of every Rank. The
// Rank's counters remain what the world sees.
//
// Memory order: a booking from the ledger swaps the entry that the cost was made
// from, so of two choices that saw the same least load one has to look again;
// all else is added and subtracted, and read as an estimate. What a board's
// refresh saw of an engine is in the entries too: slow remembers how much, so
// that the next refresh, of whichever board, adds the difference.
//
// fell counts, for the slots of a group, how often a load has gone down: who
// knew a lower bound of the group's loads, and finds fell as it was when the
// bound was made, knows that it still is one. An entry is lowered first and fell
// raised after, so that who reads fell before the entries errs on the safe side.
type loadCounters struct {
	load       [numLegs][worker.MaxSlots]atomic.Int64 // ns
	engineLoad [numLegs][worker.MaxSlots]atomic.Int64 // ns of load: waiting requests, crowding
	decreases  [numLegs][worker.MaxSlots / groupSize]atomic.Uint32
}

const (
	// overloadPenalty puts a rank behind every other without overflowing a sum.
	overloadPenalty = 1 << 50
	// groupSize is how many neighbouring slots share a count of falls, and a block of
	// a board: a few cache lines of loads, read in some 20 ns.
	groupSize = 32
)

// slotAt is a slot as an index that needs no bounds check.
func slotAt(s worker.Slot) int { return int(s) & (worker.MaxSlots - 1) }

// add books ns of prefill and of decode work, or takes them off when negative.
func (l *loadCounters) add(s worker.Slot, prefill, decode int64) {
	if prefill != 0 {
		l.addLeg(PrefillLeg, s, prefill)
	}
	if decode != 0 {
		l.addLeg(DecodeLeg, s, decode)
	}
	l.addLeg(WholeLeg, s, prefill+decode)
}

func (l *loadCounters) addLeg(leg LegKind, s worker.Slot, by int64) {
	i := slotAt(s)
	l.load[leg][i].Add(by)
	if by < 0 {
		l.decreases[leg][i/groupSize].Add(1)
	}
}

// compareAndAdd books as add does if the load of the leg is still what was seen, and
// says whether. Nothing is negative.
func (l *loadCounters) compareAndAdd(leg LegKind, s worker.Slot, expected, prefill, decode int64) bool {
	i := slotAt(s)
	switch leg {
	case PrefillLeg:
		if !l.load[PrefillLeg][i].CompareAndSwap(expected, expected+prefill) {
			return false
		}
		l.load[WholeLeg][i].Add(prefill)
	case DecodeLeg:
		if !l.load[DecodeLeg][i].CompareAndSwap(expected, expected+decode) {
			return false
		}
		l.load[WholeLeg][i].Add(decode)
	default:
		if !l.load[WholeLeg][i].CompareAndSwap(expected, expected+prefill+decode) {
			return false
		}
		l.load[PrefillLeg][i].Add(prefill)
		l.load[DecodeLeg][i].Add(decode)
	}
	return true
}

// refresh sets what engines add to the load of a slot, in ns.
func (l *loadCounters) refresh(s worker.Slot, waiting int64, lowMemory bool) {
	for leg := range l.engineLoad {
		v := waiting
		if lowMemory && LegKind(leg) != PrefillLeg {
			v += overloadPenalty
		}
		if old := l.engineLoad[leg][slotAt(s)].Swap(v); old != v {
			l.addLeg(LegKind(leg), s, v-old)
		}
	}
}
