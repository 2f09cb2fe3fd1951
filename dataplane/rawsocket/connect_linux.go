package rawsocket

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Address is an IP address and port in the form of connect(2). It is immutable.
type Address struct {
	raw  [unix.SizeofSockaddrInet6]byte
	size uintptr
}

// NewAddress converts at; not ok: it is invalid or has a zone.
func NewAddress(at netip.AddrPort) (a Address, ok bool) {
	ip := at.Addr().Unmap()
	switch {
	case !ip.IsValid() || ip.Zone() != "":
		return a, false
	case ip.Is4():
		binary.NativeEndian.PutUint16(a.raw[:], unix.AF_INET)
		v4 := ip.As4()
		copy(a.raw[4:], v4[:])
		a.size = unix.SizeofSockaddrInet4
	default:
		binary.NativeEndian.PutUint16(a.raw[:], unix.AF_INET6)
		v6 := ip.As16()
		copy(a.raw[8:], v6[:])
		a.size = unix.SizeofSockaddrInet6
	}
	binary.BigEndian.PutUint16(a.raw[2:], at.Port())
	return a, true
}

// Socket creates a non-blocking TCP socket for connections to a.
func (a *Address) Socket() (fd int, err error) {
	return unix.Socket(int(binary.NativeEndian.Uint16(a.raw[:])), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
}

// Connect starts to connect fd, or checks the progress: 0 when connected, EINPROGRESS before.
func (a *Address) Connect(fd int) syscall.Errno {
	for {
		_, _, errno := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&a.raw)), a.size)
		switch errno {
		case unix.EINTR:
			continue
		case unix.EISCONN:
			return 0
		case unix.EALREADY:
			return unix.EINPROGRESS
		}
		return errno
	}
}

// IsSelfConnected reports whether a is fd's own address. A connection to a port of this machine
// that nobody listens on may be given that port as its own, and connect to itself.
func (a *Address) IsSelfConnected(fd int) bool {
	var own Address
	size := uint32(len(own.raw))
	_, _, errno := syscall.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&own.raw)), uintptr(unsafe.Pointer(&size)))
	if errno != 0 || [4]byte(own.raw[:]) != [4]byte(a.raw[:]) { // compares family and port
		return false
	}
	if a.size == unix.SizeofSockaddrInet4 {
		return [4]byte(own.raw[4:]) == [4]byte(a.raw[4:])
	}
	return [16]byte(own.raw[8:]) == [16]byte(a.raw[8:])
}
