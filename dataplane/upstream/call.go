package upstream

import (
	"context"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

// Call is the handle by which another goroutine cancels a leg. The zero value is ready to use. One
// Call serves one Do, and after Reset another.
//
// Memory order: a Call holds one atomic pointer, which is nil (nothing to close), the leg it owns,
// or a mark that the call was ended. The ownership of a connection moves by compare-and-swap: Do
// attaches (nil -> leg), Release and every failure detach (leg -> nil), and Cancel, HalfClose and
// Group.Abandon swap in a mark. The goroutine that takes the leg out of the pointer decides its
// fate. A Cancel that gets it closes it, and its owner, whose detach then fails, never pools or
// reuses it. After a detach that succeeds a later Cancel finds nothing. So a late Cancel cannot
// reach a connection that already serves another request.
type Call struct {
	leg    atomic.Pointer[callLeg]
	sent   atomic.Bool
	tokens atomic.Int32 // Request.Tokens plus one; 0 once a byte of the body has come
	member membership

	cancelFunc func() // allocated once; see CancelFunc
}

// callLeg is what Cancel closes. Its fields are set before it is attached and never changed
// afterwards, so Cancel reads them without a lock.
type callLeg struct{ canceller Canceller }

// Canceller can be cancelled from any goroutine.
type Canceller interface{ Cancel() }

// dialInProgress is the Canceller of a connection that is being dialled.
type dialInProgress context.CancelFunc

func (d dialInProgress) Cancel() { d() }

// The marks of an ended call: ended by its own side, and by its Group.
var cancelledMark, frozenMark = new(callLeg), new(callLeg)

// isMark reports whether l is nil or a mark: there is nothing to close.
func isMark(l *callLeg) bool { return l == nil || l == cancelledMark || l == frozenMark }

// Cancel closes the leg's connection (see Request.Grace). A Do or read that is running returns
// ErrCancelled. Cancel may be called from any goroutine, at any time, also before Do, and more than
// once.
func (c *Call) Cancel() {
	if l := c.leg.Swap(cancelledMark); !isMark(l) {
		l.canceller.Cancel()
	}
}

// abandon ends the call as Cancel does, for its Group. It returns false if the call has been ended
// before. Cancelled stays false, and the call fails with ErrFrozen.
func (c *Call) abandon() bool {
	for {
		l := c.leg.Load()
		if l == cancelledMark || l == frozenMark {
			return false
		}
		if !c.leg.CompareAndSwap(l, frozenMark) {
			continue // the owner is exchanging the leg
		}
		if l != nil {
			l.canceller.Cancel()
		}
		return true
	}
}

// wasAbandoned reports whether the call was ended by its Group.
func (c *Call) wasAbandoned() bool { return c != nil && c.leg.Load() == frozenMark }

// ended reports whether the call was ended by anyone. Do must not begin then.
func (c *Call) ended() bool { return c.Cancelled() || c.wasAbandoned() }

// CancelFunc returns Cancel as a function, the same at each call. Only the goroutine that makes the
// legs calls it.
func (c *Call) CancelFunc() func() {
	if c.cancelFunc == nil {
		c.cancelFunc = c.Cancel
	}
	return c.cancelFunc
}

// Reset makes the Call ready for another Do. The caller must have it alone: the last leg's Response
// has been released, and no goroutine can cancel it any more.
func (c *Call) Reset() {
	c.leg.Store(nil)
	c.sent.Store(false)
}

// halfCloseTimeout is how long HalfClose waits for a response that was on its way. An engine treats
// the end of its input as a client that disconnects, at once. This bounds one that does not.
const halfCloseTimeout = time.Second

// HalfClose cancels the call as Cancel does, but a response that the engine sent before it noticed
// is still read. Only the sending direction is closed. The engine closes the other, or it is closed
// after a second; what has come by then can still be read. Cancelled is true although Do and the
// reads of the response succeed. A detached stream is cancelled as by Cancel.
func (c *Call) HalfClose() {
	l := c.leg.Swap(cancelledMark)
	if isMark(l) {
		return
	}
	own, ok := l.canceller.(*conn)
	if !ok { // being dialled, or a detached stream
		l.canceller.Cancel()
		return
	}
	nc := own.nc
	if lingering := own.linger(); lingering.active() { // no response was on its way
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

// halfCloser is a connection of which one direction can be closed.
type halfCloser interface {
	CloseWrite() error
	CloseRead() error
}

// fileHalfCloser is a halfCloser for a descriptor that is not a net.Conn.
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

// Cancelled reports whether Cancel or HalfClose was called.
func (c *Call) Cancelled() bool { return c != nil && c.leg.Load() == cancelledMark }

// Sent reports whether the whole request has been passed to the kernel.
func (c *Call) Sent() bool { return c.sent.Load() }

// markSent records that. c may be nil.
func (c *Call) markSent() {
	if c != nil {
		c.sent.Store(true)
	}
}

// attach makes l the leg to close; false: the call has been ended.
func (c *Call) attach(l *callLeg) bool { return c == nil || c.leg.CompareAndSwap(nil, l) }

// swap replaces the dialling leg by the connected one; false: the call has been ended.
func (c *Call) swap(from, to *callLeg) bool { return c == nil || c.leg.CompareAndSwap(from, to) }

// detach removes l; false: a Cancel has it.
func (c *Call) detach(l *callLeg) bool { return c == nil || c.leg.CompareAndSwap(l, nil) }

// abort closes nc without waiting. A TLS close would first try to write its close_notify for up to
// five seconds.
func abort(nc engineConn) { _ = transportOf(nc).Close() }

// transportOf returns the connection below TLS.
func transportOf(nc engineConn) engineConn {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn()
	}
	return nc
}
