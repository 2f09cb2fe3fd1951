package eventloop

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/dataplane/rawsocket"
)

const (
	epollBatch = 256
	// A loop's one buffer is read into piece by piece, each of readSize at most, and is
	// free again when all was written.
	bufferSize = 8 * readSize
	// readsInARow bounds how long a stream that has much may keep the others waiting.
	readsInARow = 4
	// epollHangup is what a read that is shorter than asked for may leave unseen.
	epollHangup = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
)

// epoll is an edge-triggered poller. A descriptor is told of once for what comes, so
// each is read until it has no more: that a read brought less than asked for says so,
// and saves the read that would say it.
type epoll struct {
	loop   *Loop
	fd     int
	wakeFD int // an eventfd: wake
	events [epollBatch]unix.EpollEvent
	at, n  int
	buf    []byte
	used   int
}

// tagWake is the eventfd's; a task's is its slot, generation and side.
const tagWake = -1

func openEpoll(l *Loop) (*epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("loop: cannot make an epoll instance: %w", err)
	}
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("loop: cannot make an eventfd: %w", err)
	}
	p := &epoll{loop: l, fd: fd, wakeFD: event, buf: make([]byte, bufferSize)}
	if err := unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, event, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: tagWake}); err != nil {
		p.close()
		return nil, fmt.Errorf("loop: cannot watch an eventfd: %w", err)
	}
	return p, nil
}

// watch begins to read t's In. It reads on after a pause: the edge may have come while nobody read.
func (p *epoll) watch(t *Task) error {
	if t.reading {
		p.read(t, true)
		return nil
	}
	t.reading = true
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, t.In, p.tag(t, unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLET, 0))
}

func (p *epoll) tag(t *Task, events uint32, side uint32) *unix.EpollEvent {
	return &unix.EpollEvent{Events: events, Fd: int32(t.slot), Pad: int32(t.gen<<1 | side)}
}

// watchOut asks to be told when Out takes bytes again. unasked: no write has failed since
// it was told last, which would have had the kernel see to that.
func (p *epoll) watchOut(t *Task, rearm bool) error {
	op := unix.EPOLL_CTL_ADD
	if t.polling {
		if !rearm {
			return nil // edge-triggered, once for all
		}
		op = unix.EPOLL_CTL_MOD // looks anew
	}
	t.polling = true
	return unix.EpollCtl(p.fd, op, t.Out, p.tag(t, unix.EPOLLOUT|unix.EPOLLET, 1))
}

// remove makes the kernel let go of t.
func (p *epoll) remove(t *Task) {
	if t.reading {
		t.reading = false
		_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, t.In, nil)
	}
	if t.polling {
		t.polling = false
		_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, t.Out, nil)
	}
}

// wait waits for something to do and queues it for next.
func (p *epoll) wait(h pollMode) error {
	var n uintptr
	var errno syscall.Errno
	p.at, p.n = 0, 0
	events := unsafe.Pointer(&p.events[0])
	switch h {
	case pollImmediate:
		n, _, errno = syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(events), epollBatch, 0, 0, 0)
	case pollBrief:
		n, _, errno = syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(events), epollBatch, pollBriefWait, 0, 0)
	default:
		n, _, errno = syscall.Syscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(events), epollBatch, ^uintptr(0), 0, 0)
	}
	switch errno {
	case 0:
		p.n = int(n)
	case syscall.EINTR:
	default:
		return fmt.Errorf("loop: cannot wait in epoll: %w", errno)
	}
	return nil
}

// next does one thing that wait queued; false when nothing is left.
func (p *epoll) next() bool {
	if p.at >= p.n {
		return false
	}
	ev := &p.events[p.at]
	p.at++
	if ev.Fd == tagWake {
		var b [8]byte
		_, _ = unix.Read(p.wakeFD, b[:])
		return true
	}
	t := p.loop.find(uint32(ev.Fd), uint32(ev.Pad)>>1)
	switch {
	case t == nil:
	case ev.Pad&1 != 0:
		p.loop.onWritable(t)
	default:
		p.read(t, ev.Events&epollHangup != 0)
	}
	return true
}

// read reads what t's In has; all says that a short read is not the last.
func (p *epoll) read(t *Task, all bool) {
	full := false
	for range readsInARow {
		if t.state != taskAttached || t.paused {
			return
		}
		if t.queued || len(p.buf)-p.used < readSize {
			if p.loop.flush(); t.state != taskAttached || t.paused {
				return // what In still has is for whoever goes on, or for later
			}
		}
		size := t.readLimit(full)
		if size == 0 {
			p.loop.waitWritable(t)
			return
		}
		buf := p.buf[p.used : p.used+size]
		n, errno := rawsocket.Recv(t.In, buf)
		switch {
		case errno == syscall.EAGAIN:
			return
		case errno != 0 || n == 0:
			p.loop.onReadEnd(t, errno)
			return
		}
		p.used += n
		p.loop.dispatch(t, buf[:n:n])
		if full = n == len(buf); !full && !all {
			return
		}
	}
	if t.state == taskAttached && !t.readAgain {
		t.readAgain = true
		p.loop.readAgain = append(p.loop.readAgain, t)
	}
}

// releaseBuffer tells that nobody has use for the bytes that were read any more.
func (p *epoll) releaseBuffer() { p.used = 0 }

func (p *epoll) wake() {
	one := [8]byte{0: 1}
	_, _ = unix.Write(p.wakeFD, one[:])
}

func (p *epoll) close() {
	_ = unix.Close(p.fd)
	_ = unix.Close(p.wakeFD)
}
