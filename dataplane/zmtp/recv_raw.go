//go:build linux && !race

package zmtp

import (
	"syscall"
	"unsafe"
)

// recv reads what a socket has and never waits: EAGAIN if it is empty, 0 bytes at its end. The
// scheduler is not informed of the call.
func recv(fd int, p []byte) (int, syscall.Errno) {
	for {
		n, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), syscall.MSG_DONTWAIT, 0, 0)
		if errno == 0 {
			return int(n), 0
		}
		if errno != syscall.EINTR {
			return 0, errno
		}
	}
}
