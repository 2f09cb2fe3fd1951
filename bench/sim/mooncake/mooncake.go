// Package mooncake has the hand-over of vLLM's MooncakeConnector (0.16 and later). Prefill returns
// no handle. Both legs carry a transfer_id, and decode the engine id and the bootstrap
// address of the prefill.
package mooncake

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"sluice/bench/sim/api"
	"sluice/bench/sim/bootstrap"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/nixl"
	"sluice/bench/sim/offer"
)

// family is the family in one incarnation.
type family struct {
	p      *core.Process
	offers *offer.Table
}

// New returns the family for one incarnation.
func New(p *core.Process) core.Family { return &family{p, offer.NewTable(p)} }

// ServeSide implements core.Family.
func (f *family) ServeSide(c *httpconn.Conn, r *httpconn.Request) { f.offers.ServeSide(c, r) }

// Close implements core.Family.
func (f *family) Close() {}

// leg is one leg of the hand-over.
type leg struct {
	core.WholeLeg
	family    *family
	prefill   bool
	id        string // transfer_id
	engine    string // decode: remote_engine_id
	bootstrap string // decode: remote_bootstrap_addr, without scheme
	ctx       context.Context
	stop      context.CancelFunc
	done      bool // decode: prefill has been notified
}

// Read reads kv_transfer_params. A decode that lacks one of its three keys
// computes the prompt itself, with a warning; the engine counts it.
func (f *family) Read(b *api.Body, r *httpconn.Request) (core.Leg, error) {
	if len(b.KVTransfer) == 0 || string(b.KVTransfer) == "null" {
		return nil, nil
	}
	if _, err := nixl.ReadParams(b.KVTransfer); err != nil { // vLLM reads it the same way for all connectors
		return nil, err
	}
	var p struct {
		Decode  bool   `json:"do_remote_decode"`
		Prefill bool   `json:"do_remote_prefill"`
		ID      string `json:"transfer_id"`
		Engine  string `json:"remote_engine_id"`
		Boot    string `json:"remote_bootstrap_addr"`
	}
	if err := json.Unmarshal(b.KVTransfer, &p); err != nil {
		return nil, api.Refuse(400, "body.kv_transfer_params", "kv_transfer_params: %s", err)
	}
	switch {
	case p.Prefill && p.ID != "" && p.Engine != "" && strings.HasPrefix(p.Boot, "http://"):
		return &leg{family: f, id: p.ID, engine: p.Engine, bootstrap: strings.TrimPrefix(p.Boot, "http://")}, nil
	case p.Decode && !p.Prefill && p.ID != "":
		return &leg{family: f, prefill: true, id: p.ID}, nil
	case p.Prefill || p.Decode:
		f.p.IgnoredPD.Add(1)
	}
	return nil, nil
}

// Side implements core.Leg.
func (g *leg) Side() string {
	if g.prefill {
		return "prefill"
	}
	return "decode"
}

// Submit queues all sequences of a prefill, but only the first of a decode, whose transfer fills the
// blocks that the others share.
func (g *leg) Submit(r *core.Rank, j *core.Job) {
	if !g.prefill {
		g.ctx, g.stop = context.WithCancel(r.Process.Context)
		r.Queue(j.Seqs[0]) // the other sequences of n find its blocks in the cache
		return
	}
	r.Queue(j.Seqs...)
}

// RetainBlocks offers the blocks of a prefill that ended because it reached max_tokens;
// any other end cancels the transfer.
func (g *leg) RetainBlocks(r *core.Rank, s *core.Seq) bool {
	if !g.prefill || !s.IsFirst() {
		return false
	}
	if s.Reason == "length" {
		return g.family.offers.Offer(r, s, g.id, r.Process.Options.AbortTimeout)
	}
	g.family.offers.Retire(r, g.id)
	return false
}

// OnAdmitted starts the transfer of a decode's first sequence. It ends in a call that frees the blocks
// on the prefill engine, whether or not they were read.
func (g *leg) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	if g.prefill || !s.IsFirst() {
		return false
	}
	f := r.Process.HandoverFault(s.Job)
	r.Transfer(s)
	q := offer.Call{EngineID: g.engine, Key: g.id, Sum: core.PromptSum(s.Prompt)}
	local := s.Local()
	r.Process.Go(func() {
		// A decode that is dropped during its fetch notifies prefill nevertheless: vLLM
		// keeps an aborted request until its transfer has ended.
		addr, err := g.family.worker(r.Process.Context, g.bootstrap, g.engine)
		var reply offer.Reply
		ok := err == nil
		if ok {
			reply, ok = g.family.offers.Fetch(g.ctx, f, addr, q, local)
			g.family.offers.Release(addr, g.engine, g.id)
		}
		r.Post(func() {
			g.done = true
			offer.Fetched(r, s, reply, ok)
		})
	})
	return true
}

// Cancel notifies the prefill if the decode ends before it was scheduled, as vLLM does.
func (g *leg) Cancel(r *core.Rank, j *core.Job) {
	if g.prefill {
		g.family.offers.Retire(r, g.id)
		return
	}
	if g.stop != nil {
		g.stop()
	}
	if !g.done && !j.Seqs[0].Scheduled() {
		g.done = true
		r.Process.Go(func() {
			if addr, err := g.family.worker(r.Process.Context, g.bootstrap, g.engine); err == nil {
				g.family.offers.Release(addr, g.engine, g.id)
			}
		})
	}
}

// OnRefused does as with NIXL: decode's server submits an aborted request instead.
func (g *leg) OnRefused() {
	if g.prefill || !g.family.p.Options.VLLM.RefusalReleases() {
		return
	}
	g.family.p.Go(func() {
		if addr, err := g.family.worker(g.family.p.Context, g.bootstrap, g.engine); err == nil {
			g.family.offers.Release(addr, g.engine, g.id)
		}
	})
}

// worker queries a bootstrap server for the worker of an engine id.
func (f *family) worker(ctx context.Context, boot, engine string) (string, error) {
	var ranks map[string]bootstrap.WorkerRank
	if err := f.p.Call(ctx, "GET", strings.TrimSuffix(boot, "/"), "/query", nil, &ranks); err != nil {
		return "", err
	}
	for _, e := range ranks {
		if e.EngineID == engine && e.Addr["0"]["0"] != "" {
			return e.Addr["0"]["0"], nil
		}
	}
	return "", fmt.Errorf("sim: %s does not know engine id %q", boot, engine)
}
