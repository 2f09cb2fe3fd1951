package upstream

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"sluice/dataplane/descriptors"
	"sluice/dataplane/sock"
)

// directly is an engine's address where that needs no look-up and no TLS: a connection to
// it is made by hand. What net.Dialer makes for one, some thirty objects of which nothing
// is left when a loop takes the stream, would lie between what thousands of streams keep,
// and hold its memory.
type directly struct {
	to sock.Address
	ok bool
}

func directlyTo(addr string) (d directly) {
	if at, err := netip.ParseAddrPort(addr); err == nil {
		d.to, d.ok = sock.AddressOf(at)
	}
	return d
}

// connectDirectly makes a connection, attached to call.
func (e *Endpoint) connectDirectly(by time.Time, call *Call) (*conn, error) {
	fd, err := e.direct.to.Stream()
	if err != nil {
		return nil, e.dialFailed(os.NewSyscallError("socket", err))
	}
	if descriptors.Short(fd) {
		_ = unix.Close(fd)
		return nil, descriptors.ErrReserved
	}
	e.setOptions(fd)
	errno := e.begin(fd)
	file := os.NewFile(uintptr(fd), "engine")
	c := newConn(e, file)
	dials := &leg{(*connecting)(file)}
	if !call.attach(dials) {
		abort(c.nc)
		return nil, ErrCut
	}
	if errno == unix.EINPROGRESS {
		errno, err = e.connected(c, by)
	}
	if errno != 0 {
		err = os.NewSyscallError("connect", errno)
	}
	if err != nil {
		call.detach(dials)
		abort(c.nc)
		return nil, e.dialFailed(err)
	}
	if !call.swap(dials, &c.leg) {
		abort(c.nc)
		return nil, ErrCut
	}
	return c, nil
}

// connecting is a connection by hand that is not made yet.
type connecting os.File

func (c *connecting) Cut() { _ = (*os.File)(c).Close() }

// begin begins to connect fd, or looks how that goes on.
func (e *Endpoint) begin(fd int) syscall.Errno {
	errno := e.direct.to.Connect(fd)
	if errno == 0 && e.direct.to.IsOwn(fd) {
		return unix.ECONNREFUSED
	}
	return errno
}

// connected waits until the connection is made, or by.
func (e *Endpoint) connected(c *conn, by time.Time) (errno syscall.Errno, err error) {
	if err = c.nc.SetWriteDeadline(by); err != nil {
		return 0, err
	}
	// Readiness from before the wait is forgotten, so it is looked first.
	err = c.raw.Write(func(fd uintptr) bool {
		errno = e.begin(int(fd))
		return errno != unix.EINPROGRESS
	})
	if err != nil {
		return 0, err
	}
	return errno, c.nc.SetWriteDeadline(time.Time{})
}

// setOptions are those that net.Dialer sets, of e.dialer.
func (e *Endpoint) setOptions(fd int) {
	// Without it Nagle holds the tail of a request back for an ACK, 40 ms.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	keep := &e.dialer.KeepAliveConfig
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keep.Idle/time.Second))
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(keep.Interval/time.Second))
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keep.Count)
}

// dialFailed says it as net does.
func (e *Endpoint) dialFailed(err error) error {
	at, _ := netip.ParseAddrPort(e.addr)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = os.ErrDeadlineExceeded
	}
	return &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(at), Err: err}
}
