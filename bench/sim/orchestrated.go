package sim

import (
	"encoding/json"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/httpconn"
)

// orchestratedLeg is the decode leg of production-stack's orchestrated mode: a request
// that carries the whole response of prefill as disagg_prefill_resp. The connector is
// unspecified: the KV arrives after the time of its bytes. The prefill leg is a plain
// request for one token.
type orchestratedLeg struct{ defaultLeg }

// readOrchestrated reads disagg_prefill_resp: an object with choices.
func readOrchestrated(_ *incarnation, _ *api.Body, r *httpconn.Request) (pdLeg, error) {
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
	return orchestratedLeg{}, nil
}

func (orchestratedLeg) side() string { return "decode" }

func (orchestratedLeg) onAdmitted(r *rank, s *seq) bool {
	if s != s.j.seqs[0] {
		return false
	}
	r.transfer(s)
	n := len(s.Prompt)
	moved := n - s.local
	r.l.wg.Go(func() {
		sleepContext(r.l.ctx, cost.Scale(r.o.Cost.TransferTime(moved), r.o.Speed))
		r.post(func() {
			if r.transferDone(s, n-1, n-1) {
				r.queueSiblings(s)
			}
		})
	})
	return true
}

func (orchestratedLeg) submit(r *rank, j *job) { r.waiting = append(r.waiting, j.seqs[0]) }
