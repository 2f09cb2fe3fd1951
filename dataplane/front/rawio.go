package front

import (
	"io"
	"os"
	"syscall"

	"sluice/dataplane/rawsocket"
)

// rawIO moves a plain connection's bytes by package sock's calls: with net.Conn's
// a short request cost more than twice as many wake-ups of other threads (futex, by
// perf stat). Where and until when they wait is the runtime's poller's and the
// deadlines', as for net.Conn. A connection reads or writes, never both at once.
type rawIO struct {
	step func(fd uintptr) bool // conn.ioStep, made once
	op   ioOp
	// Of what is under way: how many bytes of p were moved, and what failed.
	n   int32
	p   []byte
	err error
}

// ioOp is what a connection does in its stay in the poller.
type ioOp uint8

const (
	opRead  ioOp = iota // p, once
	opWrite             // all of p
	opPoll              // what is held goes out, and the read-ahead is read
)

// ioStep is run in the poller, again whenever more can be done, until it says true.
func (c *conn) ioStep(fd uintptr) bool {
	t := &c.io
	switch t.op {
	case opWrite:
		n, errno := rawsocket.Send(int(fd), t.p[t.n:])
		t.n += int32(n)
		if errno != 0 && errno != syscall.EAGAIN {
			t.err = os.NewSyscallError("sendto", errno)
		}
		return errno != syscall.EAGAIN
	case opPoll:
		return c.pollOnce(int(fd))
	default:
		if !c.readState.startRead() {
			t.err = errHandedOff
			return true
		}
		ended := t.read(int(fd))
		if !ended && !c.active.Load() { // while a body is read the head was heard
			c.readState.endRead()
		}
		return ended
	}
}

func (t *rawIO) read(fd int) bool {
	n, errno := rawsocket.Recv(fd, t.p)
	switch {
	case errno == syscall.EAGAIN:
		return false
	case errno != 0:
		t.err = os.NewSyscallError("recvfrom", errno)
	case n == 0:
		t.err = io.EOF
	}
	t.n = int32(n)
	return true
}

// doIO does op with p in the poller; n is how much of p was moved.
func (c *conn) doIO(op ioOp, p []byte) (n int, err error) {
	t := &c.io
	t.op, t.p, t.n, t.err = op, p, 0, nil
	if op == opWrite {
		err = c.raw.Write(t.step)
	} else {
		err = c.raw.Read(t.step)
	}
	if err == nil {
		err = t.err
	}
	t.p, t.err = nil, nil
	return int(t.n), err
}

// isTCP says whether the connection's bytes are those of its descriptor.
func (c *conn) isTCP() bool { return c.raw != nil && c.tlsConn == nil }

// receive is Conn.Read.
func (c *conn) receive(p []byte) (n int, err error) {
	if !c.isTCP() || len(p) == 0 {
		return c.Conn.Read(p)
	}
	return c.doIO(opRead, p)
}

// send is Conn.Write.
func (c *conn) send(p []byte) (n int, err error) {
	if !c.isTCP() {
		return c.Conn.Write(p)
	}
	return c.doIO(opWrite, p)
}
