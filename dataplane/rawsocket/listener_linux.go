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

// Listener accepts connections from the socket of a net.Listener without package net. It saves
// about 300 bytes of objects for each connection, and an entry in Go's poller, whose memory is
// never freed (see Conn). One goroutine accepts; any may call Close.
type Listener struct {
	file       *os.File // a second descriptor, because only net's Accept can wait on net's own
	raw        syscall.RawConn
	acceptFunc func(fd uintptr) bool // l.accept, allocated once

	// The result of accept.
	fd    int
	from  Address
	errno syscall.Errno
}

// deferAccept is for how long, in seconds, the kernel keeps a connection without data (tcp(7),
// TCP_DEFER_ACCEPT). The client sees it established, and the router spends neither a descriptor nor
// a goroutine on it. It is accepted after that time in any case.
const deferAccept = 1

// NewListener makes a Listener of ln's socket; not ok: ln is not TCP. Both must be closed.
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

// setAcceptedOptions sets the options that net sets on each accepted connection. Sockets inherit
// them from the listener too, but not those that arrived before the options were set, nor, on all
// kernels, those of MPTCP, which net listens for.
func setAcceptedOptions(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 15)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 9)
}

// Accept waits for a connection. from is the client's address.
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

// Close ends a waiting Accept.
func (l *Listener) Close() error { return l.file.Close() }

// accept runs in the poller.
func (l *Listener) accept(listening uintptr) bool {
	for {
		size := uint32(len(l.from.raw))
		fd, _, errno := syscall.RawSyscall6(unix.SYS_ACCEPT4, listening, uintptr(unsafe.Pointer(&l.from.raw)), uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
		switch errno {
		case unix.EINTR, unix.ECONNABORTED: // the client has gone already
			continue
		case unix.EAGAIN:
			return false
		}
		l.fd, l.errno = int(fd), errno
		return true
	}
}

// AddrPort returns the address. An IPv4-mapped IPv6 address is returned as IPv4; a zone is returned
// as its number.
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
