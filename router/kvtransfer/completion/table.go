package completion

import (
	"sync/atomic"
	"time"
)

// table is where open waits are found: a hash table of fixed size whose buckets are
// a cache line of places each. A wait takes the first free place of its id's buckets
// by compare-and-swap and clears it when it is closed; who looks for an id looks at
// all places of its buckets, so there is no order to keep and nothing to lock.
//
// Memory order: a wait's place is taken while its state says closed, then its
// fields are written, then its state says open. A reader of a place may hold a
// pointer to a wait that has been closed, or opened again for another id, meanwhile:
// it must hold the wait (Wait.hold) by the state it saw, and then look at the id.
type table [1 << bucketBits]bucket

type bucket [bucketSize]atomic.Pointer[Wait]

const (
	bucketBits = 13
	bucketSize = 8 // pointers: one cache line
	// probes is how many buckets an id may lie in. With all of them full, which takes
	// near MaxWaits open waits, there is no place.
	probes = 4
	// MaxWaits is how many waits fit at most: 512 KiB of places.
	MaxWaits = bucketSize << bucketBits

	indexBits = bucketBits + 3
)

// insert gives w a place; false when there is none.
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

// find gives the wait of an id, held under its number, or nil. Of several it is the
// one opened last.
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
			// One is held at a time, so that nobody waits for another in a circle.
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

// len counts the waits that have a place.
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
