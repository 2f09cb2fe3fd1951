package upstream

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"syscall"
	"time"

	"sluice/dataplane/sock"
)

// epoch is the zero of the package's clock: a duration since it is one read of
// the monotonic clock, where time.Now is two.
var epoch = time.Now()

// now is the monotonic time since epoch.
func now() time.Duration { return time.Since(epoch) }

// born notes when c was made, and by how much of the bound on its age it is let off:
// those that were made together do not all come back at once.
func (c *conn) born() { c.made, c.spread = now(), (rand.Float32()-0.5)/4 }

// tooOld says whether c is too old for another request, at t.
func (c *conn) tooOld(t, age time.Duration) bool {
	return age > 0 && t-c.made >= age+time.Duration(float64(c.spread)*float64(age))
}

// take gives the newest idle connection at t, or nil. Connections past their time, closed
// by the engine, or on which it has sent what nobody asked for, are closed on the way.
// That is asked of the kernel each time, however short a connection was idle: the next
// client would take such bytes for its answer (RFC 9112, 6.3).
func (e *Endpoint) take(t time.Duration) *conn {
	bounds := e.bounds.Load()
	for {
		var c *conn
		e.mu.Lock()
		if n := len(e.idle); n > 0 {
			c, e.idle[n-1] = e.idle[n-1], nil
			e.idle = e.idle[:n-1]
		}
		e.mu.Unlock()
		if c == nil {
			return nil
		}
		age := t - c.idleSince
		if age >= bounds.IdleTimeout {
			// Older ones lie below it; the reaper has them within a moment.
			c.close()
			continue
		}
		if c.tooOld(t, bounds.MaxAge) {
			e.aged.Add(1)
			c.close()
			continue
		}
		if c.peerClosed() {
			e.stale.Add(1)
			c.close()
			continue
		}
		return c
	}
}

// park keeps c for the next request, or closes it when there is no room, or c is old.
func (e *Endpoint) park(c *conn) {
	c.idleSince = now()
	bounds := e.bounds.Load()
	if c.tooOld(c.idleSince, bounds.MaxAge) {
		e.aged.Add(1)
		c.close()
		return
	}
	e.mu.Lock()
	if e.closed || len(e.idle) >= e.opt.MaxIdle || e.open.Load() > int64(bounds.MaxConns) {
		e.mu.Unlock()
		c.close()
		return
	}
	e.idle = append(e.idle, c)
	if !e.reaperSet {
		e.reaperSet = true
		if e.reaper == nil {
			e.reaper = time.AfterFunc(e.bounds.Load().IdleTimeout, e.reap)
		} else {
			e.reaper.Reset(e.bounds.Load().IdleTimeout)
		}
	}
	e.mu.Unlock()
}

// unlink takes the n oldest out of the list; mu is held.
func (e *Endpoint) unlink(n int) []*conn {
	dead := slices.Clone(e.idle[:n])
	e.idle = slices.Delete(e.idle, 0, n)
	return dead
}

// reap closes connections idle for too long. It runs on a timer that is set
// only while there are idle connections.
func (e *Endpoint) reap() {
	t := now()
	e.mu.Lock()
	limit, n := e.bounds.Load().IdleTimeout, 0
	for n < len(e.idle) && t-e.idle[n].idleSince >= limit {
		n++
	}
	dead := e.unlink(n)
	if len(e.idle) > 0 && !e.closed {
		e.reaper.Reset(max(limit-(t-e.idle[0].idleSince), time.Millisecond))
	} else {
		e.reaperSet = false
	}
	e.mu.Unlock()
	closeAll(dead)
}

// Close closes idle connections; calls under way go on, and their connections
// are closed when they end. A Do after Close fails.
func (e *Endpoint) Close() {
	e.mu.Lock()
	e.closed = true
	dead := e.unlink(len(e.idle))
	if e.reaper != nil {
		e.reaper.Stop()
	}
	e.mu.Unlock()
	closeAll(dead)
}

func (e *Endpoint) isClosed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.closed
}

func closeAll(list []*conn) {
	for _, c := range list {
		c.close()
	}
}

// peerClosed asks, without waiting, whether an idle connection has an end of stream, an
// error, or bytes nobody asked for. Over TLS a record that says nothing, such as a
// session ticket, is none.
func (c *conn) peerClosed() bool {
	c.takeExchange()
	if c.raw == nil {
		return c.toldUnderTLS()
	}
	c.dead = false
	err := c.raw.Control(c.peekFunc)
	return err != nil || c.dead
}

func (x *exchange) peek(fd uintptr) {
	_, errno := sock.Peek(int(fd), x.one[:])
	x.dead = errno != syscall.EAGAIN
}

// toldUnderTLS is peerClosed over TLS: a read that gives up where it would have to wait.
func (c *conn) toldUnderTLS() bool {
	under, ok := plain(c.nc).(*underTLS)
	if !ok {
		return false
	}
	under.asks = true
	n, err := c.nc.Read(c.one[:])
	under.asks = false
	return n > 0 || !errors.Is(err, errNothing) || under.midway()
}

// underTLS is the connection below a TLS one, which can be asked for what has come.
type underTLS struct {
	*net.TCPConn
	raw  syscall.RawConn
	asks bool // Read must not wait

	look  func(fd uintptr) // made once
	p     []byte
	n     int
	errno syscall.Errno

	// Where in its records what was received ends: of a header of recordHead bytes have
	// come, and then left of its record have not.
	head [recordHead]byte
	have int
	left int
}

// recordHead is how long a TLS record's header is; its last two bytes are how much
// follows (RFC 8446, 5.1).
const recordHead = 5

// follow takes in what was received.
func (u *underTLS) follow(p []byte) {
	for len(p) > 0 {
		if u.have < recordHead {
			n := copy(u.head[u.have:], p)
			p = p[n:]
			if u.have += n; u.have == recordHead {
				u.left = int(u.head[3])<<8 | int(u.head[4])
			}
		} else {
			n := min(u.left, len(p))
			p = p[n:]
			u.left -= n
		}
		if u.have == recordHead && u.left == 0 {
			u.have = 0
		}
	}
}

// midway says whether a record has come in part: crypto/tls keeps that part, and says
// that nothing has come.
func (u *underTLS) midway() bool { return u.have > 0 }

func newUnderTLS(t *net.TCPConn) (*underTLS, error) {
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	u := &underTLS{TCPConn: t, raw: raw}
	u.look = func(fd uintptr) { u.n, u.errno = sock.Recv(int(fd), u.p) }
	return u, nil
}

func (u *underTLS) Read(p []byte) (int, error) {
	if !u.asks {
		n, err := u.TCPConn.Read(p)
		u.follow(p[:n])
		return n, err
	}
	u.p = p
	err := u.raw.Control(u.look)
	u.p = nil
	switch {
	case err != nil:
		return 0, err
	case u.errno == syscall.EAGAIN:
		return 0, errNothing
	case u.errno != 0:
		return 0, u.errno
	case u.n == 0:
		return 0, io.EOF
	}
	u.follow(p[:u.n])
	return u.n, nil
}

// nothing is what a read gives that must not wait: crypto/tls goes on after an error that
// is temporary.
type nothing struct{}

func (nothing) Error() string   { return "upstream: nothing has come" }
func (nothing) Timeout() bool   { return true }
func (nothing) Temporary() bool { return true }

var errNothing net.Error = nothing{}
