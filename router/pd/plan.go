package pd

import (
	"bytes"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// Plan says which legs a request has and who may run them. Ranks are chosen
// when the plan is run, so that a retry sees the load of its own moment; the
// legs' order is the Family's to say, for it may depend on the ranks.
type Plan struct {
	// Family of the hand-over; nil when one rank does the whole request.
	Family Family
	Traits Traits // the Family's
	// Prefill and Decode are the candidates of the two legs.
	Prefill, Decode []*worker.Rank
	// Whole are the candidates of a request run on one rank.
	Whole []*worker.Rank
	// Why one rank does it all although the pool could disaggregate; "" when
	// it could not, or does.
	Reason   string
	wholeSet wholeSet // whom Whole lists
	// lacks: one rank does it all for want of a healthy prefill worker.
	noPrefillWorker bool
	// Unfit: the pool has legs only, and none of them can take this request.
	Unservable bool
}

// wholeSet says which ranks of a pool may run a whole request.
type wholeSet uint8

const (
	wholeDefault    wholeSet = iota // wholeRanks
	wholeAny                        // anyRank
	wholeDecode                     // those of the decode leg
	wholeAggregated                 // the aggregated ones alone
)

// planFor makes the plan of a request over a pool.
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
		Prefill: withLabel(pool.Prefill, m.pd.PrefillLabel),
		Decode:  withLabel(decodeRanks(pool, m.traits), m.pd.DecodeLabel),
	}
	reason := ""
	if !m.traits.Kinds.Has(ep.Kind) {
		reason = "endpoint"
	} else if !m.traits.Batches {
		reason = multiHandoverReason(ep.Kind, doc)
	}
	if reason == "" && (!m.traits.NoPlainDecode || pool.Members[worker.Aggregated] > 0) {
		reason = singleEngineReason(ep.Kind, doc)
	}
	if reason == "" {
		return p
	}
	p.usePlainDecode(reason)
	if m.traits.NoPlainDecode {
		p.Whole, p.wholeSet = pool.Aggregated, wholeAggregated
		p.Unservable = pool.Members[worker.Aggregated] == 0
	}
	return p
}

// reasonNoPrefill is the Why of a plan that lacks a healthy prefill worker.
const reasonNoPrefill = "no_prefill_worker"

// fallBackWithoutPrefill has one rank do the whole request at once where no prefill worker is
// healthy, if the configuration lets it and the family's engines can.
func (p *Plan) fallBackWithoutPrefill(pool *fleet.Pool, plainDecode bool) {
	if p.Family == nil || len(p.Prefill) > 0 || !plainDecode {
		return
	}
	switch {
	case !p.Traits.NoPlainDecode && len(p.Decode) > 0:
		p.usePlainDecode(reasonNoPrefill)
	case p.Traits.NoPlainDecode && len(pool.Aggregated) > 0:
		p.usePlainDecode(reasonNoPrefill)
		p.Whole, p.wholeSet = pool.Aggregated, wholeAggregated
	}
	p.noPrefillWorker = p.Family == nil
}

// usePlainDecode has one decode rank do the whole request; why is one word for the reason.
func (p *Plan) usePlainDecode(reason string) {
	p.Whole, p.Family, p.Reason, p.wholeSet = p.Decode, nil, reason, wholeDecode
}

// multiHandoverReason says why a request is more than one hand-over can serve, "" when not.
func multiHandoverReason(kind front.Kind, doc *jsonscan.Doc) string {
	switch {
	case kind == front.Completions && isMultiPrompt(doc.Raw(jsonscan.KeyPrompt)):
		// One handle names the blocks of one prompt.
		return "batch_prompt"
	case wantsSeveral(doc.Raw(jsonscan.KeyN)) || wantsSeveral(doc.Raw(jsonscan.KeySamplingN)) || wantsSeveral(doc.Raw(jsonscan.KeyBestOf)):
		// One handle is good for one read: vLLM 0.32 reads it once for each
		// choice, and prefill takes its blocks back after the first.
		return "many_choices"
	case doc.Bool(jsonscan.KeyUseBeamSearch):
		// vLLM 0.32 decodes beams without looking at the handle, whose blocks
		// then stay pinned for the whole lease.
		return "beam_search"
	}
	return ""
}

// singleEngineReason says why a request is one engine's, whatever the family, "" when not.
func singleEngineReason(kind front.Kind, doc *jsonscan.Doc) string {
	switch {
	case doc.Has(jsonscan.KeyPromptLogprobs), doc.Has(jsonscan.KeySamplingPromptLogprobs),
		kind == front.Completions && isSet(doc.Raw(jsonscan.KeyEcho)) && findMember(doc, "logprobs") != nil:
		// Scores of a prompt are made where it is computed. A decode engine that was given
		// its KV answers with memory that nothing was written to (read in vLLM 0.22 to
		// 0.29), or computes it once more (0.32).
		return "prompt_logprobs"
	case wantsNoOutput(kind, doc):
		return "no_output" // engines refuse it: no prefill worker is to hold blocks for that
	case kind == front.ResponsesAPI && (doc.Has(jsonscan.KeyPreviousResponseID) || doc.Bool(jsonscan.KeyBackground)):
		// The engine that answered the last turn keeps it; one in the background answers
		// at once, without a handle.
		return "stored_response"
	}
	return ""
}

// wantsSeveral says whether a value of n asks for anything but one choice; what is
// no number is for the engine to refuse.
func wantsSeveral(n []byte) bool {
	return len(n) > 0 && !bytes.Equal(n, jsonOne) && string(n) != "null"
}

// disaggregated says whether the members of a pool ask for two legs. Members, not
// Ready ranks: without a healthy prefill worker the request falls back to one leg
// (Plan.fallBackWithoutPrefill), which is counted and shown, or waits for one. Where decode workers cannot prefill they alone ask for it.
func disaggregated(pool *fleet.Pool, m *modelPD) bool {
	if m.family == nil {
		return false
	}
	return pool.Members[worker.Prefill] > 0 ||
		m.traits.NoPlainDecode && pool.Members[worker.Decode] > 0 && pool.Members[worker.Aggregated] == 0
}

// wholeRanks are the candidates of a request that one rank runs from end to
// end: aggregated workers, or, where a pool has none, its decode ones, which can
// prefill for themselves.
func wholeRanks(pool *fleet.Pool) []*worker.Rank {
	if pool.Members[worker.Aggregated] > 0 {
		return pool.Aggregated
	}
	return pool.Decode
}

// decodeRanks are the candidates of the decode leg: decode workers, or, where a
// pool has none, its aggregated ones (kv_both, in vLLM's words), where such
// engines can take a hand-over.
func decodeRanks(pool *fleet.Pool, t Traits) []*worker.Rank {
	if pool.Members[worker.Decode] > 0 || t.NoPlainDecode {
		return pool.Decode
	}
	return pool.Aggregated
}

// anyRank lists every ready rank, for endpoints without a KV cache behind them.
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

// withLabel keeps the ranks whose worker carries one of the labels; no labels
// asked for keeps all, without copying.
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

// isMultiPrompt says whether a completions prompt holds more than one prompt: a list
// of strings or of lists with a second element. A list of ids is one prompt.
func isMultiPrompt(prompt []byte) bool { return isPromptList(prompt) && countElements(prompt) > 1 }

// isPromptList says whether a prompt is a list of prompts, be it of one.
func isPromptList(prompt []byte) bool {
	if len(prompt) == 0 || prompt[0] != '[' {
		return false
	}
	inner := prompt[1:]
	for len(inner) > 0 && (inner[0] == ' ' || inner[0] == '\n' || inner[0] == '\t' || inner[0] == '\r') {
		inner = inner[1:]
	}
	return len(inner) > 0 && (inner[0] == '"' || inner[0] == '[')
}

// countElements counts the elements of a well-formed JSON array.
func countElements(array []byte) int {
	depth, commas, inString, any := 0, 0, false, false
	for i := 0; i < len(array); i++ {
		c := array[i]
		switch {
		case inString:
			if c == '\\' {
				i++
			} else if c == '"' {
				inString = false
			}
		case c == '"':
			inString, any = true, true
		case c == '[' || c == '{':
			if depth > 0 {
				any = true
			}
			depth++
		case c == ']' || c == '}':
			depth--
		case c == ',' && depth == 1:
			commas++
		case depth == 1 && c > ' ':
			any = true
		}
	}
	if !any {
		return 0
	}
	return commas + 1
}
