package completion

import (
	"sync/atomic"
	"time"
)

// table is a hash table of fixed size that holds the open waits. Each bucket is one cache line
// of places. A wait takes the first free place in its id's buckets by compare-and-swap and
// clears it on Close. A look-up examines every place of the id's buckets. Hence there is no
// order to maintain and no lock.
//
// Memory order: a wait takes its place while its state is closed, then its fields are written,
// then its state becomes open. A reader of a place may get a pointer to a wait that has
// meanwhile been closed, or opened again for another id. It must lock the wait (Wait.lock)
// under the state it read and then compare the id.
type table [1 << bucketBits]bucket

type bucket [bucketSize]atomic.Pointer[Wait]

const (
	bucketBits = 13
	bucketSize = 8 // pointers: one cache line
	// probes is the number of buckets in which an id may lie. There is no free place when all
	// of them are full, which happens only with nearly MaxWaits open waits.
	probes = 4
	// MaxWaits is the number of places, 512 KiB of memory.
	MaxWaits = bucketSize << bucketBits

	indexBits = bucketBits + 3
)

// insert stores w in a free place; it returns false when there is none.
func (t *table) insert(hash uint64, w *Wait) (index uint32, ok bool) {
	for i := range uint64(probes) {
		n := (hash + i) % uint64(len(t))
		l := &t[n]
		for j := range l {
			if l[j].Load() == nil && l[j].CompareAndSwap(nil, w) {
				return uint32(n)*bucketSize + uint32(j), true
			}
		}
	}
	return 0, false
}

func (t *table) at(index uint32) *atomic.Pointer[Wait] {
	return &t[index/bucketSize][index%bucketSize]
}

// find returns the wait of an id, locked under its number, or nil. When several waits have the
// id, find returns the one opened last.
func (t *table) find(hash uint64, id []byte) *Wait {
	var found *Wait
	var number uint64
	var opened time.Time
	for i := range uint64(probes) {
		l := &t[(hash+i)%uint64(len(t))]
		for j := range l {
			w := l[j].Load()
			if w == nil {
				continue
			}
			// Only one wait is locked at a time, which prevents deadlock.
			n := w.state.Load() &^ locked
			if !tagMatches(n, hash) || !w.lock(n) {
				continue
			}
			if w.id == string(id) && (found == nil || !w.opened.Before(opened)) {
				found, number, opened = w, n, w.opened
			}
			w.unlock(n)
		}
	}
	if found == nil || !found.lock(number) {
		return nil
	}
	return found
}

// len counts the waits in the table.
func (t *table) len() int {
	n := 0
	for i := range t {
		for j := range t[i] {
			if t[i][j].Load() != nil {
				n++
			}
		}
	}
	return n
}
