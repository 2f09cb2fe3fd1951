package front

import (
	"io"
	"os"
	"syscall"

	"sluice/dataplane/rawsocket"
)

// rawIO reads and writes a TCP connection with the calls of package rawsocket. With those of
// net.Conn a short request caused more than twice as many wake-ups of other threads (futex,
// by perf stat). As with net.Conn, a call waits in Go's poller until the deadline. A
// connection reads or writes, never both at once.
type rawIO struct {
	step func(fd uintptr) bool // conn.ioStep, made once
	op   ioOp
	// State of the current operation: bytes of p that are transferred, and the error.
	n   int32
	p   []byte
	err error
}

// ioOp is an operation that waits in Go's poller.
type ioOp uint8

const (
	opRead  ioOp = iota // read into p once
	opWrite             // write all of p
	opPoll              // write the pending response and read into the read-ahead
)

// ioStep does a step of the current operation. syscall.RawConn calls it whenever the descriptor
// is ready, until it returns true.
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
			t.err = errPassed
			return true
		}
		ended := t.read(int(fd))
		if !ended && !c.active.Load() { // active: this read is for a body, and readStarted must stay
			c.readState.endRead()
		}
		return ended
	}
}

// read reads into p once. It returns false if there is no input.
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

// doIO runs op with p and waits for its end. n is the number of bytes of p that were transferred.
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

// isTCP reports whether the connection has a descriptor and no TLS, so that rawIO can be used.
func (c *conn) isTCP() bool { return c.raw != nil && c.tlsConn == nil }

// receive reads from the connection, with rawIO where possible.
func (c *conn) receive(p []byte) (n int, err error) {
	if !c.isTCP() || len(p) == 0 {
		return c.Conn.Read(p)
	}
	return c.doIO(opRead, p)
}

// send writes to the connection, with rawIO where possible.
func (c *conn) send(p []byte) (n int, err error) {
	if !c.isTCP() {
		return c.Conn.Write(p)
	}
	return c.doIO(opWrite, p)
}
