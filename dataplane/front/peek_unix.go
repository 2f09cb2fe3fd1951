//go:build unix

package front

import (
	"io"
	"syscall"

	"golang.org/x/sys/unix"

	"sluice/dataplane/rawsocket"
)

// peekRaw reads what is there and leaves it there; again says that nothing is.
func peekRaw(fd int, p []byte) (n int, again bool, err error) {
	n, errno := rawsocket.Peek(fd, p)
	switch {
	case errno == syscall.EAGAIN:
		return 0, true, nil
	case errno != 0:
		return 0, false, errno
	case n == 0:
		return 0, false, io.EOF
	}
	return n, false, nil
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
