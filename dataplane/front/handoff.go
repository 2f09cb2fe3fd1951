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

// A server that retires passes idle connections to the process that takes its place. A
// kept-alive connection that is closed instead may lose a request: the client sends it while
// the close is on its way, and cannot tell whether it was read. A connection that is passed
// is never closed, so bytes that come meanwhile wait in its socket for the new process.
//
// A connection is claimed first, by one swap that succeeds only while nothing of a request
// has been read; from then on nobody in this process reads it. Its goroutine, or the lobby's,
// finds the claim as it wakes up and passes the connection on.
//
// TLS connections cannot be passed: their keys are in crypto/tls. They stay for as long as
// any idle connection is kept, and their next answer says that it is the last one.

// handOffBatch is how many connections are claimed at once: what comes on one of them waits
// until the others are passed.
const handOffBatch = 64

// Successor is a process that takes the place of this one. Its method is called from many
// goroutines.
type Successor interface {
	// Take passes the connection of descriptor fd to the process; taken says that it has
	// it. The descriptor itself stays the caller's to close.
	HandOff(fd int, about HandoffState) (taken bool)
}

// HandoffState is what is told of a connection that is passed to another process.
type HandoffState struct {
	Client netip.Addr `json:"client"`         // as far as the connection tells, behind its PROXY header
	Used   bool       `json:"used,omitempty"` // it has had a request
}

// readState says who may read a connection's next request.
type readState struct{ bits atomic.Uint32 }

const (
	readStarted = 1 << iota // bytes of a head have come, or are being read: what a drain waits for
	readClaimed             // the connection is another process's, or will be: it is not read here
	readPinned              // it is not passed: a PROXY header comes first, or the heir has refused it
)

// startRead marks that bytes are being read; false where they must not be.
func (i *readState) startRead() bool { return i.bits.Or(readStarted)&readClaimed == 0 }

// endRead marks that none have come.
func (i *readState) endRead() { i.bits.And(^uint32(readStarted)) }

func (i *readState) started() bool { return i.bits.Load()&(readStarted|readClaimed) != 0 }
func (i *readState) claimed() bool { return i.bits.Load()&readClaimed != 0 }
func (i *readState) claim() bool   { return i.bits.CompareAndSwap(0, readClaimed) }
func (i *readState) pinned() bool  { return i.bits.Load()&readPinned != 0 }
func (i *readState) unpin()        { i.bits.And(^uint32(readPinned)) }

// pin takes a claim back for good.
func (i *readState) pin() { i.bits.Store(readPinned) }

// errHandedOff is what a read of a claimed connection fails with.
var errHandedOff = errors.New("front: the connection is passed to another process")

// handingOff says that the connection ends here because it is passed. A request that fasthttp's
// reader held already is answered instead, and its connection closed.
func (c *conn) handingOff() bool { return c.readState.claimed() && !c.active.Load() && !c.needsLinger }

// canHandOff says whether the connection may be passed once it is idle.
func (c *conn) canHandOff() bool { return c.isTCP() && !c.usesReservedFD && !c.readState.pinned() }

// handOff gives a claimed connection to the heir; false where it stays, and is to be served.
// It is called by who serves the connection.
func (s *Server) handOff(c *conn) (accepted bool) {
	s.clientWatcher.remove(c)
	_ = c.raw.Control(func(fd uintptr) {
		accepted = s.successor.HandOff(int(fd), HandoffState{Client: c.ip, Used: c.deadlineKind != deadlineHead})
	})
	if accepted {
		c.closeOnce()
		c.reportResponseEnded()
		return true
	}
	c.socketReadDeadline = 0 // the socket was told a time that is over
	c.readState.pin()
	return false
}

func (s *Server) handOffOrServe(c *conn) {
	if !s.handOff(c) {
		s.serveConn(c)
	}
}

// claimIdle claims some connections that are idle, and wakes up who waits for their next
// request.
func (s *Server) claimIdle() {
	s.conns.mu.Lock()
	claimed := 0
	for _, c := range s.conns.conns {
		switch {
		case claimed == handOffBatch:
		case c.readState.claimed():
			claimed++
		case c.canHandOff() && c.readState.claim():
			claimed++
			_ = c.Conn.SetReadDeadline(epoch)
		}
	}
	s.conns.mu.Unlock()
	if claimed > 0 {
		s.pendingHeads.notifyClaims()
	}
}

// retirement is the end of a server whose address another process accepts on.
type retirement struct {
	srv         *Server
	idleTimeout time.Duration       // an idle connection that is not passed is kept so long
	idleSince   map[*conn]time.Time // since when such a one was seen to be idle
}

// closeIdle has idle connections passed, and closes those that are not and whose time is over.
// It says whether any are left.
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
		if s.successor != nil && c.canHandOff() {
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

// wait returns when nothing is left but requests under way, or ctx ends.
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

// Adopt serves a connection that another process has passed to this one, by its descriptor,
// which is the Server's where it says so and else the caller's. It waits until Serve has
// begun. It refuses what would be turned away if it were accepted now, and any connection
// where clients are to speak TLS.
func (s *Server) Adopt(fd int, about HandoffState) (adopted bool) {
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

// registerAdopted counts in a connection that was passed to this process; false where there are
// too many, or the server stops.
func (s *Server) registerAdopted(c *conn) bool {
	live := s.options()
	c.fromProxy = live.Proxies.Trusted.Contain(c.ip)
	s.mu.Lock() // whoever stops the server counts its connections afterwards
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
