//go:build !linux || race

package zmtp

import (
	"errors"
	"syscall"
)

// recv uses package syscall, from which alone the race detector learns that a write happened before
// the read of its bytes. The socket is in Go's poller, so it does not block.
func recv(fd int, p []byte) (int, syscall.Errno) {
	for {
		n, err := syscall.Read(fd, p)
		var errno syscall.Errno
		switch {
		case err == nil:
			return n, 0
		case !errors.As(err, &errno):
			return 0, syscall.EIO
		case errno != syscall.EINTR:
			return 0, errno
		}
	}
}
