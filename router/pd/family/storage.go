package family

import (
	"bytes"
	"fmt"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
	"sluice/router/pd/reqbody"
)

// storage is the hand-over through a KV store that all engines share (LMCache, or any connector
// that needs no handle). Prefill fills the store, and decode finds the blocks there by their
// hashes. The router passes nothing between the legs and waits only for prefill's response.
//
// With a threshold the decode leg goes first and carries cache_hit_threshold. An engine that
// supports the member (llm-d's vLLM) declines with the finish reason "cache_threshold" if it has
// cached a smaller share of the prompt. Other engines run the whole request.
type storage struct {
	threshold []byte // JSON number; nil if prefill goes first
}

// Name implements Family.
func (storage) Name() string { return "storage" }

// configure implements configurableFamily.
func (storage) configure(pd *config.PD) Family {
	if pd.CacheHitThreshold <= 0 {
		return storage{}
	}
	return storage{threshold: strconv.AppendFloat(nil, pd.CacheHitThreshold, 'g', -1, 64)}
}

// Traits implements Family. The store serves any number of reads, so there is no lease.
func (s storage) Traits() Traits {
	kinds := vllmKinds
	if s.threshold != nil {
		// Declined knows the place of the finish reason on these endpoints only.
		kinds = kindsOf(front.Chat, front.Completions)
	}
	return Traits{Kinds: kinds, Batches: true, NoLease: true, PromptIDs: true}
}

// Order implements Family. Each of several prompts or choices declines on its own. A stream would
// show this only after the client has received output of the others, so such streams prefill first.
func (s storage) Order(p *Handover) Order {
	if s.threshold != nil && !(p.Stream && reqbody.SeveralSequences(p.Kind, p.Doc) != "") {
		return DecodeFirst
	}
	return PrefillFirst
}

// Prefill implements Family: one token of one choice.
func (s storage) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.limitToOneToken(p)
	leg.removeThinkingBudget(p)
	leg.setPromptIDsAlone(p, p.Prefill)
	leg.Replace(jsonscan.KeyN, jsonOne)
	leg.Replace(jsonscan.KeyBestOf, jsonOne)
	leg.Replace(jsonscan.KeySamplingN, jsonOne)
	s.neverDecline(leg)
}

// Handle implements Family. The handle is empty; any response without an error suffices.
func (storage) Handle(_ *Handover, body []byte) ([]byte, error) {
	if v, _, err := jsonscan.Find(body, "error"); err != nil || v.Kind > jsonscan.Null {
		return nil, fmt.Errorf("%w: the prefill response is an error or not JSON", ErrIncompleteHandle)
	}
	return body[:0:0], nil
}

// Decode implements Family. A trial carries the threshold.
func (s storage) Decode(leg *LegRequest, p *Handover) {
	if p.Trial {
		leg.Set(jsonscan.KeyCacheHitThreshold, s.threshold)
		return
	}
	s.neverDecline(leg)
}

// neverDecline prevents the engine from declining the request.
func (s storage) neverDecline(leg *LegRequest) {
	if s.threshold != nil {
		leg.Set(jsonscan.KeyCacheHitThreshold, jsonZero)
	} else {
		leg.Replace(jsonscan.KeyCacheHitThreshold, jsonZero)
	}
}

var (
	jsonZero     = []byte("0")
	finishReason = []byte(`"finish_reason":`)
	cacheReason  = []byte(`"cache_threshold"`)
	roleMember   = []byte(`"role"`)
	eventEnd     = []byte("\n\n")
)

// Declined implements Decliner. It searches the raw bytes of a response or of the beginning of a
// stream, independent of the framing. Quotes inside JSON strings are escaped, so generated text
// cannot match the member. A stream is undecided until it has an event after the one with the role.
func (storage) Declined(answer []byte) (declined, more bool) {
	for rest := answer; ; {
		i := bytes.Index(rest, finishReason)
		if i < 0 {
			break
		}
		rest = bytes.TrimLeft(rest[i+len(finishReason):], " ")
		if bytes.HasPrefix(rest, cacheReason) {
			return true, false
		}
	}
	need := 1
	if bytes.Contains(answer, roleMember) {
		need = 2
	}
	return false, bytes.Count(answer, eventEnd) < need
}
