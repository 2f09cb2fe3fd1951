//go:build linux && !race

package membudget

import (
	"golang.org/x/sys/unix"

	"sluice/dataplane/objpool"
)

// mapped says that large buffers are mapped outside Go's heap. Under the race detector they
// are not, because it tracks only memory that Go allocated.
const mapped = true

// newMemory returns size zero bytes that take memory page by page when they are first
// accessed. If the system refuses the mapping, the bytes come from Go's heap.
func newMemory(size int) []byte {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return make([]byte, size)
	}
	if size <= slab {
		// A huge page would take memory for neighbouring buffers that are free.
		_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE)
	}
	return b
}

// releasePages returns the memory of b to the system and keeps its address range.
func releasePages(b []byte) bool {
	if objpool.ChecksEnabled() {
		return true // the pattern must stay until it is verified
	}
	return unix.Madvise(b, unix.MADV_DONTNEED) == nil
}
