package nixl

import "sync/atomic"

// indexQueue is a bounded FIFO queue of slot numbers, for any number of producers and
// consumers (after Vyukov). A cell's turn says who may use it: turn == place, a
// producer; turn == place+1, a consumer. The turn is stored after the value and loaded
// before it.
type indexQueue struct {
	mask  uint64
	head  atomic.Uint64
	_     [7]uint64
	tail  atomic.Uint64
	_     [7]uint64
	cells []queueCell
}

type queueCell struct {
	sequence atomic.Uint64
	value    uint32
}

func newIndexQueue(n int) *indexQueue {
	size := 1
	for size < n {
		size *= 2
	}
	q := &indexQueue{mask: uint64(size - 1), cells: make([]queueCell, size)}
	for i := range q.cells {
		q.cells[i].sequence.Store(uint64(i))
	}
	return q
}

// push never finds the queue full: there are as many cells as numbers.
func (q *indexQueue) push(v uint32) {
	for {
		at := q.tail.Load()
		c := &q.cells[at&q.mask]
		if c.sequence.Load() == at && q.tail.CompareAndSwap(at, at+1) {
			c.value = v
			c.sequence.Store(at + 1)
			return
		}
	}
}

func (q *indexQueue) pop() (uint32, bool) {
	for {
		at := q.head.Load()
		c := &q.cells[at&q.mask]
		switch d := int64(c.sequence.Load() - (at + 1)); {
		case d < 0:
			return 0, false
		case d == 0 && q.head.CompareAndSwap(at, at+1):
			v := c.value
			c.sequence.Store(at + q.mask + 1)
			return v, true
		}
	}
}
