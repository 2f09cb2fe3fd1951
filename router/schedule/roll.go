package schedule

import (
	"slices"
	"sync"
	"sync/atomic"

	"sluice/router/worker"
)

// roll gives ranks numbers, by which the records of the explain ring name them: a slot's number
// may be another rank's while a record still speaks of the one before.
//
// Who holds a record's mutex may look a number up, and so a number that is in a record, or on
// its way into one, is never given to another rank: sweep takes numbers back that were no cell's
// when it began, that no record holds which it then went over, each under its mutex, and that
// nobody has asked for meanwhile. A number that is a cell's is found without the lock.
type roll struct {
	cells [worker.MaxSlots]atomic.Uint32 // by slot: the number of the rank that was asked for last
	// By number; replaced as a whole when it grows, or a number is given again. The first is none.
	all atomic.Pointer[[]*worker.Rank]

	mu      sync.Mutex // of those who write
	numbers map[*worker.Rank]uint32
	asked   map[uint32]bool // under mu since the present sweep began
	free    []uint32
	most    int         // numbers in use from which a sweep is worth its time
	crowded atomic.Bool // there are as many
}

// leastSwept is how many numbers are not worth a sweep.
const leastSwept = 64

func newRoll() *roll {
	r := &roll{numbers: map[*worker.Rank]uint32{}, most: leastSwept}
	r.all.Store(&[]*worker.Rank{nil})
	return r
}

func (r *roll) cell(rank *worker.Rank) *atomic.Uint32 { return &r.cells[int(rank.Slot)%len(r.cells)] }

// rank is the one of a number.
func (r *roll) rank(number uint32) *worker.Rank { return (*r.all.Load())[number] }

// number is that of a rank. Its caller holds the mutex of the record that it is for.
func (r *roll) number(rank *worker.Rank) uint32 {
	cell := r.cell(rank)
	if n := cell.Load(); r.rank(n) == rank {
		return n
	}
	return r.enter(rank, cell)
}

func (r *roll) enter(rank *worker.Rank, cell *atomic.Uint32) uint32 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, ok := r.numbers[rank]
	if !ok {
		all := *r.all.Load()
		if last := len(r.free) - 1; last >= 0 {
			n, r.free = r.free[last], r.free[:last]
			all = slices.Clone(all)
			all[n] = rank
		} else {
			n = uint32(len(all))
			all = append(all, rank) // behind what readers of the shorter one look at
		}
		r.all.Store(&all)
		r.numbers[rank] = n
		r.crowded.Store(len(r.numbers) >= r.most)
	}
	if r.asked != nil {
		r.asked[n] = true
	}
	cell.Store(n)
	return n
}

// sweep takes the numbers back of ranks that no record speaks of any more. Its caller holds no
// record's mutex.
func (b *book) sweep() {
	r := b.ranks
	r.mu.Lock()
	if r.asked != nil || len(r.numbers) < r.most { // somebody else is at it, or was
		r.mu.Unlock()
		return
	}
	r.asked = map[uint32]bool{}
	old := map[*worker.Rank]uint32{}
	for rank, n := range r.numbers {
		if r.cell(rank).Load() != n {
			old[rank] = n
		}
	}
	r.mu.Unlock()
	var terms []term
	for i := range b.slots {
		rec := &b.slots[i]
		rec.mu.Lock()
		for rest := rec.packed(); len(rest) > 0 && len(old) > 0; {
			_, terms, rest = unpack(rest, terms, r)
			for k := range terms {
				delete(old, terms[k].rank)
			}
		}
		rec.mu.Unlock()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(*r.all.Load())
	for rank, n := range old {
		if !r.asked[n] {
			delete(r.numbers, rank)
			all[n] = nil
			r.free = append(r.free, n)
		}
	}
	r.all.Store(&all)
	r.asked = nil
	r.most = max(leastSwept, 2*len(r.numbers))
	r.crowded.Store(false)
}
