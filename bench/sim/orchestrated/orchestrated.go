// Package orchestrated has the hand-over of production-stack's orchestrated mode: decode receives the
// whole response of prefill as disagg_prefill_resp. The connector is unspecified: the KV arrives after the
// time of its bytes. The prefill leg is an ordinary request for one token.
package orchestrated

import (
	"encoding/json"

	"sluice/bench/sim/api"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
)

type family struct{ core.NoCalls }

// New returns the family for one incarnation.
func New(*core.Process) core.Family { return family{} }

// Read reads disagg_prefill_resp: an object with choices.
func (family) Read(_ *api.Body, r *httpconn.Request) (core.Leg, error) {
	var p struct {
		Resp json.RawMessage `json:"disagg_prefill_resp"`
	}
	if err := json.Unmarshal(r.Body, &p); err != nil || len(p.Resp) == 0 || string(p.Resp) == "null" {
		return nil, nil
	}
	var resp struct {
		Choices []json.RawMessage `json:"choices"`
	}
	if err := json.Unmarshal(p.Resp, &resp); err != nil || len(resp.Choices) == 0 {
		return nil, api.Refuse(400, "disagg_prefill_resp", "disagg_prefill_resp is not the answer of a prefill.")
	}
	return leg{}, nil
}

// leg is the decode leg.
type leg struct{ core.WholeLeg }

// Side implements core.Leg.
func (leg) Side() string { return "decode" }

// Submit queues the first sequence; the others are queued after its transfer.
func (leg) Submit(r *core.Rank, j *core.Job) { r.Queue(j.Seqs[0]) }

// OnAdmitted starts a transfer that takes the time of the bytes that are not cached here.
func (leg) OnAdmitted(r *core.Rank, s *core.Seq) bool {
	if !s.IsFirst() {
		return false
	}
	r.Transfer(s)
	n := len(s.Prompt)
	moved := n - s.Local()
	r.Process.Go(func() {
		core.Sleep(r.Process.Context, r.Process.TransferTime(moved))
		r.Post(func() {
			if r.TransferDone(s, n-1, n-1) {
				r.QueueSiblings(s)
			}
		})
	})
	return true
}
