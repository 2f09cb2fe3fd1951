package kvindex

import (
	"runtime"
	"syscall"
	"unsafe"
)

// mmapCells is memory for the cells of a large side table, from the kernel instead of
// the heap: it comes as zero pages when they are first written, so a table of any
// size is there at once, and what a move has left behind goes back piece by piece.
// From the heap, a table of a million cells stops its writer for milliseconds while
// it is zeroed.
//
// It is freed by whoever has the rank's lock; the collector frees that of an index
// that was dropped, which is why each access to cells comes before the unlocking of
// the rank that they belong to.
type mmapCells struct {
	bytes    []byte
	cleanup  runtime.Cleanup
	returned int // what lies before this cell and after the first given back is given back
	filled   int // chunks that fill has made, from that of begun on
}

// fillChunk is how many cells fill has made at a time: eight pages.
const fillChunk = 1 << 11

// mmapMinCells is how many cells are mapped instead of allocated, mmapReturnBytes how many are
// given back at a time, a power of two; tests make them less.
var mmapMinCells, mmapReturnBytes = 1 << 14, 1 << 14

const cellSize = int(unsafe.Sizeof(engineCell{}))

// newCells makes an empty table.
func newCells(size int) ([]engineCell, *mmapCells) {
	if size < mmapMinCells {
		return make([]engineCell, size), nil
	}
	b, err := syscall.Mmap(-1, 0, size*cellSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil { // too many mappings
		return make([]engineCell, size), nil
	}
	m := &mmapCells{bytes: b}
	m.cleanup = runtime.AddCleanup(m, unmap, b)
	return unsafe.Slice((*engineCell)(unsafe.Pointer(&b[0])), size), m
}

func unmap(b []byte) { _ = syscall.Munmap(b) }

// free gives all of it back. There may be none.
func (m *mmapCells) free() {
	if m != nil {
		m.cleanup.Stop()
		unmap(m.bytes)
	}
}

// populate has the kernel give all pages now, to a table that is empty.
func (m *mmapCells) populate() {
	if m == nil || syscall.Madvise(m.bytes, madvPopulateWrite) == nil {
		return
	}
	for i := 0; i < len(m.bytes); i += 1 << 12 { // a kernel before 5.14
		m.bytes[i] = 0
	}
}

const madvPopulateWrite = 23 // linux/mman.h; package syscall has no name for it

// fill has the kernel give the pages that a move will write next: so many cells from
// one on, round the end. One call for eight pages costs less than their faults, of which
// there would be two a page, for a move looks for an empty cell before it writes.
func (m *mmapCells) fill(begun, cells int) {
	if m == nil {
		return
	}
	chunks := (len(m.bytes) + fillChunk*cellSize - 1) / (fillChunk * cellSize)
	for need := min((begun%fillChunk+cells)/fillChunk+1, chunks); m.filled < need; m.filled++ {
		from := (begun/fillChunk + m.filled) % chunks * fillChunk * cellSize
		_ = syscall.Madvise(m.bytes[from:min(from+fillChunk*cellSize, len(m.bytes))], madvPopulateWrite)
	}
}

// returnPages gives back what lies before a cell that a move has come to, which began at
// another. It reads as zero from then on.
func (m *mmapCells) returnPages(begun, at int) {
	if m == nil {
		return
	}
	from := max(m.returned, (begun+mmapReturnBytes-1)&^(mmapReturnBytes-1))
	if at >= from+mmapReturnBytes {
		_ = syscall.Madvise(m.bytes[from*cellSize:at*cellSize], syscall.MADV_DONTNEED)
		m.returned = at
	}
}
