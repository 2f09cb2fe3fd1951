package upstream

import (
	"math/rand/v2"
	"syscall"
	"time"

	"sluice/dataplane/sock"
)

// epoch is the zero of the package's clock: a duration since it is one read of
// the monotonic clock, where time.Now is two.
var epoch = time.Now()

// now is the monotonic time since epoch.
func now() time.Duration { return time.Since(epoch) }

// trustIdle is how long a connection may have been idle and still be used
// without asking the kernel whether the engine has closed it. Under load
// connections come back sooner, and the extra system call is saved.
const trustIdle = time.Millisecond

// born notes when c was made, and by how much of the bound on its age it is let off:
// those that were made together do not all come back at once.
func (c *conn) born() { c.made, c.spread = now(), (rand.Float32()-0.5)/4 }

// tooOld says whether c is too old for another request, at t.
func (c *conn) tooOld(t, age time.Duration) bool {
	return age > 0 && t-c.made >= age+time.Duration(float64(c.spread)*float64(age))
}

// take gives the newest idle connection, or nil. Connections past their time
// or closed by the engine are closed on the way.
func (e *Endpoint) take() *conn {
	t, bounds := now(), e.bounds.Load()
	for {
		e.mu.Lock()
		c := e.newest
		if c != nil {
			e.unlink(c)
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
		if age >= trustIdle && c.raw != nil && c.peerClosed() {
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
	if e.closed || e.idle >= e.opt.MaxIdle || e.open.Load() > int64(bounds.MaxConns) {
		e.mu.Unlock()
		c.close()
		return
	}
	c.older, c.newer = e.newest, nil
	if e.newest != nil {
		e.newest.newer = c
	} else {
		e.oldest = c
	}
	e.newest = c
	e.idle++
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

// unlink takes c out of the list; mu is held.
func (e *Endpoint) unlink(c *conn) {
	if c.newer != nil {
		c.newer.older = c.older
	} else {
		e.newest = c.older
	}
	if c.older != nil {
		c.older.newer = c.newer
	} else {
		e.oldest = c.newer
	}
	c.newer, c.older = nil, nil
	e.idle--
}

// reap closes connections idle for too long. It runs on a timer that is set
// only while there are idle connections.
func (e *Endpoint) reap() {
	t := now()
	var dead *conn
	e.mu.Lock()
	limit := e.bounds.Load().IdleTimeout
	for c := e.oldest; c != nil && t-c.idleSince >= limit; c = e.oldest {
		e.unlink(c)
		c.older, dead = dead, c
	}
	if e.oldest != nil && !e.closed {
		e.reaper.Reset(max(limit-(t-e.oldest.idleSince), time.Millisecond))
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
	var dead *conn
	for c := e.oldest; c != nil; c = e.oldest {
		e.unlink(c)
		c.older, dead = dead, c
	}
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

func closeAll(list *conn) {
	for list != nil {
		c := list
		list, c.older = c.older, nil
		c.close()
	}
}

// peerClosed asks the kernel, without waiting, whether an idle connection has
// an end of stream, an error, or bytes nobody asked for.
func (c *conn) peerClosed() bool {
	c.dead = false
	err := c.raw.Control(c.peekFunc)
	return err != nil || c.dead
}

func (c *conn) peek(fd uintptr) {
	_, errno := sock.Peek(int(fd), c.one[:])
	c.dead = errno != syscall.EAGAIN
}
