package front

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"sluice/dataplane/descriptors"
)

const (
	// spares is how many connections may be served, a page each, whose descriptor is
	// of the reserve: whoever watches over this router must be able to ask it how it is.
	spares = 16
	// spareTime is what such a connection has for each step.
	spareTime = 2 * time.Second
	// Idle connections are closed to make room, so many at once and so often.
	roomAtOnce = 64
	roomEvery  = 100 * time.Millisecond
)

// scarcity is how a server without descriptors is doing.
type scarcity struct {
	spares  atomic.Int32
	madeAt  atomic.Int64  // when room was made last, Unix nanoseconds
	waits   atomic.Uint64 // accepts that failed
	turned  atomic.Uint64 // connections turned away
	freed   atomic.Uint64 // idle connections closed
	logLine sparse
}

// Scarcity is what want of file descriptors has led to since the start: accepts that
// failed and were waited out, connections that were told to come again, and idle ones
// that were closed to make room.
func (s *Server) Scarcity() (waits, turned, freed uint64) {
	return s.scarce.waits.Load(), s.scarce.turned.Load(), s.scarce.freed.Load()
}

// short says whether the connection's descriptor is of the reserve.
func (c *conn) short() (is bool) {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) { is = descriptors.Short(int(fd)) })
	}
	return is
}

// takeSpare makes room, and c one of the few that are served all the same; false when
// there are enough of those.
func (s *Server) takeSpare(c *conn) bool {
	s.makeRoom()
	s.scarce.logLine.warn(s.opt.Log, "file descriptors run out: idle connections are closed, and new ones get a page or a 503", "connections", s.conns.len(), "help", "raise the limit (ulimit -n, LimitNOFILE=), or lower limits.max_conns")
	if s.scarce.spares.Add(1) > spares {
		s.scarce.spares.Add(-1)
		s.scarce.turned.Add(1)
		return false
	}
	c.spare = true
	return true
}

// cannotAccept notes an accept that failed for want of means.
func (s *Server) cannotAccept(err error) {
	s.scarce.waits.Add(1)
	s.makeRoom()
	s.scarce.logLine.warn(s.opt.Log, "cannot accept, trying again", "error", err, "connections", s.conns.len())
}

// makeRoom closes some connections on which nothing is under way, and where there are none
// some of which half a head has come, and no more.
func (s *Server) makeRoom() {
	now, last := time.Now().UnixNano(), s.scarce.madeAt.Load()
	if now-last < int64(roomEvery) || !s.scarce.madeAt.CompareAndSwap(last, now) {
		return
	}
	left := roomAtOnce
	close := func(which func(c *conn) bool) {
		s.conns.cut(func(c *conn) bool {
			if left == 0 || c.spare || !which(c) {
				return false
			}
			left--
			return true
		})
	}
	close((*conn).idle)
	if left == roomAtOnce && s.lobby != nil {
		left -= s.lobby.shed(left)
	}
	if left == roomAtOnce { // half heads under TLS are in no lobby
		close(func(c *conn) bool { return c.secure != nil && !c.active.Load() && !c.unread() })
	}
	s.scarce.freed.Add(uint64(roomAtOnce - left))
}

// sparse says a thing once in a while, with how often it would have been said.
type sparse struct {
	at    atomic.Int64 // Unix nanoseconds
	unsay atomic.Int64
}

const sparseEvery = 10 * time.Second

func (l *sparse) warn(log *slog.Logger, msg string, args ...any) {
	l.say(log, slog.LevelWarn, msg, args...)
}

func (l *sparse) say(log *slog.Logger, level slog.Level, msg string, args ...any) {
	now, last := time.Now().UnixNano(), l.at.Load()
	if last != 0 && now-last < int64(sparseEvery) || !l.at.CompareAndSwap(last, now) {
		l.unsay.Add(1)
		return
	}
	if n := l.unsay.Swap(0); n > 0 {
		args = append(args, "not_logged", n)
	}
	log.Log(context.Background(), level, msg, args...)
}
