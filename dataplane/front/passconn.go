package front

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"sluice/dataplane/fdlimit"
	"sluice/dataplane/rawsocket"
)

// A server that retires hands idle connections off to its successor process. If it closed a
// kept-alive connection instead, a request could be lost: the client may send it while the
// close is on its way, and cannot know whether the server has read it. A connection that is
// passed is never closed, so bytes that arrive meanwhile wait in its socket for the new
// process.
//
// The server first claims a connection, with an atomic operation that succeeds only while no
// byte of a request has been read. From then on nothing in this process reads it. The
// connection's goroutine, or that of the pending-header queue, sees the claim when it wakes
// up and hands the connection off.
//
// TLS connections cannot be passed, because crypto/tls does not export their keys. They
// stay here until the idle timeout, and their next response carries Connection: close.

// passBatch is how many connections are claimed at once. A request that arrives on a claimed
// connection waits until the others of its batch are passed.
const passBatch = 64

// Successor is a process that replaces this one. Its method is called from many goroutines.
type Successor interface {
	// Pass passes the connection of descriptor fd to the process. taken reports whether
	// the process has accepted it. The caller must still close fd.
	Pass(fd int, about PassedState) (taken bool)
}

// PassedState describes a connection that is passed to another process.
type PassedState struct {
	Client netip.Addr `json:"client"`         // the peer's address, or the one in its PROXY header
	Used   bool       `json:"used,omitempty"` // it has had a request
}

// readState says who may read a connection's next request.
type readState struct{ bits atomic.Uint32 }

const (
	readStarted = 1 << iota // bytes of a head have been read or are being read; a drain waits for the request
	readClaimed             // the connection is to be passed; this process must not read it
	readLocal               // the connection stays here: its PROXY header is unread, or the successor has refused it
)

// startRead records that bytes are being read. It returns false if the connection is claimed
// and must not be read.
func (i *readState) startRead() bool { return i.bits.Or(readStarted)&readClaimed == 0 }

// endRead records that a read has returned no bytes.
func (i *readState) endRead() { i.bits.And(^uint32(readStarted)) }

func (i *readState) started() bool   { return i.bits.Load()&(readStarted|readClaimed) != 0 }
func (i *readState) claimed() bool   { return i.bits.Load()&readClaimed != 0 }
func (i *readState) claim() bool     { return i.bits.CompareAndSwap(0, readClaimed) }
func (i *readState) keptLocal() bool { return i.bits.Load()&readLocal != 0 }
func (i *readState) allowPass()      { i.bits.And(^uint32(readLocal)) }

// keepLocal keeps the connection in this process until allowPass, and removes a claim.
func (i *readState) keepLocal() { i.bits.Store(readLocal) }

// errPassed is the error of a read on a claimed connection.
var errPassed = errors.New("front: the connection is passed to another process")

// isBeingPassed reports whether the connection leaves fasthttp to be passed. It does not if
// fasthttp's reader already had a request, which is answered before the connection is closed.
func (c *conn) isBeingPassed() bool {
	return c.readState.claimed() && !c.active.Load() && !c.needsLinger
}

// canPass reports whether the connection may be passed once it is idle.
func (c *conn) canPass() bool { return c.isTCP() && !c.usesReservedFD && !c.readState.keptLocal() }

// pass passes a claimed connection to the successor. If the successor refuses it, pass
// returns false and the caller must serve the connection. The goroutine that serves the
// connection calls it.
func (s *Server) pass(c *conn) (accepted bool) {
	s.clientWatcher.Remove(&c.clientWatch, c.raw)
	_ = c.raw.Control(func(fd uintptr) {
		accepted = s.successor.Pass(int(fd), PassedState{Client: c.ip, Used: c.deadlineKind != deadlineHead})
	})
	if accepted {
		c.closeOnce()
		c.reportResponseEnded()
		return true
	}
	// claimIdle sets the socket's deadline to a past time after its claim, both under this lock.
	// Without it, a goroutine that sees the claim by itself could serve the connection first,
	// and its next read would fail by that deadline.
	s.conns.mu.Lock()
	defer s.conns.mu.Unlock()
	c.socketReadDeadline = 0
	c.readState.keepLocal()
	return false
}

func (s *Server) passOrServe(c *conn) {
	if !s.pass(c) {
		s.serveConn(c)
	}
}

// claimIdle claims up to passBatch idle connections, and wakes the goroutines that wait for
// their next requests.
func (s *Server) claimIdle() {
	s.conns.mu.Lock()
	claimed := 0
	for _, c := range s.conns.conns {
		switch {
		case claimed == passBatch:
		case c.readState.claimed():
			claimed++
		case c.canPass() && c.readState.claim():
			claimed++
			_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
		}
	}
	s.conns.mu.Unlock()
	if claimed > 0 {
		s.pendingHeads.notifyClaims()
	}
}

// retirement ends a server after another process has begun to accept on its address.
type retirement struct {
	srv         *Server
	idleTimeout time.Duration       // how long an idle connection is kept that cannot be passed
	idleSince   map[*conn]time.Time // when each of these was first seen idle
}

// closeIdle passes idle connections, and closes those that cannot be passed and have
// been idle for idleTimeout. left reports whether there are idle connections that are not
// closed or passed yet.
func (r *retirement) closeIdle() (left bool) {
	s := r.srv
	if s.successor != nil {
		s.claimIdle()
	}
	now, since := time.Now(), make(map[*conn]time.Time)
	s.conns.shutdownIf(func(c *conn) (cut bool) {
		if c.busy() && !c.readState.claimed() {
			return false
		}
		left = true
		if s.successor != nil && c.canPass() {
			return false
		}
		first, ok := r.idleSince[c]
		if !ok {
			first = now
		}
		since[c] = first
		return now.Sub(first) >= r.idleTimeout && c.idle()
	})
	r.idleSince = since
	return left
}

// wait returns when only connections with a request in progress are left, when idleTimeout has
// passed, or when ctx ends.
func (r *retirement) wait(ctx context.Context) {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for last := time.Now().Add(r.idleTimeout); r.closeIdle() && time.Now().Before(last); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Adopt serves a connection that another process has passed to this one, given its
// descriptor fd. If adopted is true the Server owns fd, otherwise the caller still does. Adopt
// waits until Serve has begun. It refuses connections beyond the limits, and all connections
// if the server uses TLS.
func (s *Server) Adopt(fd int, about PassedState) (adopted bool) {
	select {
	case <-s.serveReady:
	case <-s.stop:
		return false
	}
	if s.initial.TLS != nil || fdlimit.IsReserved(fd) {
		return false
	}
	nc, ok := rawsocket.Adopt(fd)
	if !ok {
		return false
	}
	c := s.newConn(nc, about.Client)
	if about.Used {
		c.deadlineKind = deadlineAsSet
	}
	if !s.registerAdopted(c) {
		return false
	}
	go s.serveConn(c)
	return true
}

// registerAdopted adds a connection that another process has passed to connSet. It returns
// false if that exceeds a limit or the server has stopped.
func (s *Server) registerAdopted(c *conn) bool {
	live := s.options()
	c.fromProxy = live.Proxies.Trusted.Contain(c.ip)
	s.mu.Lock() // a stop of the server counts its connections afterwards
	defer s.mu.Unlock()
	if s.stopped() || !c.fromProxy && !s.conns.acquireConnIP(c, live.MaxConnsPerIP) {
		return false
	}
	open, ok := s.conns.add(c, live.MaxConns)
	if !ok {
		s.conns.releaseConnIP(c)
		return false
	}
	if o := s.initial.Observer; o != nil {
		o.Connections(open)
	}
	return true
}
