package pd

import (
	"bytes"
	"fmt"
	"strconv"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
)

// storage is the hand-over through a KV store that all engines share (LMCache,
// or any connector that needs no handle): prefill fills the store, decode finds
// the blocks there by their hashes. There is nothing to hand over and nothing to
// wait for but prefill's answer.
//
// With a threshold decode goes first: it is sent cache_hit_threshold, and an
// engine that knows the member (llm-d's vLLM) declines with the finish reason
// "cache_threshold" when it holds a smaller share of the prompt. One that does
// not know it does the whole request.
type storage struct {
	threshold []byte // JSON number; nil: prefill first
}

// Name implements Family.
func (storage) Name() string { return "storage" }

// configure implements configured.
func (storage) configure(pd *config.PD) Family {
	if pd.CacheHitThreshold <= 0 {
		return storage{}
	}
	return storage{threshold: strconv.AppendFloat(nil, pd.CacheHitThreshold, 'g', -1, 64)}
}

// Traits implements Family. The store serves any number of reads.
func (s storage) Traits() Traits {
	kinds := vllmKinds
	if s.threshold != nil {
		// Elsewhere the reason for the end would stand in another place.
		kinds = kindsOf(front.Chat, front.Completions)
	}
	return Traits{Kinds: kinds, Batches: true, NoLease: true}
}

// Order implements Family. Several prompts or choices decline each by itself, which a
// stream shows too late: behind what others have told.
func (s storage) Order(p *Handover) Order {
	if s.threshold != nil && !(p.Stream && multiHandoverReason(p.Kind, p.Doc) != "") {
		return DecodeFirst
	}
	return PrefillFirst
}

// Prefill implements Family: one token of one choice.
func (s storage) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.limitToOneToken(p)
	leg.removeThinkingBudget(p)
	leg.Replace(jsonscan.KeyN, jsonOne)
	leg.Replace(jsonscan.KeyBestOf, jsonOne)
	leg.Replace(jsonscan.KeySamplingN, jsonOne)
	s.neverDecline(leg)
}

// Handle implements Family: there is none; an answer is all it takes.
func (storage) Handle(_ *Handover, body []byte) ([]byte, error) {
	if v, _, err := jsonscan.Find(body, "error"); err != nil || v.Kind > jsonscan.Null {
		return nil, fmt.Errorf("%w: the prefill response is no answer", ErrIncompleteHandle)
	}
	return body[:0:0], nil
}

// Decode implements Family: the client's body, on trial with the threshold.
func (s storage) Decode(leg *LegRequest, p *Handover) {
	if p.Trial {
		leg.Set(jsonscan.KeyCacheHitThreshold, s.threshold)
		return
	}
	s.neverDecline(leg)
}

// neverDecline keeps an engine from declining.
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

// Declined implements Trier. It looks at raw bytes, an answer or the beginning
// of a stream in whatever framing: a quote inside of a string is escaped there,
// so no text can look like the member. A stream is undecided until it has an
// event beyond the one that tells the role.
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
