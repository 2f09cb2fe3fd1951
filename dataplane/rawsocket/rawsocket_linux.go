//go:build linux && !race

package rawsocket

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sendFlags returns the flags of a send. more: another send follows at once, so the kernel holds
// back a partial packet (tcp(7), MSG_MORE). MaxPiece exceeds a packet of the loopback by a few
// bytes, which would otherwise be a packet of their own each time.
func sendFlags(more bool) uintptr {
	if more {
		return unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL | unix.MSG_MORE
	}
	return unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
}

func send(fd int, p []byte, more bool) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), sendFlags(more), 0, 0)
	return int(n), errno
}

func sendVector(fd int, v [][]byte, more bool) (int, syscall.Errno) {
	var pieces [16]unix.Iovec // SendVector passes at most this many
	for i, p := range v {
		pieces[i].Base = unsafe.SliceData(p)
		pieces[i].SetLen(len(p))
	}
	msg := unix.Msghdr{Iov: &pieces[0]}
	msg.SetIovlen(len(v))
	n, _, errno := syscall.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&msg)), sendFlags(more))
	return int(n), errno
}

func recv(fd int, p []byte, flags int) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
	return int(n), errno
}
