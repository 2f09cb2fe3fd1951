//go:build linux && !race

package membudget

import (
	"golang.org/x/sys/unix"

	"sluice/dataplane/objpool"
)

// mapped says that large buffers lie outside of Go's heap. Under the race detector they do
// not: it sees only what Go has allocated.
const mapped = true

// newMemory gives size bytes of zeros, which take memory page by page as they are touched.
// Where the system gives no more addresses they are Go's.
func newMemory(size int) []byte {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return make([]byte, size)
	}
	if size <= slab {
		// A huge page would be memory for buffers that nobody has.
		_ = unix.Madvise(b, unix.MADV_NOHUGEPAGE)
	}
	return b
}

// releasePages gives the memory of b back to the system, and keeps its addresses.
func releasePages(b []byte) bool {
	if objpool.ChecksEnabled() {
		return true // the pattern stays to be looked at
	}
	return unix.Madvise(b, unix.MADV_DONTNEED) == nil
}
