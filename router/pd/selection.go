package pd

import (
	"time"

	"sluice/dataplane/front"
	"sluice/router/fleet"
	"sluice/router/pd/family"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// WorkerSelector finds the workers that a request's headers name. It is used beside a single engine
// (sluice sidecar), where another router has already made the choice. It decides which workers a
// request may name. It is called on the request path.
type WorkerSelector interface {
	// Select reads the headers. The Selection stays valid for as long as the request runs. A
	// non-nil Refusal is the response to the request.
	Select(h Headers) (Selection, *Refusal)
}

// Headers gives access to a request's headers. front.Exchange implements it.
type Headers interface {
	// Header returns the value of a header, or nil if it is absent. Names are case-insensitive. The
	// value is borrowed.
	Header(name string) []byte
}

// Selection is what the headers of one request select. The zero value selects nothing.
type Selection struct {
	// Prefill are ranks of prefill workers, in the order in which to try them.
	Prefill []*worker.Rank
	// NoPrefill says that the request must not use a prefill worker.
	NoPrefill bool
	// HasRank says that the local engine must run the request on its rank number Rank.
	HasRank bool
	Rank    uint16
}

// Refusal is an error response of the router.
type Refusal struct {
	Reason     front.Reason
	Message    string
	RetryAfter time.Duration
}

// selectWorkers calls the WorkerSelector, if any. It answers with an error and returns false if the
// headers name workers that the request may not use.
func (q *request) selectWorkers() bool {
	selector := q.settings.Selector
	if selector == nil {
		return true
	}
	selection, refusal := selector.Select(q.x)
	if refusal != nil {
		q.model = ""
		q.refuse(refusal.Reason, refusal.Message, refusal.RetryAfter)
		return false
	}
	q.selected = selection
	return true
}

// poolOf returns the pool of the request's model. With a WorkerSelector it falls back to the local
// engine's pool for an unknown model, and that engine refuses the model itself.
func (q *request) poolOf(v *fleet.View) (*fleet.Pool, bool) {
	p, ok := v.Pool(q.model)
	if q.settings.Selector == nil {
		return p, ok
	}
	if !ok {
		if p, ok = v.Pool(""); !ok {
			return nil, false
		}
	}
	n := &q.selected
	if !n.NoPrefill && !n.HasRank && n.Prefill == nil {
		return p, true
	}
	q.ownPool = *p
	own := &q.ownPool
	if n.HasRank {
		own.Decode, own.Aggregated = ranksNumbered(own.Decode, n.Rank), ranksNumbered(own.Aggregated, n.Rank)
	}
	switch {
	case n.NoPrefill:
		own.Prefill, own.Members[worker.Prefill] = nil, 0
	case n.Prefill != nil:
		own.Prefill, own.Members[worker.Prefill] = n.Prefill, len(n.Prefill)
	}
	return own, true
}

// ranksNumbered returns the rank with number n as a slice of ranks, or nil if there is none.
func ranksNumbered(ranks []*worker.Rank, n uint16) []*worker.Rank {
	for i, r := range ranks {
		if r.ID.Rank == n {
			return ranks[i : i+1 : i+1]
		}
	}
	return nil
}

// skipTrippedPrefill plans one rank for the whole request if every selected prefill worker has an
// open breaker or is at capacity, so that the request does not pay for another failed attempt.
func (q *request) skipTrippedPrefill() {
	if q.selected.Prefill == nil || q.plan.Family == nil || q.plan.Traits.NoDecodeOnly || !q.pd.DecodeOnlyFallback {
		return
	}
	for _, r := range q.selected.Prefill {
		if worker.BreakerState(r.Breaker.Load()) != worker.BreakerOpen && !q.settings.Fleet.AtCapacity(r) {
			return
		}
	}
	q.plan.useDecodeOnly("prefill_unavailable")
	q.plan.noPrefillWorker = true
}

// nextSelected returns the candidates of a prefill leg. If the request selected prefill workers,
// that is the first one that has not failed the request, has a closed breaker and is below
// capacity; the order of the selection decides. If all of them are unavailable, it is the first
// that has not failed the request. Otherwise nextSelected returns ranks.
func (q *request) nextSelected(ranks []*worker.Rank) []*worker.Rank {
	if q.selected.Prefill == nil {
		return ranks
	}
	tripped := -1
	for i, r := range ranks {
		if q.isExcluded(r) {
			continue
		}
		if worker.BreakerState(r.Breaker.Load()) != worker.BreakerOpen && !q.settings.Fleet.AtCapacity(r) {
			return ranks[i : i+1 : i+1]
		}
		if tripped < 0 {
			tripped = i
		}
	}
	if tripped >= 0 {
		return ranks[tripped : tripped+1 : tripped+1]
	}
	return ranks
}

// lacksPrefillSource reports whether the request needs a prefill worker although neither its
// headers nor the configuration name one. Waiting cannot help such a request.
func (q *request) lacksPrefillSource() bool {
	return q.settings.Selector != nil && q.plan.Family != nil && len(q.plan.Prefill) == 0 && q.pool.Members[worker.Prefill] == 0
}

// isPredetermined reports whether the request leaves nothing to choose: each leg has one candidate
// or a selected order. The prompt then need not be tokenized, unless the family is a RequestFilter,
// which reads the prompt's tokens.
func (q *request) isPredetermined() bool {
	if q.settings.Selector == nil {
		return false
	}
	if q.plan.Family == nil {
		return len(q.plan.Whole) <= 1
	}
	if _, filter := q.plan.Family.(family.RequestFilter); filter {
		return false
	}
	return len(q.plan.Decode) <= 1 && (len(q.plan.Prefill) <= 1 || q.selected.Prefill != nil)
}

// estimatePrompt replaces resolvePrompt if there is nothing to choose. It estimates the prompt's
// length for the load accounting of the ranks.
func (q *request) estimatePrompt() {
	q.prompt = tokenize.Prompt{Tokens: q.prompt.Tokens[:0], Blocks: q.prompt.Blocks[:0], Count: len(q.req.Doc.Body) / bytesPerToken}
	q.overlaps, q.keys = q.overlaps[:0], q.keys[:0]
	q.approx.Reset()
}
