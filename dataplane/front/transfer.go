package front

import (
	"io"
	"os"
	"syscall"

	"sluice/dataplane/sock"
)

// transfer moves a plain connection's bytes by package sock's calls: with net.Conn's
// a short request cost more than twice as many wake-ups of other threads (futex, by
// perf stat). Where and until when they wait is the runtime's poller's and the
// deadlines', as for net.Conn.
type transfer struct {
	recv, send func(fd uintptr) bool // made once; nil where there is no descriptor, or TLS

	in, out       []byte // of the read, the write under way
	inN, outN     int
	inErr, outErr error
}

func (t *transfer) init() { t.recv, t.send = t.doRecv, t.doSend }

func (t *transfer) doRecv(fd uintptr) bool {
	n, errno := sock.Recv(int(fd), t.in)
	switch {
	case errno == syscall.EAGAIN:
		return false
	case errno != 0:
		t.inErr = os.NewSyscallError("recvfrom", errno)
	case n == 0:
		t.inErr = io.EOF
	}
	t.inN = n
	return true
}

func (t *transfer) doSend(fd uintptr) bool {
	n, errno := sock.Send(int(fd), t.out[t.outN:])
	t.outN += n
	if errno != 0 && errno != syscall.EAGAIN {
		t.outErr = os.NewSyscallError("sendto", errno)
	}
	return errno != syscall.EAGAIN
}

// receive is Conn.Read.
func (c *conn) receive(p []byte) (int, error) {
	t := &c.transfer
	if t.recv == nil || len(p) == 0 {
		return c.Conn.Read(p)
	}
	t.in, t.inN, t.inErr = p, 0, nil
	err := c.raw.Read(t.recv)
	t.in = nil
	if err == nil {
		err = t.inErr
	}
	return t.inN, err
}

// transmit is Conn.Write.
func (c *conn) transmit(p []byte) (int, error) {
	t := &c.transfer
	if t.send == nil {
		return c.Conn.Write(p)
	}
	t.out, t.outN, t.outErr = p, 0, nil
	err := c.raw.Write(t.send)
	t.out = nil
	if err == nil {
		err = t.outErr
	}
	return t.outN, err
}
