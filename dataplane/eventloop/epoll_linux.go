package eventloop

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sluice/dataplane/rawsocket"
)

const (
	epollBatch = 256
	// A loop reads into one buffer, at most readSize at a time. The buffer is free again when
	// everything has been written.
	bufferSize = 8 * readSize
	// readsInARow bounds how long a stream with much data may delay the others.
	readsInARow = 4
	// epollHangup are the events that a read shorter than requested may leave unnoticed.
	epollHangup = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
)

// epoll is an edge-triggered poller. It reports a descriptor once for new data, so each is read
// until it is empty. A short read shows that, and saves the read that would return EAGAIN.
type epoll struct {
	loop   *Loop
	fd     int
	wakeFD int // an eventfd for wake
	events [epollBatch]unix.EpollEvent
	at, n  int
	buf    []byte
	used   int
}

// tagWake is the tag of the eventfd. The tag of a task is its slot, generation and side.
const tagWake = -1

func openEpoll(l *Loop) (*epoll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("eventloop: cannot make an epoll instance: %w", err)
	}
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("eventloop: cannot make an eventfd: %w", err)
	}
	p := &epoll{loop: l, fd: fd, wakeFD: event, buf: make([]byte, bufferSize)}
	if err := unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, event, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: tagWake}); err != nil {
		p.close()
		return nil, fmt.Errorf("eventloop: cannot watch an eventfd: %w", err)
	}
	return p, nil
}

// watch begins to read t's In. After a pause it reads at once, because the edge may have been
// reported while nobody read.
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

// watchOut requests a report when Out is writable again. rearm: no write has failed since the last
// report, so the kernel would not report again by itself.
func (p *epoll) watchOut(t *Task, rearm bool) error {
	op := unix.EPOLL_CTL_ADD
	if t.polling {
		if !rearm {
			return nil // edge-triggered, registered once
		}
		op = unix.EPOLL_CTL_MOD // makes the kernel check again
	}
	t.polling = true
	return unix.EpollCtl(p.fd, op, t.Out, p.tag(t, unix.EPOLLOUT|unix.EPOLLET, 1))
}

// remove removes t from the poller.
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

// wait waits for events and queues them for next.
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
		return fmt.Errorf("eventloop: cannot wait in epoll: %w", errno)
	}
	return nil
}

// ready reports whether wait has queued events.
func (p *epoll) ready() bool { return p.at < p.n }

// pause waits for d. A signal ends it early. As pollBrief it does not inform Go's scheduler.
func (p *epoll) pause(d time.Duration) {
	t := unix.NsecToTimespec(int64(d))
	_, _, _ = syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&t)), 0, 0)
}

// next handles one queued event; false: none is left.
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

// read reads what t's In has. all: a short read does not mean that In is empty.
func (p *epoll) read(t *Task, all bool) {
	full := false
	for range readsInARow {
		if t.state != taskAttached || t.paused {
			return
		}
		if t.queued || len(p.buf)-p.used < readSize {
			if p.loop.flush(); t.state != taskAttached || t.paused {
				return // the rest of In is read later, or by the next owner
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

// releaseBuffer marks the bytes read as no longer used.
func (p *epoll) releaseBuffer() { p.used = 0 }

func (p *epoll) wake() {
	one := [8]byte{0: 1}
	_, _ = unix.Write(p.wakeFD, one[:])
}

func (p *epoll) close() {
	_ = unix.Close(p.fd)
	_ = unix.Close(p.wakeFD)
}
