package front

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hangupEvents are the events of a client that disconnects. They are edge-triggered, because one
// report is enough.
const hangupEvents = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR | unix.EPOLLET

// poller is an epoll instance whose own descriptor waits in Go's poller, so that it blocks no
// thread. It is used in one of two ways: add and run watch for clients that disconnect; addInput
// and wait watch for input.
type poller struct {
	file *os.File
	raw  syscall.RawConn
	fd   int
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("front: cannot make an epoll instance: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("front: cannot make an epoll instance: %w", err)
	}
	file := os.NewFile(uintptr(fd), "epoll")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("front: cannot make an epoll instance: %w", err)
	}
	return &poller{file: file, raw: raw, fd: fd}, nil
}

// run calls event with the id of every connection whose client has disconnected, until close.
func (p *poller) run(event func(id uint64)) {
	var events [128]unix.EpollEvent
	for {
		n := 0
		err := p.raw.Read(func(fd uintptr) bool {
			for {
				var err error
				if n, err = unix.EpollWait(int(fd), events[:], 0); err != unix.EINTR {
					return n != 0
				}
			}
		})
		if err != nil || n <= 0 {
			return
		}
		for i := range events[:n] {
			event(uint64(uint32(events[i].Fd)) | uint64(uint32(events[i].Pad))<<32)
		}
	}
}

// add watches the connection's descriptor for hangupEvents and reports them with id. Control
// keeps the descriptor open during the call, so its number cannot be another connection's.
func (p *poller) add(conn syscall.RawConn, id uint64) (err error) {
	outer := conn.Control(func(fd uintptr) {
		ev := unix.EpollEvent{Events: hangupEvents, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
		err = unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, int(fd), &ev)
	})
	if outer != nil {
		return outer
	}
	return err
}

// addInput makes wait report fd while it has unread bytes or has ended. The events are
// level-triggered.
func (p *poller) addInput(fd int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(fd)})
}

// remove undoes addInput.
func (p *poller) remove(fd int) {
	_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil)
}

// setDeadline sets when wait fails with os.ErrDeadlineExceeded; the zero time means never.
func (p *poller) setDeadline(t time.Time) { _ = p.file.SetReadDeadline(t) }

// wait waits until a descriptor of addInput has input, and calls ready for up to 32 of them. It
// also returns at the deadline and after close.
func (p *poller) wait(ready func(fd int32)) error {
	var events [32]unix.EpollEvent
	n := 0
	err := p.raw.Read(func(fd uintptr) bool {
		for {
			var err error
			if n, err = unix.EpollWait(int(fd), events[:], 0); err != unix.EINTR {
				return n > 0
			}
		}
	})
	for i := range max(n, 0) {
		ready(events[i].Fd)
	}
	return err
}

func (p *poller) close() { _ = p.file.Close() }

// pollYielder makes Go's poller run: it writes to an eventfd and waits until the poller
// reports it, behind the input that had arrived before.
type pollYielder struct {
	file      *os.File // an eventfd; nil: yield does nothing
	raw       syscall.RawConn
	signalled bool
	step      func(fd uintptr) bool
}

// open makes the eventfd. If the kernel refuses it, yield does nothing.
func (b *pollYielder) open() {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return
	}
	file := os.NewFile(uintptr(fd), "eventfd")
	if b.raw, err = file.SyscallConn(); err != nil {
		_ = file.Close()
		return
	}
	b.file = file
	b.step = func(fd uintptr) bool {
		n := [8]byte{1}
		if b.signalled {
			_, _ = unix.Read(int(fd), n[:])
			return true
		}
		b.signalled = true
		_, err := unix.Write(int(fd), n[:])
		return err != nil
	}
}

// yield returns after the poller has run and the goroutines that it found have been scheduled.
func (b *pollYielder) yield() {
	if b.file != nil {
		b.signalled = false
		_ = b.raw.Read(b.step) // fails when close has ended it
	}
}

// close ends a yield that waits, and all later ones.
func (b *pollYielder) close() {
	if b.file != nil {
		_ = b.file.Close()
	}
}

// isClientGone reports whether the peer has closed or reset the connection, by a system call.
func isClientGone(conn syscall.RawConn) bool {
	left := false
	err := conn.Control(func(fd uintptr) { left = peerClosed(int(fd)) })
	return left || err != nil
}

// peerClosed reports whether the peer has sent its last byte, read or not, or has reset the
// connection.
func peerClosed(fd int) bool {
	fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds[:], 0)
	return err == nil && n > 0
}
