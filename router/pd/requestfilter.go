package pd

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// RequestFilter is a Family that cannot hand over every request of its Kinds.
type RequestFilter interface {
	// Unfit says in one word why a request is to run on one worker, "" when it
	// can be handed over.
	Unsupported(r *Request) string
}

// Request is a client's request before ranks are chosen, as a Picky sees it.
type Request struct {
	Kind   front.Kind
	Doc    *jsonscan.Doc
	Tokens []uint32       // the prompt's ids; empty when not known
	Decode []*worker.Rank // the candidates
}

// filterRequest makes the plan one for a single worker where the family cannot hand the
// request over. Where the configuration wants no such thing it answers and
// returns false.
func (q *request) filterRequest() bool {
	filter, ok := q.plan.Family.(RequestFilter)
	if !ok {
		return true
	}
	unsupported := filter.Unsupported(&Request{Kind: q.x.Endpoint.Kind, Doc: &q.x.Doc, Tokens: q.prompt.Tokens, Decode: q.plan.Decode})
	if unsupported == "" {
		return true
	}
	if !q.pd.PlainDecode {
		code := front.BadField
		if unsupported == "no_tokens" {
			code = front.UpstreamFailed // the client cannot help it
		}
		q.refuse(code, "family "+q.plan.Family.Name()+" cannot hand this request over ("+unsupported+"), and pd.decode_only_fallback is off", 0)
		return false
	}
	q.plan.usePlainDecode(unsupported)
	return true
}
