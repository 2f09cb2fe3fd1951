package core

import (
	"encoding/json"
	"time"

	"sluice/bench/sim/httpconn"
)

// Lease is the blocks that a prefill keeps for a decode: they stay referenced until the
// decode reports that it has read them, or the lease expires.
type Lease struct {
	Blocks []int32
	Tokens int    // tokens of the prompt
	Cached int    // of these, found in prefill's cache
	Sum    uint64 // hash of the prompt, see PromptSum; set by families that compare it

	until      time.Time
	blockLogID string // id for the block log
}

// leases are the leases of one rank, by the key that its family chooses.
type leases struct {
	byKey map[string]*Lease
	next  time.Time // no lease expires earlier
}

// untilNext returns how long no lease expires, at most an hour.
func (ls *leases) untilNext(now time.Time) time.Duration {
	if len(ls.byKey) == 0 {
		return time.Hour
	}
	return max(ls.next.Sub(now), 0) + time.Millisecond
}

// blocks returns the number of leased blocks.
func (ls *leases) blocks() (n int) {
	for _, l := range ls.byKey {
		n += len(l.Blocks)
	}
	return n
}

// Lease keeps the blocks of a finished prefill under key for ttl.
func (r *Rank) Lease(key string, s *Seq, ttl time.Duration) *Lease {
	until := time.Now().Add(ttl)
	if len(r.leases.byKey) == 0 || until.Before(r.leases.next) {
		r.leases.next = until
	}
	if old := r.leases.byKey[key]; old != nil { // a key used twice: the second lease replaces the first
		r.Counters.RoomsReused++
		r.pool.Release(old.Blocks)
		r.Process.Blocks.release(old.blockLogID)
	}
	// The handle does not include the block of the last output token, which was never
	// computed.
	n := (len(s.Prompt) + r.o.BlockSize - 1) / r.o.BlockSize
	if n < len(s.blocks) {
		r.pool.Release(s.blocks[n:])
	}
	r.Process.Blocks.acquire(s.Job.BlockLogID)
	l := &Lease{Blocks: s.blocks[:n], until: until, blockLogID: s.Job.BlockLogID, Tokens: len(s.Prompt), Cached: s.Cached}
	r.leases.byKey[key] = l
	r.Counters.Leased++
	return l
}

// Leased returns the lease under key, or nil.
func (r *Rank) Leased(key string) *Lease { return r.leases.byKey[key] }

// Expire frees the blocks of expired leases.
func (r *Rank) Expire(now time.Time) {
	if len(r.leases.byKey) == 0 || now.Before(r.leases.next) {
		return
	}
	r.leases.next = now.Add(time.Hour)
	for key, l := range r.leases.byKey {
		if !l.until.After(now) {
			r.free(key, l)
			r.Counters.Expired++
		} else if l.until.Before(r.leases.next) {
			r.leases.next = l.until
		}
	}
}

// free ends a lease.
func (r *Rank) free(key string, l *Lease) {
	r.pool.Release(l.Blocks)
	delete(r.leases.byKey, key)
	r.Process.Blocks.release(l.blockLogID)
}

// LeaseCall is the body of the calls about leases on the side channel, which stand for NIXL's
// handshake, reads and notifications: /read reports whether the blocks are still leased, /done frees them,
// /heartbeat extends their leases.
type LeaseCall struct {
	EngineID   string   `json:"engine_id"`
	RequestIDs []string `json:"request_ids"`
}

// LeaseReply is the reply to a LeaseCall.
type LeaseReply struct {
	Held bool `json:"held"` // all of the blocks are leased
}

// ServeLeases serves a LeaseCall. released is called on the rank's goroutine for every key of a /done;
// held says that there was a lease.
func ServeLeases(p *Process, c *httpconn.Conn, r *httpconn.Request, released func(rk *Rank, key string, held bool)) {
	var q LeaseCall
	if err := json.Unmarshal(r.Body, &q); err != nil {
		c.Respond(r, 400, "text/plain", []byte(err.Error()))
		return
	}
	rk := p.RankByID(q.EngineID)
	if rk == nil {
		c.Respond(r, 404, "text/plain", []byte("unknown engine id"))
		return
	}
	reply := LeaseReply{Held: true}
	rk.Do(func() {
		now := time.Now()
		rk.Expire(now)
		for _, key := range q.RequestIDs {
			l := rk.leases.byKey[key]
			switch {
			case l == nil:
				if reply.Held = false; r.Path == "/done" {
					released(rk, key, false)
				}
			case r.Path == "/done":
				rk.free(key, l)
				rk.Counters.Released++
				released(rk, key, true)
			case r.Path == "/heartbeat":
				if until := now.Add(rk.o.Lease * 2 / 3); until.After(l.until) {
					l.until = until
				}
				rk.Counters.Heartbeats++
			}
		}
	})
	body, _ := json.Marshal(reply)
	c.Respond(r, 200, "application/json", body)
}
