package nixl

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/native/rings"
)

// inlineBytes fit in a slot; longer payloads need a call into C for memory.
const inlineBytes = 184

// slot mirrors struct sluice_slot: 256 bytes, one command or event.
type slot struct {
	seq           atomic.Uint64
	op, length    uint32
	token, handle uint64
	big           uint64
	status        int32
	aux           uint32
	arg           [3]uint64
	data          [inlineBytes]byte
}

// sharedHead mirrors struct sluice_shared, whose comment explains the memory order.
// Go's atomics are sequentially consistent, which is stronger than required there.
type sharedHead struct {
	cmdTail     atomic.Uint64
	_           [7]uint64
	cmdHead     atomic.Uint64
	_           [7]uint64
	evtTail     atomic.Uint64
	_           [7]uint64
	evtHead     atomic.Uint64
	_           [7]uint64
	asleep      atomic.Uint32
	waiting     atomic.Uint32
	_           [7]uint64
	outstanding atomic.Uint64
	_           [7]uint64
	busySince   atomic.Uint64
	busyOp      atomic.Uint64
	beats       atomic.Uint64
	foreign     atomic.Uint64
	unread      atomic.Uint64
	signals     atomic.Uint64
	gone        atomic.Uint64
	stuck       atomic.Uint64
}

// ring is a shared block: the head, the command slots, the event slots. The memory is a
// memfd mapping, so that it can be shared with another process.
type ring struct {
	block    []byte
	head     *sharedHead
	commands []slot
	events   []slot
	spill    int    // bytes outside each slot for a payload that does not fit; 0: such payloads are allocated
	shared   *arena // arena that contains the block if another process maps it too; else nil
	wakeFD   int    // wakes the thread when commands arrive
	eventFD  int    // wakes the reader of events

	corrupt  atomic.Bool // the other process wrote invalid data
	eventBuf event       // owned by the reader: avoids an allocation for each event
}

// newRing maps the block; capacities must be powers of two.
func newRing(commands, events int) (*ring, error) {
	size := int(unsafe.Sizeof(sharedHead{})) + (commands+events)*int(unsafe.Sizeof(slot{}))
	block, err := mapShared("sluice-ring", size)
	if err != nil {
		return nil, err
	}
	r, err := placeRing(block, commands, events, 0)
	if err != nil {
		return nil, err
	}
	if err := r.init(); err != nil {
		return nil, err
	}
	return r, nil
}

// newSharedRing maps a block that another process maps at the same address, with spill
// bytes outside each slot.
func newSharedRing(commands, events, spill int) (*ring, error) {
	a, err := newArena("sluice-ring", ringBytes(commands, events, spill))
	if err != nil {
		return nil, err
	}
	r, err := placeRing(a.bytes, commands, events, spill)
	if err == nil {
		r.shared = a
		err = r.init()
	}
	return r, err
}

func ringBytes(commands, events, spill int) int {
	return int(unsafe.Sizeof(sharedHead{})) + (commands+events)*(int(unsafe.Sizeof(slot{}))+spill)
}

// placeRing lays a ring over a block.
func placeRing(block []byte, commands, events, spill int) (*ring, error) {
	if commands < 16 || events < 16 || spill < 0 || len(block) < ringBytes(commands, events, spill) {
		return nil, fmt.Errorf("nixl: a ring of %d and %d slots does not fit in %d bytes", commands, events, len(block))
	}
	r := &ring{block: block, spill: spill, wakeFD: -1, eventFD: -1}
	base := unsafe.Pointer(unsafe.SliceData(block))
	r.head = (*sharedHead)(base)
	slots := unsafe.Slice((*slot)(unsafe.Add(base, unsafe.Sizeof(sharedHead{}))), commands+events)
	r.commands, r.events = slots[:commands:commands], slots[commands:]
	return r, nil
}

// spillArea returns the spill bytes of a slot, counted through both rings.
func (r *ring) spillArea(i int) []byte {
	at := len(r.block) - (len(r.commands)+len(r.events)-i)*r.spill
	return r.block[at : at+r.spill : at+r.spill]
}

// init empties the commands and makes the descriptors.
func (r *ring) init() (err error) {
	for i := range r.commands {
		r.commands[i].seq.Store(uint64(i))
	}
	if r.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
		r.eventFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	}
	if err != nil {
		r.free()
	}
	return err
}

// free releases everything; the thread must have ended.
func (r *ring) free() {
	if r.wakeFD >= 0 {
		unix.Close(r.wakeFD)
	}
	if r.eventFD >= 0 {
		unix.Close(r.eventFD)
	}
	if r.shared == nil {
		unix.Munmap(r.block)
	}
}

// push copies a command into the ring. It takes no lock, calls no C (except for
// payloads over inlineBytes) and allocates nothing. It makes a system call only if the
// thread sleeps.
func (r *ring) push(c *command) error {
	var big uint64
	switch n := len(c.data); {
	case n <= inlineBytes:
	case r.spill > 0:
		if n > r.spill {
			return errTooLong
		}
		big = 1
	default:
		if big = rings.CopyToC(c.data); big == 0 {
			return ErrFull
		}
	}
	for tries := 0; ; tries++ {
		at := r.head.cmdTail.Load()
		s := &r.commands[at&uint64(len(r.commands)-1)]
		d := int64(s.seq.Load() - at)
		if d > 0 && tries < maxPushTries && r.head.cmdTail.Load() != at {
			continue // another producer was faster
		}
		if d != 0 {
			if big != 0 && r.spill == 0 {
				rings.TakeFromC(big, 0)
			}
			if d < 0 {
				return ErrFull
			}
			r.reportCorrupt() // no producer advances the tail: the other process wrote there
			return ErrClosed
		}
		if !r.head.cmdTail.CompareAndSwap(at, at+1) {
			continue
		}
		s.op, s.token, s.handle, s.arg = c.op, c.token, c.handle, c.arg
		s.length, s.big = uint32(len(c.data)), big
		if big == 0 {
			copy(s.data[:], c.data)
		} else if r.spill > 0 {
			copy(r.spillArea(int(at&uint64(len(r.commands)-1))), c.data)
		}
		s.seq.Store(at + 1)
		r.wake()
		return nil
	}
}

// maxPushTries limits how often a producer may lose to others: another process that
// shares the ring can write any number there.
const maxPushTries = 1 << 16

// errTooLong means that a payload does not fit in a ring shared with another process.
var errTooLong = fmt.Errorf("nixl: the payload is too long for an agent in a process of its own; at most %d bytes", isolatedSpill)

var one = [8]byte{1} // little endian, as on every machine with NIXL

// wake ends a long sleep of the thread; a short one is not worth a call.
func (r *ring) wake() {
	if r.head.asleep.Load() != 0 && r.head.asleep.CompareAndSwap(1, 0) {
		// A raw system call: a write to a non-blocking eventfd never waits.
		syscall.RawSyscall(syscall.SYS_WRITE, uintptr(r.wakeFD), uintptr(unsafe.Pointer(&one)), 8)
	}
}

// reportCorrupt makes the reader kill the other process.
func (r *ring) reportCorrupt() {
	if r.corrupt.CompareAndSwap(false, true) {
		syscall.RawSyscall(syscall.SYS_WRITE, uintptr(r.eventFD), uintptr(unsafe.Pointer(&one)), 8)
	}
}

// expect changes the number of outstanding completions.
func (r *ring) expect(delta int64) {
	if r.head.outstanding.Add(uint64(delta)) == uint64(delta) && delta > 0 {
		r.wake() // from none to some
	}
}

// pop passes the next event to f and reports whether there was one. Only one goroutine
// may read.
func (r *ring) pop(f func(*event)) bool {
	at := r.head.evtHead.Load()
	switch n := r.head.evtTail.Load() - at; {
	case n == 0:
		return false
	case n > uint64(len(r.events)):
		r.corrupt.Store(true)
		return false
	}
	s := &r.events[at&uint64(len(r.events)-1)]
	e := &r.eventBuf
	*e = event{op: s.op, status: Status(s.status), token: s.token, handle: s.handle, aux: s.aux, arg: s.arg}
	switch {
	case r.spill > 0 && s.big != 0: // the address is ignored: only one place is valid
		i := len(r.commands) + int(at&uint64(len(r.events)-1))
		e.data = bytes.Clone(r.spillArea(i)[:min(int(s.length), r.spill)])
	case s.big != 0:
		e.data = rings.TakeFromC(s.big, int(s.length))
		s.big = 0
	default:
		e.data = s.data[:min(int(s.length), inlineBytes)]
	}
	f(e)
	r.head.evtHead.Store(at + 1)
	return true
}

// empty reports that no event waits.
func (r *ring) empty() bool { return r.head.evtTail.Load() == r.head.evtHead.Load() }

// mapShared maps size bytes of anonymous shared memory.
func mapShared(name string, size int) ([]byte, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, err
	}
	return unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}
