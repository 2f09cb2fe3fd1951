//go:build !linux || race

package sock

// The race detector takes what one side wrote before the other read it for ordered, but
// only of package syscall's calls: under it these are used.

import (
	"errors"
	"syscall"
)

// Send writes as much of p as the socket takes at once, MaxPiece at most.
func Send(fd int, p []byte) (int, syscall.Errno) {
	n, err := syscall.Write(fd, p[:min(len(p), MaxPiece)])
	return max(n, 0), errnoOf(err)
}

// Recv reads what the socket has, MaxPiece at most.
func Recv(fd int, p []byte) (int, syscall.Errno) {
	n, err := syscall.Read(fd, p[:min(len(p), MaxPiece)])
	return max(n, 0), errnoOf(err)
}

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	if err != nil && !errors.As(err, &errno) {
		return syscall.EIO
	}
	return errno
}
