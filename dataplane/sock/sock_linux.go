//go:build linux && !race

package sock

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Send writes as much of p as the socket takes at once, MaxPiece at most; EAGAIN where
// it takes nothing.
func Send(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(min(len(p), MaxPiece)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

// Recv reads what the socket has, MaxPiece at most; EAGAIN where it has nothing, 0 at
// its end.
func Recv(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(min(len(p), MaxPiece)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}
