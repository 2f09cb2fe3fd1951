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

// stepper runs a worker of UCX, which has no thread of its own. Its descriptor and
// that of the commands are both in Go's poller, so that at rest nothing holds a
// thread, and a message wakes one goroutine, which takes it out of UCX and hands it
// on.
//
// Two other forms were measured beside it (docs/nixl.md). A goroutine that waits inside
// of C takes more CPU. A thread in C that hands messages over through the ring takes
// less where nothing else goes on, for a call into C ends the deep sleep of the
// runtime's watch, but more where something does, and it wakes two threads one after the
// other: on a busy machine it was up to twice as late in the middle, and ten times as
// late at the ninety-ninth percentile.
type stepper struct {
	u    ucx.Worker
	pop  func() bool // hands out one event; nil where another process reads them
	wake *os.File    // commands
	done chan struct{}

	mu         sync.Mutex // guards what follows, and the steps: one at a time
	arrival    *os.File   // UCX's descriptor, once the worker is open
	stopped    bool
	goroutines sync.WaitGroup
}

// newStepper makes a worker over a ring. Where pop is nil, the reader of events waits
// on the ring's event descriptor.
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
		if s.arrival == nil { // set here alone
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

// pump steps until the worker has nothing left to do; false when it has stopped.
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
			// Both goroutines leave their waits. Closing would wait for them, and this is one.
			s.wake.SetReadDeadline(time.Unix(1, 0))
			if s.arrival != nil {
				s.arrival.SetReadDeadline(time.Unix(1, 0))
			}
		}
	}
	return false
}

// armArrivals waits for messages from now on, if the worker is open.
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
	// It is a descriptor of epoll, which never blocks; the mark is what Go's poller asks for.
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
		// Nothing is read from it: it can be read as long as UCX has not looked. Go's
		// poller tells of each rise anew, and a pump that comes after one sees it all.
		c.Read(func(uintptr) bool { return !s.pump() })
	})
}

// localStepper is a stepper whose events are read here.
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

// stop waits for the worker's end. One that hangs in the library is left behind.
func (t *localStepper) stop(by time.Time) bool {
	if !t.awaitStopped(by) {
		return false
	}
	<-t.done
	t.unmap()
	return true
}
