package sock

import "syscall"

// Send writes p until the socket takes no more: n is how much it took, and errno EAGAIN
// where that was not all.
func Send(fd int, p []byte) (n int, errno syscall.Errno) {
	for n < len(p) {
		m, errno := send(fd, p[n:min(len(p), n+MaxPiece)])
		switch errno {
		case 0:
			n += m
		case syscall.EINTR:
		default:
			return n, errno
		}
	}
	return n, 0
}

// Recv reads what the socket has, MaxPiece at most; EAGAIN where it has nothing, 0 bytes
// at its end.
func Recv(fd int, p []byte) (n int, errno syscall.Errno) {
	for {
		if n, errno = recv(fd, p[:min(len(p), MaxPiece)]); errno != syscall.EINTR {
			return max(n, 0), errno
		}
	}
}
