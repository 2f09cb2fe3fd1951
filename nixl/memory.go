package nixl

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/native/cuda"
)

// Kind is the kind of memory; the values are NIXL's.
type Kind uint8

// The kinds that can be registered.
const (
	DRAM Kind = 0 // host memory
	VRAM Kind = 1 // memory of a GPU, allocated by the CUDA driver
)

// String returns the name of the segment in NIXL, DRAM or VRAM.
func (k Kind) String() string {
	if k == VRAM {
		return "VRAM"
	}
	return "DRAM"
}

// Memory is a range that can be registered with an agent. It is mapped by this package
// or allocated by the CUDA driver. It is never from the Go heap, whose pages the
// runtime may free while a network card uses them.
type Memory struct {
	kind    Kind
	device  int
	address uint64
	size    int
	bytes   []byte // DRAM only

	mu         sync.Mutex
	agent      *Agent
	handle     uint64
	shared     *arena // the arena it is part of, if its agent is in another process
	unreusable bool   // deregistering failed: the library may still use it, so it is never reused
}

// hostPool holds mapped ranges for the next NewHostMemory of the same size. They are
// not unmapped, because UCX caches registrations and is not notified of an unmap.
var hostPool struct {
	sync.Mutex
	free map[int][][]byte
}

// NewHostMemory maps size bytes (rounded up to pages), zeroed.
func NewHostMemory(size int) (*Memory, error) {
	if size <= 0 {
		return nil, fmt.Errorf("nixl: cannot map %d bytes of host memory: want more than 0", size)
	}
	page := unix.Getpagesize()
	size = (size + page - 1) / page * page
	hostPool.Lock()
	var b []byte
	if l := hostPool.free[size]; len(l) > 0 {
		b, hostPool.free[size] = l[len(l)-1], l[:len(l)-1]
	}
	hostPool.Unlock()
	if b != nil {
		clear(b)
	} else {
		var err error
		if b, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
			return nil, fmt.Errorf("nixl: cannot map %d bytes of host memory: %w", size, err)
		}
	}
	return &Memory{kind: DRAM, bytes: b, size: size, address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))}, nil
}

// boardMemory maps size bytes that a can write to, and peers once they are registered.
// If a is in another process, they are part of the memory shared with it.
func boardMemory(a *Agent, size int) (*Memory, error) {
	d, ok := (*isolated)(nil), false
	if a != nil {
		d, ok = a.driver.(*isolated)
	}
	if !ok {
		return NewHostMemory(size)
	}
	b, err := d.memory.alloc(size)
	if err != nil {
		return nil, err
	}
	return &Memory{kind: DRAM, bytes: b, size: len(b), address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), shared: d.memory}, nil
}

// NewDeviceMemory allocates size bytes on a GPU through the CUDA driver.
func NewDeviceMemory(device, size int) (*Memory, error) {
	if size <= 0 {
		return nil, fmt.Errorf("nixl: cannot allocate %d bytes of VRAM: want more than 0", size)
	}
	if _, err := cuda.Open(device); err != nil {
		return nil, err
	}
	a, err := cuda.Alloc(device, size)
	if err != nil {
		return nil, err
	}
	return &Memory{kind: VRAM, device: device, size: size, address: a}, nil
}

// Kind returns the kind of the memory.
func (m *Memory) Kind() Kind { return m.kind }

// Size returns the size in bytes.
func (m *Memory) Size() int { return m.size }

// Bytes returns the memory itself; nil for VRAM. While it is registered, peers may
// write to it at any time: read what they write by atomic loads.
func (m *Memory) Bytes() []byte { return m.bytes }

// Remote returns the name of a part of this memory that a peer uses in a transfer.
func (m *Memory) Remote(offset, n int) Remote {
	return Remote{Kind: m.kind, Address: m.address + uint64(offset), Bytes: uint64(n), Device: uint64(m.device)}
}

// Write copies b to offset; for VRAM through the CUDA driver.
func (m *Memory) Write(offset int, b []byte) error {
	if offset < 0 || offset > m.size-len(b) {
		return fmt.Errorf("nixl: cannot write %d bytes at offset %d of %d bytes", len(b), offset, m.size)
	}
	if m.kind == VRAM {
		return cuda.Write(m.device, m.address+uint64(offset), b)
	}
	copy(m.bytes[offset:], b)
	return nil
}

// Read fills b from offset; for VRAM through the CUDA driver.
func (m *Memory) Read(offset int, b []byte) error {
	if offset < 0 || offset > m.size-len(b) {
		return fmt.Errorf("nixl: cannot read %d bytes at offset %d of %d bytes", len(b), offset, m.size)
	}
	if m.kind == VRAM {
		return cuda.Read(m.device, b, m.address+uint64(offset))
	}
	copy(b, m.bytes[offset:])
	return nil
}

// Free frees the memory. It must not be registered. Memory whose deregistration failed
// is never freed.
func (m *Memory) Free() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.agent != nil {
		return fmt.Errorf("nixl: cannot free %d bytes of %s: the memory is registered with agent %q", m.size, m.kind, m.agent.Name())
	}
	if m.unreusable || m.address == 0 || m.shared != nil { // shared memory is freed with its last user
		return nil
	}
	a := m.address
	m.address = 0
	if m.kind == VRAM {
		return cuda.Free(m.device, a)
	}
	poolHostMemory(m.bytes)
	m.bytes = nil
	return nil
}

// poolHostMemory stores a mapped range for NewHostMemory.
func poolHostMemory(b []byte) {
	hostPool.Lock()
	defer hostPool.Unlock()
	if hostPool.free == nil {
		hostPool.free = map[int][][]byte{}
	}
	hostPool.free[len(b)] = append(hostPool.free[len(b)], b)
}

// Remote is a part of a peer's registered memory.
type Remote struct {
	Kind    Kind
	Address uint64
	Bytes   uint64
	Device  uint64
}

// Span is a part of a local Memory.
type Span struct {
	Memory *Memory
	Offset int
	Bytes  int
}
