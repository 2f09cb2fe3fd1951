package upstream

import (
	"sync"
	"sync/atomic"
	"time"
)

// Group is the calls under way to one engine rank, and what has come on their
// connections: both are needed to find out whether the engine is frozen, and to end its
// calls then. The zero value is ready. It is safe for concurrent use, and must not be
// copied.
//
// A Call is in the group of its Request from the beginning of Do until Do has failed or
// the Response is released.
type Group struct {
	mu    sync.Mutex
	first *Call
	calls int

	answered atomic.Uint64
	bytes    atomic.Uint64
}

// membership is a Call's place in a Group's list. group, next and prev are guarded by the
// group's mu; the owner of the Call alone changes group.
type membership struct {
	group      *Group
	next, prev *Call
	since      time.Duration // on the package's clock
}

// GroupState is a snapshot of a Group. The counts are cumulative.
type GroupState struct {
	Calls    int    // under way
	Overdue  int    // of which no body byte has come for the time that State was given
	Longest  int    // prompt tokens of the largest of those of which no body byte has come
	Answered uint64 // response heads
	Bytes    uint64 // parts of response bodies behind their first; see Response.Heard
}

// State gives a snapshot; a call without a body byte is overdue after so long. It takes time in proportion to the calls under way.
func (g *Group) State(overdue time.Duration) GroupState {
	before := now() - overdue
	s := GroupState{Answered: g.answered.Load(), Bytes: g.bytes.Load()}
	g.mu.Lock()
	defer g.mu.Unlock()
	s.Calls = g.calls
	for c := g.first; c != nil; c = c.in.next {
		n := c.tokens.Load()
		if n > 0 && c.in.since < before {
			s.Overdue++
		}
		s.Longest = max(s.Longest, int(n)-1)
	}
	return s
}

// Abandon ends all calls under way, because their engine is frozen: a Do or read under
// way returns ErrFrozen, and whatever the engine sends later reaches nobody. It returns
// how many calls it has ended.
func (g *Group) Abandon() (n int) {
	// The lock is held all along: a call that has left the group may be another's by then.
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := g.first; c != nil; c = c.in.next {
		if c.abandon() {
			n++
		}
	}
	return n
}

// join puts the call into the request's group, where it has one. c may be nil.
func (c *Call) join(req *Request) {
	g := req.Group
	if g == nil || c == nil {
		return
	}
	c.tokens.Store(int32(min(req.Tokens, 1<<30)) + 1)
	g.mu.Lock()
	defer g.mu.Unlock()
	c.in = membership{group: g, next: g.first, since: now()}
	if g.first != nil {
		g.first.in.prev = c
	}
	g.first = c
	g.calls++
}

// part takes the call out of its group. c may be nil, and in none.
func (c *Call) part() {
	if c == nil || c.in.group == nil {
		return
	}
	g := c.in.group
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.in.prev != nil {
		c.in.prev.in.next = c.in.next
	} else {
		g.first = c.in.next
	}
	if c.in.next != nil {
		c.in.next.in.prev = c.in.prev
	}
	c.in = membership{}
	g.calls--
}

// wasAnswered notes the response head.
func (c *Call) wasAnswered() {
	if c != nil && c.in.group != nil {
		c.in.group.answered.Add(1)
	}
}

// Heard tells that a part of the body has come. It is for those who relay a stream, who
// call it now and then, not for each part. What comes first may be the API server's own
// word and not the engine core's (an event that tells the role): first says that.
func (r *Response) Heard(first bool) {
	c := r.call
	if c == nil || c.in.group == nil {
		return
	}
	if c.tokens.Load() != 0 {
		c.tokens.Store(0)
	}
	if first {
		c.in.group.answered.Add(1)
	} else {
		c.in.group.bytes.Add(1)
	}
}
