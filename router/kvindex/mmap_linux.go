package kvindex

import (
	"runtime"
	"syscall"
	"unsafe"
)

// mmapCells is memory-mapped memory for the cells of a large engine table. Its pages are zeroed by
// the kernel on first write, so that a table of any size is available at once, and a resize returns
// the old pages step by step. On the heap, a table of a million cells would stop its writer for
// milliseconds while it is zeroed.
//
// The holder of the rank's lock frees it. The garbage collector frees it for an index that was
// dropped; therefore every access to cells precedes the unlocking of the rank.
type mmapCells struct {
	bytes    []byte
	cleanup  runtime.Cleanup
	returned int // cells before this one, from the first returned on, were returned to the kernel
	filled   int // chunks that fill has populated, from that of the first on
}

// fillChunk is the number of cells that fill populates at a time: eight pages.
const fillChunk = 1 << 11

// mmapMinCells is the table size in cells from which it is mapped; mmapReturnBytes is how many
// cells are returned at a time, a power of two. Tests lower them.
var mmapMinCells, mmapReturnBytes = 1 << 14, 1 << 14

const cellSize = int(unsafe.Sizeof(engineCell{}))

// newCells allocates an empty table.
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

// free unmaps the memory. The receiver may be nil.
func (m *mmapCells) free() {
	if m != nil {
		m.cleanup.Stop()
		unmap(m.bytes)
	}
}

// populate has the kernel allocate all pages of an empty table now.
func (m *mmapCells) populate() {
	if m == nil || syscall.Madvise(m.bytes, madvPopulateWrite) == nil {
		return
	}
	for i := 0; i < len(m.bytes); i += 1 << 12 { // Linux before 5.14
		m.bytes[i] = 0
	}
}

const madvPopulateWrite = 23 // linux/mman.h; package syscall does not define it

// fill has the kernel allocate the pages that a resize writes next: a number of cells from one on,
// wrapping at the end. One call for eight pages costs less than their page faults, of which there
// would be two per page, because a resize reads a cell before it writes.
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

// returnPages returns the memory between the cell at which a resize began and the one it has
// reached. It reads as zero afterwards.
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
