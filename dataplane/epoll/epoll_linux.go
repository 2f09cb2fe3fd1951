// Package epoll waits for events of many sockets outside Go's own poller.
package epoll

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hangupEvents are the events of a peer that disconnects. They are edge-triggered, because one
// report is enough.
const hangupEvents = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR | unix.EPOLLET

// Poller is an epoll instance whose own descriptor waits in Go's poller, so that it blocks no
// thread. It is used in one of two ways: Add and Run watch for peers that disconnect; AddInput
// and Wait watch for input.
type Poller struct {
	file *os.File
	raw  syscall.RawConn
	fd   int
}

// New makes a Poller. It returns nil without an error on systems that have no epoll.
func New() (*Poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: cannot make an epoll instance: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("epoll: cannot make an epoll instance: %w", err)
	}
	file := os.NewFile(uintptr(fd), "epoll")
	raw, err := file.SyscallConn()
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("epoll: cannot make an epoll instance: %w", err)
	}
	return &Poller{file: file, raw: raw, fd: fd}, nil
}

// Run calls event with the id of every connection whose peer has disconnected, until Close.
func (p *Poller) Run(event func(id uint64)) {
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

// Add watches the connection's descriptor for hangupEvents and reports them with id. Control
// keeps the descriptor open during the call, so its number cannot be another connection's.
func (p *Poller) Add(conn syscall.RawConn, id uint64) (err error) {
	outer := conn.Control(func(fd uintptr) {
		ev := unix.EpollEvent{Events: hangupEvents, Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
		err = unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, int(fd), &ev)
	})
	if outer != nil {
		return outer
	}
	return err
}

// AddInput makes Wait report fd while it has unread bytes or has ended. The events are
// level-triggered.
func (p *Poller) AddInput(fd int) error {
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(fd)})
}

// Remove undoes Add and AddInput.
func (p *Poller) Remove(fd int) {
	_ = unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil)
}

// SetDeadline sets when Wait fails with os.ErrDeadlineExceeded; the zero time means never.
func (p *Poller) SetDeadline(t time.Time) { _ = p.file.SetReadDeadline(t) }

// Wait waits until a descriptor of AddInput has input, and calls ready for up to 32 of them. It
// also returns at the deadline and after Close.
func (p *Poller) Wait(ready func(fd int32)) error {
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

// Close ends Run and Wait and frees the descriptor.
func (p *Poller) Close() { _ = p.file.Close() }

// Yielder makes Go's Poller run: it writes to an eventfd and waits until the Poller
// reports it, behind the input that had arrived before.
type Yielder struct {
	file      *os.File // an eventfd; nil: Yield does nothing
	raw       syscall.RawConn
	signalled bool
	step      func(fd uintptr) bool
}

// Open makes the eventfd. If the kernel refuses it, Yield does nothing.
func (b *Yielder) Open() {
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

// Yield returns after the Poller has run and the goroutines that it found have been scheduled.
func (b *Yielder) Yield() {
	if b.file != nil {
		b.signalled = false
		_ = b.raw.Read(b.step) // fails when Close has ended it
	}
}

// Close ends a Yield that waits, and all later ones.
func (b *Yielder) Close() {
	if b.file != nil {
		_ = b.file.Close()
	}
}
