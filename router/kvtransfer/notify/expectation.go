package notify

import (
	"context"
	"fmt"
	"time"
)

// Expectation is one request's wait. Its methods are for one goroutine.
type Expectation struct {
	listener *Listener
	id       string
	need     int
	done     chan struct{}
	open     bool
	own      entry // on the board, unless a notification came first
}

// Done is closed when every rank's notification has come.
func (t *Expectation) Done() <-chan struct{} { return t.done }

// Wait blocks until every rank has notified, ctx ends or the board is closed.
// The error says how many were missing and wraps ctx's, or ErrClosed.
func (t *Expectation) Wait(ctx context.Context) error {
	select {
	case <-t.done:
		return nil
	default:
	}
	cause := ErrClosed
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		cause = context.Cause(ctx)
	case <-t.listener.closed:
	}
	return fmt.Errorf("notify: %d of %d notifications came for request %q: %w", t.Received(), t.need, t.id, cause)
}

// Received is how many notifications have come, at most as many as are needed.
func (t *Expectation) Received() int {
	s := t.listener.shard(t.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[t.id]; e != nil && e.expectation == t {
		return min(e.received, t.need)
	}
	return 0
}

// Close ends the wait; it may be called more than once. What comes for the id
// afterwards is kept like anything unclaimed, until its time is over.
func (t *Expectation) Close() {
	if !t.open {
		return
	}
	t.open = false
	s := t.listener.shard(t.id)
	s.mu.Lock()
	delete(s.entries, t.id)
	s.mu.Unlock()
}

// entry is what the board knows of one id.
type entry struct {
	received    int
	expectation *Expectation // nil: nobody has asked for it yet
	since       time.Time    // of the first arrival, when unclaimed
}
