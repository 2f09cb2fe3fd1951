package upstream

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/fdlimit"
	"sluice/dataplane/rawsocket"
)

// directAddress is an engine's address that needs no look-up and no TLS. A connection to it is made
// without net.Dialer, whose thirty or so objects become garbage when a loop takes the stream, lie
// between what thousands of streams keep, and so fragment the heap.
type directAddress struct {
	to rawsocket.Address
	ok bool
}

func directAddressOf(addr string) (d directAddress) {
	if at, err := netip.ParseAddrPort(addr); err == nil {
		d.to, d.ok = rawsocket.NewAddress(at)
	}
	return d
}

// dialRaw makes a connection, attached to call.
func (e *Endpoint) dialRaw(by time.Time, call *Call) (*conn, error) {
	fd, err := e.direct.to.Socket()
	if err != nil {
		return nil, e.dialError(os.NewSyscallError("socket", err))
	}
	if fdlimit.IsReserved(fd) {
		_ = unix.Close(fd)
		return nil, fdlimit.ErrReserved
	}
	e.setOptions(fd)
	errno := e.startConnect(fd)
	file := os.NewFile(uintptr(fd), "engine")
	c := newConn(e, file)
	dials := &callLeg{(*rawDial)(file)}
	if !call.attach(dials) {
		abort(c.nc)
		return nil, ErrCancelled
	}
	if errno == unix.EINPROGRESS {
		errno, err = e.waitConnected(c, by)
	}
	if errno != 0 {
		err = os.NewSyscallError("connect", errno)
	}
	if err != nil {
		call.detach(dials)
		abort(c.nc)
		return nil, e.dialError(err)
	}
	if !call.swap(dials, &c.leg) {
		abort(c.nc)
		return nil, ErrCancelled
	}
	return c, nil
}

// rawDial is a direct connection that is not established yet.
type rawDial os.File

func (c *rawDial) Cancel() { _ = (*os.File)(c).Close() }

// startConnect starts to connect fd, or checks the progress.
func (e *Endpoint) startConnect(fd int) syscall.Errno {
	errno := e.direct.to.Connect(fd)
	if errno == 0 && e.direct.to.IsSelfConnected(fd) {
		return unix.ECONNREFUSED
	}
	return errno
}

// waitConnected waits until the connection is established, or until by.
func (e *Endpoint) waitConnected(c *conn, by time.Time) (errno syscall.Errno, err error) {
	if err = c.nc.SetWriteDeadline(by); err != nil {
		return 0, err
	}
	// Readiness from before the wait is forgotten, so the state is checked first.
	err = c.raw.Write(func(fd uintptr) bool {
		errno = e.startConnect(int(fd))
		return errno != unix.EINPROGRESS
	})
	if err != nil {
		return 0, err
	}
	return errno, c.nc.SetWriteDeadline(time.Time{})
}

// setOptions sets the options that net.Dialer would set for e.dialer.
func (e *Endpoint) setOptions(fd int) {
	// Otherwise Nagle's algorithm delays the end of a request by 40 ms.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	keep := &e.dialer.KeepAliveConfig
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keep.Idle/time.Second))
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(keep.Interval/time.Second))
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keep.Count)
}

// dialError formats an error as package net does.
func (e *Endpoint) dialError(err error) error {
	at, _ := netip.ParseAddrPort(e.addr)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = os.ErrDeadlineExceeded
	}
	return &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(at), Err: err}
}
