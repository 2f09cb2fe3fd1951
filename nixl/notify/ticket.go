package notify

import (
	"context"
	"fmt"
	"time"
)

// Ticket is one request's wait. Its methods are for one goroutine.
type Ticket struct {
	board *Board
	id    string
	need  int
	done  chan struct{}
	open  bool
	own   entry // on the board, unless a notification came first
}

// Done is closed when every rank's notification has come.
func (t *Ticket) Done() <-chan struct{} { return t.done }

// Wait blocks until every rank has notified, ctx ends or the board is closed.
// The error says how many were missing and wraps ctx's, or ErrClosed.
func (t *Ticket) Wait(ctx context.Context) error {
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
	case <-t.board.closed:
	}
	return fmt.Errorf("notify: %d of %d notifications came for request %q: %w", t.Came(), t.need, t.id, cause)
}

// Came is how many notifications have come, at most as many as are needed.
func (t *Ticket) Came() int {
	s := t.board.shard(t.id)
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[t.id]; e != nil && e.ticket == t {
		return min(e.came, t.need)
	}
	return 0
}

// Close ends the wait; it may be called more than once. What comes for the id
// afterwards is kept like anything unclaimed, until its time is over.
func (t *Ticket) Close() {
	if !t.open {
		return
	}
	t.open = false
	s := t.board.shard(t.id)
	s.mu.Lock()
	delete(s.entries, t.id)
	s.mu.Unlock()
}

// entry is what the board knows of one id.
type entry struct {
	came   int
	ticket *Ticket   // nil: nobody has asked for it yet
	since  time.Time // of the first arrival, when unclaimed
}
