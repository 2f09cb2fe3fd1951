package nixl

import (
	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
)

// pull is vLLM's NixlConnector in pull mode, vLLM's default.
type pull struct {
	p      *core.Process
	puller *Puller
}

// New returns the family for one incarnation.
func New(p *core.Process) core.Family { return &pull{p, NewPuller(p)} }

// Read implements core.Family.
func (f *pull) Read(b *api.Body, _ *httpconn.Request) (core.Leg, error) {
	w, err := ReadParams(b.KVTransfer)
	if w == nil || err != nil {
		return nil, err
	}
	g := &leg{Decode: Decode{puller: f.puller}, prefill: w.RemoteDecode && !w.RemotePrefill, params: w}
	if w.RemotePrefill {
		if !f.p.Options.VLLM.RemoteID() && w.RequestID == "" {
			w.RequestID = "-" // decode refers to the request by its own id, which Begin sets
		}
		g.Handle = NewHandle(*w)
	}
	return g, nil
}

// ServeSide implements core.Family.
func (f *pull) ServeSide(c *httpconn.Conn, r *httpconn.Request) {
	core.ServeLeases(f.p, c, r, func(rk *core.Rank, _ string, held bool) {
		if !held {
			rk.Counters.Late++
		}
	})
}

// Close implements core.Family.
func (f *pull) Close() {}

// Ignored is the family of a vLLM without a connector, which checks kv_transfer_params and ignores it
// with a warning.
type Ignored struct{ core.NoCalls }

// Read implements core.Family.
func (Ignored) Read(b *api.Body, _ *httpconn.Request) (core.Leg, error) {
	_, err := ReadParams(b.KVTransfer)
	return nil, err
}

// leg is one leg of the hand-over.
type leg struct {
	Decode
	params  *Params
	prefill bool
	leased  bool // the blocks of the first sequence are kept
}

// Side implements core.Leg.
func (g *leg) Side() string {
	switch {
	case g.params.RemotePrefill:
		return "decode"
	case g.params.RemoteDecode:
		return "prefill"
	}
	return "whole"
}

// Begin sets the id by which a decode asks for its blocks in releases without remote_request_id.
func (g *leg) Begin(j *core.Job) error {
	if g.Handle != nil && !g.puller.p.Options.VLLM.RemoteID() {
		g.Handle.RequestID = j.Internal // decode asks by its own id
	}
	return nil
}

// HoldLastToken keeps the blocks of a prefill that ended in a way that keeps them. It holds nothing back.
func (g *leg) HoldLastToken(r *core.Rank, s *core.Seq) bool {
	if o := r.Process.Options; g.prefill && s.IsFirst() && (s.Reason == "length" || o.VLLM.StopRetainsBlocks()) {
		g.leased = true
		r.Lease(s.Job.Internal, s, o.Lease)
	}
	return false
}

// RetainBlocks keeps the blocks that HoldLastToken has leased.
func (g *leg) RetainBlocks(_ *core.Rank, s *core.Seq) bool { return g.leased && s.IsFirst() }

// AppendHandle appends the handle of leased blocks, otherwise null.
func (g *leg) AppendHandle(b []byte, j *core.Job) []byte {
	if !g.leased {
		return append(b, "null"...)
	}
	return appendHandle(b, j, j.Internal, "pull")
}

// StreamsHandle implements core.HandleStreamer: since 0.33 the handle is in the last chunk of a stream.
func (g *leg) StreamsHandle(s *core.Seq) bool {
	return s.Reason != "" && g.leased && s.IsFirst() && g.puller.p.Options.VLLM.StreamsHandle()
}
