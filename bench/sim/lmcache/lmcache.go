// Package lmcache has LMCache's hand-over over NIXL. A prefill whose request has a disagg_spec writes its
// KV to the receiver named there, one stream for each tensor-parallel rank. Every rank
// then notifies the proxy over ZMQ, with real PUSH sockets and messages. A write is a
// call of the receiver's side channel, whose port stands for the init and alloc ports.
// Decode is an ordinary completion: it looks up what was written by its prompt and computes
// the rest.
//
// Faults on the path "notify": stall loses one rank's notification, slow sends all of
// them Delay later, garbage sends them twice. On the path "write": slow writes Delay
// later, stall never. LMCache's receiver exposes blocks as soon as it has allocated
// them, so a decode that arrives before the write reads the previous content of that
// memory (GarbageReads).
package lmcache

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
	"sluice/bench/sim/core"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
)

// leg is the leg of prefill, or of decode, which has no members of its own.
type leg struct {
	core.WholeLeg
	family           *family
	spec             *spec // prefill; nil: decode
	returnFirstToken bool  // ret_first_tok
	tokenSent        bool  // HoldLastToken has run
}

type spec struct {
	ReqID string `json:"req_id"`
	Host  string `json:"receiver_host"`
	Init  []int  `json:"receiver_init_port"`
	Alloc []int  `json:"receiver_alloc_port"`
}

// family is the family in one incarnation.
type family struct {
	p        *core.Process
	notifier notifier
	received []map[uint64]int // by rank: tokens of the prompts whose KV was written here, by hash of the prompt; negative if only allocated. Each belongs to the rank's goroutine.
}

// maxReceived bounds the prompts of a rank whose KV no decode has fetched.
const maxReceived = 1 << 16

// New returns the family for one incarnation.
func New(p *core.Process) core.Family {
	f := &family{p: p, received: make([]map[uint64]int, p.Options.Ranks)}
	for i := range f.received {
		f.received[i] = make(map[uint64]int)
	}
	return f
}

// Close implements core.Family.
func (f *family) Close() {
	f.notifier.mu.Lock()
	defer f.notifier.mu.Unlock()
	f.notifier.close()
}

// Read implements core.Family.
func (f *family) Read(b *api.Body, _ *httpconn.Request) (core.Leg, error) {
	if len(b.KVTransfer) == 0 || string(b.KVTransfer) == "null" {
		return &leg{family: f}, nil
	}
	var p struct {
		First json.RawMessage `json:"ret_first_tok"`
		Spec  *spec           `json:"disagg_spec"`
	}
	if err := json.Unmarshal(b.KVTransfer, &p); err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "kv_transfer_params: %s", err)
	}
	if s := p.Spec; s != nil && (s.ReqID == "" || s.Host == "" || len(s.Init) == 0 || len(s.Alloc) != len(s.Init)) {
		return nil, api.Refuse(400, "body.kv_transfer_params", "disagg_spec needs req_id, receiver_host, and as many receiver_init_port as receiver_alloc_port")
	}
	return &leg{family: f, spec: p.Spec, returnFirstToken: p.First != nil}, nil
}

// Side implements core.Leg. A request with ret_first_tok and without disagg_spec is "whole".
func (g *leg) Side() string {
	switch {
	case g.spec != nil:
		return "prefill"
	case g.returnFirstToken:
		return "whole"
	}
	return "decode"
}

// HoldLastToken starts the transfer when the prefill is done. With EarlyNotify the
// response waits until the notifications are sent; otherwise either may be first.
func (g *leg) HoldLastToken(r *core.Rank, s *core.Seq) bool {
	if g.spec == nil || g.tokenSent || !s.IsFirst() {
		return false
	}
	g.tokenSent = true
	prompt, spec, early := s.Prompt, g.spec, r.Process.Options.EarlyNotify
	f := r.Process.Match(&httpconn.Request{Path: "notify", Headers: s.Job.Request.Headers, Body: s.Job.Request.Body}, "notify")
	late := r.Process.Match(&httpconn.Request{Path: "write", Headers: s.Job.Request.Headers, Body: s.Job.Request.Body}, "write")
	r.Process.Go(func() {
		wrote := true
		if late != nil { // otherwise the delay would be invisible
			wrote = g.family.writeKV(spec, prompt, false) == nil && core.FaultTransfer(r.Process.Context, late)
		}
		core.Sleep(r.Process.Context, r.Process.TransferTime(len(prompt)))
		if wrote && g.family.writeKV(spec, prompt, true) == nil {
			g.family.notifyRanks(spec, f)
		}
		if early {
			r.Post(func() { r.FinishHeld(s) })
		}
	})
	return early
}

// writeKV writes the prompt's KV to its receiver, or only allocates it there.
func (f *family) writeKV(spec *spec, prompt []uint32, written bool) error {
	addr := net.JoinHostPort(spec.Host, strconv.Itoa(spec.Alloc[0]))
	return f.p.Call(f.p.Context, "POST", addr, "/lmcache/put", write{core.PromptSum(prompt), len(prompt), written}, nil)
}

type write struct {
	Sum     uint64 `json:"sum"`
	Tokens  int    `json:"tokens"`
	Written bool   `json:"written"`
}

// ServeSide serves /lmcache/put: it stores KV by its prompt, for the next request that starts with that
// prompt.
func (f *family) ServeSide(c *httpconn.Conn, r *httpconn.Request) {
	var q write
	if r.Path != "/lmcache/put" || json.Unmarshal(r.Body, &q) != nil || q.Tokens <= 0 {
		c.Respond(r, 400, "text/plain", nil)
		return
	}
	for _, rk := range f.p.Ranks {
		rk.Do(func() {
			received := f.received[rk.Index]
			if len(received) > maxReceived {
				clear(received)
			}
			if !q.Written {
				received[q.Sum] = -q.Tokens
				return
			}
			received[q.Sum] = q.Tokens
			rk.Counters.Leased++
		})
	}
	c.Respond(r, 200, "application/json", []byte("{}"))
}

// OnAdmitted looks for KV of decode's whole prompt, or of all but the last token, which
// prefill generated.
func (g *leg) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	if g.Side() != "decode" || !s.IsFirst() {
		return false
	}
	received := g.family.received[r.Index]
	for _, prompt := range [][]uint32{s.Prompt, s.Prompt[:len(s.Prompt)-1]} {
		sum := core.PromptSum(prompt)
		n := received[sum]
		if n < 0 {
			r.Counters.Garbage++
			s.Gen.Fold(prompt[0])
			n = -n
		}
		if n == len(prompt) && n > 0 {
			delete(received, sum)
			r.Counters.Released++
			r.Transfer(s)
			r.Process.Go(func() { r.Post(func() { r.TransferDone(s, n, n) }) })
			return true
		}
	}
	return false
}

// AppendHandle appends the first output token if ret_first_tok asks for it, otherwise null.
func (g *leg) AppendHandle(b []byte, j *core.Job) []byte {
	if !g.returnFirstToken || len(j.Seqs[0].Out) == 0 {
		return append(b, "null"...)
	}
	b = strconv.AppendUint(append(b, `{"first_tok":`...), uint64(j.Seqs[0].Out[0]), 10)
	return append(b, '}')
}

// notifyRanks pushes one notification for each rank of the receiver, which has as many
// as the sender. In LMCache each is sent by its own process.
func (f *family) notifyRanks(spec *spec, fault *faults.Fault) {
	if f.p.Options.LMCacheProxy == "" {
		return // pd_skip_proxy_notification
	}
	count, tag := len(spec.Init), "ProxyNotif"
	if f.p.Options.OldNotify {
		tag = "NixlProxyNotif"
	}
	if fault != nil {
		switch fault.Kind {
		case faults.Stall:
			count--
		case faults.Slow:
			if !core.Sleep(f.p.Context, fault.Delay) {
				return
			}
		case faults.Malformed:
			count *= 2
		}
	}
	if err := f.push(tag, spec.ReqID, count); err != nil {
		f.p.IgnoredPD.Add(1)
	}
}

// notifier is the one PUSH socket of an incarnation for notifications, made for the
// first one.
type notifier struct {
	mu     sync.Mutex
	ctx    *zmq.Context
	socket *zmq.Socket
}

func (f *family) push(tag, id string, count int) error {
	n := &f.notifier
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.socket == nil {
		if err := n.connect(f.p.Options.LMCacheProxy); err != nil {
			n.close()
			return err
		}
	}
	for range count {
		if _, err := n.socket.SendBytes(notification(tag, id), 0); err != nil {
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

// notification returns the message as msgspec encodes it: a map of type and
// req_id (router/kvtransfer/notify/testdata has the bytes of the releases).
func notification(tag, id string) []byte {
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
