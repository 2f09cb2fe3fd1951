package nixl

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	nativenixl "sluice/native/nixl"
)

// thread is the driver of an agent that a C thread owns.
type thread struct {
	guardedRing
	*reader
}

// startThread starts the C thread and the goroutine that reads its events.
func startThread(cfg *Config, sink func(*event)) (driver, error) {
	r, err := newRing(cfg.Commands, cfg.Events)
	if err != nil {
		return nil, err
	}
	t := &thread{guardedRing: guardedRing{ring: r}}
	if t.reader, err = newReader(r); err == nil {
		if err = nativenixl.StartAgent(unsafe.Pointer(r.head), uint32(cfg.Commands), uint32(cfg.Events), uint32(r.spill), r.wakeFD, r.eventFD, cfg.Poll); err != nil {
			t.wait.Close()
		}
	}
	if err != nil {
		r.free()
		return nil, err
	}
	go t.read(sink)
	return t, nil
}

// stop waits for the C thread's end. A thread that hangs in the library keeps its block
// and its descriptors, which are abandoned with it.
func (t *thread) stop(by time.Time) bool {
	gone := t.awaitStopped(by)
	if !t.reader.stop(by) || !gone {
		return false
	}
	t.unmap()
	return true
}

// reader passes on the events that another thread, or process, puts into a ring.
type reader struct {
	r         *ring
	wait      *os.File // the event descriptor, in Go's poller
	done      chan struct{}
	onCorrupt func() // called if the ring contains invalid data; nil if only this process writes to it
}

func newReader(r *ring) (*reader, error) {
	f, err := pollable(r.eventFD, "nixl-events")
	if err != nil {
		return nil, err
	}
	return &reader{r: r, wait: f, done: make(chan struct{})}, nil
}

// pollable puts a copy of a descriptor, which must be non-blocking, into Go's poller.
func pollable(fd int, name string) (*os.File, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(own), name), nil
}

// read drains the events and waits for more in Go's poller, until stop.
//
// Nothing is read from the descriptor: Go's poller reports each write to it. So neither
// an arrival nor a wait makes a system call here, which would also wake the runtime's
// monitor; that cost as much as everything else.
func (t *reader) read(sink func(*event)) {
	defer close(t.done)
	c, err := t.wait.SyscallConn()
	if err != nil {
		return
	}
	// Read forgets earlier reports of the descriptor when it begins, so the ring is
	// checked after that; once the descriptor has been reported, Read returns.
	asked := false
	look := func(uintptr) bool {
		t.r.head.waiting.Store(1)
		if !asked && t.r.empty() {
			asked = true
			return false
		}
		t.r.head.waiting.Store(0)
		return true
	}
	for {
		for t.r.pop(sink) {
		}
		if t.onCorrupt != nil && t.r.corrupt.Load() {
			t.onCorrupt()
			return
		}
		asked = false
		if err := c.Read(look); err != nil {
			return
		}
	}
}

// handlerTimeout is how long a handler of events may run on when its agent is closed.
const handlerTimeout = 100 * time.Millisecond

// stop ends the reading. It returns false if a handler of events has not returned by
// then and still uses a slot of the ring.
func (t *reader) stop(by time.Time) bool {
	t.wait.Close()
	select {
	case <-t.done:
		return true
	case <-time.After(max(handlerTimeout, time.Until(by))):
		return false
	}
}
