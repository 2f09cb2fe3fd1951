//go:build unix

package front

import (
	"io"
	"syscall"

	"golang.org/x/sys/unix"
)

// peek reads what is there and leaves it there; again says that nothing is.
func peek(fd int, p []byte) (n int, again bool, err error) {
	for {
		n, _, err = unix.Recvfrom(fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, true, nil
		case err == nil && n == 0:
			return 0, false, io.EOF
		default:
			return n, false, err
		}
	}
}

// skip takes len(p) bytes that were peeked at.
func skip(fd int, p []byte) error {
	for len(p) > 0 {
		switch n, err := unix.Read(fd, p); {
		case err == syscall.EINTR:
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		default:
			p = p[n:]
		}
	}
	return nil
}
