//go:build unix

package front

import (
	"io"
	"syscall"

	"golang.org/x/sys/unix"

	"sluice/dataplane/rawsocket"
)

// peekRaw copies bytes that have arrived on fd to p and leaves them in the socket. again reports
// that none have arrived.
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

// skip removes the next len(p) bytes, which peekRaw has seen, from the socket. It overwrites p.
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
