package rawsocket

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// PeerClosed reports whether the peer has sent its last byte, read or not, or has reset the
// connection.
func PeerClosed(fd int) bool {
	fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds[:], 0)
	return err == nil && n > 0
}

// PeerGone is PeerClosed for the descriptor of conn. It also reports true for a closed conn.
func PeerGone(conn syscall.RawConn) bool {
	gone := false
	err := conn.Control(func(fd uintptr) { gone = PeerClosed(int(fd)) })
	return gone || err != nil
}
