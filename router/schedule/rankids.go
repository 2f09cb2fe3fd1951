package schedule

import (
	"slices"
	"sync"
	"sync/atomic"

	"sluice/router/worker"
)

// rankIDs assigns numbers to ranks, by which the records of the explain ring name them: a slot may
// have been reassigned to another rank while a record still names the previous one.
//
// A caller that holds a record's mutex may look up a number. A number that is in a record, or about
// to be written to one, is therefore never reassigned: sweepRankIDs frees only numbers that were in
// no cell when it started, that no record contains when it then visits each under its mutex, and
// that were not requested meanwhile. A number in a cell is found without the lock.
type rankIDs struct {
	cells [worker.MaxSlots]atomic.Uint32 // by slot: the number of the most recently requested rank
	// Indexed by number; replaced as a whole when it grows or a number is reassigned. Number 0 is
	// unused.
	ranks atomic.Pointer[[]*worker.Rank]

	mu       sync.Mutex // guards writes
	numbers  map[*worker.Rank]uint32
	checked  map[uint32]bool // numbers requested since the current sweep began; guarded by mu
	free     []uint32
	sweepAt  int         // numbers in use from which a sweep is worthwhile
	sweepDue atomic.Bool // that many are in use
}

// minSweep is the smallest number of ranks for which a sweep runs.
const minSweep = 64

func newRankIDs() *rankIDs {
	r := &rankIDs{numbers: map[*worker.Rank]uint32{}, sweepAt: minSweep}
	r.ranks.Store(&[]*worker.Rank{nil})
	return r
}

func (r *rankIDs) cell(rank *worker.Rank) *atomic.Uint32 {
	return &r.cells[int(rank.Slot)%len(r.cells)]
}

// rank returns the rank with a number.
func (r *rankIDs) rank(number uint32) *worker.Rank { return (*r.ranks.Load())[number] }

// number returns a rank's number. The caller holds the mutex of the record that it is for.
func (r *rankIDs) number(rank *worker.Rank) uint32 {
	cell := r.cell(rank)
	if n := cell.Load(); r.rank(n) == rank {
		return n
	}
	return r.assign(rank, cell)
}

func (r *rankIDs) assign(rank *worker.Rank, cell *atomic.Uint32) uint32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, ok := r.numbers[rank]
	if !ok {
		all := *r.ranks.Load()
		if last := len(r.free) - 1; last >= 0 {
			n, r.free = r.free[last], r.free[:last]
			all = slices.Clone(all)
			all[n] = rank
		} else {
			n = uint32(len(all))
			all = append(all, rank) // readers of the shorter slice do not see it
		}
		r.ranks.Store(&all)
		r.numbers[rank] = n
		r.sweepDue.Store(len(r.numbers) >= r.sweepAt)
	}
	if r.checked != nil {
		r.checked[n] = true
	}
	cell.Store(n)
	return n
}

// sweepRankIDs frees the numbers of ranks that no record names. The caller holds no record's mutex.
func (b *recordRing) sweepRankIDs() {
	r := b.ranks
	r.mu.Lock()
	if r.checked != nil || len(r.numbers) < r.sweepAt { // another sweep is running, or was completed
		r.mu.Unlock()
		return
	}
	r.checked = map[uint32]bool{}
	old := map[*worker.Rank]uint32{}
	for rank, n := range r.numbers {
		if r.cell(rank).Load() != n {
			old[rank] = n
		}
	}
	r.mu.Unlock()
	var terms []candidateState
	for i := range b.slots {
		rec := &b.slots[i]
		rec.mu.Lock()
		for rest := rec.encodedDecisions(); len(rest) > 0 && len(old) > 0; {
			_, terms, rest = decodeDecision(rest, terms, r)
			for k := range terms {
				delete(old, terms[k].rank)
			}
		}
		rec.mu.Unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(*r.ranks.Load())
	for rank, n := range old {
		if !r.checked[n] {
			delete(r.numbers, rank)
			all[n] = nil
			r.free = append(r.free, n)
		}
	}
	r.ranks.Store(&all)
	r.checked = nil
	r.sweepAt = max(minSweep, 2*len(r.numbers))
	r.sweepDue.Store(false)
}
