//go:build linux && !race

package sock

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func send(fd int, p []byte) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

func sendVector(fd int, v [][]byte) (int, syscall.Errno) {
	var pieces [16]unix.Iovec // as many as SendVector gives at once
	for i, p := range v {
		pieces[i].Base = unsafe.SliceData(p)
		pieces[i].SetLen(len(p))
	}
	msg := unix.Msghdr{Iov: &pieces[0]}
	msg.SetIovlen(len(v))
	n, _, errno := syscall.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return int(n), errno
}

func recv(fd int, p []byte, flags int) (int, syscall.Errno) {
	n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
	return int(n), errno
}
