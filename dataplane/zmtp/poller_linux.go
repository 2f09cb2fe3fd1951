package zmtp

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func duplicate(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }

// Poller watches many Streams and reports those that may have something to read. It is one epoll
// instance, which waits in the runtime's poller, so that no thread is blocked in it.
//
// Between two checks it pauses, so that one wake-up serves all messages that came meanwhile. The
// pause is short where few messages come, and longer, up to a bound, where more do. So the cost of
// a message hardly depends on their rate once the rate matters.
//
// The runtime's poller watches gate, an epoll instance that contains fd only while run waits. A
// descriptor that the runtime watches wakes one of its threads for every message, whether or not a
// goroutine waits for it.
type Poller struct {
	fd    int
	gate  *os.File
	raw   syscall.RawConn
	armed bool // gate contains fd; used by run only
	pause time.Duration
	done  chan struct{}

	mu      sync.Mutex
	last    int32 // numbers registrations, because descriptors are reused
	watched map[int32]watched
	due     []func() // reused
}

type watched struct {
	stream *Stream
	ready  func()
	number int32
}

const (
	minPause, maxPause = 10 * time.Millisecond, 40 * time.Millisecond
	targetBatch        = 256
)

// NewPoller creates a Poller. The caller closes it.
func NewPoller() (*Poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("zmtp: cannot make an epoll instance: %w", err)
	}
	p := &Poller{fd: fd, pause: minPause, done: make(chan struct{}), watched: make(map[int32]watched)}
	if p.gate, p.raw, err = newGate(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("zmtp: cannot make an epoll instance: %w", err)
	}
	go p.run()
	return p, nil
}

// newGate creates an empty epoll instance that the runtime's poller watches.
func newGate() (*os.File, syscall.RawConn, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, nil, err
	}
	gate := os.NewFile(uintptr(fd), "epoll")
	raw, err := gate.SyscallConn()
	if err != nil {
		gate.Close()
	}
	return gate, raw, err
}

// Watch calls ready whenever s may have something to read, until s is closed. What ready leaves
// unread is reported again. ready is called on the Poller's goroutine, one at a time, may be called
// once more after Close, and must return soon.
func (p *Poller) Watch(s *Stream, ready func()) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(s.fd), Pad: p.last}
	if err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, s.fd, &event); err != nil {
		return fmt.Errorf("zmtp: cannot watch a connection: %w", err)
	}
	s.poller = p
	p.watched[int32(s.fd)] = watched{stream: s, ready: ready, number: p.last}
	return nil
}

// remove is called before the descriptor is closed.
func (p *Poller) remove(fd int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.watched[int32(fd)]; ok {
		delete(p.watched, int32(fd))
		_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil)
	}
}

func (p *Poller) run() {
	defer close(p.done)
	var events [256]unix.EpollEvent
	for {
		n, err := p.wait(events[:])
		if err != nil {
			return
		}
		notified := n
		// Streams that were reported and have not been read yet are reported again, after the
		// others.
		for all := p.notify(events[:n]); n == len(events) && all > 0; all -= n {
			if n, _ = p.look(events[:]); n > 0 {
				p.notify(events[:n])
				notified += n
			}
		}
		p.pause = nextPause(p.pause, notified)
		time.Sleep(p.pause)
	}
}

// nextPause returns the pause in which enough messages should come, given the number in the last
// one.
func nextPause(pause time.Duration, notified int) time.Duration {
	if notified < targetBatch/16 {
		return minPause // short enough that its wake-ups do not matter
	}
	return min(max(pause*targetBatch/time.Duration(notified), minPause), maxPause)
}

// wait blocks until a Stream is readable or the Poller is closed.
func (p *Poller) wait(events []unix.EpollEvent) (n int, err error) {
	var wrong error
	err = p.raw.Read(func(gate uintptr) bool {
		if n, wrong = p.look(events); n == 0 && wrong == nil && !p.armed {
			wrong = unix.EpollCtl(int(gate), unix.EPOLL_CTL_ADD, p.fd, &unix.EpollEvent{Events: unix.EPOLLIN})
			p.armed = wrong == nil
		}
		if p.armed && n > 0 {
			p.armed = false
			wrong = unix.EpollCtl(int(gate), unix.EPOLL_CTL_DEL, p.fd, nil)
		}
		return n > 0 || wrong != nil
	})
	if err == nil {
		err = wrong
	}
	return n, err
}

// look returns the Streams that are readable now.
func (p *Poller) look(events []unix.EpollEvent) (n int, err error) {
	for {
		if n, err = unix.EpollWait(p.fd, events, 0); err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// notify calls ready for events. all is the number of Streams.
func (p *Poller) notify(events []unix.EpollEvent) (all int) {
	p.mu.Lock()
	all = len(p.watched)
	p.due = p.due[:0]
	for i := range events {
		w, ok := p.watched[events[i].Fd]
		if !ok || w.number != events[i].Pad {
			continue
		}
		if events[i].Events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			w.stream.gone.Store(true)
		}
		p.due = append(p.due, w.ready)
	}
	p.mu.Unlock()
	for i, ready := range p.due {
		p.due[i] = nil
		ready()
	}
	return all
}

// Close stops the Poller. The caller closes its Streams before.
func (p *Poller) Close() {
	p.gate.Close()
	<-p.done
	unix.Close(p.fd)
}
