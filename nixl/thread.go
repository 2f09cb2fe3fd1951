package nixl

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/native"
)

// thread drives an agent that a C thread owns.
type thread struct {
	guarded
	*reader
}

// startThread starts the C thread and the goroutine that reads its events.
func startThread(cfg *Config, sink func(*event)) (driver, error) {
	r, err := newRing(cfg.Commands, cfg.Events)
	if err != nil {
		return nil, err
	}
	t := &thread{guarded: guarded{ring: r}}
	if t.reader, err = newReader(r); err == nil {
		if err = native.StartAgent(unsafe.Pointer(r.head), uint32(cfg.Commands), uint32(cfg.Events), uint32(r.spill), r.wakeFD, r.eventFD, cfg.Pace); err != nil {
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

// stop waits for the C thread's end. One that hangs in the library keeps its block
// and its descriptors: they are left to it.
func (t *thread) stop(by time.Time) bool {
	ended := t.gone(by)
	t.end()
	if ended {
		t.giveBack()
	}
	return ended
}

// reader hands out the events that another thread, or process, puts in a ring.
type reader struct {
	r    *ring
	wait *os.File // the event descriptor, in Go's poller
	done chan struct{}
	lost func() // told when the ring holds nonsense; nil where only this process writes to it
}

func newReader(r *ring) (*reader, error) {
	f, err := pollable(r.eventFD, "nixl-events")
	if err != nil {
		return nil, err
	}
	return &reader{r: r, wait: f, done: make(chan struct{})}, nil
}

// pollable puts a copy of a descriptor, which must not block, into Go's poller.
func pollable(fd int, name string) (*os.File, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(own), name), nil
}

// read drains the events and waits for more in Go's poller, until end.
func (t *reader) read(sink func(*event)) {
	defer close(t.done)
	var buf [8]byte
	for {
		for t.r.pop(sink) {
		}
		if t.lost != nil && t.r.broken.Load() {
			t.lost()
			return
		}
		t.r.head.waiting.Store(1)
		if t.r.pop(sink) {
			t.r.head.waiting.Store(0)
			continue
		}
		if _, err := t.wait.Read(buf[:]); err != nil {
			return
		}
	}
}

// end has the reading stop, and waits for that.
func (t *reader) end() {
	t.wait.Close()
	<-t.done
}
