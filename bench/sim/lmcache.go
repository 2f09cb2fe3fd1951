package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

// LMCache's hand-over over NIXL. A prefill whose request has a disagg_spec writes its
// KV to the receiver named there, one stream for each tensor-parallel rank. Every rank
// then notifies the proxy over ZMQ, with real PUSH sockets and messages. A write is a
// call of the receiver's side channel, whose port stands for the init and alloc ports.
// Decode is a plain completion: it looks up what was written by its prompt and computes
// the rest.
//
// Faults on the path "notify": stall loses one rank's notification, slow sends all of
// them Delay later, garbage sends them twice. On the path "write": slow writes Delay
// later, stall never. LMCache's receiver exposes blocks as soon as it has allocated
// them, so a decode that arrives before the write reads the previous content of that
// memory (GarbageReads).

// lmcacheLeg is the leg of prefill, or of decode, which has no members of its own.
type lmcacheLeg struct {
	defaultLeg
	spec             *lmcacheSpec // prefill; nil: decode
	returnFirstToken bool         // ret_first_tok
	tokenSent        bool         // holdLastToken has run
}

type lmcacheSpec struct {
	ReqID string `json:"req_id"`
	Host  string `json:"receiver_host"`
	Init  []int  `json:"receiver_init_port"`
	Alloc []int  `json:"receiver_alloc_port"`
}

func readLMCache(_ *incarnation, b *api.Body, _ *httpconn.Request) (pdLeg, error) {
	if len(b.KVTransfer) == 0 || string(b.KVTransfer) == "null" {
		return &lmcacheLeg{}, nil
	}
	var p struct {
		First json.RawMessage `json:"ret_first_tok"`
		Spec  *lmcacheSpec    `json:"disagg_spec"`
	}
	if err := json.Unmarshal(b.KVTransfer, &p); err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "kv_transfer_params: %s", err)
	}
	if s := p.Spec; s != nil && (s.ReqID == "" || s.Host == "" || len(s.Init) == 0 || len(s.Alloc) != len(s.Init)) {
		return nil, api.Refuse(400, "body.kv_transfer_params", "disagg_spec needs req_id, receiver_host, and as many receiver_init_port as receiver_alloc_port")
	}
	return &lmcacheLeg{spec: p.Spec, returnFirstToken: p.First != nil}, nil
}

func (g *lmcacheLeg) side() string {
	switch {
	case g.spec != nil:
		return "prefill"
	case g.returnFirstToken:
		return "plain"
	}
	return "decode"
}

// holdLastToken starts the transfer when the prefill is done. With EarlyNotify the
// response waits until the notifications are sent; otherwise either may be first.
func (g *lmcacheLeg) holdLastToken(r *rank, s *seq) bool {
	if g.spec == nil || g.tokenSent || s != s.j.seqs[0] {
		return false
	}
	g.tokenSent = true
	prompt, spec, early := s.Prompt, g.spec, r.o.EarlyNotify
	f := r.e.matchFault(&httpconn.Request{Path: "notify", Headers: s.j.req.Headers, Body: s.j.req.Body}, "notify", false)
	late := r.e.matchFault(&httpconn.Request{Path: "write", Headers: s.j.req.Headers, Body: s.j.req.Body}, "write", false)
	r.l.wg.Go(func() {
		wrote := true
		if late != nil { // otherwise the delay would be invisible
			wrote = r.l.writeKV(spec, prompt, false) == nil && faultTransfer(r.l.ctx, late)
		}
		sleepContext(r.l.ctx, cost.Scale(r.o.Cost.TransferTime(len(prompt)), r.o.Speed))
		if wrote && r.l.writeKV(spec, prompt, true) == nil {
			r.l.notifyRanks(spec, f)
		}
		if early {
			r.post(func() { r.finishHeld(s) })
		}
	})
	return early
}

// writeKV writes the prompt's KV to its receiver, or only allocates it there.
func (l *incarnation) writeKV(spec *lmcacheSpec, prompt []uint32, written bool) error {
	addr := net.JoinHostPort(spec.Host, strconv.Itoa(spec.Alloc[0]))
	return l.call(l.ctx, "POST", addr, "/lmcache/put", lmcacheWrite{promptSum(prompt), len(prompt), written}, nil)
}

type lmcacheWrite struct {
	Sum     uint64 `json:"sum"`
	Tokens  int    `json:"tokens"`
	Written bool   `json:"written"`
}

// serveLMCacheWrite stores KV by its prompt, for the next request that starts with that
// prompt.
func serveLMCacheWrite(c *conn, r *httpconn.Request) {
	var q lmcacheWrite
	if json.Unmarshal(r.Body, &q) != nil || q.Tokens <= 0 {
		c.Respond(r, 400, "text/plain", nil)
		return
	}
	for _, rk := range c.incarnation.ranks {
		rk.do(func() {
			if len(rk.received) > maxUsedRooms {
				clear(rk.received)
			}
			if !q.Written {
				rk.received[q.Sum] = -q.Tokens
				return
			}
			rk.received[q.Sum] = q.Tokens
			rk.counters.leased++
		})
	}
	c.Respond(r, 200, "application/json", []byte("{}"))
}

// onAdmitted looks for KV of decode's whole prompt, or of all but the last token, which
// prefill generated.
func (g *lmcacheLeg) onAdmitted(r *rank, s *seq) bool {
	if g.side() != "decode" || s != s.j.seqs[0] {
		return false
	}
	for _, prompt := range [][]uint32{s.Prompt, s.Prompt[:len(s.Prompt)-1]} {
		sum := promptSum(prompt)
		n := r.received[sum]
		if n < 0 {
			r.counters.garbage++
			s.Gen.Fold(prompt[0])
			n = -n
		}
		if n == len(prompt) && n > 0 {
			delete(r.received, sum)
			r.counters.released++
			r.transfer(s)
			r.l.wg.Go(func() { r.post(func() { r.transferDone(s, n, n) }) })
			return true
		}
	}
	return false
}

func (g *lmcacheLeg) params(b []byte, j *job) []byte {
	if !g.returnFirstToken || len(j.seqs[0].Out) == 0 {
		return append(b, "null"...)
	}
	b = strconv.AppendUint(append(b, `{"first_tok":`...), uint64(j.seqs[0].Out[0]), 10)
	return append(b, '}')
}

// notifyRanks pushes one notification for each rank of the receiver, which has as many
// as the sender. In LMCache each is sent by its own process.
func (l *incarnation) notifyRanks(spec *lmcacheSpec, f *faults.Fault) {
	if l.e.o.LMCacheProxy == "" {
		return // pd_skip_proxy_notification
	}
	count, tag := len(spec.Init), "ProxyNotif"
	if l.e.o.OldNotify {
		tag = "NixlProxyNotif"
	}
	if f != nil {
		switch f.Kind {
		case faults.Stall:
			count--
		case faults.Slow:
			if !sleepContext(l.ctx, f.Delay) {
				return
			}
		case faults.Garbage:
			count *= 2
		}
	}
	if err := l.push(tag, spec.ReqID, count); err != nil {
		l.ignoredPD.Add(1)
	}
}

// notifier is the one PUSH socket of an incarnation for notifications, made for the
// first one.
type notifier struct {
	mu     sync.Mutex
	ctx    *zmq.Context
	socket *zmq.Socket
}

func (l *incarnation) push(tag, id string, count int) error {
	n := &l.notifier
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.socket == nil {
		if err := n.connect(l.e.o.LMCacheProxy); err != nil {
			n.close()
			return err
		}
	}
	for range count {
		if _, err := n.socket.SendBytes(lmcacheNotification(tag, id), 0); err != nil {
			return err
		}
	}
	return nil
}

func (n *notifier) connect(endpoint string) (err error) {
	if n.ctx, err = zmq.NewContext(); err != nil {
		return err
	}
	if n.socket, err = n.ctx.NewSocket(zmq.PUSH); err != nil {
		return err
	}
	if err := errors.Join(n.socket.SetLinger(2*time.Second), n.socket.SetSndtimeo(2*time.Second), n.socket.Connect(endpoint)); err != nil {
		return fmt.Errorf("sim: cannot notify %q: %w", endpoint, err)
	}
	return nil
}

// close closes the socket after everything was sent.
func (n *notifier) close() {
	if n.socket != nil {
		n.socket.Close()
	}
	if n.ctx != nil {
		n.ctx.Term()
	}
	n.socket, n.ctx = nil, nil
}

// lmcacheNotification returns the message as msgspec encodes it: a map of type and
// req_id (router/kvtransfer/notify/testdata has the bytes of the releases).
func lmcacheNotification(tag, id string) []byte {
	str := func(b []byte, s string) []byte {
		switch n := len(s); {
		case n < 32:
			b = append(b, 0xa0|byte(n))
		case n < 256:
			b = append(b, 0xd9, byte(n))
		default:
			b = append(b, 0xda, byte(n>>8), byte(n))
		}
		return append(b, s...)
	}
	b := str([]byte{0x82}, "type")
	b = str(b, tag)
	return str(str(b, "req_id"), id)
}

// SidePort returns the port that stands for LMCache's init and alloc ports in the
// current incarnation.
func (e *Engine) SidePort() int {
	if l := e.incarnation(); l != nil {
		return l.side.Addr().(*net.TCPAddr).Port
	}
	return 0
}
