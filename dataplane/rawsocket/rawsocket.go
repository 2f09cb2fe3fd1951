package rawsocket

import "syscall"

// Send writes p until the socket accepts no more. n is the number of bytes accepted. errno is
// EAGAIN if that is less than len(p).
func Send(fd int, p []byte) (n int, errno syscall.Errno) {
	for n < len(p) {
		to := min(len(p), n+MaxPiece)
		m, errno := send(fd, p[n:to], to < len(p))
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

// SendVector is Send for several pieces, in as few calls as MaxVector allows.
func SendVector(fd int, v [][]byte) (n int, errno syscall.Errno) {
	from := 0 // offset in v[0]
	for {
		var batch [16][]byte
		count, size, more := 0, 0, false
		for i := 0; i < len(v) && !more; i++ {
			p := v[i]
			if i == 0 {
				p = p[from:]
			}
			switch space := MaxVector - size; {
			case len(p) == 0:
			case count == len(batch) || space == 0:
				more = true
			default:
				more = len(p) > space
				batch[count] = p[:min(len(p), space)]
				size += len(batch[count])
				count++
			}
		}
		if count == 0 {
			return n, 0
		}
		m, errno := sendVector(fd, batch[:count], more)
		switch errno {
		case 0:
			n += m
		case syscall.EINTR:
			continue
		default:
			return n, errno
		}
		for m += from; len(v) > 0 && m >= len(v[0]); v = v[1:] {
			m -= len(v[0])
		}
		from = m
	}
}

// Recv reads up to MaxPiece bytes. errno is EAGAIN if there are none; n is 0 at the end of the
// stream.
func Recv(fd int, p []byte) (n int, errno syscall.Errno) { return receive(fd, p, 0) }

// Peek is Recv, except that the bytes remain unread.
func Peek(fd int, p []byte) (n int, errno syscall.Errno) { return receive(fd, p, syscall.MSG_PEEK) }

func receive(fd int, p []byte, flags int) (n int, errno syscall.Errno) {
	for {
		if n, errno = recv(fd, p[:min(len(p), MaxPiece)], flags); errno != syscall.EINTR {
			return max(n, 0), errno
		}
	}
}
