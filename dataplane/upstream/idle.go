package upstream

import (
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/rawsocket"
)

// now returns the monotonic time of the process. It reads the monotonic clock only; time.Now reads
// the wall clock too.
func now() time.Duration { return monotime.Uptime() }

// setAgeLimit records when c was made, and a jitter of its maximum age, so that connections made
// together are not all replaced at once.
func (c *conn) setAgeLimit() { c.dialedAt, c.ageJitter = now(), (rand.Float32()-0.5)/4 }

// tooOld reports whether c is too old for another request at t.
func (c *conn) tooOld(t, age time.Duration) bool {
	return age > 0 && t-c.dialedAt >= age+time.Duration(float64(c.ageJitter)*float64(age))
}

// acquireIdle returns the newest idle connection at t, or nil. On the way it closes connections
// that have expired, were closed by the engine, or have unexpected bytes. The kernel is asked each
// time, however short the connection was idle, because the next client would take such bytes for
// its response (RFC 9112, 6.3).
func (e *Endpoint) acquireIdle(t time.Duration) *conn {
	bounds := e.reloadable.Load()
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
			// Older ones are below it. The reaper closes them soon.
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

// releaseIdle keeps c for the next request, or closes it if the pool is full or c is too old.
func (e *Endpoint) releaseIdle(c *conn) {
	c.idleSince = now()
	bounds := e.reloadable.Load()
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
	if e.opt.Periodic && c.deadlineSet != 0 {
		c.setReadDeadline(0) // otherwise its timer wakes the process up
	}
	e.idle = append(e.idle, c)
	if !e.reaperSet && !e.opt.Periodic {
		e.reaperSet = true
		if e.reaper == nil {
			e.reaper = time.AfterFunc(e.reloadable.Load().IdleTimeout, e.reap)
		} else {
			e.reaper.Reset(e.reloadable.Load().IdleTimeout)
		}
	}
	e.mu.Unlock()
}

// removeOldest removes the n oldest from the list. mu is held.
func (e *Endpoint) removeOldest(n int) []*conn {
	dead := slices.Clone(e.idle[:n])
	e.idle = slices.Delete(e.idle, 0, n)
	return dead
}

// reap closes connections that have been idle for too long. It runs on a timer that is set only
// while there are idle connections.
func (e *Endpoint) reap() {
	t := now()
	e.mu.Lock()
	limit, n := e.reloadable.Load().IdleTimeout, 0
	for n < len(e.idle) && t-e.idle[n].idleSince >= limit {
		n++
	}
	dead := e.removeOldest(n)
	if len(e.idle) > 0 && !e.closed {
		e.reaper.Reset(max(limit-(t-e.idle[0].idleSince), time.Millisecond))
	} else {
		e.reaperSet = false
	}
	e.mu.Unlock()
	closeAll(dead)
}

// Close closes idle connections and keeps none from then on. Running calls continue, and so does a
// later Do, because a request may have been placed here a moment before. Each of their connections
// is closed when its call ends.
func (e *Endpoint) Close() {
	e.mu.Lock()
	e.closed = true
	dead := e.removeOldest(len(e.idle))
	if e.reaper != nil {
		e.reaper.Stop()
	}
	e.mu.Unlock()
	closeAll(dead)
}

func closeAll(list []*conn) {
	for _, c := range list {
		c.close()
	}
}

// peerClosed checks without waiting whether an idle connection has an end of stream, an error, or
// unexpected bytes. Over TLS, a record without data, such as a session ticket, does not count.
func (c *conn) peerClosed() bool {
	c.acquireExchange()
	if c.raw == nil {
		return c.peerClosedTLS()
	}
	c.dead = false
	err := c.raw.Control(c.peekStep)
	return err != nil || c.dead
}

func (x *exchange) peek(fd uintptr) {
	_, errno := rawsocket.Peek(int(fd), x.one[:])
	x.dead = errno != syscall.EAGAIN
}
