package sim

import (
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"sluice/bench/sim/api"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

// lease is the blocks that a prefill keeps for a decode: they stay referenced until the
// decode reports that it has read them, or the lease expires.
type lease struct {
	blocks     []int32
	until      time.Time
	blockLogID string // id for the block log
	tokens     int    // tokens of the prompt
	cached     int    // of these, found in prefill's cache
	sum        uint64 // hash of the prompt, for offers
}

// leases are the leases of one rank, by internal request id.
type leases struct {
	byID map[string]*lease
	next time.Time // no lease expires earlier
}

func (ls *leases) init() { ls.byID = make(map[string]*lease) }

// untilNext returns how long no lease expires, at most an hour.
func (ls *leases) untilNext(now time.Time) time.Duration {
	if len(ls.byID) == 0 {
		return time.Hour
	}
	return max(ls.next.Sub(now), 0) + time.Millisecond
}

// lease keeps the blocks of a finished prefill.
func (r *rank) lease(s *seq) { r.leaseAs(s.j.internal, s, r.o.Lease) }

// leasePrefill keeps the blocks of a prefill that ended in a way that keeps them.
func (r *rank) leasePrefill(s *seq) {
	if s.j.prefillLeg && s == s.j.seqs[0] && (s.Reason == "length" || r.o.VLLM.StopRetainsBlocks()) {
		s.leased = true
		r.lease(s)
	}
}

// leaseAs keeps the blocks under another key than the request's id, for ttl.
func (r *rank) leaseAs(key string, s *seq, ttl time.Duration) {
	until := time.Now().Add(ttl)
	if len(r.leases.byID) == 0 || until.Before(r.leases.next) {
		r.leases.next = until
	}
	if old := r.leases.byID[key]; old != nil { // a key used twice: the second lease replaces the first
		r.counters.roomsReused++
		r.pool.Release(old.blocks)
		r.e.blockLog.release(old.blockLogID)
	}
	// The handle does not include the block of the last output token, which was never
	// computed.
	n := (len(s.Prompt) + r.o.BlockSize - 1) / r.o.BlockSize
	if n < len(s.blocks) {
		r.pool.Release(s.blocks[n:])
	}
	r.e.blockLog.acquire(s.j.blockLogID)
	r.leases.byID[key] = &lease{blocks: s.blocks[:n], until: until, blockLogID: s.j.blockLogID, tokens: len(s.Prompt), cached: s.Cached}
	r.counters.leased++
}

// expire frees the blocks of expired leases.
func (r *rank) expire(now time.Time) {
	if len(r.leases.byID) == 0 || now.Before(r.leases.next) {
		return
	}
	r.leases.next = now.Add(time.Hour)
	for id, l := range r.leases.byID {
		if !l.until.After(now) {
			r.pool.Release(l.blocks)
			delete(r.leases.byID, id)
			r.e.blockLog.release(l.blockLogID)
			r.counters.expired++
		} else if l.until.Before(r.leases.next) {
			r.leases.next = l.until
		}
	}
}

// blocks returns the number of leased blocks.
func (ls *leases) blocks() (n int) {
	for _, l := range ls.byID {
		n += len(l.blocks)
	}
	return n
}

// sideChannelCalls are the calls of other families on the side channel.
var sideChannelCalls = map[string]func(*conn, *httpconn.Request){
	"/room/open": serveSideRooms,
	"/room/wait": serveSideRooms,
	"/offer":     serveSideOffer,

	"/lmcache/put": serveLMCacheWrite,
}

// sideChannelRequest is the body of the calls of NIXL's pull mode, which stand for
// NIXL's handshake, reads and notifications.
type sideChannelRequest struct {
	EngineID   string   `json:"engine_id"`
	RequestIDs []string `json:"request_ids"`
}

type sideChannelReply struct {
	Held bool `json:"held"`
}

// serveSideChannel serves other simulated engines: /read reports whether the blocks are
// still leased, /done frees them, /heartbeat extends their lease.
func serveSideChannel(c *conn, r *httpconn.Request) *job {
	if call := sideChannelCalls[r.Path]; call != nil {
		call(c, r)
		return nil
	}
	var q sideChannelRequest
	if err := json.Unmarshal(r.Body, &q); err != nil {
		c.Respond(r, 400, "text/plain", []byte(err.Error()))
		return nil
	}
	rk := c.incarnation.rankByID(q.EngineID)
	if rk == nil {
		c.Respond(r, 404, "text/plain", []byte("unknown engine id"))
		return nil
	}
	reply := sideChannelReply{Held: true}
	rk.do(func() {
		now := time.Now()
		rk.expire(now)
		for _, id := range q.RequestIDs {
			l := rk.leases.byID[id]
			switch {
			case l == nil:
				reply.Held = false
				switch {
				case r.Path != "/done":
				case rk.o.PD == "nixl":
					rk.counters.late++
				default:
					rk.offers.retire(id)
				}
			case r.Path == "/done":
				rk.pool.Release(l.blocks)
				delete(rk.leases.byID, id)
				rk.e.blockLog.release(l.blockLogID)
				rk.counters.released++
				if rk.o.PD != "nixl" { // a later request for them is told so at once
					rk.offers.retire(id)
				}
			case r.Path == "/heartbeat":
				if until := now.Add(rk.o.Lease * 2 / 3); until.After(l.until) {
					l.until = until
				}
				rk.counters.heartbeats++
			}
		}
	})
	body, _ := json.Marshal(reply)
	c.Respond(r, 200, "application/json", body)
	return nil
}

// AppendHandle appends the handle of a finished prefill, with the keys of vLLM 0.32 in
// their order.
func (j *job) AppendHandle(b []byte) []byte {
	if pd := j.pd; pd != nil && (j.fault == nil || j.fault.Kind != faults.NoHandle) {
		return pd.params(b, j)
	}
	if !j.prefillLeg || !j.seqs[0].leased || j.fault != nil && j.fault.Kind == faults.NoHandle {
		return append(b, "null"...)
	}
	return j.nixlHandle(b, j.internal, "pull")
}

// nixlHandle appends the handle of blocks leased under key.
func (j *job) nixlHandle(b []byte, key, mode string) []byte {
	s, l, rel := j.seqs[0], j.rank.l, j.rank.o.VLLM
	b = append(b, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[`...)
	if j.fault == nil || j.fault.Kind != faults.BadHandle {
		if !rel.FlatIDs() {
			b = append(b, '[')
		}
		if held := j.rank.leases.byID[key]; held != nil {
			for i, id := range held.blocks {
				if i > 0 {
					b = append(b, ',')
				}
				b = strconv.AppendInt(b, int64(id), 10)
			}
		}
		if !rel.FlatIDs() {
			b = append(b, ']')
		}
	}
	host, port, _ := net.SplitHostPort(l.side.Addr().String())
	str := func(name, v string) {
		b = append(b, `,"`+name+`":`...)
		b = api.AppendJSON(b, v)
	}
	raw := func(minor int, name, v string) {
		if rel.Since(minor, 0) {
			b = append(b, `,"`+name+`":`+v...)
		}
	}
	b = append(b, ']')
	str("remote_engine_id", l.rankID(j.rank.index))
	if rel.RemoteID() {
		str("remote_request_id", j.internal)
	}
	str("remote_host", host)
	raw(9, "remote_port", port)
	if rel.Since(9, 1) {
		raw(9, "tp_size", "1")
	}
	raw(29, "dcp_size", "1")
	if mode == "push" {
		raw(26, "pp_size", "1")
	} else {
		raw(29, "pp_size", "1")
	}
	raw(21, "remote_num_tokens", strconv.Itoa(len(s.Prompt)))
	raw(26, "remote_blocks_expiry_time", "null")
	raw(28, "transfer_mode", `"`+mode+`"`)
	raw(31, "remote_prefill_cached_tokens", strconv.Itoa(s.Cached))
	raw(33, "remote_registration_generation", "0")
	return append(b, '}')
}

// AppendStreamedHandle appends the handle to the last chunk of a stream, since 0.33.
func (j *job) AppendStreamedHandle(b []byte, index int) []byte {
	if s := j.seqs[index]; s.Reason == "" || !s.leased || !j.rank.o.VLLM.StreamsHandle() {
		return b
	}
	return j.AppendHandle(append(b, `,"kv_transfer_params":`...))
}

// PrefillCached implements api.Transfer.
func (j *job) PrefillCached() *int {
	if j.handle == nil {
		return nil
	}
	return j.handle.prefillCached
}

// readTransferParams reads a request's kv_transfer_params; null and absent are nil.
func readTransferParams(raw json.RawMessage) (*handle, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if raw[0] != '{' {
		return nil, fmt.Errorf("1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary', 'input': %s}", strings.ReplaceAll(string(raw), `"`, `'`))
	}
	h := &handle{cancelled: make(chan struct{})}
	if err := json.Unmarshal(raw, &h.wire); err != nil {
		return nil, fmt.Errorf("kv_transfer_params: %w", err)
	}
	h.prefillCached = h.wire.PrefillCached
	return h, nil
}
