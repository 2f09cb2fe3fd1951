package front

import (
	"context"
	"fmt"
	"time"
)

const (
	// drainRetry is what a refused client is told to wait.
	drainRetry = time.Second
	// drainPoll is how often a drain looks whether it is done.
	drainPoll = 10 * time.Millisecond
	// drainGrace is how long requests that were cut may take to end.
	drainGrace = time.Second
)

// Shutdown closes the listener, answers new requests on kept-alive connections
// with 503 Draining and Connection: close, and waits for requests and streams
// under way until ctx ends; then it cuts them. It is nil when nothing had to be
// cut. A second Shutdown waits as well, and may bring an earlier end.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	first := s.draining.CompareAndSwap(false, true)
	if first {
		close(s.stop)
		if s.ln != nil {
			_ = s.ln.Close()
		}
	}
	watch, loops := s.watch, s.loops
	s.mu.Unlock()

	err := s.awaitIdle(ctx)
	if first && watch != nil {
		watch.close()
	}
	if first && loops != nil {
		loops.Close()
	}
	return err
}

// awaitIdle closes connections as they become idle until none is left.
func (s *Server) awaitIdle(ctx context.Context) error {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	var cutAt time.Time
	cut := 0
	for {
		s.conns.cut(func(c *conn) bool { return !c.active.Load() })
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
			s.cutting.Store(true)
			s.conns.cut(func(*conn) bool { return true })
		}
	}
}
