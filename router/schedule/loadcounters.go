package schedule

import (
	"sync/atomic"

	"sluice/router/worker"
)

// loadCounters duplicates the load of this scheduler's reservations, as the cost in nanoseconds
// that it adds to each leg, stored by slot: a choice among a thousand ranks reads a few cache lines
// here instead of two of every Rank. The Rank's counters remain the public ones.
//
// Memory order: a reservation made with an index compares and swaps the entry from which the cost
// was computed, so of two choices that saw the same lowest load one has to retry. Everything else
// is added and subtracted, and read as an estimate. The load that a refresh saw at an engine is
// included in the entries; engineLoad remembers how much, so that the next refresh of any index
// adds only the difference.
//
// decreases counts, per group of slots, how often a load has decreased. A lower bound of the
// group's loads is valid as long as the count has not changed since it was computed. An entry is
// lowered first and the count raised afterwards, so that a reader that loads the count before the
// entries errs on the safe side.
type loadCounters struct {
	load       [numLegs][worker.MaxSlots]atomic.Int64 // ns
	engineLoad [numLegs][worker.MaxSlots]atomic.Int64 // ns of load: waiting requests, low memory
	decreases  [numLegs][worker.MaxSlots / groupSize]atomic.Uint32
}

const (
	// overloadPenalty places a rank behind every other without overflowing a sum.
	overloadPenalty = 1 << 50
	// groupSize is the number of adjacent slots that share a count of decreases and form a block of
	// an index: a few cache lines of loads, read in some 20 ns.
	groupSize = 32
)

// slotAt returns a slot as an index that needs no bounds check.
func slotAt(s worker.Slot) int { return int(s) & (worker.MaxSlots - 1) }

// add adds ns of prefill and decode work, or subtracts negative ones.
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

// compareAndAdd is add if the load of the leg is still the expected one, and reports whether it is.
// No argument is negative.
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

// refresh sets the load that engines add to a slot, in ns.
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
