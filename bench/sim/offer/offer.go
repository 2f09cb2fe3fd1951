// Package offer has the transfers that are named before there are blocks: both legs start at once and
// meet under a key that the router chose. Prefill offers the blocks under the key until
// decode fetches them (as leases, with the family's timeout). Decode waits on the side
// channel until they are offered.
package offer

import (
	"context"
	"encoding/json"
	"time"

	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

const (
	maxRetired = 1 << 16     // keys of a rank
	callWait   = time.Second // how long one /offer call is kept open
)

// Table has the offers of all ranks of an incarnation.
type Table struct {
	p     *core.Process
	ranks []offers // by rank; each belongs to the rank's goroutine
}

// NewTable returns a table without offers.
func NewTable(p *core.Process) *Table {
	t := &Table{p: p, ranks: make([]offers, p.Options.Ranks)}
	for i := range t.ranks {
		t.ranks[i] = offers{awaited: make(map[string]chan struct{}), retired: make(map[string]bool)}
	}
	return t
}

// of returns the offers of a rank.
func (t *Table) of(r *core.Rank) *offers { return &t.ranks[r.Index] }

// offers are the keys of one rank that a decode waits for or that have ended.
type offers struct {
	awaited map[string]chan struct{} // closed when the blocks are offered
	retired map[string]bool          // cancelled or released before they were offered
	order   []string
}

// retire marks a key whose blocks will not be offered, or not again.
func (o *offers) retire(key string) {
	if ch := o.awaited[key]; ch != nil {
		close(ch)
		delete(o.awaited, key)
	}
	if o.retired[key] {
		return
	}
	if len(o.order) == maxRetired {
		delete(o.retired, o.order[0])
		o.order = o.order[1:]
	}
	o.retired[key] = true
	o.order = append(o.order, key)
}

// Retire marks a key whose blocks will not be offered on the rank, or not again.
func (t *Table) Retire(r *core.Rank, key string) { t.of(r).retire(key) }

// Offer keeps the blocks of a finished prefill under key; it returns false if decode
// has released them already.
func (t *Table) Offer(r *core.Rank, s *core.Seq, key string, ttl time.Duration) bool {
	o := t.of(r)
	if o.retired[key] {
		return false
	}
	r.Lease(key, s, ttl).Sum = core.PromptSum(s.Prompt)
	if ch := o.awaited[key]; ch != nil {
		close(ch)
		delete(o.awaited, key)
	}
	return true
}

// Call asks a prefill rank for the blocks under a key. Sum is the hash of decode's
// own prompt, as in roomCall.
type Call struct {
	EngineID string `json:"engine_id"`
	Key      string `json:"key"`
	Sum      uint64 `json:"sum"`
}

// Reply is the answer to a Call. If neither Held nor Gone is set, the blocks were not offered within
// the time of one call, and decode calls again. Tokens and Cached count prompt tokens: those whose KV
// is offered, and those of them that prefill had cached.
type Reply struct {
	Held       bool `json:"held"`    // the blocks are offered
	Gone       bool `json:"gone"`    // the blocks will not be offered
	Mismatched bool `json:"another"` // the blocks are those of another prompt
	Tokens     int  `json:"tokens"`
	Cached     int  `json:"cached"`
}

// ServeSide serves the calls about leases and /offer: at once, when the blocks are
// offered, or after a limited time without them.
func (t *Table) ServeSide(c *httpconn.Conn, r *httpconn.Request) {
	if r.Path != "/offer" {
		core.ServeLeases(t.p, c, r, func(rk *core.Rank, key string, _ bool) {
			t.Retire(rk, key) // a later request for them is answered so at once
		})
		return
	}
	var q Call
	rk := (*core.Rank)(nil)
	if json.Unmarshal(r.Body, &q) == nil {
		rk = t.p.RankByID(q.EngineID)
	}
	if rk == nil {
		c.Respond(r, 404, "text/plain", []byte("unknown engine id"))
		return
	}
	o := t.of(rk)
	var ch chan struct{}
	var reply Reply
	look := func() {
		rk.Expire(time.Now())
		if l := rk.Leased(q.Key); l != nil {
			reply = Reply{Held: true, Mismatched: l.Sum != q.Sum, Tokens: l.Tokens, Cached: l.Cached}
		} else if o.retired[q.Key] {
			reply.Gone = true
		} else if ch = o.awaited[q.Key]; ch == nil {
			ch = make(chan struct{})
			o.awaited[q.Key] = ch
		}
	}
	if rk.Do(look); ch != nil {
		timer := time.NewTimer(callWait)
		select {
		case <-ch:
			rk.Do(look)
		case <-timer.C:
			rk.Do(func() {
				if o.awaited[q.Key] == ch {
					delete(o.awaited, q.Key)
					close(ch) // other calls that wait for it check again
				}
			})
		case <-t.p.Context.Done():
		}
		timer.Stop()
	}
	body, _ := json.Marshal(reply)
	c.Respond(r, 200, "application/json", body)
}

// Fetch waits for an offer and reads it. It returns the transferred tokens, how
// many of them prefill had cached, and whether it succeeded.
func (t *Table) Fetch(ctx context.Context, f *faults.Fault, addr string, q Call, local int) (reply Reply, ok bool) {
	if !core.FaultTransfer(ctx, f) {
		return reply, false
	}
	o := t.p.Options
	unreachable := time.Time{}
	for end := time.Now().Add(o.AbortTimeout); ; {
		err := t.p.Call(ctx, "POST", addr, "/offer", q, &reply)
		now := time.Now()
		switch {
		case ctx.Err() != nil:
			return reply, false
		case err != nil:
			if unreachable.IsZero() {
				unreachable = now
			}
			if now.Sub(unreachable) > o.PullTimeout || !core.Sleep(ctx, min(o.PullTimeout/10, 100*time.Millisecond)) {
				return reply, false
			}
			continue
		case reply.Gone || reply.Mismatched || now.After(end):
			return reply, false
		case reply.Held:
			moved := max(min(reply.Tokens, 1<<30)-local, 0)
			return reply, core.Sleep(ctx, t.p.TransferTime(moved))
		}
		unreachable = time.Time{}
	}
}

// Release tells a prefill that the blocks under key were read, or are not wanted.
func (t *Table) Release(addr, engine, key string) {
	t.p.Go(func() {
		t.p.Call(t.p.Context, "POST", addr, "/done", core.LeaseCall{EngineID: engine, RequestIDs: []string{key}}, nil)
	})
}

// Fetched ends a fetch on the rank's goroutine. A failed fetch fails the request,
// as kv_load_failure_policy "fail" does.
func Fetched(r *core.Rank, s *core.Seq, reply Reply, ok bool) {
	tokens := 0
	if ok {
		tokens = reply.Tokens
	}
	if reply.Mismatched {
		r.Counters.RoomsMismatched++
	}
	if !r.TransferDone(s, tokens, reply.Tokens) {
		return
	}
	if !ok {
		r.Counters.PullsFailed++
		r.Fail(s.Job, 500, "Internal server error")
		return
	}
	r.QueueSiblings(s)
}
