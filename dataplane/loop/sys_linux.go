package loop

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The calls below never wait, so Go's scheduler is not told of them: telling costs
// more than some of them.

// send writes p to a socket, as much as it takes at once.
func send(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

// recv reads what a socket has.
func recv(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// unsentOf is how many bytes of a socket's the other side has not acknowledged.
func unsentOf(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0 // what is wrong with it, the next write will say
	}
	return n
}
