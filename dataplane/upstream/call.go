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
// detach (leg -> nil), Cut, HangUp and Group.Abandon swap a mark in. Whoever takes the leg out of
// the pointer owns its fate: a Cut that got it closes it and its owner, whose
// detach then fails, never pools or reuses it; a detach that succeeded leaves
// nothing for a later Cut to find. So a late Cut cannot reach a connection
// that already serves another request.
type Call struct {
	at     atomic.Pointer[leg]
	sent   atomic.Bool
	tokens atomic.Int32 // Request.Tokens and one, 0 once a byte of the body has come
	in     membership

	cut func() // made once; see Cutter
}

// leg is what a Cut closes. Its fields are set before it is attached and never
// changed afterwards, so the cutter may read them without a lock.
type leg struct{ end Cutter }

// Cutter is what can be cut, from any goroutine.
type Cutter interface{ Cut() }

// dialling is that of a connection that is being made.
type dialling context.CancelFunc

func (d dialling) Cut() { d() }

// The marks of a call that was ended: by its own side, and with its Group.
var cutMark, frozenMark = new(leg), new(leg)

// isMark says whether l is a mark, or nothing: there is nothing to close.
func isMark(l *leg) bool { return l == nil || l == cutMark || l == frozenMark }

// Cut closes the leg's connection (see Request.Grace); a Do or read under way returns
// ErrCut. It may be called at any time, before Do as well, more than once, from anywhere.
func (c *Call) Cut() {
	if l := c.at.Swap(cutMark); !isMark(l) {
		l.end.Cut()
	}
}

// abandon ends the call as Cut does, but for its Group: false when it was ended before.
// WasCut is false then, and what fails for it fails with ErrFrozen.
func (c *Call) abandon() bool {
	for {
		l := c.at.Load()
		if l == cutMark || l == frozenMark {
			return false
		}
		if !c.at.CompareAndSwap(l, frozenMark) {
			continue // its owner passes the connection on
		}
		if l != nil {
			l.end.Cut()
		}
		return true
	}
}

// wasAbandoned says whether the call was ended with its Group.
func (c *Call) wasAbandoned() bool { return c != nil && c.at.Load() == frozenMark }

// ended says whether the call was ended by anybody: Do must not begin.
func (c *Call) ended() bool { return c.WasCut() || c.wasAbandoned() }

// Cutter gives Cut as a function, the same at each call. It is for the goroutine that
// makes the legs.
func (c *Call) Cutter() func() {
	if c.cut == nil {
		c.cut = c.Cut
	}
	return c.cut
}

// Renew makes the Call ready for another Do. It is for a caller who alone has it: the
// last leg's Response is released, and nobody is left who might cut it.
func (c *Call) Renew() {
	c.at.Store(nil)
	c.sent.Store(false)
}

// hangUpFor is how long HangUp listens for an answer that was on its way. An engine
// takes the end of its input as a client that left, at once; this bounds one that
// does not.
const hangUpFor = time.Second

// HangUp cuts the call as Cut does, but an answer that the engine had sent before
// it could know is still read: only our side of the connection is closed, the
// other when the engine closes it, within a second at the latest; what has come by
// then can still be read later. WasCut is true although Do and the reads of the answer
// have succeeded. A stream that is lent is cut as by Cut.
func (c *Call) HangUp() {
	l := c.at.Swap(cutMark)
	if isMark(l) {
		return
	}
	own, ok := l.end.(*conn)
	if !ok { // dialled, or a stream under way
		l.end.Cut()
		return
	}
	nc := own.nc
	if kept := own.linger(); kept.on() { // no answer was on its way
		abort(nc)
		kept.start()
		return
	}
	half, ok := plain(nc).(halves)
	if file, is := nc.(*os.File); is {
		half, ok = fileHalves{file}, true
	}
	if !ok || half.CloseWrite() != nil {
		abort(nc)
		return
	}
	time.AfterFunc(hangUpFor, func() {
		if half.CloseRead() != nil { // its owner closes it
			abort(nc)
		}
	})
}

// halves is a connection of which one way can be closed.
type halves interface {
	CloseWrite() error
	CloseRead() error
}

// fileHalves is that of a descriptor which is no net.Conn.
type fileHalves struct{ *os.File }

func (f fileHalves) CloseWrite() error { return f.shut(syscall.SHUT_WR) }
func (f fileHalves) CloseRead() error  { return f.shut(syscall.SHUT_RD) }

func (f fileHalves) shut(how int) error {
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

// WasCut says whether Cut or HangUp was called.
func (c *Call) WasCut() bool { return c != nil && c.at.Load() == cutMark }

// Sent says whether the whole request has been given to the kernel.
func (c *Call) Sent() bool { return c.sent.Load() }

// markSent notes that; c may be nil.
func (c *Call) markSent() {
	if c != nil {
		c.sent.Store(true)
	}
}

// attach makes l the thing to close; false when the call was cut before.
func (c *Call) attach(l *leg) bool { return c == nil || c.at.CompareAndSwap(nil, l) }

// swap replaces the dialling leg by the dialled one; false when cut.
func (c *Call) swap(from, to *leg) bool { return c == nil || c.at.CompareAndSwap(from, to) }

// detach takes l back; false when a Cut has it.
func (c *Call) detach(l *leg) bool { return c == nil || c.at.CompareAndSwap(l, nil) }

// abort closes nc without waiting: a TLS close would first try to write its
// close_notify, up to five seconds long.
func abort(nc link) { _ = plain(nc).Close() }

// plain is the connection under TLS.
func plain(nc link) link {
	if t, ok := nc.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn()
	}
	return nc
}
