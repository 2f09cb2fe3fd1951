package disagg

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// Picky is a Family that cannot hand over every request of its Kinds.
type Picky interface {
	// Unfit says in one word why a request is to run on one worker, "" when it
	// can be handed over.
	Unfit(r *Request) string
}

// Request is a client's request before ranks are chosen, as a Picky sees it.
type Request struct {
	Kind   front.Kind
	Doc    *jsonscan.Doc
	Tokens []uint32       // the prompt's ids; empty when not known
	Decode []*worker.Rank // the candidates
}

// fit makes the plan one for a single worker where the family cannot hand the
// request over. Where the configuration wants no such thing it answers and
// returns false.
func (q *request) fit() bool {
	picky, ok := q.plan.Family.(Picky)
	if !ok {
		return true
	}
	why := picky.Unfit(&Request{Kind: q.x.Endpoint.Kind, Doc: &q.x.Doc, Tokens: q.prompt.Tokens, Decode: q.plan.Decode})
	if why == "" {
		return true
	}
	if !q.pd.PlainDecode {
		reason := front.BadField
		if why == "no_tokens" {
			reason = front.UpstreamFailed // the client cannot help it
		}
		q.refuse(reason, "family "+q.plan.Family.Name()+" cannot hand this request over ("+why+"), and pd.plain_decode is off", 0)
		return false
	}
	q.plan.decodeAlone(why)
	return true
}
