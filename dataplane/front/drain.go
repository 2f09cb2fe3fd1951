package front

import (
	"context"
	"fmt"
	"time"

	"sluice/dataplane/rawsocket"
)

const (
	// drainRetry is what a refused client is told to wait.
	drainRetry = time.Second
	// drainPoll is how often a drain looks whether it is done.
	drainPoll = 10 * time.Millisecond
	// idleGrace is how long beyond IdleTimeout a server that retires waits for idle
	// connections to end by themselves.
	idleGrace = time.Second
	// finalResponseTime is how long what is ended at the end of the drain has to tell its clients
	// so: streams by an event, requests without an answer by a 503.
	finalResponseTime = 500 * time.Millisecond
	// drainGrace is how long requests that were cut may take to end.
	drainGrace = time.Second
	// acceptDrainTime is how long what was accepted as the listener closed may take until it
	// is counted.
	acceptDrainTime = time.Second
)

// Shutdown closes the listener, answers new requests on kept-alive connections
// with 503 Draining and Connection: close, and waits for requests and streams
// under way until ctx ends; then it cuts them, streams with an error event,
// requests whose answer has not begun with a 503. It is nil when nothing had to be
// cut. A second Shutdown waits as well, and may bring an earlier end.
func (s *Server) Shutdown(ctx context.Context) error {
	s.closeAfterResponse.Store(true)
	s.draining.Store(true)
	s.stopAccepting()
	return s.waitEmpty(ctx, s.closeIdle)
}

// CloseAfterResponse makes every answer from now on the last one of its connection, so that
// clients go elsewhere, or to the same address anew, without a request that is lost:
// one sent over a kept-alive connection while it is being closed would be. Requests
// are served as ever.
func (s *Server) CloseAfterResponse() { s.closeAfterResponse.Store(true) }

// Retire ends a server whose address another process accepts on by now. The listener is
// closed, and every answer from now on is the last one of its connection. Idle connections
// go to heir, where there is one that takes them; others, as all over TLS, are kept for
// IdleTimeout, as if nothing had happened, since to close one may lose the request that is
// on its way. A request that has begun is served as ever: nothing has told its client to go
// elsewhere. When only such are left they have the time of drain, and are cut as by Shutdown.
// Once ctx ends idle connections are closed that cannot be passed.
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

// stopAccepting closes the listener, once, and returns when every connection that was
// accepted is counted: one that is not would be lost with the process.
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
		s.initial.Log.Warn("the listener is closed, but accepting has not ended", "after", acceptDrainTime)
	}
}

// waitEmpty waits until no connection is left, or until ctx ends, and closes what served them.
// idle is called again and again, to see to those that are idle.
func (s *Server) waitEmpty(ctx context.Context, idle func()) error {
	err := s.waitIdle(ctx, idle)
	s.mu.Lock()
	watch, loops, pending := s.clientWatcher, s.loops, s.pendingHeads
	s.mu.Unlock()
	s.closeOnce.Do(func() {
		if watch != nil {
			watch.close()
		}
		if loops != nil {
			loops.Close()
		}
		pending.close()
	})
	return err
}

// markIdle notes that the connection waits for a request.
func (c *conn) markIdle() {
	c.active.Store(false)
	c.readState.endRead()
}

// busy says whether a request is, as far as it was read.
func (c *conn) busy() bool { return c.active.Load() || c.readState.started() }

// idle says that the connection has nothing of a request that closing it would lose. Its
// goroutine may not have got round to what lies in the socket, and leaves half a PROXY
// header there, so that is looked at too. First: bytes that were read before that have made
// the connection underway, and those that come after it cross the close on their way.
func (c *conn) idle() bool {
	if c.busy() {
		return false
	}
	return !c.hasUnread() && !c.busy()
}

// hasUnread says whether something has come that nobody has read.
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

// waitIdle waits until no connection is left, and has idle see to those that are idle.
func (s *Server) waitIdle(ctx context.Context, idle func()) error {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	var cutAt time.Time
	cut := 0
	for {
		idle()
		open := s.conns.len()
		switch {
		case open == 0 && cut == 0:
			return nil
		case open == 0:
			return fmt.Errorf("front: cut %d connections at the end of the drain: %w", cut, ctx.Err())
		case cut > 0 && time.Since(cutAt) > drainGrace:
			return fmt.Errorf("front: %d of %d connections cut at the end of the drain are still served: %w", open, cut, ctx.Err())
		}
		if cut > 0 {
			<-tick.C
			continue
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			cut, cutAt = open, time.Now()
			s.initial.Log.Warn("the drain's time is over; what is under way is cut", "connections", open)
			s.drainExpired.Store(true)
			for left := open - s.conns.cancelStreams() - s.respondDrained(); s.conns.len() > left && time.Since(cutAt) < finalResponseTime; {
				<-tick.C
			}
			s.conns.shutdownIf(func(*conn) bool { return true })
		}
	}
}
