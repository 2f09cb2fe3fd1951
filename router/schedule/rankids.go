package schedule

import (
	"slices"
	"sync"
	"sync/atomic"

	"sluice/router/worker"
)

// rankIDs gives ranks numbers, by which the records of the explain ring name them: a slot's number
// may be another rank's while a record still speaks of the one before.
//
// Who holds a record's mutex may look a number up, and so a number that is in a record, or on
// its way into one, is never given to another rank: sweep takes numbers back that were no cell's
// when it began, that no record holds which it then went over, each under its mutex, and that
// nobody has asked for meanwhile. A number that is a cell's is found without the lock.
type rankIDs struct {
	cells [worker.MaxSlots]atomic.Uint32 // by slot: the number of the rank that was asked for last
	// By number; replaced as a whole when it grows, or a number is given again. The first is none.
	ranks atomic.Pointer[[]*worker.Rank]

	mu       sync.Mutex // of those who write
	numbers  map[*worker.Rank]uint32
	checked  map[uint32]bool // under mu since the present sweep began
	free     []uint32
	sweepAt  int         // numbers in use from which a sweep is worth its time
	sweepDue atomic.Bool // there are as many
}

// minSweep is how many numbers are not worth a sweep.
const minSweep = 64

func newRankIDs() *rankIDs {
	r := &rankIDs{numbers: map[*worker.Rank]uint32{}, sweepAt: minSweep}
	r.ranks.Store(&[]*worker.Rank{nil})
	return r
}

func (r *rankIDs) cell(rank *worker.Rank) *atomic.Uint32 {
	return &r.cells[int(rank.Slot)%len(r.cells)]
}

// rank is the one of a number.
func (r *rankIDs) rank(number uint32) *worker.Rank { return (*r.ranks.Load())[number] }

// number is that of a rank. Its caller holds the mutex of the record that it is for.
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
			all = append(all, rank) // behind what readers of the shorter one look at
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

// sweepRankIDs takes the numbers back of ranks that no record speaks of any more. Its caller holds no
// record's mutex.
func (b *recordRing) sweepRankIDs() {
	r := b.ranks
	r.mu.Lock()
	if r.checked != nil || len(r.numbers) < r.sweepAt { // somebody else is at it, or was
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
