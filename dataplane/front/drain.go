package front

import (
	"context"
	"fmt"
	"time"

	"sluice/dataplane/sock"
)

const (
	// drainRetry is what a refused client is told to wait.
	drainRetry = time.Second
	// drainPoll is how often a drain looks whether it is done.
	drainPoll = 10 * time.Millisecond
	// unusedGrace is how long beyond IdleTimeout a server that retires waits for idle
	// connections to end by themselves.
	unusedGrace = time.Second
	// lastWords is how long what is ended at the end of the drain has to tell its clients
	// so: streams by an event, requests without an answer by a 503.
	lastWords = 500 * time.Millisecond
	// drainGrace is how long requests that were cut may take to end.
	drainGrace = time.Second
	// lastAccepted is how long what was accepted as the listener closed may take until it
	// is counted.
	lastAccepted = time.Second
)

// Shutdown closes the listener, answers new requests on kept-alive connections
// with 503 Draining and Connection: close, and waits for requests and streams
// under way until ctx ends; then it cuts them, streams with an error event,
// requests whose answer has not begun with a 503. It is nil when nothing had to be
// cut. A second Shutdown waits as well, and may bring an earlier end.
func (s *Server) Shutdown(ctx context.Context) error {
	s.leaving.Store(true)
	s.draining.Store(true)
	s.stopAccepting()
	return s.empty(ctx, s.closeIdle)
}

// Leave makes every answer from now on the last one of its connection, so that
// clients go elsewhere, or to the same address anew, without a request that is lost:
// one sent over a kept-alive connection while it is being closed would be. Requests
// are served as ever.
func (s *Server) Leave() { s.leaving.Store(true) }

// Retire ends a server whose address another process accepts on by now. The listener is
// closed, and every answer from now on is the last one of its connection. Idle connections
// go to heir, where there is one that takes them; others, as all over TLS, are kept for
// IdleTimeout, as if nothing had happened, since to close one may lose the request that is
// on its way. A request that has begun is served as ever: nothing has told its client to go
// elsewhere. When only such are left they have the time of drain, and are cut as by Shutdown.
// Once ctx ends idle connections are closed that cannot be passed.
func (s *Server) Retire(ctx context.Context, heir Heir, drain time.Duration) error {
	return s.retire(ctx, heir, s.live().IdleTimeout+unusedGrace, drain)
}

func (s *Server) retire(ctx context.Context, heir Heir, unused, drain time.Duration) error {
	s.heir = heir
	s.Leave()
	s.stopAccepting()
	r := retirement{srv: s, unused: unused}
	r.await(ctx)
	within, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	return s.empty(within, func() {
		if ctx.Err() != nil {
			r.unused = 0
		}
		r.idle()
	})
}

// stopAccepting closes the listener, once, and returns when every connection that was
// accepted is counted: one that is not would be lost with the process.
func (s *Server) stopAccepting() {
	s.mu.Lock()
	accepted := s.accepted
	if !s.stopped() {
		close(s.stop)
		if s.ln != nil {
			_ = s.ln.Close()
		}
		if s.byHand != nil {
			_ = s.byHand.Close()
		}
	}
	s.mu.Unlock()
	if accepted == nil {
		return
	}
	select {
	case <-accepted:
	case <-time.After(lastAccepted):
		s.opt.Log.Warn("the listener is closed, but accepting has not ended", "after", lastAccepted)
	}
}

// empty waits until no connection is left, or until ctx ends, and closes what served them.
// idle is called again and again, to see to those that are idle.
func (s *Server) empty(ctx context.Context, idle func()) error {
	err := s.awaitIdle(ctx, idle)
	s.mu.Lock()
	watch, loops, lobby := s.watch, s.loops, s.lobby
	s.mu.Unlock()
	s.emptied.Do(func() {
		if watch != nil {
			watch.close()
		}
		if loops != nil {
			loops.Close()
		}
		lobby.close()
	})
	return err
}

// rests notes that the connection waits for a request.
func (c *conn) rests() {
	c.active.Store(false)
	c.input.rest()
}

// underway says whether a request is, as far as it was read.
func (c *conn) underway() bool { return c.active.Load() || c.input.heard() }

// idle says that the connection has nothing of a request that closing it would lose. Its
// goroutine may not have got round to what lies in the socket, and leaves half a PROXY
// header there, so that is looked at too. First: bytes that were read before that have made
// the connection underway, and those that come after it cross the close on their way.
func (c *conn) idle() bool {
	if c.underway() {
		return false
	}
	return !c.unread() && !c.underway()
}

// unread says whether something has come that nobody has read.
func (c *conn) unread() (is bool) {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) {
			var b [1]byte
			n, errno := sock.Peek(int(fd), b[:])
			is = errno == 0 && n > 0
		})
	}
	return is
}

// closeIdle closes the connections that are idle.
func (s *Server) closeIdle() { s.conns.cut((*conn).idle) }

// awaitIdle waits until no connection is left, and has idle see to those that are idle.
func (s *Server) awaitIdle(ctx context.Context, idle func()) error {
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
			s.opt.Log.Warn("the drain's time is over; what is under way is cut", "connections", open)
			s.cutting.Store(true)
			for left := open - s.conns.endStreams() - s.tellOpen(); s.conns.len() > left && time.Since(cutAt) < lastWords; {
				<-tick.C
			}
			s.conns.cut(func(*conn) bool { return true })
		}
	}
}
