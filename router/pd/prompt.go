package pd

import (
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/pd/reqbody"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

const (
	// approxBlockTokens is the block size of the approximate index in tokens. approxBlockBytes is
	// the block size, in bytes, if only the prompt's text is known; it holds about as many tokens.
	approxBlockTokens = 16
	approxBlockBytes  = 64
)

// resolvePrompt finds the prompt's tokens and the part of the prompt that each rank has cached. It
// cannot fail: without tokens and text the scheduler chooses by load alone.
func (q *request) resolvePrompt() {
	if !q.req.Endpoint.Disaggregable {
		q.approx.Reset() // it holds another request's matches
		return
	}
	if q.isPredetermined() {
		q.estimatePrompt()
		return
	}
	if !q.accountPrompt() {
		q.estimatePrompt()
		q.prompt.Err = "limits.memory_budget is exhausted"
		return
	}
	q.tokenizePrompt()
	q.applyHintedTokens()
	q.salt = q.promptSalt()
	q.lookUpOverlap(q.req.Received)
}

// lookUpOverlap finds the part of the prompt that each rank has cached.
func (q *request) lookUpOverlap(now time.Time) {
	salt, opt := q.salt, q.settings
	if len(q.prompt.Tokens) > 0 {
		c := q.poolSummary(now)
		q.keys = q.blockSeqs(q.keys[:0], salt, approxBlockTokens)
		q.overlaps = q.overlaps[:0]
		if len(c.baseModels) > 1 && q.resumption == nil { // the salt of a resumption is that of the original request
			for _, base := range c.baseModels {
				if altSalt := q.saltForBase(base); altSalt != salt {
					for _, size := range c.blockSizes {
						q.findOverlap(altSalt, size)
					}
				}
			}
		}
		for _, size := range c.blockSizes {
			q.findOverlap(salt, size)
		}
		if !c.needsApprox {
			q.approx.Reset()
			return
		}
	} else {
		q.keys = blockhash.TextSeqs(q.keys[:0], salt, q.prompt.Text, approxBlockBytes)
	}
	q.approx.Reset()
	// Dependent loads would take one cache miss after the other; prefetching overlaps them.
	q.prefetched = opt.Scheduler.Prefetch(q.id, q.keys) + opt.Approx.Prefetch(q.keys)
	opt.Approx.Find(q.keys, &q.approx)
}

// promptSalt returns the salt that separates prompts that share tokens but not KV. The requested
// model may be an adapter or an alias, whereas engine events name the base model and the adapter
// separately.
func (q *request) promptSalt() blockhash.Salt {
	if r := q.firstRank(); r != nil {
		return q.saltForBase(r.Worker.Info().Base)
	}
	return q.saltForBase("")
}

// saltForBase returns the salt of prompts on engines that list base as their first model name.
func (q *request) saltForBase(base string) blockhash.Salt {
	adapter := ""
	if base == "" {
		base = q.pool.Model
	}
	if r := q.firstRank(); r != nil && slices.Contains(r.Worker.Info().Adapters, q.pool.Model) {
		adapter = q.pool.Model
	}
	return blockhash.NewSalt(base, adapter, string(q.req.Doc.String(jsonscan.KeyCacheSalt)))
}

// firstRank returns a rank that is the same for all requests of a pool, whichever ranks they may
// use.
func (q *request) firstRank() *worker.Rank {
	for _, ranks := range [...][]*worker.Rank{q.pool.Aggregated, q.pool.Prefill, q.pool.Decode} {
		if len(ranks) > 0 {
			return ranks[0]
		}
	}
	return nil
}

// maxUnaccountedBody is the body size in bytes up to which the data derived from a prompt does not
// count against the memory budget.
const maxUnaccountedBody = 64 << 10

// accountPrompt charges the memory budget for the data derived from a long prompt: its token ids,
// their hashes and the engine's tokenize response. It returns false if the budget is exhausted; the
// scheduler then chooses by load alone.
func (q *request) accountPrompt() bool {
	if len(q.req.Doc.Body) <= maxUnaccountedBody {
		return true
	}
	kind := tokenizeKind(q.req.Endpoint.Kind)
	return q.derived.Acquire(q.settings.Tokenizer.EstimateMemory(kind, &q.req.Doc))
}

// tokenizePrompt gets the prompt's token ids from the request or from the tokenizer. It passes the
// tokenizer a ready rank that it may ask.
func (q *request) tokenizePrompt() {
	kind := tokenizeKind(q.req.Endpoint.Kind)
	if q.settings.Tokenizer.FromRequestIDs(&q.prompt, kind, &q.req.Doc) {
		return
	}
	var call upstream.Call
	var ep *upstream.Endpoint
	r := q.tokenizerRank()
	if r != nil {
		ep = q.settings.Fleet.Endpoint(r)
	}
	if q.tokenizeInProcess(kind, r, ep) {
		return
	}
	if r != nil {
		q.x.OnClientGone(call.Cancel)
		defer q.x.OnClientGone(nil)
	}
	server := tokenize.VLLM
	if r != nil && r.Worker.Info().Engine == "sglang" {
		server = tokenize.SGLang
	}
	q.settings.Tokenizer.PromptOf(&q.prompt, kind, &q.req.Doc, server, ep, &call)
}

// tokenizeInProcess finds the prompt's ids without an engine, if the model's tokenizer is loaded.
// It knows how vLLM renders; other engines' prompts are left to them.
func (q *request) tokenizeInProcess(kind tokenize.Kind, r *worker.Rank, ep *upstream.Endpoint) bool {
	if r == nil || r.Worker.Info().Engine != "vllm" {
		return false
	}
	query := tokenize.NativeQuery{
		Model: q.pool.Model, Kind: kind, Doc: &q.req.Doc, Scope: uint64(q.promptSalt()),
		Endpoint: ep, Incarnation: q.settings.Fleet.Incarnation(r), Contexts: q,
	}
	if info := r.Worker.Info(); !slices.Contains(info.Adapters, q.pool.Model) {
		query.Base = info.Base
	}
	return q.settings.Tokenizer.PromptInProcess(&q.prompt, &query)
}

// tokenizerRank rotates over the candidates, prefill first, so that no single worker tokenizes all
// prompts. It skips engines that are in back-off after a failed tokenize call.
func (q *request) tokenizerRank() *worker.Rank {
	ranks := q.plan.Prefill
	if q.plan.Family == nil {
		ranks = q.plan.Whole
	}
	if len(ranks) == 0 {
		return nil
	}
	const maxLooks = 4
	first := int(q.r.nextTokenizer.Add(1))
	for i := range min(maxLooks, len(ranks)) {
		if r := ranks[(first+i)%len(ranks)]; q.settings.Tokenizer.Available(q.settings.Fleet.Endpoint(r)) {
			return r
		}
	}
	return ranks[first%len(ranks)]
}

func tokenizeKind(k front.Kind) tokenize.Kind {
	switch k {
	case front.Chat:
		return tokenize.Chat
	case front.Completions:
		return tokenize.Completion
	case front.ResponsesAPI:
		return tokenize.Responses
	case front.Messages:
		return tokenize.Messages
	case front.Generate:
		return tokenize.Generate
	case front.NativeGenerate:
		return tokenize.Native
	}
	return tokenize.Other
}

// findOverlap looks up the prompt in blocks of one size. A fleet with one kind of engine has one
// size.
func (q *request) findOverlap(salt blockhash.Salt, size int) {
	if len(q.overlaps) < cap(q.overlaps) {
		q.overlaps = q.overlaps[:len(q.overlaps)+1] // reuses the memory of its Overlap
	} else {
		q.overlaps = append(q.overlaps, schedule.SizedOverlap{})
	}
	s := &q.overlaps[len(q.overlaps)-1]
	s.BlockSize = size
	q.indexKeys = q.keys
	if size != approxBlockTokens || salt != q.salt {
		q.keyBuf = q.blockSeqs(q.keyBuf[:0], salt, size)
		q.indexKeys = q.keyBuf
	}
	s.Overlap.Reset()
	q.settings.Index.Find(q.indexKeys, &s.Overlap)
}

// choose asks the scheduler for the rank of one leg and records the choice.
func (q *request) choose(leg schedule.LegKind, candidates []*worker.Rank) (schedule.Choice, bool) {
	q.query = q.newQuery(leg, candidates)
	q.query.Reservation = q.reservations.acquire()
	if leg == schedule.DecodeLeg {
		q.query.TransferRates = q.settings.Transfers.RatesFrom(q.handover.Prefill)
	}
	began := q.entryTime()
	c, ok := q.chooseBelowLimits(&q.query)
	q.addEntryChoice(leg, c.Rank, began)
	q.recordChosenRank(leg, c.Rank)
	q.publishChoice(c, ok)
	return c, ok
}

// adoptChoice records a choice that the scheduler made without choose.
func (q *request) adoptChoice(leg schedule.LegKind, candidates []*worker.Rank, c schedule.Choice) {
	began := q.entryTime()
	q.query = q.newQuery(leg, candidates)
	q.recordChosenRank(leg, c.Rank)
	q.publishChoice(c, true)
	q.addEntryChoice(leg, c.Rank, began)
}

// publishChoice passes a choice to the approximate index and the recorder.
func (q *request) publishChoice(c schedule.Choice, ok bool) {
	if keys := q.approxKeys(c.Rank); ok && len(keys) > 0 {
		q.settings.Approx.Observe(c.Rank.Slot, keys)
	}
	q.r.forgetIfRemoved(c.Rank)
	q.record(c)
}

// newQuery returns the scheduler query for a leg.
func (q *request) newQuery(leg schedule.LegKind, candidates []*worker.Rank) schedule.Query {
	query := schedule.Query{
		Leg:               leg,
		Candidates:        candidates,
		Overlaps:          q.overlaps,
		Approx:            &q.approx,
		ApproxBlockTokens: approxBlockTokens,
		PromptTokens:      q.prompt.Count + q.otherChoiceTokens,
		Source:            q.prompt.Source,
		MaxTokens:         q.maxTokens,
		Keys:              q.keys,
		KeyTokens:         approxBlockTokens,
		Excluded:          q.excluded,
		RequestID:         q.id,
		Attempt:           q.attemptsBefore + q.attempt,
		Unseen:            !q.stream,
	}
	q.sessionHint(&query)
	if q.expectedOutput > 0 {
		query.MaxTokens = q.expectedOutput
	}
	if q.tuning != nil {
		query.OverlapWeight, query.Temperature = q.tuning.OverlapWeight, q.tuning.Temperature
	}
	return query
}

// record passes a choice to the recorder, with the prompt's blocks of the size that was looked up
// last.
func (q *request) record(c schedule.Choice) {
	switch n := len(q.overlaps); {
	case q.settings.Recorder == nil:
	case n > 0:
		q.settings.Recorder.RecordChoice(&q.query, c, q.indexKeys, q.overlaps[n-1].BlockSize, true)
	default:
		q.settings.Recorder.RecordChoice(&q.query, c, q.keys, approxBlockTokens, false)
	}
}

// approxKeys returns the blocks that the approximate index should expect rank r to cache. It
// returns all of the prompt's blocks if the rank has no live event feed, or if the prompt's tokens
// are unknown, since events name blocks of tokens only. It returns nil if the engine's events
// report its cache or the engine caches nothing.
func (q *request) approxKeys(r *worker.Rank) []blockhash.Seq {
	if r == nil || !usesApprox(r) && len(q.prompt.Tokens) > 0 || !r.MayCache() {
		return nil
	}
	return q.keys
}

// usesApprox reports whether the router predicts a rank's cache from its own choices, because the
// rank's event feed is not live. The engine may send no events, or only HTTP may reach it.
func usesApprox(r *worker.Rank) bool {
	return worker.FeedState(r.Feed.Load()) != worker.FeedLive
}

// reconfirmAfter is the time after a choice from which learnCached confirms correctly predicted
// blocks again.
const reconfirmAfter = 5 * time.Second

// learnCached compares the cached tokens that an engine reported with the predicted ones and
// corrects the approximate index. keys are those that approxKeys returned. cached is -1 if the
// engine reported nothing. elapsed is the time since the choice.
//
// If both numbers are equal, the index needs no correction. After reconfirmAfter learnCached
// confirms the blocks anyway, which renews their age.
func (r *Runner) learnCached(rank *worker.Rank, keys []blockhash.Seq, tokens, predicted, cached int, elapsed time.Duration) {
	r.options().Observer.Cached(rank.ID, tokens, predicted, cached)
	if rank.RecordCacheHit(predicted, cached) {
		r.options().Log.Info("the engine reports no cached tokens where hits were predicted; no hits are predicted until it reports some", "rank", rank.ID.String())
		go func() { // must not block a stream's event loop
			r.options().Scheduler.Forget(rank.Slot)
			r.options().Approx.Clear(rank.Slot)
		}()
	}
	predictedBlocks, cachedBlocks := predicted/approxBlockTokens, cached/approxBlockTokens
	if cached >= 0 && len(keys) > 0 && (cachedBlocks != predictedBlocks || cachedBlocks > 0 && elapsed > reconfirmAfter) {
		r.options().Approx.Confirm(rank.Slot, keys, cachedBlocks)
	}
	r.forgetIfRemoved(rank)
}

// forgetIfRemoved clears a rank's data again if its worker has been removed. Call it after
// recording anything under the rank's slot number: the cleanup of the removed worker may have run
// before, and the slot's next rank would inherit the data.
func (r *Runner) forgetIfRemoved(rank *worker.Rank) {
	if rank == nil || !rank.Removed() {
		return
	}
	go func() { // must not block a stream's event loop
		r.options().Scheduler.Forget(rank.Slot)
		r.options().Approx.Clear(rank.Slot)
	}()
}

// rawTokens returns the prompt's token ids as they appear in a completions body, a JSON array of
// numbers. It returns nil if the ids have another source.
func (q *request) rawTokens() []byte {
	if q.req.Endpoint.Kind != front.Completions || q.prompt.Source != tokenize.FromRequest {
		return nil
	}
	if h, ok := q.req.Attached.(*Hints); ok && len(h.Tokens) > 0 {
		return nil
	}
	return reqbody.NumberArray(q.req.Doc.Raw(jsonscan.KeyPrompt))
}
