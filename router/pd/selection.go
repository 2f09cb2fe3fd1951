package pd

import (
	"time"

	"sluice/dataplane/front"
	"sluice/router/fleet"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// WorkerSelector finds the workers that a request's headers name: beside one engine,
// where another router has made the choice already (sluice sidecar). It decides
// what may be named at all. It is called on the request path.
type WorkerSelector interface {
	// Name reads the headers. What the Named holds stays valid for the request
	// however long that takes. A non-nil Refusal is the request's answer.
	Select(h Headers) (Selection, *Refusal)
}

// Headers are a request's; front.Exchange has them.
type Headers interface {
	// Header gives a value by its name, whatever its case; nil when absent. It
	// is borrowed.
	Header(name string) []byte
}

// Selection is what the headers of one request say; the zero value: nothing.
type Selection struct {
	// Prefill are ranks of prefill workers, to be tried in this order.
	Prefill []*worker.Rank
	// Plain: no prefill worker is to be used.
	NoPrefill bool
	// Ranked: the own engine's rank is Rank.
	HasRank bool
	Rank    uint16
}

// Refusal is an answer of the router's own.
type Refusal struct {
	Reason     front.Reason
	Message    string
	RetryAfter time.Duration
}

// selectWorkers has the headers read; it answers and returns false where they name what
// may not be named.
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

// poolOf is the pool of a model. Beside one engine that is this engine's,
// whatever the model: it says itself which it does not know.
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

// ranksNumbered keeps the ranks of one number, without copying where it can.
func ranksNumbered(ranks []*worker.Rank, n uint16) []*worker.Rank {
	for i, r := range ranks {
		if r.ID.Rank == n {
			return ranks[i : i+1 : i+1]
		}
	}
	return nil
}

// skipTrippedPrefill makes the plan one for a single worker where every prefill worker
// named is resting after failures: the request does not pay for another try.
func (q *request) skipTrippedPrefill() {
	if q.selected.Prefill == nil || q.plan.Family == nil || q.plan.Traits.NoPlainDecode || !q.pd.PlainDecode {
		return
	}
	for _, r := range q.selected.Prefill {
		if worker.BreakerState(r.Breaker.Load()) != worker.BreakerOpen && !q.settings.Fleet.AtCapacity(r) {
			return
		}
	}
	q.plan.usePlainDecode("prefill_resting")
	q.plan.noPrefillWorker = true
}

// nextSelected are the candidates of a prefill leg: of workers that the request
// named the first that has not failed it and is not resting, for their order is
// the choice; else all.
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

// lacksPrefillSource says that the request needs a prefill worker and neither it nor the
// configuration names one: there is nothing to wait for.
func (q *request) lacksPrefillSource() bool {
	return q.settings.Selector != nil && q.plan.Family != nil && len(q.plan.Prefill) == 0 && q.pool.Members[worker.Prefill] == 0
}

// isPredetermined says that there is nothing to choose, so that the prompt need not be
// looked into: each leg has one candidate, or an order. A Picky family looks at
// the prompt's tokens itself.
func (q *request) isPredetermined() bool {
	if q.settings.Selector == nil {
		return false
	}
	if q.plan.Family == nil {
		return len(q.plan.Whole) <= 1
	}
	if _, filter := q.plan.Family.(RequestFilter); filter {
		return false
	}
	return len(q.plan.Decode) <= 1 && (len(q.plan.Prefill) <= 1 || q.selected.Prefill != nil)
}

// estimatePrompt is resolvePrompt where nothing is to be chosen: a guess of the
// prompt's length, for the load on the ranks.
func (q *request) estimatePrompt() {
	q.prompt = tokenize.Prompt{Tokens: q.prompt.Tokens[:0], Count: len(q.x.Doc.Body) / bytesPerToken}
	q.overlaps, q.keys = q.overlaps[:0], q.keys[:0]
	q.approx.Reset()
}
