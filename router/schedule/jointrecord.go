package schedule

import (
	"time"
)

// maxJointRecords bounds the pairs of one record, as maxDecisions does its choices.
const maxJointRecords = 8

// jointRecord is one ChooseJoint as a record keeps it.
type jointRecord struct {
	at                     time.Duration // since begun
	attempt, prompt        int
	prefill, decode, local candidateState // local.rank nil: no alternative was looked at
	pull, rate, handover   float64
	remote                 float64
	chosen                 bool // local
	reason                 string
}

// addJoint adds a pair to the record that its legs' decisions were written to.
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
	Plan         string  `json:"plan"` // remote: prefill elsewhere; local: decode does it all
	Reason       string  `json:"why"`
	PromptTokens int     `json:"prompt_tokens"`
	Remote       Remote  `json:"remote"`
	Local        *Local  `json:"local,omitempty"` // nil: not looked at
}

// Remote is the pair's estimated time to first token and its terms, in ms.
type Remote struct {
	Prefill      string  `json:"prefill"` // worker/rank
	Decode       string  `json:"decode"`
	Cost         float64 `json:"cost_ms"`
	Terms        Terms   `json:"terms_ms"`                    // of both legs, the transfer between these two
	Handover     float64 `json:"handover_ms,omitempty"`       // what a hand-over takes whatever the prompt
	TransferRate float64 `json:"pair_ms_per_token,omitempty"` // of this pair; else the decode rank's own rate was taken
	Cached       int     `json:"prefill_cached_tokens"`       // predicted on the prefill rank
	Uncached     int     `json:"decode_uncached_tokens"`      // left on the decode rank
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

// Start sets the clock of a leg that was booked before it is sent: the time it
// lay waiting says nothing of what its work costs.
func (res *Reservation) Start() {
	if res == nil || res.s == nil {
		return
	}
	res.started = res.s.now()
	res.tokensBefore = max(0, res.rank.PrefillTokens.Load()-res.prefill)
	res.blocksBefore = max(0, res.rank.DecodeBlocks.Load()-res.blocks)
}
