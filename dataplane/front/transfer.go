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
	// Made once; nil where there is no descriptor, or TLS.
	recv, send, exchange func(fd uintptr) bool

	in, out       []byte // of the read, the write under way
	inN, outN     int
	inErr, outErr error
}

func (t *transfer) init(c *conn) { t.recv, t.send, t.exchange = t.doRecv, t.doSend, c.exchange }

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
	f := t.recv
	if c.held.buf != nil {
		f = t.exchange
	}
	for {
		t.in, t.inN, t.inErr = p, 0, nil
		err := c.raw.Read(f)
		t.in = nil
		if err == nil {
			err = t.inErr
		}
		if err != nil || c.held.buf == nil {
			return t.inN, err
		}
		if err := c.release(); err != nil || t.inN > 0 {
			return t.inN, err
		}
	}
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
