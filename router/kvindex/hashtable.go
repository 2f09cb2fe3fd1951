package kvindex

import "math/bits"

// table maps 64-bit keys to references by open addressing with linear probing. A reference of 0
// marks an empty cell. Deletion shifts later cells back, so there are no tombstones; a table that
// becomes empty frees its memory. The zero value is ready for use.
type table struct {
	cells []cell
	n     int
}

type cell struct {
	key uint64
	ref uint32
}

const minCells = 8 // there are many tables with few keys

// home is the preferred cell of a key. Keys come from outside, so they are spread first; the
// multiplier is 2^64 divided by the golden ratio.
func (t *table) home(key uint64) int {
	return int(spread(key) >> (64 - bits.TrailingZeros64(uint64(len(t.cells)))))
}

func spread(key uint64) uint64 { return key * 0x9E3779B97F4A7C15 }

func (t *table) get(key uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	mask := len(t.cells) - 1
	for i := t.home(key); ; i = (i + 1) & mask {
		c := &t.cells[i]
		if c.ref == 0 || c.key == key {
			return c.ref
		}
	}
}

// put inserts a key or changes its reference.
func (t *table) put(key uint64, ref uint32) {
	if 4*(t.n+1) > 3*len(t.cells) {
		t.resize(max(minCells, 2*len(t.cells)))
	}
	if t.place(key, ref) {
		t.n++
	}
}

func (t *table) place(key uint64, ref uint32) (isNew bool) {
	mask := len(t.cells) - 1
	for i := t.home(key); ; i = (i + 1) & mask {
		c := &t.cells[i]
		if c.ref == 0 || c.key == key {
			isNew = c.ref == 0
			*c = cell{key, ref}
			return isNew
		}
	}
}

func (t *table) remove(key uint64) {
	if t.n == 0 {
		return
	}
	mask := len(t.cells) - 1
	i := t.home(key)
	for t.cells[i].key != key || t.cells[i].ref == 0 {
		if t.cells[i].ref == 0 {
			return
		}
		i = (i + 1) & mask
	}
	// Close the hole: a later cell of the cluster moves in if its home is not between the hole and
	// itself.
	for j := (i + 1) & mask; t.cells[j].ref != 0; j = (j + 1) & mask {
		if h := t.home(t.cells[j].key); (j-h)&mask >= (j-i)&mask {
			t.cells[i] = t.cells[j]
			i = j
		}
	}
	t.cells[i] = cell{}
	if t.n--; t.n == 0 {
		t.cells = nil
	} else if len(t.cells) > minCells && 8*t.n < len(t.cells) {
		t.resize(len(t.cells) / 2)
	}
}

// pointBehind returns the point in the order of homes that is about cells of have cells after
// point.
func pointBehind(point uint64, have, cells int) (next uint64, last bool) {
	share := ^uint64(0)
	if n := uint64(have / cells); n > 0 {
		share /= n
	}
	next = point + share
	if last = next < point; last {
		next = ^uint64(0)
	}
	return next, last
}

// from calls do for every key whose home is at or after point in the order of homes, for about that
// many cells, and returns the next point. The order does not change when the table grows.
func (t *table) from(point uint64, cells int, do func(cell)) (next uint64, last bool) {
	if len(t.cells) == 0 {
		return 0, true
	}
	next, last = pointBehind(point, len(t.cells), cells)
	shift := 64 - bits.TrailingZeros64(uint64(len(t.cells)))
	mask := uint64(len(t.cells) - 1)
	end := next >> shift
	for i, n := point>>shift, uint64(0); n <= mask; i, n = i+1, n+1 {
		c := t.cells[i&mask]
		if c.ref == 0 {
			if i > end {
				break
			}
			continue
		}
		if x := spread(c.key); x >= point && (x < next || last) {
			do(c)
		}
	}
	return next, last
}

func (t *table) resize(size int) {
	old := t.cells
	t.cells = make([]cell, size)
	for _, c := range old {
		if c.ref != 0 {
			t.place(c.key, c.ref)
		}
	}
}

// slab allocates numbered records from pages that never move. Number 0 is unused. Freed records are
// zeroed and reused.
type slab[T any] struct {
	pages [][]T
	freed []uint32
	used  uint32 // numbers ever allocated, including 0
}

const slabPage = 1 << 10

func (s *slab[T]) at(ref uint32) *T { return &s.pages[ref/slabPage][ref%slabPage] }

func (s *slab[T]) alloc() uint32 {
	if n := len(s.freed); n > 0 {
		ref := s.freed[n-1]
		s.freed = s.freed[:n-1]
		return ref
	}
	s.used = max(s.used, 1)
	if int(s.used/slabPage) == len(s.pages) {
		s.pages = append(s.pages, make([]T, slabPage))
	}
	s.used++
	return s.used - 1
}

func (s *slab[T]) free(ref uint32) {
	var zero T
	*s.at(ref) = zero
	s.freed = append(s.freed, ref)
}

// live is the number of records in use.
func (s *slab[T]) live() int { return int(max(s.used, 1)) - 1 - len(s.freed) }
