package kvindex

import (
	"math/bits"
	"slices"
	"sync/atomic"
)

// A line is 64 bytes of words, the allocation unit of extents and sets.
const (
	wordsPerLine = 8
	wordsPerPage = 1 << 12 // words
	linesPerPage = wordsPerPage / wordsPerLine
)

// classes are the sizes of storage, in words.
var classes = [...]uint16{8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024}

// maxExtent is the largest number of blocks of an extent. A longer prompt continues in another
// extent: that costs readers one look-up and avoids the large unused storage that longer extents
// would leave behind as they grow.
const maxExtent = 1024

// classFor is the smallest class with at least n words.
func classFor(n int) int {
	for c, size := range classes {
		if int(size) >= n {
			return c
		}
	}
	return len(classes) - 1
}

type wordPage [wordsPerPage]uint64

// wordSlab allocates storage, named by the number of its first line, from pages that never move,
// are never freed and contain no pointers. Line 0 is unused. A reader may load storage that was
// reallocated in the meantime: it loads atomically and then finds that the generation of its node
// has changed.
type wordSlab struct {
	pages pages[wordPage]
	freed [len(classes)][]uint32
	next  uint32 // the first line that was never allocated
	inUse int64  // words
}

// page returns the page of a line and the index of the line's first word in it.
func (s *wordSlab) page(line uint32) (*wordPage, uint32) {
	return s.pages.writer[line/linesPerPage], line % linesPerPage * wordsPerLine
}

// readPage is page for readers.
func (s *wordSlab) readPage(line uint32) (*wordPage, uint32) {
	return s.pages.read(line / linesPerPage), line % linesPerPage * wordsPerLine
}

func (s *wordSlab) alloc(class int) uint32 {
	size := uint32(classes[class])
	s.inUse += int64(size)
	if n := len(s.freed[class]); n > 0 {
		line := s.freed[class][n-1]
		s.freed[class] = s.freed[class][:n-1]
		return line
	}
	lines := size / wordsPerLine
	if s.pages.writer == nil {
		s.pages.add(new(wordPage))
		s.next = 1
	}
	left := (linesPerPage - s.next%linesPerPage) % linesPerPage
	if left < lines && (left > 0 || int(s.next/linesPerPage) == len(s.pages.writer)) {
		// The rest of the page is used for smaller allocations.
		for c := len(classes) - 1; c >= 0; c-- {
			for n := uint32(classes[c]) / wordsPerLine; left >= n; left -= n {
				s.freed[c] = append(s.freed[c], s.next)
				s.next += n
			}
		}
		s.pages.add(new(wordPage))
	}
	line := s.next
	s.next += lines
	return line
}

func (s *wordSlab) free(line uint32, class int) {
	s.inUse -= int64(classes[class])
	s.freed[class] = append(s.freed[class], line)
}

// A set of slots is storage of setWidth words, named by line<<2 | width class. The set of the lower
// tiers has two such arrays, host and disk.
var setClasses = [4]uint32{8, 16, 32, 64}

func setWidth(ref uint32) uint32 { return setClasses[ref&3] }

// widthFor is the width class of a set that can contain a slot.
func widthFor(slot uint32) uint32 {
	return uint32(max(0, bits.Len32(slot>>6)-3))
}

// newSet allocates an empty set with arrays of a width class.
func (s *wordSlab) newSet(width uint32, arrays int) uint32 {
	size := int(setClasses[width]) * arrays
	line := s.alloc(classFor(size))
	p, at := s.page(line)
	for i := range uint32(size) {
		release(&p[at+i], 0)
	}
	return line<<2 | width
}

func (s *wordSlab) freeSet(ref uint32, arrays int) {
	s.free(ref>>2, classFor(int(setWidth(ref))*arrays))
}

// copySet copies a set to at least the given width.
func (s *wordSlab) copySet(ref, width uint32, arrays int) uint32 {
	to := s.newSet(max(width, ref&3), arrays)
	p, at := s.page(ref >> 2)
	q, into := s.page(to >> 2)
	for a := range uint32(arrays) {
		for i := range setWidth(ref) {
			release(&q[into+a*setWidth(to)+i], p[at+a*setWidth(ref)+i])
		}
	}
	return to
}

// setWord returns one word for the writer; 0 beyond the width.
func (s *wordSlab) setWord(ref uint32, array, w uint32) uint64 {
	if w >= setWidth(ref) {
		return 0
	}
	p, at := s.page(ref >> 2)
	return p[at+array*setWidth(ref)+w]
}

func (s *wordSlab) putWord(ref uint32, array, w uint32, v uint64) {
	p, at := s.page(ref >> 2)
	atomic.StoreUint64(&p[at+array*setWidth(ref)+w], v)
}

// setLen counts the slots in all arrays.
func (s *wordSlab) setLen(ref uint32, arrays int) (n int) {
	p, at := s.page(ref >> 2)
	for i := range setWidth(ref) * uint32(arrays) {
		n += bits.OnesCount64(p[at+i])
	}
	return n
}

// sameSets reports whether two sets are equal, regardless of their widths.
func (s *wordSlab) sameSets(a, b uint32, arrays int) bool {
	if setWidth(a) > setWidth(b) {
		a, b = b, a
	}
	narrow, wide := setWidth(a), setWidth(b)
	p, at := s.page(a >> 2)
	q, bt := s.page(b >> 2)
	for array := range uint32(arrays) {
		x, y := p[at+array*narrow:][:narrow], q[bt+array*wide:][:wide]
		if !slices.Equal(x, y[:narrow]) {
			return false
		}
		for _, w := range y[narrow:] {
			if w != 0 {
				return false
			}
		}
	}
	return true
}
