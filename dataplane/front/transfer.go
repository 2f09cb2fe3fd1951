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
// deadlines', as for net.Conn. A connection reads or writes, never both at once.
type transfer struct {
	do func(fd uintptr) bool // conn.transferSome, made once
	op op
	// Of what is under way: how many bytes of p were moved, and what failed.
	n   int32
	p   []byte
	err error
}

// op is what a connection does in its stay in the poller.
type op uint8

const (
	opRead  op = iota // p, once
	opWrite           // all of p
	opTurn            // what is held goes out, and the read-ahead is read
)

// transferSome is run in the poller, again whenever more can be done, until it says true.
func (c *conn) transferSome(fd uintptr) bool {
	t := &c.transfer
	switch t.op {
	case opWrite:
		n, errno := sock.Send(int(fd), t.p[t.n:])
		t.n += int32(n)
		if errno != 0 && errno != syscall.EAGAIN {
			t.err = os.NewSyscallError("sendto", errno)
		}
		return errno != syscall.EAGAIN
	case opTurn:
		return c.turn(int(fd))
	default:
		if !c.input.hear() {
			t.err = errPassedOn
			return true
		}
		ended := t.read(int(fd))
		if !ended && !c.active.Load() { // while a body is read the head was heard
			c.input.rest()
		}
		return ended
	}
}

func (t *transfer) read(fd int) bool {
	n, errno := sock.Recv(fd, t.p)
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

// await does op with p in the poller; n is how much of p was moved.
func (c *conn) await(op op, p []byte) (n int, err error) {
	t := &c.transfer
	t.op, t.p, t.n, t.err = op, p, 0, nil
	if op == opWrite {
		err = c.raw.Write(t.do)
	} else {
		err = c.raw.Read(t.do)
	}
	if err == nil {
		err = t.err
	}
	t.p, t.err = nil, nil
	return int(t.n), err
}

// plain says whether the connection's bytes are those of its descriptor.
func (c *conn) plain() bool { return c.raw != nil && c.secure == nil }

// receive is Conn.Read.
func (c *conn) receive(p []byte) (n int, err error) {
	if !c.plain() || len(p) == 0 {
		return c.Conn.Read(p)
	}
	return c.await(opRead, p)
}

// transmit is Conn.Write.
func (c *conn) transmit(p []byte) (n int, err error) {
	if !c.plain() {
		return c.Conn.Write(p)
	}
	return c.await(opWrite, p)
}
