package pd

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// RequestFilter is a Family that cannot hand over every request of its Kinds.
type RequestFilter interface {
	// Unsupported returns one word for why one worker must run the request, "" if the family can
	// hand the request over.
	Unsupported(r *Request) string
}

// Request is a client's request before the choice of ranks, as a RequestFilter sees it.
type Request struct {
	Kind   front.Kind
	Doc    *jsonscan.Doc
	Tokens []uint32       // the prompt's token ids; empty if unknown
	Decode []*worker.Rank // the candidates of the decode leg
}

// filterRequest plans one rank for the whole request if the family cannot hand the request over. It
// answers with an error and returns false if the configuration forbids that.
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
			code = front.UpstreamFailed // the client cannot avoid it
		}
		q.refuse(code, "family "+q.plan.Family.Name()+" cannot hand this request over ("+unsupported+"), and pd.decode_only_fallback is off", 0)
		return false
	}
	q.plan.usePlainDecode(unsupported)
	return true
}
