package front

import (
	"context"
	"fmt"
	"time"

	"sluice/dataplane/rawsocket"
)

const (
	// drainRetry is the Retry-After of a request refused during a drain.
	drainRetry = time.Second
	// drainPoll is the interval at which a drain checks for open connections.
	drainPoll = 10 * time.Millisecond
	// idleGrace is how long beyond IdleTimeout a retiring server waits for idle connections
	// to close.
	idleGrace = time.Second
	// finalResponseTime is the time for the last responses at the end of a drain: an error
	// event for streams, a 503 for requests without a response.
	finalResponseTime = 500 * time.Millisecond
	// drainGrace is how long requests that the drain has cancelled may take to end.
	drainGrace = time.Second
	// acceptDrainTime is how long connections that were accepted while the listener closed
	// may take until they are counted.
	acceptDrainTime = time.Second
)

// Shutdown closes the listener, refuses new requests on kept-alive connections with status 503
// and Connection: close, and waits for running requests and streams until ctx ends. Then it
// cancels them: streams with an error event, requests without a response with a 503. It returns
// nil if it had to cancel nothing. A second Shutdown also waits, and may end the first one
// earlier.
func (s *Server) Shutdown(ctx context.Context) error {
	s.closeAfterResponse.Store(true)
	s.draining.Store(true)
	s.stopAccepting()
	return s.waitEmpty(ctx, s.closeIdle)
}

// CloseAfterResponse makes every further response the last one of its connection, so that
// clients connect again, to another server or to this one. No request is lost, unlike one that
// a client sends while an idle connection is being closed. Requests are served as before.
func (s *Server) CloseAfterResponse() { s.closeAfterResponse.Store(true) }

// Retire ends a server whose address another process serves now. It closes the listener and
// makes every further response the last one of its connection. Idle connections go to
// successor if it accepts them. Others, and all with TLS, stay open for IdleTimeout, because
// closing one may lose a request that is on its way. New requests on them are served. When
// only running requests are left, they have the time drain, and are then cancelled as by Shutdown.
// When ctx ends, idle connections that cannot be passed are closed.
func (s *Server) Retire(ctx context.Context, successor Successor, drain time.Duration) error {
	return s.retire(ctx, successor, s.options().IdleTimeout+idleGrace, drain)
}

func (s *Server) retire(ctx context.Context, successor Successor, idleTimeout, drain time.Duration) error {
	s.successor = successor
	s.CloseAfterResponse()
	s.stopAccepting()
	r := retirement{srv: s, idleTimeout: idleTimeout}
	r.wait(ctx)
	within, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	return s.waitEmpty(within, func() {
		if ctx.Err() != nil {
			r.idleTimeout = 0
		}
		r.closeIdle()
	})
}

// stopAccepting closes the listener once and returns when every accepted connection is counted:
// an uncounted one would be lost with the process.
func (s *Server) stopAccepting() {
	s.mu.Lock()
	accepted := s.acceptDone
	if !s.stopped() {
		close(s.stop)
		if s.ln != nil {
			_ = s.ln.Close()
		}
		if s.rawListener != nil {
			_ = s.rawListener.Close()
		}
	}
	s.mu.Unlock()
	if accepted == nil {
		return
	}
	select {
	case <-accepted:
	case <-time.After(acceptDrainTime):
		s.initial.Log.Warn("the listener is closed, but accepting has not ended", "duration", acceptDrainTime)
	}
}

// waitEmpty waits until no connection is open or ctx ends, and then closes the watcher, the
// event loops and the pending-header queue. It calls idle repeatedly, which handles idle
// connections.
func (s *Server) waitEmpty(ctx context.Context, idle func()) error {
	err := s.waitIdle(ctx, idle)
	s.mu.Lock()
	watch, loops, pending := s.clientWatcher, s.loops, s.pendingHeads
	s.mu.Unlock()
	s.closeOnce.Do(func() {
		if watch != nil {
			watch.Close()
		}
		if loops != nil {
			loops.Close()
		}
		pending.close()
	})
	return err
}

// markIdle records that the connection waits for a request.
func (c *conn) markIdle() {
	c.active.Store(false)
	c.readState.endRead()
}

// busy reports whether bytes of a request have been read and its response has not been written.
func (c *conn) busy() bool { return c.active.Load() || c.readState.started() }

// idle reports whether closing the connection would lose no part of a request. It also checks
// the socket for unread bytes, because the connection's goroutine may not have read them yet
// and leaves an incomplete PROXY header there. The second check of busy covers bytes that
// the goroutine read before the check of the socket. Bytes that arrive later cross the close.
func (c *conn) idle() bool {
	if c.busy() {
		return false
	}
	return !c.hasUnread() && !c.busy()
}

// hasUnread reports whether the socket has unread bytes.
func (c *conn) hasUnread() (is bool) {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) {
			var b [1]byte
			n, errno := rawsocket.Peek(int(fd), b[:])
			is = errno == 0 && n > 0
		})
	}
	return is
}

// closeIdle closes the connections that are idle.
func (s *Server) closeIdle() { s.conns.shutdownIf((*conn).idle) }

// waitIdle waits until no connection is open, or cancels those that are left when ctx ends.
func (s *Server) waitIdle(ctx context.Context, idle func()) error {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	var cancelledAt time.Time
	cancelled := 0
	for {
		idle()
		open := s.conns.len()
		switch {
		case open == 0 && cancelled == 0:
			return nil
		case open == 0:
			return fmt.Errorf("front: cancelled %d connections at the drain deadline: %w", cancelled, ctx.Err())
		case cancelled > 0 && time.Since(cancelledAt) > drainGrace:
			return fmt.Errorf("front: %d of %d connections that were cancelled at the drain deadline are still open: %w", open, cancelled, ctx.Err())
		}
		if cancelled > 0 {
			<-tick.C
			continue
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			cancelled, cancelledAt = open, time.Now()
			s.initial.Log.Warn("the drain deadline has passed; requests in progress are cancelled", "connections", open)
			s.drainExpired.Store(true)
			for left := open - s.conns.cancelStreams() - s.respondDrained(); s.conns.len() > left && time.Since(cancelledAt) < finalResponseTime; {
				<-tick.C
			}
			s.conns.shutdownIf(func(*conn) bool { return true })
		}
	}
}
