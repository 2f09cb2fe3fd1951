package schedule

import (
	"time"

	"sluice/router/worker"
)

// maxJointRecords bounds the joint choices of one record, as maxDecisions does its decisions.
const maxJointRecords = 8

// jointRecord is one ChooseJoint in a record.
type jointRecord struct {
	at                     time.Duration // since the start of the record
	attempt, prompt        int
	prefill, decode, local candidateState // local.rank is nil if no alternative was evaluated
	pull, rate, handover   float64
	remote                 float64
	chosen                 bool // local was chosen
	reason                 string
}

// addJoint adds a joint choice to the record that contains its legs' decisions.
func (b *recordRing) addJoint(p *jointState) {
	id := clipID(p.decode.query.RequestID)
	r := b.open(id, hashID(id))
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	a := r.ensureExtra()
	if len(a.joint) == maxJointRecords {
		return
	}
	f := &p.decode.scratch.ctx
	e := jointRecord{at: time.Duration(f.now - r.started), attempt: p.decode.query.Attempt, prompt: f.prompt, prefill: *p.prefill.best(), decode: *p.decode.best(),
		pull: p.pull, rate: p.rate, handover: p.handover, remote: p.remote, chosen: p.chooseLocal, reason: p.reason}
	if p.localAllowed {
		e.local = *p.local.best()
	}
	a.joint = append(a.joint, e)
}

// JointDecision is one joint choice of both legs, and of whether there are two.
type JointDecision struct {
	AtMS         float64 `json:"at_ms"`
	Attempt      int     `json:"attempt"`
	Plan         string  `json:"plan"` // remote: prefill on another worker; local: the decode rank runs the whole request
	Reason       string  `json:"reason"`
	PromptTokens int     `json:"prompt_tokens"`
	Remote       Remote  `json:"remote"`
	Local        *Local  `json:"local,omitempty"` // nil: not evaluated
}

// Remote is the estimated time to first token of two legs and its terms, in ms.
type Remote struct {
	Prefill      string  `json:"prefill"` // worker/rank
	Decode       string  `json:"decode"`
	Cost         float64 `json:"cost_ms"`
	Terms        Terms   `json:"terms_ms"`                        // of both legs, with the transfer between them
	Handover     float64 `json:"handover_ms,omitempty"`           // the time of a hand-over, independent of the prompt
	TransferRate float64 `json:"transfer_ms_per_token,omitempty"` // between these two ranks; otherwise the decode rank's own rate was used
	Cached       int     `json:"prefill_cached_tokens"`           // predicted on the prefill rank
	Uncached     int     `json:"decode_uncached_tokens"`          // left on the decode rank
}

// Local is the alternative that the whole request runs on one decode rank.
type Local struct {
	Rank     string  `json:"rank"`
	Cost     float64 `json:"cost_ms"`
	Terms    Terms   `json:"terms_ms"`
	Uncached int     `json:"uncached_tokens"`
}

func (e *jointRecord) export(w *weights) JointDecision {
	p, d := w.termsOf(PrefillLeg, e.prompt, &e.prefill), w.termsOf(DecodeLeg, e.prompt, &e.decode)
	out := JointDecision{AtMS: ms(e.at), Attempt: e.attempt, Plan: "remote", Reason: e.reason, PromptTokens: e.prompt,
		Remote: Remote{Prefill: e.prefill.rank.ID.String(), Decode: e.decode.rank.ID.String(), Cost: round3(e.remote), Handover: round3(e.handover), TransferRate: e.rate,
			Cached: int(e.prefill.cached), Uncached: e.prompt - int(e.decode.cached),
			Terms: Terms{Prefill: p.Prefill, Queue: p.Queue, Waiting: p.Waiting + d.Waiting, Transfer: e.pull, Decode: d.Decode, Pressure: d.Pressure}}}
	if e.chosen {
		out.Plan = "local"
	}
	if e.local.rank != nil {
		out.Local = &Local{Rank: e.local.rank.ID.String(), Cost: round3(e.local.cost), Terms: w.termsOf(WholeLeg, e.prompt, &e.local), Uncached: e.prompt - int(e.local.cached)}
	}
	return out
}

// Start sets the clock of a leg that was reserved before it is sent: the time between says nothing
// about the cost of its work.
func (res *Reservation) Start() {
	if res == nil || res.s == nil {
		return
	}
	res.started = res.s.now()
	res.tokensBefore = uncomputed(res.rank, max(0, res.rank.PrefillTokens.Load()-res.prefill), res.rank.Pending.Load()-1, res.s.rates.price(res.rank, worker.Prefilling), res.started)
	res.blocksBefore = max(0, res.rank.DecodeBlocks.Load()-res.blocks)
}
