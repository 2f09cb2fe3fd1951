package notify

import (
	"context"
	"fmt"
	"time"
)

// Expectation waits for the notifications of one request. Its methods are for one goroutine.
type Expectation struct {
	listener *Listener
	id       string
	need     int
	done     chan struct{}
	open     bool
	own      entry // in the listener's table, unless a notification arrived first
}

// Done is closed when every rank's notification has arrived.
func (t *Expectation) Done() <-chan struct{} { return t.done }

// Wait blocks until every rank has sent its notification, ctx ends or the listener is closed.
// The error gives the number of notifications received and wraps the cause of ctx, or
// ErrClosed.
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
	return fmt.Errorf("notify: %d of %d notifications arrived for request %q: %w", t.Received(), t.need, t.id, cause)
}

// Received returns the number of notifications received, at most the number needed.
func (t *Expectation) Received() int {
	s := t.listener.shard(t.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[t.id]; e != nil && e.expectation == t {
		return min(e.received, t.need)
	}
	return 0
}

// Close ends the wait; it may be called more than once. Later notifications of the id are kept
// as unmatched until their TTL ends.
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

// entry is the state of one id.
type entry struct {
	received    int
	expectation *Expectation // nil: no Expectation is registered yet
	since       time.Time    // arrival of the first notification while unmatched
}
