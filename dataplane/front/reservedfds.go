package front

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"sluice/dataplane/fdlimit"
)

const (
	// maxReservedConns is how many connections with a reserved descriptor are served at a
	// time. Each gets one page and is closed, so that probes and monitoring can reach a router
	// that has no other descriptors.
	maxReservedConns = 16
	// reservedConnTimeout bounds each read of such a connection.
	reservedConnTimeout = 2 * time.Second
	// evictBatch idle connections are closed at most every evictInterval to free descriptors.
	evictBatch    = 64
	evictInterval = 100 * time.Millisecond
)

// fdStats is the state of a server that runs out of descriptors.
type fdStats struct {
	reservedConns atomic.Int32  // open connections with a reserved descriptor
	evictedAt     atomic.Int64  // time of the last eviction, in Unix nanoseconds
	acceptRetries atomic.Uint64 // accepts that failed
	rejected      atomic.Uint64 // connections refused
	evicted       atomic.Uint64 // idle connections closed
	logLine       sampledLog
}

// FDStats returns what a lack of file descriptors has caused since the start: accepts that
// failed and were retried, connections that were refused with a 503, and idle connections that
// were closed.
func (s *Server) FDStats() (acceptRetries, rejected, evicted uint64) {
	return s.fdStats.acceptRetries.Load(), s.fdStats.rejected.Load(), s.fdStats.evicted.Load()
}

// hasReservedFD reports whether the connection's descriptor is reserved (package fdlimit).
func (c *conn) hasReservedFD() (is bool) {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) { is = fdlimit.IsReserved(int(fd)) })
	}
	return is
}

// acquireReservedConn evicts idle connections, and marks c as a connection with a reserved
// descriptor. It returns false if maxReservedConns such connections are open already.
func (s *Server) acquireReservedConn(c *conn) bool {
	s.evictIdle()
	s.fdStats.logLine.warn(s.initial.Log, "file descriptors are exhausted: idle connections are closed, and new ones get a status page or a 503", "connections", s.conns.len(), "hint", "raise the limit (ulimit -n, LimitNOFILE=), or lower limits.max_conns")
	if s.fdStats.reservedConns.Add(1) > maxReservedConns {
		s.fdStats.reservedConns.Add(-1)
		s.fdStats.rejected.Add(1)
		return false
	}
	c.usesReservedFD = true
	return true
}

// onAcceptError handles an accept that has failed for lack of descriptors or memory: it evicts
// idle connections and logs the error.
func (s *Server) onAcceptError(err error) {
	s.fdStats.acceptRetries.Add(1)
	s.evictIdle()
	s.fdStats.logLine.warn(s.initial.Log, "cannot accept, trying again", "error", err, "connections", s.conns.len())
}

// evictIdle closes up to evictBatch idle connections. If there are none it closes connections
// with an incomplete head and no unread input.
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
	if left == evictBatch { // incomplete heads over TLS are not in the pending-header queue
		close(func(c *conn) bool { return c.tlsConn != nil && !c.active.Load() && !c.hasUnread() })
	}
	s.fdStats.evicted.Add(uint64(evictBatch - left))
}

// sampledLog logs at most one line in sampledLogInterval, with the number of lines that it has
// suppressed. It is safe for concurrent use.
type sampledLog struct {
	at         atomic.Int64 // time of the last line, in Unix nanoseconds
	suppressed atomic.Int64 // lines not logged since
}

// sampledLogInterval is the least time between two lines of a sampledLog.
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
		args = append(args, "suppressed", n)
	}
	logger.Log(context.Background(), level, msg, args...)
}
