package nixl

import (
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/native"
)

// thread drives an agent that a C thread owns, or a goroutine locked to its thread.
type thread struct {
	*ring
	wait *os.File // the event descriptor, in Go's poller; nil where the reader is the owner
	done chan struct{}

	// users are inside of the block; ended keeps more from entering. So stop can
	// unmap it although anyone may call at any time.
	users atomic.Int64
	ended atomic.Bool
}

// enter answers whether the block may be touched; leave when it did.
func (t *thread) enter() bool {
	t.users.Add(1)
	if t.ended.Load() {
		t.users.Add(-1)
		return false
	}
	return true
}

func (t *thread) leave() { t.users.Add(-1) }

func (t *thread) push(c *command) error {
	if !t.enter() {
		return ErrClosed
	}
	err := t.ring.push(c)
	t.leave()
	return err
}

func (t *thread) post(peer uint64, message []byte) error {
	c := command{op: opNotify, handle: peer, data: message}
	return t.push(&c)
}

func (t *thread) expect(delta int64) {
	if t.enter() {
		t.ring.expect(delta)
		t.leave()
	}
}

// startThread starts the C thread and the goroutine that reads its events.
func startThread(cfg *Config, sink func(*event)) (driver, error) {
	r, err := newRing(cfg.Commands, cfg.Events)
	if err != nil {
		return nil, err
	}
	fd, err := unix.FcntlInt(uintptr(r.eventFD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		r.free()
		return nil, err
	}
	t := &thread{ring: r, wait: os.NewFile(uintptr(fd), "nixl-events"), done: make(chan struct{})}
	if err := native.StartAgent(unsafe.Pointer(r.head), uint32(cfg.Commands), uint32(cfg.Events), r.wakeFD, r.eventFD, cfg.Pace); err != nil {
		t.wait.Close()
		r.free()
		return nil, err
	}
	go t.read(sink)
	return t, nil
}

// startUCX starts the goroutine that is the thread of a worker of UCX: it waits
// inside of C, so that a message wakes one thread and not two.
func startUCX(cfg *Config, sink func(*event)) (driver, error) {
	r, err := newRing(cfg.Commands, cfg.Events)
	if err != nil {
		return nil, err
	}
	u, ok := native.NewUCX(unsafe.Pointer(r.head), uint32(cfg.Commands), uint32(cfg.Events), r.wakeFD)
	if !ok {
		r.free()
		return nil, syscall.ENOMEM
	}
	t := &thread{ring: r, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for more := true; more; {
			more = u.Step()
			for t.pop(sink) {
			}
		}
	}()
	return t, nil
}

// read drains the events and waits for more in Go's poller, until stop closes the
// descriptor.
func (t *thread) read(sink func(*event)) {
	defer close(t.done)
	var buf [8]byte
	for {
		for t.pop(sink) {
		}
		t.head.waiting.Store(1)
		if t.pop(sink) {
			t.head.waiting.Store(0)
			continue
		}
		if _, err := t.wait.Read(buf[:]); err != nil {
			return
		}
	}
}

func (t *thread) busy() (uint32, time.Duration) {
	if !t.enter() {
		return 0, 0
	}
	defer t.leave()
	since := t.head.busySince.Load()
	if since == 0 {
		return 0, 0
	}
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return 0, 0
	}
	return uint32(t.head.busyOp.Load()), max(0, time.Duration(uint64(now.Nano())-since))
}

func (t *thread) counters() Counters {
	if !t.enter() {
		return Counters{}
	}
	defer t.leave()
	return Counters{Unmatched: t.head.foreign.Load(), Unread: t.head.unread.Load(), Signals: t.head.signals.Load(), Stuck: t.head.stuck.Load()}
}

// stop waits for the C thread's end. One that hangs in the library keeps its block
// and its descriptors: they are left to it.
func (t *thread) stop(by time.Time) bool {
	for t.head.gone.Load() == 0 {
		if time.Now().After(by) {
			if t.wait != nil { // else the goroutine hangs in the library itself
				t.wait.Close()
				<-t.done
			}
			return false
		}
		time.Sleep(200 * time.Microsecond)
	}
	if t.wait != nil {
		t.wait.Close()
	}
	<-t.done
	t.ended.Store(true)
	for t.users.Load() != 0 {
		runtime.Gosched()
	}
	t.free()
	return true
}
