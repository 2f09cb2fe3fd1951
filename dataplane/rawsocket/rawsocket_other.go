//go:build !linux || race

package rawsocket

// The race detector knows only from package syscall's calls that what one side wrote happened
// before the other side read it. Under the detector these are used.

import (
	"errors"
	"syscall"
)

func send(fd int, p []byte, _ bool) (int, syscall.Errno) {
	n, err := syscall.Write(fd, p)
	return n, errnoOf(err)
}

func sendVector(fd int, v [][]byte, more bool) (int, syscall.Errno) { return send(fd, v[0], more) }

func recv(fd int, p []byte, flags int) (n int, errno syscall.Errno) {
	var err error
	if flags == 0 {
		n, err = syscall.Read(fd, p)
	} else {
		n, _, err = syscall.Recvfrom(fd, p, flags)
	}
	return n, errnoOf(err)
}

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	if err != nil && !errors.As(err, &errno) {
		return syscall.EIO
	}
	return errno
}
