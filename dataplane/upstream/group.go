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
	mu            sync.Mutex
	first         *Call
	calls         int
	largestPrompt int           // tokens of the largest prompt that was answered
	timePerToken  time.Duration // per token, until the first byte, of prompts about as large; slow ones count more

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
	Calls        int           // under way
	Overdue      int           // of which no body byte has come for the time that State was given
	Longest      int           // prompt tokens of the largest of those of which no body byte has come
	TimePerToken time.Duration // that a prompt token has taken until the answer's first byte, queues included; 0: unknown
	Answered     uint64        // response heads
	Bytes        uint64        // parts of response bodies behind their first; see Response.Heard
}

// State gives a snapshot; a call without a body byte is overdue after so long. It takes time in proportion to the calls under way.
func (g *Group) State(overdue time.Duration) GroupState {
	before := now() - overdue
	s := GroupState{Answered: g.answered.Load(), Bytes: g.bytes.Load()}
	g.mu.Lock()
	defer g.mu.Unlock()
	s.Calls, s.TimePerToken = g.calls, g.timePerToken
	for c := g.first; c != nil; c = c.member.next {
		n := c.tokens.Load()
		if n > 0 && c.member.since < before {
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
	for c := g.first; c != nil; c = c.member.next {
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
	c.member = membership{group: g, next: g.first, since: now()}
	if g.first != nil {
		g.first.member.prev = c
	}
	g.first = c
	g.calls++
}

// leave takes the call out of its group. c may be nil, and in none.
func (c *Call) leave() {
	if c == nil || c.member.group == nil {
		return
	}
	g := c.member.group
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.member.prev != nil {
		c.member.prev.member.next = c.member.next
	} else {
		g.first = c.member.next
	}
	if c.member.next != nil {
		c.member.next.member.prev = c.member.prev
	}
	c.member = membership{}
	g.calls--
}

// minPacedTokens is the smallest prompt, in tokens, that tells how long others may take.
const minPacedTokens = 16

// observePrompt learns from a prompt of so many tokens that took so long. Only prompts of at least
// half of the largest size seen count: of small ones most is not the prompt's.
func (g *Group) observePrompt(tokens int, elapsed time.Duration) {
	if tokens < minPacedTokens {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if tokens >= g.largestPrompt/2 {
		g.largestPrompt = max(g.largestPrompt, tokens)
		g.timePerToken = max(elapsed/time.Duration(tokens), g.timePerToken*15/16)
	}
}

// markAnswered notes the response head of a request.
func (c *Call) markAnswered(req *Request, status int) {
	if c == nil || c.member.group == nil {
		return
	}
	c.member.group.answered.Add(1)
	if req.Prefill && status == 200 {
		c.member.group.observePrompt(req.Tokens, now()-c.member.since)
	}
}

// NoteProgress tells that a part of the body has come. It is for those who relay a stream, who
// call it now and then, not for each part. What comes first may be the API server's own
// word and not the engine core's (an event that tells the role): first says that.
func (r *Response) NoteProgress(first bool) {
	c := r.call
	if c == nil || c.member.group == nil {
		return
	}
	if n := c.tokens.Load(); n != 0 {
		c.tokens.Store(0)
		if r.Status == 200 && r.ContentLength == LengthChunked {
			c.member.group.observePrompt(int(n)-1, now()-c.member.since)
		}
	}
	if first {
		c.member.group.answered.Add(1)
	} else {
		c.member.group.bytes.Add(1)
	}
}
