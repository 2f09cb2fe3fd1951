package pd

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/fleet"
	"sluice/router/pd/family"
	"sluice/router/pd/reqbody"
	"sluice/router/worker"
)

// Plan says which legs a request has and which ranks may run them. The scheduler chooses the ranks
// when the plan runs, so a retry sees the load at its own time. The Family decides the order of the
// legs, because the order may depend on the ranks.
type Plan struct {
	// Family is the hand-over family. It is nil if one rank runs the whole request.
	Family family.Family
	Traits family.Traits // Traits of Family
	// Prefill and Decode are the candidates of the two legs.
	Prefill, Decode []*worker.Rank
	// Whole are the candidates if one rank runs the whole request.
	Whole []*worker.Rank
	// Reason says why one rank runs the whole request although the pool is disaggregated. It is ""
	// if the request has two legs or the pool is not disaggregated.
	Reason   string
	wholeSet wholeSet // the set of ranks in Whole
	// noPrefillWorker says that one rank runs the whole request because no prefill worker is ready.
	noPrefillWorker bool
	// Unservable says that the pool can only run two legs and this request cannot be split.
	Unservable bool
	largeOnly  bool // ranks whose whole KV is too small for the prompt were removed
}

// wholeSet says which ranks of a pool may run a whole request.
type wholeSet uint8

const (
	wholeDefault    wholeSet = iota // see wholeRanks
	wholeAny                        // see anyRank
	wholeDecode                     // the ranks of the decode leg
	wholeAggregated                 // the aggregated ranks only
)

// planFor makes the plan of a request for a pool.
func planFor(pool *fleet.Pool, ep *front.Endpoint, doc *jsonscan.Doc, m *modelPD) Plan {
	if !ep.Disaggregable {
		return Plan{Whole: anyRank(pool), wholeSet: wholeAny}
	}
	if !disaggregated(pool, m) {
		return Plan{Whole: wholeRanks(pool)}
	}
	p := Plan{
		Family:  m.family,
		Traits:  m.traits,
		Prefill: withLabel(pool.Prefill, m.pd.PrefillLabels),
		Decode:  withLabel(decodeRanks(pool, m.traits), m.pd.DecodeLabels),
	}
	reason := ""
	if !m.traits.Kinds.Has(ep.Kind) {
		reason = "endpoint"
	} else if !m.traits.Batches {
		reason = reqbody.SeveralSequences(ep.Kind, doc)
	}
	if reason == "" && (!m.traits.NoDecodeOnly || pool.Members[worker.Aggregated] > 0) {
		reason = singleEngineReason(ep.Kind, doc)
	}
	if reason == "" {
		return p
	}
	p.useDecodeOnly(reason)
	if m.traits.NoDecodeOnly {
		p.Whole, p.wholeSet = pool.Aggregated, wholeAggregated
		p.Unservable = pool.Members[worker.Aggregated] == 0
	}
	return p
}

// reasonNoPrefill is the Reason of a plan without a ready prefill worker.
const reasonNoPrefill = "no_prefill_worker"

// fallBackWithoutPrefill changes the plan to one rank for the whole request if no prefill worker is
// ready, the configuration allows it (decodeOnly) and the family's engines can do it.
func (p *Plan) fallBackWithoutPrefill(pool *fleet.Pool, decodeOnly bool) {
	if p.Family == nil || len(p.Prefill) > 0 || !decodeOnly {
		return
	}
	switch {
	case !p.Traits.NoDecodeOnly && len(p.Decode) > 0:
		p.useDecodeOnly(reasonNoPrefill)
	case p.Traits.NoDecodeOnly && len(pool.Aggregated) > 0:
		p.useDecodeOnly(reasonNoPrefill)
		p.Whole, p.wholeSet = pool.Aggregated, wholeAggregated
	}
	p.noPrefillWorker = p.Family == nil
}

// useDecodeOnly changes the plan to one decode rank for the whole request. reason is one word.
func (p *Plan) useDecodeOnly(reason string) {
	p.Whole, p.Family, p.Reason, p.wholeSet = p.Decode, nil, reason, wholeDecode
}

// singleEngineReason returns why one engine must run the whole request in every family, or "" if
// two can run it.
func singleEngineReason(kind front.Kind, doc *jsonscan.Doc) string {
	switch {
	case doc.Has(jsonscan.KeyPromptLogprobs), doc.Has(jsonscan.KeySamplingPromptLogprobs),
		kind == front.Completions && reqbody.IsSet(doc.Raw(jsonscan.KeyEcho)) && reqbody.Member(doc, "logprobs") != nil:
		// The engine that computes the prompt also scores it. A decode engine that receives the
		// prompt's KV returns uninitialised memory instead of scores (read in vLLM 0.22 to 0.29) or
		// computes the prompt again (0.32).
		return "prompt_logprobs"
	case wantsNoOutput(kind, doc):
		return "no_output" // engines refuse the request, so no prefill worker should keep blocks for it
	case kind == front.ResponsesAPI && (doc.Has(jsonscan.KeyPreviousResponseID) || doc.Bool(jsonscan.KeyBackground)):
		// The engine that answered the previous turn has stored the response. A background request
		// returns at once, without a handle.
		return "stored_response"
	}
	return ""
}

// disaggregated reports whether requests of a pool have two legs. It counts members and not ready
// ranks: without a ready prefill worker the request falls back to one leg
// (Plan.fallBackWithoutPrefill), which metrics and explain records show, or waits for a worker. If
// decode workers cannot prefill, their presence alone makes a pool disaggregated.
func disaggregated(pool *fleet.Pool, m *modelPD) bool {
	if m.family == nil {
		return false
	}
	return pool.Members[worker.Prefill] > 0 ||
		m.traits.NoDecodeOnly && pool.Members[worker.Decode] > 0 && pool.Members[worker.Aggregated] == 0
}

// wholeRanks returns the candidates for a request that one rank runs as a whole: the aggregated
// workers, or the decode workers if the pool has none, since those can also prefill.
func wholeRanks(pool *fleet.Pool) []*worker.Rank {
	if pool.Members[worker.Aggregated] > 0 {
		return pool.Aggregated
	}
	return pool.Decode
}

// decodeRanks returns the candidates of the decode leg: the decode workers, or the aggregated
// workers (kv_both in vLLM) if the pool has no decode workers and such engines accept a hand-over.
func decodeRanks(pool *fleet.Pool, t family.Traits) []*worker.Rank {
	if pool.Members[worker.Decode] > 0 || t.NoDecodeOnly {
		return pool.Decode
	}
	return pool.Aggregated
}

// anyRank returns every ready rank. It serves endpoints that do not use the KV cache.
func anyRank(pool *fleet.Pool) []*worker.Rank {
	switch {
	case len(pool.Prefill) == 0 && len(pool.Decode) == 0:
		return pool.Aggregated
	case len(pool.Aggregated) == 0 && len(pool.Prefill) == 0:
		return pool.Decode
	}
	all := make([]*worker.Rank, 0, len(pool.Prefill)+len(pool.Decode)+len(pool.Aggregated))
	all = append(all, pool.Aggregated...)
	all = append(all, pool.Decode...)
	return append(all, pool.Prefill...)
}

// withLabel returns the ranks whose worker has one of the labels. Without labels it returns ranks
// itself.
func withLabel(ranks []*worker.Rank, labels []string) []*worker.Rank {
	if len(labels) == 0 {
		return ranks
	}
	var matching []*worker.Rank
	for _, r := range ranks {
		if hasAny(r.Worker.Spec.Labels, labels) {
			matching = append(matching, r)
		}
	}
	return matching
}

func hasAny(have, want []string) bool {
	for _, w := range want {
		for _, h := range have {
			if h == w {
				return true
			}
		}
	}
	return false
}

// filterRequest plans one rank for the whole request if the family cannot hand the request over. It
// answers with an error and returns false if the configuration forbids that.
func (q *request) filterRequest() bool {
	filter, ok := q.plan.Family.(family.RequestFilter)
	if !ok {
		return true
	}
	unsupported := filter.Unsupported(&family.Request{Kind: q.req.Endpoint.Kind, Doc: &q.req.Doc, Tokens: q.prompt.Tokens, Decode: q.plan.Decode})
	if unsupported == "" {
		return true
	}
	if !q.pd.DecodeOnlyFallback {
		code := front.BadField
		if unsupported == "no_tokens" {
			code = front.UpstreamFailed // the client cannot avoid it
		}
		q.refuse(code, "family "+q.plan.Family.Name()+" cannot hand this request over ("+unsupported+"), and pd.decode_only_fallback is off", 0)
		return false
	}
	q.plan.useDecodeOnly(unsupported)
	return true
}
