package upstream

import (
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dupDescriptor duplicates the connection's descriptor. Go's poller only drops a descriptor that is
// closed, and is otherwise woken by what arrives.
func (c *conn) dupDescriptor() (fd int, err error) {
	outer := c.raw.Control(func(own uintptr) {
		fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0)
		// Acknowledge every second event instead of each. The engine does not wait for
		// acknowledgements, and each costs a packet. An engine that does wait gets that of the head
		// now.
		quick := 0
		if c.ep.delayedACK.detected() {
			quick = 1
		}
		_ = unix.SetsockoptInt(int(own), unix.IPPROTO_TCP, unix.TCP_QUICKACK, quick)
	})
	if outer != nil {
		return 0, outer
	}
	return fd, err
}

// reattach puts a detached descriptor back into Go's poller. An *os.File costs two system calls, a
// net.Conn made of a descriptor nine.
func (c *conn) reattach() bool {
	if c.fd < 0 {
		return true
	}
	file := os.NewFile(uintptr(c.fd), "engine")
	raw, err := file.SyscallConn()
	c.nc, c.raw, c.fd = file, raw, -1
	return err == nil && file.SetReadDeadline(time.Time{}) == nil // else Go's poller refused it
}

func closeDescriptor(fd int) { _ = unix.Close(fd) }

// duplicate duplicates the connection's descriptor, in whichever form it is held.
func (c *conn) duplicate() (fd int, err error) {
	if c.fd >= 0 {
		return unix.FcntlInt(uintptr(c.fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	holder, ok := transportOf(c.nc).(syscall.Conn)
	if !ok {
		return 0, syscall.ENOTSUP
	}
	raw, err := holder.SyscallConn()
	if err != nil {
		return 0, err
	}
	outer := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) })
	if outer != nil {
		return 0, outer
	}
	return fd, err
}

// writeVector is net.Buffers.WriteTo for a file, which does not support writev.
func writeVector(raw syscall.RawConn, v *net.Buffers) error {
	var failed error
	err := raw.Write(func(fd uintptr) bool {
		for len(*v) > 0 {
			n, err := unix.Writev(int(fd), *v)
			switch {
			case err == unix.EAGAIN:
				return false
			case err == unix.EINTR:
				continue
			case err != nil:
				failed = os.NewSyscallError("writev", err)
				return true
			}
			consume(v, n)
		}
		return true
	})
	if err != nil {
		return err
	}
	return failed
}
