package rawsocket

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Unsent is how many bytes written to the socket the other side has not acknowledged.
func Unsent(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0 // what is wrong with it, the next write will say
	}
	return n
}

// As <linux/sock_diag.h> has them, of SO_MEMINFO.
const (
	memSndBuf = 3 // the bound (SO_SNDBUF)
	memQueued = 5 // how much of it is taken, the kernel's own books included
	memInfo   = 9
)

// SendSpace is how much more the socket takes at the least, as the kernel counts, which includes
// its own books. writable is false where poll(2) would not call it writable: not before a
// third is free.
func SendSpace(fd int) (space int, writable bool) {
	var mem [memInfo]uint32
	size := uint32(unsafe.Sizeof(mem))
	_, _, errno := syscall.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO, uintptr(unsafe.Pointer(&mem)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 || size <= memQueued*4 {
		return 0, true // the next write will say
	}
	bound, queued := int(mem[memSndBuf]), int(mem[memQueued])
	return max(bound-queued, 0), bound-queued >= queued/2
}
