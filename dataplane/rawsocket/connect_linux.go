package rawsocket

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Address is an IP address and a port as connect(2) has them. It is not changed once made.
type Address struct {
	raw  [unix.SizeofSockaddrInet6]byte
	size uintptr
}

// NewAddress is the Address of at; not ok where it is of a zone, or none.
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

// Socket makes a non-blocking TCP socket for connections to a.
func (a *Address) Socket() (fd int, err error) {
	return unix.Socket(int(binary.NativeEndian.Uint16(a.raw[:])), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
}

// Connect begins to connect fd, or looks how that goes on: 0 when it is done, EINPROGRESS
// while it is not.
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

// IsSelfConnected says whether a is fd's own address: a connection to a port that nobody listens on
// may be given that port, and meet itself.
func (a *Address) IsSelfConnected(fd int) bool {
	var own Address
	size := uint32(len(own.raw))
	_, _, errno := syscall.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&own.raw)), uintptr(unsafe.Pointer(&size)))
	if errno != 0 || [4]byte(own.raw[:]) != [4]byte(a.raw[:]) { // family and port
		return false
	}
	if a.size == unix.SizeofSockaddrInet4 {
		return [4]byte(own.raw[4:]) == [4]byte(a.raw[4:])
	}
	return [16]byte(own.raw[8:]) == [16]byte(a.raw[8:])
}
