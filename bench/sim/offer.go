package sim

import (
	"context"
	"encoding/json"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

// Some families name a transfer before there are blocks: both legs start at once and
// meet under a key that the router chose. Prefill offers the blocks under the key until
// decode fetches them (as leases, with the family's timeout). Decode waits on the side
// channel until they are offered.

// offers are the keys of one rank that a decode waits for or that have ended.
type offers struct {
	awaited map[string]chan struct{} // closed when the blocks are offered
	retired map[string]bool          // cancelled or released before they were offered
	order   []string
}

func (o *offers) init() { o.awaited, o.retired = make(map[string]chan struct{}), make(map[string]bool) }

// retire marks a key whose blocks will not be offered, or not again.
func (o *offers) retire(key string) {
	if ch := o.awaited[key]; ch != nil {
		close(ch)
		delete(o.awaited, key)
	}
	if o.retired[key] {
		return
	}
	if len(o.order) == maxUsedRooms {
		delete(o.retired, o.order[0])
		o.order = o.order[1:]
	}
	o.retired[key] = true
	o.order = append(o.order, key)
}

// offer keeps the blocks of a finished prefill under key; it returns false if decode
// has released them already.
func (r *rank) offer(s *seq, key string, ttl time.Duration) bool {
	if r.offers.retired[key] {
		return false
	}
	r.leaseAs(key, s, ttl)
	r.leases.byID[key].sum = promptSum(s.Prompt)
	if ch := r.offers.awaited[key]; ch != nil {
		close(ch)
		delete(r.offers.awaited, key)
	}
	return true
}

// offerCall asks a prefill rank for the blocks under a key. Sum is the hash of decode's
// own prompt, as in roomCall.
type offerCall struct {
	EngineID string `json:"engine_id"`
	Key      string `json:"key"`
	Sum      uint64 `json:"sum"`
}

type offerReply struct {
	Held       bool `json:"held"`    // the blocks are offered
	Gone       bool `json:"gone"`    // the blocks will not be offered
	Mismatched bool `json:"another"` // the blocks are those of another prompt
	Tokens     int  `json:"tokens"`
	Cached     int  `json:"cached"`
}

// serveSideOffer serves /offer on the side channel: at once, when the blocks are
// offered, or after a limited time without them.
func serveSideOffer(c *conn, r *httpconn.Request) {
	var q offerCall
	rk := (*rank)(nil)
	if json.Unmarshal(r.Body, &q) == nil {
		rk = c.incarnation.rankByID(q.EngineID)
	}
	if rk == nil {
		c.Respond(r, 404, "text/plain", []byte("unknown engine id"))
		return
	}
	var ch chan struct{}
	var reply offerReply
	look := func() {
		rk.expire(time.Now())
		if l := rk.leases.byID[q.Key]; l != nil {
			reply = offerReply{Held: true, Mismatched: l.sum != q.Sum, Tokens: l.tokens, Cached: l.cached}
		} else if rk.offers.retired[q.Key] {
			reply.Gone = true
		} else if ch = rk.offers.awaited[q.Key]; ch == nil {
			ch = make(chan struct{})
			rk.offers.awaited[q.Key] = ch
		}
	}
	if rk.do(look); ch != nil {
		t := time.NewTimer(roomWait)
		select {
		case <-ch:
			rk.do(look)
		case <-t.C:
			rk.do(func() {
				if rk.offers.awaited[q.Key] == ch {
					delete(rk.offers.awaited, q.Key)
					close(ch) // other calls that wait for it check again
				}
			})
		case <-c.incarnation.stopc:
		}
		t.Stop()
	}
	body, _ := json.Marshal(reply)
	c.Respond(r, 200, "application/json", body)
}

// fetchOffer waits for an offer and reads it. It returns the transferred tokens, how
// many of them prefill had cached, and whether it succeeded.
func (l *incarnation) fetchOffer(ctx context.Context, f *faults.Fault, addr string, q offerCall, local int) (reply offerReply, ok bool) {
	if !faultTransfer(ctx, f) {
		return reply, false
	}
	o := &l.e.o
	unreachable := time.Time{}
	for end := time.Now().Add(o.AbortTimeout); ; {
		err := l.call(ctx, "POST", addr, "/offer", q, &reply)
		now := time.Now()
		switch {
		case ctx.Err() != nil:
			return reply, false
		case err != nil:
			if unreachable.IsZero() {
				unreachable = now
			}
			if now.Sub(unreachable) > o.PullTimeout || !sleepContext(ctx, min(o.PullTimeout/10, 100*time.Millisecond)) {
				return reply, false
			}
			continue
		case reply.Gone || reply.Mismatched || now.After(end):
			return reply, false
		case reply.Held:
			moved := max(min(reply.Tokens, 1<<30)-local, 0)
			return reply, sleepContext(ctx, cost.Scale(o.Cost.TransferTime(moved), o.Speed))
		}
		unreachable = time.Time{}
	}
}

// releaseOffer tells a prefill that the blocks under key were read, or are not wanted.
func (l *incarnation) releaseOffer(addr, engine, key string) {
	l.wg.Go(func() {
		l.call(l.ctx, "POST", addr, "/done", sideChannelRequest{engine, []string{key}}, nil)
	})
}

// rankByID returns the rank with an engine id, or nil if the id is not of this
// incarnation.
func (l *incarnation) rankByID(id string) *rank {
	for i, x := range l.ranks {
		if l.rankID(i) == id {
			return x
		}
	}
	return nil
}
