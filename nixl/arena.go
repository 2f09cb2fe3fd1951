package nixl

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// arena is memory that two processes map at one address, so that an address in a
// command, a slot or a peer's metadata means the same in both. It is unmapped when
// nothing refers to it any more: boards outlive their agents.
type arena struct {
	fd    int
	bytes []byte

	mu   sync.Mutex
	next int
}

// Arenas are mapped from 2^44 on, where neither Go, nor the loader, nor the race
// detector maps anything. Each has an address of its own.
const (
	arenaBase   = 1 << 44
	arenaStride = 1 << 32
	arenaSlots  = 1 << 10
)

var nextArena atomic.Uint64

// newArena maps size bytes of shared memory. Only touched pages use memory.
func newArena(name string, size int) (*arena, error) {
	if size <= 0 || size > arenaStride {
		return nil, fmt.Errorf("nixl: cannot map an arena of %d bytes: want 1 to %d", size, arenaStride)
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		for range 64 {
			var b []byte
			if b, err = mapAt(fd, arenaBase+nextArena.Add(1)%arenaSlots*arenaStride, size); err == nil {
				a := &arena{fd: fd, bytes: b}
				runtime.AddCleanup(a, func(m mapping) { unix.Close(m.fd); unmapAt(m.bytes) }, mapping{fd, b})
				return a, nil
			}
			if !errors.Is(err, unix.EEXIST) {
				break
			}
		}
	}
	unix.Close(fd)
	return nil, fmt.Errorf("nixl: cannot map %d bytes of shared memory: %w", size, err)
}

type mapping struct {
	fd    int
	bytes []byte
}

// mapAt maps a shared file at an address, or fails.
func mapAt(fd int, address uint64, size int) ([]byte, error) {
	// The address is passed as a number: it is not a Go pointer.
	p, _, errno := unix.Syscall6(unix.SYS_MMAP, uintptr(address), uintptr(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_NORESERVE|unix.MAP_FIXED_NOREPLACE, uintptr(fd), 0)
	if errno != 0 {
		return nil, errno
	}
	b := unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), size)
	if uint64(p) != address { // kernels before 4.17 treat the address as a hint
		unmapAt(b)
		return nil, unix.EEXIST
	}
	return b, nil
}

func unmapAt(b []byte) { _ = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b))) }

func (a *arena) address() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(a.bytes)))) }

// alloc returns size bytes on pages of their own. They are freed with the arena.
func (a *arena) alloc(size int) ([]byte, error) {
	page := unix.Getpagesize()
	size = (size + page - 1) / page * page
	a.mu.Lock()
	defer a.mu.Unlock()
	if size > len(a.bytes)-a.next {
		return nil, fmt.Errorf("nixl: cannot allocate %d bytes of memory shared with the agent's process: %d are free", size, len(a.bytes)-a.next)
	}
	b := a.bytes[a.next : a.next+size : a.next+size]
	a.next += size
	return b, nil
}
