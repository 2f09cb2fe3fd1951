package nixl

import (
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/native/ucx"
)

// stepper runs a worker of UCX, which has no thread of its own. Its descriptor and that
// of the commands are both in Go's poller, so an idle worker occupies no thread. A
// message wakes one goroutine, which takes the message from UCX and passes it on.
//
// Two alternatives were measured (docs/nixl.md). A goroutine that waits inside C uses
// more CPU. A thread in C that passes messages through the ring uses less CPU on an
// idle process, because a call into C ends the deep sleep of the runtime's monitor, but
// more on a busy one. It also wakes two threads in a row: on a busy machine its median
// delay was up to twice as long, and its 99th percentile ten times as long.
type stepper struct {
	u    ucx.Worker
	pop  func() bool // passes on one event; nil if another process reads them
	wake *os.File    // signals commands
	done chan struct{}

	mu         sync.Mutex // guards the fields below, and the steps: one at a time
	arrival    *os.File   // UCX's descriptor, once the worker is open
	stopped    bool
	goroutines sync.WaitGroup
}

// newStepper makes a worker over a ring. If pop is nil, the reader of events waits on
// the ring's event descriptor.
func newStepper(r *ring, pop func() bool) (*stepper, error) {
	eventFD := -1
	if pop == nil {
		eventFD = r.eventFD
	}
	wake, err := pollable(r.wakeFD, "ucx-commands")
	if err != nil {
		return nil, err
	}
	u, ok := ucx.NewWorker(unsafe.Pointer(r.head), uint32(len(r.commands)), uint32(len(r.events)), uint32(r.spill), eventFD)
	if !ok {
		wake.Close()
		return nil, syscall.ENOMEM
	}
	return &stepper{u: u, pop: pop, wake: wake, done: make(chan struct{})}, nil
}

// run steps the worker until it has stopped.
func (s *stepper) run() {
	defer close(s.done)
	var buf [8]byte
	for s.pump() {
		if s.arrival == nil { // set by this goroutine only
			s.armArrivals()
		}
		if _, err := s.wake.Read(buf[:]); err != nil {
			break // the other goroutine's pump saw the end
		}
	}
	s.goroutines.Wait()
	s.wake.Close()
	if s.arrival != nil {
		s.arrival.Close()
	}
}

// stepInterval is the pause before a step that nothing will wake.
const stepInterval = 200 * time.Microsecond

// pump steps until the worker has nothing left to do; it returns false if the worker
// has stopped.
func (s *stepper) pump() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.stopped {
		next, read := s.u.Step(), false
		for s.pop != nil && s.pop() {
			read = true
		}
		switch {
		case next == ucx.Wait:
			return true
		case next == ucx.RetrySoon && !read:
			time.Sleep(stepInterval)
		case next == ucx.Stopped:
			s.stopped = true
			// Both goroutines end their waits. Closing would wait for them, and this is
			// one of them.
			s.wake.SetReadDeadline(time.Unix(1, 0))
			if s.arrival != nil {
				s.arrival.SetReadDeadline(time.Unix(1, 0))
			}
		}
	}
	return false
}

// armArrivals starts to wait for messages, if the worker is open.
func (s *stepper) armArrivals() {
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := -1
	if !s.stopped {
		fd = s.u.FD()
	}
	if fd < 0 {
		return
	}
	// An epoll descriptor never blocks; Go's poller requires the flag.
	if err := unix.SetNonblock(fd, true); err != nil {
		return
	}
	f, err := pollable(fd, "ucx-arrivals")
	if err != nil {
		return
	}
	c, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return
	}
	s.arrival = f
	s.goroutines.Go(func() {
		// Nothing is read from the descriptor: it stays readable until UCX polls. Go's
		// poller reports each rising edge, and a pump that runs after one sees all
		// messages.
		c.Read(func(uintptr) bool { return !s.pump() })
	})
}

// localStepper is a stepper whose events this process reads.
type localStepper struct {
	guardedRing
	*stepper
}

// startUCX starts a worker of UCX.
func startUCX(cfg *Config, sink func(*event)) (driver, error) {
	r, err := newRing(cfg.Commands, cfg.Events)
	if err != nil {
		return nil, err
	}
	s, err := newStepper(r, func() bool { return r.pop(sink) })
	if err != nil {
		r.free()
		return nil, err
	}
	go s.run()
	return &localStepper{guardedRing{ring: r}, s}, nil
}

// stop waits for the worker's end. A worker that hangs in the library is abandoned.
func (t *localStepper) stop(by time.Time) bool {
	if !t.awaitStopped(by) {
		return false
	}
	<-t.done
	t.unmap()
	return true
}
