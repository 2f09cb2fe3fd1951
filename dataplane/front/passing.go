package front

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"sluice/dataplane/descriptors"
	"sluice/dataplane/sock"
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

// passAtOnce is how many connections are claimed at once: what comes on one of them waits
// until the others are passed.
const passAtOnce = 64

// Heir is a process that takes the place of this one. Its method is called from many
// goroutines.
type Heir interface {
	// Take passes the connection of descriptor fd to the process; taken says that it has
	// it. The descriptor itself stays the caller's to close.
	Take(fd int, about Passed) (taken bool)
}

// Passed is what is told of a connection that is passed to another process.
type Passed struct {
	Client netip.Addr `json:"client"`         // as far as the connection tells, behind its PROXY header
	Used   bool       `json:"used,omitempty"` // it has had a request
}

// input says who may read a connection's next request.
type input struct{ bits atomic.Uint32 }

const (
	inputHeard   = 1 << iota // bytes of a head have come, or are being read: what a drain waits for
	inputClaimed             // the connection is another process's, or will be: it is not read here
	inputStays               // it is not passed: a PROXY header comes first, or the heir has refused it
)

// hear marks that bytes are being read; false where they must not be.
func (i *input) hear() bool { return i.bits.Or(inputHeard)&inputClaimed == 0 }

// rest marks that none have come.
func (i *input) rest() { i.bits.And(^uint32(inputHeard)) }

func (i *input) heard() bool   { return i.bits.Load()&(inputHeard|inputClaimed) != 0 }
func (i *input) claimed() bool { return i.bits.Load()&inputClaimed != 0 }
func (i *input) claim() bool   { return i.bits.CompareAndSwap(0, inputClaimed) }
func (i *input) stays() bool   { return i.bits.Load()&inputStays != 0 }
func (i *input) mayPass()      { i.bits.And(^uint32(inputStays)) }

// stay takes a claim back for good.
func (i *input) stay() { i.bits.Store(inputStays) }

// errPassedOn is what a read of a claimed connection fails with.
var errPassedOn = errors.New("front: the connection is passed to another process")

// passes says that the connection ends here because it is passed. A request that fasthttp's
// reader held already is answered instead, and its connection closed.
func (c *conn) passes() bool { return c.input.claimed() && !c.active.Load() && !c.lingered }

// passable says whether the connection may be passed once it is idle.
func (c *conn) passable() bool { return c.plain() && !c.spare && !c.input.stays() }

// passOn gives a claimed connection to the heir; false where it stays, and is to be served.
// It is called by who serves the connection.
func (s *Server) passOn(c *conn) (taken bool) {
	s.watch.forget(c)
	_ = c.raw.Control(func(fd uintptr) {
		taken = s.heir.Take(int(fd), Passed{Client: c.ip, Used: c.due != dueHead})
	})
	if taken {
		c.shut()
		c.reportEnd()
		return true
	}
	c.readSet = 0 // the socket was told a time that is over
	c.input.stay()
	return false
}

func (s *Server) passOrServe(c *conn) {
	if !s.passOn(c) {
		s.serveConn(c)
	}
}

// claimIdle claims some connections that are idle, and wakes up who waits for their next
// request.
func (s *Server) claimIdle() {
	s.conns.mu.Lock()
	claimed := 0
	for _, c := range s.conns.all {
		switch {
		case claimed == passAtOnce:
		case c.input.claimed():
			claimed++
		case c.passable() && c.input.claim():
			claimed++
			_ = c.Conn.SetReadDeadline(epoch)
		}
	}
	s.conns.mu.Unlock()
	if claimed > 0 {
		s.lobby.lookForClaimed()
	}
}

// retirement is the end of a server whose address another process accepts on.
type retirement struct {
	srv    *Server
	unused time.Duration       // an idle connection that is not passed is kept so long
	since  map[*conn]time.Time // since when such a one was seen to be idle
}

// idle has idle connections passed, and closes those that are not and whose time is over.
// It says whether any are left.
func (r *retirement) idle() (left bool) {
	s := r.srv
	if s.heir != nil {
		s.claimIdle()
	}
	now, since := time.Now(), make(map[*conn]time.Time)
	s.conns.cut(func(c *conn) (cut bool) {
		if c.underway() && !c.input.claimed() {
			return false
		}
		left = true
		if s.heir != nil && c.passable() {
			return false
		}
		first, ok := r.since[c]
		if !ok {
			first = now
		}
		since[c] = first
		return now.Sub(first) >= r.unused && c.idle()
	})
	r.since = since
	return left
}

// await returns when nothing is left but requests under way, or ctx ends.
func (r *retirement) await(ctx context.Context) {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for last := time.Now().Add(r.unused); r.idle() && time.Now().Before(last); {
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
func (s *Server) Adopt(fd int, about Passed) (adopted bool) {
	select {
	case <-s.serving:
	case <-s.stop:
		return false
	}
	if s.opt.TLS != nil || descriptors.Short(fd) {
		return false
	}
	nc, ok := sock.Adopt(fd)
	if !ok {
		return false
	}
	c := s.newConn(nc, about.Client)
	if about.Used {
		c.due = dueOther
	}
	if !s.countAdopted(c) {
		return false
	}
	go s.serveConn(c)
	return true
}

// countAdopted counts in a connection that was passed to this process; false where there are
// too many, or the server stops.
func (s *Server) countAdopted(c *conn) bool {
	live := s.live()
	c.proxy = live.Proxies.Trusted.Contain(c.ip)
	s.mu.Lock() // whoever stops the server counts its connections afterwards
	defer s.mu.Unlock()
	if s.stopped() || !c.proxy && !s.conns.count(c, live.MaxConnsPerIP) {
		return false
	}
	open, ok := s.conns.add(c, live.MaxConns)
	if !ok {
		s.conns.uncount(c)
		return false
	}
	if o := s.opt.Observer; o != nil {
		o.Connections(open)
	}
	return true
}
