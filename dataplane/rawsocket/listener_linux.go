package rawsocket

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Listener accepts by hand from the socket of a net.Listener. What net makes for each
// connection is not made: some 300 bytes of objects, and an entry of Go's poller, whose
// memory never comes back (see Conn). One goroutine accepts; any may Close.
type Listener struct {
	file       *os.File // a second descriptor: at net's own nothing can wait but net's Accept
	raw        syscall.RawConn
	acceptFunc func(fd uintptr) bool // l.accept, made once

	// What accept found.
	fd    int
	from  Address
	errno syscall.Errno
}

// deferAccept is for how long, in seconds, the kernel keeps a connection on which nothing has
// come (tcp(7), TCP_DEFER_ACCEPT). For a client it is made meanwhile; the router has
// neither a descriptor nor a goroutine for it. Then it is accepted all the same.
const deferAccept = 1

// NewListener makes a Listener of ln's socket; not ok where it is none of TCP. Both are to
// be closed.
func NewListener(ln net.Listener) (l *Listener, ok bool) {
	if _, tcp := ln.Addr().(*net.TCPAddr); !tcp {
		return nil, false
	}
	holder, ok := ln.(syscall.Conn)
	if !ok {
		return nil, false
	}
	own, err := holder.SyscallConn()
	if err != nil {
		return nil, false
	}
	fd := -1
	if own.Control(func(of uintptr) { fd, err = unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0) }) != nil || err != nil {
		return nil, false
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, deferAccept)
	l = &Listener{file: os.NewFile(uintptr(fd), "listener")}
	l.acceptFunc = l.accept
	if l.raw, err = l.file.SyscallConn(); err != nil {
		_ = l.file.Close()
		return nil, false
	}
	return l, true
}

// setAcceptedOptions sets what net sets on each connection that it accepts. Sockets have it from
// their listener's too, but not those that came before it was set there, nor, in all
// kernels, those of MPTCP, which net listens for.
func setAcceptedOptions(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 15)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 9)
}

// Accept waits for a connection; from is its other end's address.
func (l *Listener) Accept() (c *Conn, from netip.Addr, err error) {
	if err := l.raw.Read(l.acceptFunc); err != nil {
		return nil, from, err
	}
	if l.errno != 0 {
		return nil, from, os.NewSyscallError("accept4", l.errno)
	}
	setAcceptedOptions(l.fd)
	return &Conn{fd: int32(l.fd)}, l.from.AddrPort().Addr(), nil
}

// Close ends an Accept that waits.
func (l *Listener) Close() error { return l.file.Close() }

// accept is run in the poller.
func (l *Listener) accept(listening uintptr) bool {
	for {
		size := uint32(len(l.from.raw))
		fd, _, errno := syscall.RawSyscall6(unix.SYS_ACCEPT4, listening, uintptr(unsafe.Pointer(&l.from.raw)), uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case unix.EINTR, unix.ECONNABORTED: // who has gone is not missed
			continue
		case unix.EAGAIN:
			return false
		}
		l.fd, l.errno = int(fd), errno
		return true
	}
}

// AddrPort is the address, without the form in which IPv6 writes one of IPv4; a zone is
// told by its number.
func (a *Address) AddrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(a.raw[2:])
	switch binary.NativeEndian.Uint16(a.raw[:]) {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(a.raw[4:])), port)
	case unix.AF_INET6:
		ip := netip.AddrFrom16([16]byte(a.raw[8:])).Unmap()
		if zone := binary.NativeEndian.Uint32(a.raw[24:]); zone != 0 && ip.Is6() {
			ip = ip.WithZone(strconv.Itoa(int(zone)))
		}
		return netip.AddrPortFrom(ip, port)
	}
	return netip.AddrPort{}
}
