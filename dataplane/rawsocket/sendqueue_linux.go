package rawsocket

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Unsent returns how many bytes written to the socket the peer has not acknowledged.
func Unsent(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0 // the next write reports the error
	}
	return n
}

// Indexes of SO_MEMINFO, from <linux/sock_diag.h>.
const (
	memSndBuf = 3 // the limit (SO_SNDBUF)
	memQueued = 5 // used, including the kernel's overhead
	memInfo   = 9
)

// SendSpace returns a lower bound of the bytes that the socket accepts, by the kernel's accounting,
// which includes its overhead. writable is false while poll(2) would not report the socket
// writable, which it does when a third is free.
func SendSpace(fd int) (space int, writable bool) {
	var mem [memInfo]uint32
	size := uint32(unsafe.Sizeof(mem))
	_, _, errno := syscall.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&mem)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 || size <= memQueued*4 {
		return 0, true // the next write reports the error
	}
	bound, queued := int(mem[memSndBuf]), int(mem[memQueued])
	return max(bound-queued, 0), bound-queued >= queued/2
}
