package upstream

import (
	"sync"
	"sync/atomic"
	"time"
)

// Group is the running calls to one engine rank and the progress on their connections. Both are
// needed to determine whether the engine is frozen, and to end its calls then. The zero value is
// ready to use. A Group is safe for concurrent use and must not be copied.
//
// A Call is in the Group of its Request from the beginning of Do until Do has failed or the
// Response is released.
type Group struct {
	mu            sync.Mutex
	first         *Call
	calls         int
	largestPrompt int           // tokens of the largest answered prompt
	timePerToken  time.Duration // per token, until the first byte, of prompts about as large; slow ones weigh more

	answered atomic.Uint64
	bytes    atomic.Uint64
}

// membership is a Call's place in a Group's list. group, next and prev are guarded by the group's
// mu. Only the owner of the Call changes group.
type membership struct {
	group      *Group
	next, prev *Call
	since      time.Duration // by the package's clock
}

// GroupState is a snapshot of a Group. The counters are cumulative.
type GroupState struct {
	Calls        int           // running
	Overdue      int           // running, without a body byte for the time passed to State
	Longest      int           // prompt tokens of the largest running call without a body byte
	TimePerToken time.Duration // time per prompt token until the first byte, queues included; 0: unknown
	Answered     uint64        // response heads
	Bytes        uint64        // parts of response bodies after the first; see Response.NoteProgress
}

// State returns a snapshot. A call without a body byte is overdue after the given time. State takes
// time proportional to the number of running calls.
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

// Abandon ends all running calls because their engine is frozen. A Do or read that is running
// returns ErrFrozen, and nothing that the engine sends later reaches anyone. It returns the number
// of calls that it has ended.
func (g *Group) Abandon() (n int) {
	// The lock is held throughout, because a call that has left the group may belong to another.
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := g.first; c != nil; c = c.member.next {
		if c.abandon() {
			n++
		}
	}
	return n
}

// join adds the call to the request's group, if any. c may be nil.
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

// leave removes the call from its group. c may be nil or in no group.
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

// minPacedTokens is the smallest prompt, in tokens, from which the time of others is estimated.
const minPacedTokens = 16

// observePrompt learns from a prompt of this many tokens that took this long. Only prompts of at
// least half the largest size seen count, because the time of small ones is mostly overhead.
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

// markAnswered records the response head of a request.
func (c *Call) markAnswered(req *Request, status int) {
	if c == nil || c.member.group == nil {
		return
	}
	c.member.group.answered.Add(1)
	if req.Prefill && status == 200 {
		c.member.group.observePrompt(req.Tokens, now()-c.member.since)
	}
}

// NoteProgress records that a part of the body has come. A relay calls it now and then, not for
// each part. first: it is the first part, which may come from the API server and not from the
// engine core (an event with the role).
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
