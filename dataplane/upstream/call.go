package upstream

import (
	"context"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// Call is the handle by which another goroutine ends a leg. The zero value is
// ready; one Call serves one Do, and after Renew another.
//
// Memory order. The call holds one atomic pointer: nil (nothing to close), the
// leg it owns, or the mark of a cut. Ownership of a connection moves by
// compare-and-swap on it: Do attaches (nil -> leg), Release and every failure
// detach (leg -> nil), Cut, HalfClose and Group.Abandon swap a mark in. Whoever takes the leg out of
// the pointer owns its fate: a Cut that got it closes it and its owner, whose
// detach then fails, never pools or reuses it; a detach that succeeded leaves
// nothing for a later Cut to find. So a late Cut cannot reach a connection
// that already serves another request.
type Call struct {
	leg    atomic.Pointer[callLeg]
	sent   atomic.Bool
	tokens atomic.Int32 // Request.Tokens and one, 0 once a byte of the body has come
	member membership

	cancelFunc func() // made once; see Cutter
}

// callLeg is what a Cut closes. Its fields are set before it is attached and never
// changed afterwards, so the cutter may read them without a lock.
type callLeg struct{ canceller Canceller }

// Canceller is what can be cut, from any goroutine.
type Canceller interface{ Cancel() }

// dialInProgress is that of a connection that is being made.
type dialInProgress context.CancelFunc

func (d dialInProgress) Cancel() { d() }

// The marks of a call that was ended: by its own side, and with its Group.
var cancelledMark, frozenMark = new(callLeg), new(callLeg)

// isMark says whether l is a mark, or nothing: there is nothing to close.
func isMark(l *callLeg) bool { return l == nil || l == cancelledMark || l == frozenMark }

// Cancel closes the leg's connection (see Request.Grace); a Do or read under way returns
// ErrCancelled. It may be called at any time, before Do as well, more than once, from anywhere.
func (c *Call) Cancel() {
	if l := c.leg.Swap(cancelledMark); !isMark(l) {
		l.canceller.Cancel()
	}
}

// abandon ends the call as Cut does, but for its Group: false when it was ended before.
// Cancelled is false then, and what fails for it fails with ErrFrozen.
func (c *Call) abandon() bool {
	for {
		l := c.leg.Load()
		if l == cancelledMark || l == frozenMark {
			return false
		}
		if !c.leg.CompareAndSwap(l, frozenMark) {
			continue // its owner passes the connection on
		}
		if l != nil {
			l.canceller.Cancel()
		}
		return true
	}
}

// wasAbandoned says whether the call was ended with its Group.
func (c *Call) wasAbandoned() bool { return c != nil && c.leg.Load() == frozenMark }

// ended says whether the call was ended by anybody: Do must not begin.
func (c *Call) ended() bool { return c.Cancelled() || c.wasAbandoned() }

// CancelFunc gives Cut as a function, the same at each call. It is for the goroutine that
// makes the legs.
func (c *Call) CancelFunc() func() {
	if c.cancelFunc == nil {
		c.cancelFunc = c.Cancel
	}
	return c.cancelFunc
}

// Reset makes the Call ready for another Do. It is for a caller who alone has it: the
// last leg's Response is released, and nobody is left who might cut it.
func (c *Call) Reset() {
	c.leg.Store(nil)
	c.sent.Store(false)
}

// halfCloseTimeout is how long HalfClose listens for an answer that was on its way. An engine
// takes the end of its input as a client that left, at once; this bounds one that
// does not.
const halfCloseTimeout = time.Second

// HalfClose cuts the call as Cut does, but an answer that the engine had sent before
// it could know is still read: only our side of the connection is closed, the
// other when the engine closes it, within a second at the latest; what has come by
// then can still be read later. Cancelled is true although Do and the reads of the answer
// have succeeded. A stream that is lent is cut as by Cut.
func (c *Call) HalfClose() {
	l := c.leg.Swap(cancelledMark)
	if isMark(l) {
		return
	}
	own, ok := l.canceller.(*conn)
	if !ok { // dialled, or a stream under way
		l.canceller.Cancel()
		return
	}
	nc := own.nc
	if lingering := own.linger(); lingering.active() { // no answer was on its way
		abort(nc)
		lingering.start()
		return
	}
	half, ok := transportOf(nc).(halfCloser)
	if file, is := nc.(*os.File); is {
		half, ok = fileHalfCloser{file}, true
	}
	if !ok || half.CloseWrite() != nil {
		abort(nc)
		return
	}
	time.AfterFunc(halfCloseTimeout, func() {
		if half.CloseRead() != nil { // its owner closes it
			abort(nc)
		}
	})
}

// halfCloser is a connection of which one way can be closed.
type halfCloser interface {
	CloseWrite() error
	CloseRead() error
}

// fileHalfCloser is that of a descriptor which is no net.Conn.
type fileHalfCloser struct{ *os.File }

func (f fileHalfCloser) CloseWrite() error { return f.shutdown(syscall.SHUT_WR) }
func (f fileHalfCloser) CloseRead() error  { return f.shutdown(syscall.SHUT_RD) }

func (f fileHalfCloser) shutdown(how int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	outer := raw.Control(func(fd uintptr) { err = syscall.Shutdown(int(fd), how) })
	if outer != nil {
		return outer
	}
	return err
}

// Cancelled says whether Cut or HalfClose was called.
func (c *Call) Cancelled() bool { return c != nil && c.leg.Load() == cancelledMark }

// Sent says whether the whole request has been given to the kernel.
func (c *Call) Sent() bool { return c.sent.Load() }

// markSent notes that; c may be nil.
func (c *Call) markSent() {
	if c != nil {
		c.sent.Store(true)
	}
}

// attach makes l the thing to close; false when the call was cut before.
func (c *Call) attach(l *callLeg) bool { return c == nil || c.leg.CompareAndSwap(nil, l) }

// swap replaces the dialling leg by the dialled one; false when cut.
func (c *Call) swap(from, to *callLeg) bool { return c == nil || c.leg.CompareAndSwap(from, to) }

// detach takes l back; false when a Cut has it.
func (c *Call) detach(l *callLeg) bool { return c == nil || c.leg.CompareAndSwap(l, nil) }

// abort closes nc without waiting: a TLS close would first try to write its
// close_notify, up to five seconds long.
func abort(nc engineConn) { _ = transportOf(nc).Close() }

// transportOf is the connection under TLS.
func transportOf(nc engineConn) engineConn {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn()
	}
	return nc
}
