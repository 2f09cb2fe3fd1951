package front

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"sluice/dataplane/fdlimit"
)

const (
	// maxReservedConns is how many connections may be served, a page each, whose descriptor is
	// of the reserve: whoever watches over this router must be able to ask it how it is.
	maxReservedConns = 16
	// reservedConnTimeout is what such a connection has for each step.
	reservedConnTimeout = 2 * time.Second
	// Idle connections are closed to make room, so many at once and so often.
	evictBatch    = 64
	evictInterval = 100 * time.Millisecond
)

// fdStats is how a server without descriptors is doing.
type fdStats struct {
	reservedConns atomic.Int32
	evictedAt     atomic.Int64  // when room was made last, Unix nanoseconds
	acceptRetries atomic.Uint64 // accepts that failed
	rejected      atomic.Uint64 // connections turned away
	evicted       atomic.Uint64 // idle connections closed
	logLine       sampledLog
}

// FDStats is what want of file descriptors has led to since the start: accepts that
// failed and were waited out, connections that were told to come again, and idle ones
// that were closed to make room.
func (s *Server) FDStats() (acceptRetries, rejected, evicted uint64) {
	return s.fdStats.acceptRetries.Load(), s.fdStats.rejected.Load(), s.fdStats.evicted.Load()
}

// hasReservedFD says whether the connection's descriptor is of the reserve.
func (c *conn) hasReservedFD() (is bool) {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) { is = fdlimit.IsReserved(int(fd)) })
	}
	return is
}

// acquireReservedConn makes room, and c one of the few that are served all the same; false when
// there are enough of those.
func (s *Server) acquireReservedConn(c *conn) bool {
	s.evictIdle()
	s.fdStats.logLine.warn(s.initial.Log, "file descriptors run out: idle connections are closed, and new ones get a page or a 503", "connections", s.conns.len(), "help", "raise the limit (ulimit -n, LimitNOFILE=), or lower limits.max_conns")
	if s.fdStats.reservedConns.Add(1) > maxReservedConns {
		s.fdStats.reservedConns.Add(-1)
		s.fdStats.rejected.Add(1)
		return false
	}
	c.usesReservedFD = true
	return true
}

// onAcceptError notes an accept that failed for want of means.
func (s *Server) onAcceptError(err error) {
	s.fdStats.acceptRetries.Add(1)
	s.evictIdle()
	s.fdStats.logLine.warn(s.initial.Log, "cannot accept, trying again", "error", err, "connections", s.conns.len())
}

// evictIdle closes some connections on which nothing is under way, and where there are none
// some of which half a head has come, and no more.
func (s *Server) evictIdle() {
	now, last := time.Now().UnixNano(), s.fdStats.evictedAt.Load()
	if now-last < int64(evictInterval) || !s.fdStats.evictedAt.CompareAndSwap(last, now) {
		return
	}
	left := evictBatch
	close := func(match func(c *conn) bool) {
		s.conns.shutdownIf(func(c *conn) bool {
			if left == 0 || c.usesReservedFD || !match(c) {
				return false
			}
			left--
			return true
		})
	}
	close((*conn).idle)
	if left == evictBatch && s.pendingHeads != nil {
		left -= s.pendingHeads.evict(left)
	}
	if left == evictBatch { // half heads under TLS are in no lobby
		close(func(c *conn) bool { return c.tlsConn != nil && !c.active.Load() && !c.hasUnread() })
	}
	s.fdStats.evicted.Add(uint64(evictBatch - left))
}

// sampledLog says a thing once in a while, with how often it would have been said.
type sampledLog struct {
	at         atomic.Int64 // Unix nanoseconds
	suppressed atomic.Int64
}

const sampledLogInterval = 10 * time.Second

func (l *sampledLog) warn(log *slog.Logger, msg string, args ...any) {
	l.log(log, slog.LevelWarn, msg, args...)
}

func (l *sampledLog) log(logger *slog.Logger, level slog.Level, msg string, args ...any) {
	now, last := time.Now().UnixNano(), l.at.Load()
	if last != 0 && now-last < int64(sampledLogInterval) || !l.at.CompareAndSwap(last, now) {
		l.suppressed.Add(1)
		return
	}
	if n := l.suppressed.Swap(0); n > 0 {
		args = append(args, "not_logged", n)
	}
	logger.Log(context.Background(), level, msg, args...)
}
