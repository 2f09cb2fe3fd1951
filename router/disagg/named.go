package disagg

import (
	"time"

	"sluice/dataplane/front"
	"sluice/router/fleet"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Namer finds the workers that a request's headers name: beside one engine,
// where another router has made the choice already (sluice sidecar). It decides
// what may be named at all. It is called on the request path.
type Namer interface {
	// Name reads the headers. What the Named holds stays valid for the request
	// however long that takes. A non-nil Refusal is the request's answer.
	Name(h Headers) (Named, *Refusal)
}

// Headers are a request's; front.Exchange has them.
type Headers interface {
	// Header gives a value by its name, whatever its case; nil when absent. It
	// is borrowed.
	Header(name string) []byte
}

// Named is what the headers of one request say; the zero value: nothing.
type Named struct {
	// Prefill are ranks of prefill workers, to be tried in this order.
	Prefill []*worker.Rank
	// Plain: no prefill worker is to be used.
	Plain bool
	// Ranked: the own engine's rank is Rank.
	Ranked bool
	Rank   uint16
}

// Refusal is an answer of the router's own.
type Refusal struct {
	Reason     front.Reason
	Message    string
	RetryAfter time.Duration
}

// name has the headers read; it answers and returns false where they name what
// may not be named.
func (q *request) name() bool {
	namer := q.r.opt().Namer
	if namer == nil {
		return true
	}
	named, refusal := namer.Name(q.x)
	if refusal != nil {
		q.model = ""
		q.refuse(refusal.Reason, refusal.Message, refusal.RetryAfter)
		return false
	}
	q.named = named
	return true
}

// poolOf is the pool of a model. Beside one engine that is this engine's,
// whatever the model: it says itself which it does not know.
func (q *request) poolOf(v *fleet.View) (*fleet.Pool, bool) {
	p, ok := v.Pool(q.model)
	if q.r.opt().Namer == nil {
		return p, ok
	}
	if !ok {
		if p, ok = v.Pool(""); !ok {
			return nil, false
		}
	}
	n := &q.named
	if !n.Plain && !n.Ranked && n.Prefill == nil {
		return p, true
	}
	q.own = *p
	own := &q.own
	if n.Ranked {
		own.Decode, own.Aggregated = only(own.Decode, n.Rank), only(own.Aggregated, n.Rank)
	}
	switch {
	case n.Plain:
		own.Prefill, own.Members[worker.Prefill] = nil, 0
	case n.Prefill != nil:
		own.Prefill, own.Members[worker.Prefill] = n.Prefill, len(n.Prefill)
	}
	return own, true
}

// only keeps the ranks of one number, without copying where it can.
func only(ranks []*worker.Rank, n uint16) []*worker.Rank {
	for i, r := range ranks {
		if r.ID.Rank == n {
			return ranks[i : i+1 : i+1]
		}
	}
	return nil
}

// restNamed makes the plan one for a single worker where every prefill worker
// named is resting after failures: the request does not pay for another try.
func (q *request) restNamed() {
	if q.named.Prefill == nil || q.plan.Family == nil || q.plan.Traits.NoPlain || !q.pd.PlainDecode {
		return
	}
	for _, r := range q.named.Prefill {
		if worker.BreakerState(r.Breaker.Load()) != worker.BreakerOpen && !q.r.opt().Fleet.Full(r) {
			return
		}
	}
	q.plan.decodeAlone("prefill_resting")
	q.plan.lacks = true
}

// nextNamed are the candidates of a prefill leg: of workers that the request
// named the first that has not failed it and is not resting, for their order is
// the choice; else all.
func (q *request) nextNamed(ranks []*worker.Rank) []*worker.Rank {
	if q.named.Prefill == nil {
		return ranks
	}
	resting := -1
	for i, r := range ranks {
		if q.isExcluded(r) {
			continue
		}
		if worker.BreakerState(r.Breaker.Load()) != worker.BreakerOpen && !q.r.opt().Fleet.Full(r) {
			return ranks[i : i+1 : i+1]
		}
		if resting < 0 {
			resting = i
		}
	}
	if resting >= 0 {
		return ranks[resting : resting+1 : resting+1]
	}
	return ranks
}

// orphaned says that the request needs a prefill worker and neither it nor the
// configuration names one: there is nothing to wait for.
func (q *request) orphaned() bool {
	return q.r.opt().Namer != nil && q.plan.Family != nil && len(q.plan.Prefill) == 0 && q.pool.Members[worker.Prefill] == 0
}

// chosen says that there is nothing to choose, so that the prompt need not be
// looked into: each leg has one candidate, or an order. A Picky family looks at
// the prompt's tokens itself.
func (q *request) chosen() bool {
	if q.r.opt().Namer == nil {
		return false
	}
	if q.plan.Family == nil {
		return len(q.plan.Whole) <= 1
	}
	if _, picky := q.plan.Family.(Picky); picky {
		return false
	}
	return len(q.plan.Decode) <= 1 && (len(q.plan.Prefill) <= 1 || q.named.Prefill != nil)
}

// skipPrompt is findPrompt where nothing is to be chosen: a guess of the
// prompt's length, for the load on the ranks.
func (q *request) skipPrompt() {
	q.prompt = tokenize.Prompt{Tokens: q.prompt.Tokens[:0], Count: len(q.x.Doc.Body) / bytesPerToken}
	q.sized, q.keys = q.sized[:0], q.keys[:0]
	q.approx.Reset()
}
