package pd

import (
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

const (
	// approxBlockTokens is the grain of the approximate index where tokens are
	// known; approxBlockBytes the grain over text, about as many tokens.
	approxBlockTokens = 16
	approxBlockBytes  = 64
)

// resolvePrompt finds the prompt's tokens and what every rank holds of them. It
// cannot fail: with nothing found, the choice goes by load alone.
func (q *request) resolvePrompt() {
	if !q.x.Endpoint.Disaggregable {
		q.approx.Reset() // what another request found
		return
	}
	if q.isPredetermined() {
		q.estimatePrompt()
		return
	}
	if !q.accountPrompt() {
		q.estimatePrompt()
		q.prompt.Err = "the memory for bodies (limits.memory_budget) is spent"
		return
	}
	q.tokenizePrompt()
	q.applyHintedTokens()
	q.salt = q.promptSalt()
	q.lookUpOverlap(q.x.Received)
}

// lookUpOverlap finds what every rank holds of the prompt.
func (q *request) lookUpOverlap(now time.Time) {
	salt, opt := q.salt, q.settings
	if len(q.prompt.Tokens) > 0 {
		c := q.poolSummary(now)
		q.keys = q.blockSeqs(q.keys[:0], salt, approxBlockTokens)
		q.overlaps = q.overlaps[:0]
		if len(c.baseModels) > 1 && q.resumption == nil { // else the salt is another request's
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
	// Loads that wait for each other would take one miss of the caches after the other.
	q.prefetched = opt.Scheduler.Prefetch(q.id, q.keys) + opt.Approx.Prefetch(q.keys)
	opt.Approx.Find(q.keys, &q.approx)
}

// promptSalt separates prompts that share tokens but not KV. The model asked for may
// be an adapter or an alias: engines' events speak of the base model and name
// the adapter apart.
func (q *request) promptSalt() blockhash.Salt {
	if r := q.firstRank(); r != nil {
		return q.saltForBase(r.Worker.Info().Base)
	}
	return q.saltForBase("")
}

// saltForBase is the salt of prompts on engines that list base as their model's first name.
func (q *request) saltForBase(base string) blockhash.Salt {
	adapter := ""
	if base == "" {
		base = q.pool.Model
	}
	if r := q.firstRank(); r != nil && slices.Contains(r.Worker.Info().Adapters, q.pool.Model) {
		adapter = q.pool.Model
	}
	return blockhash.NewSalt(base, adapter, string(q.x.Doc.String(jsonscan.KeyCacheSalt, nil)))
}

// firstRank is the same for all requests of a pool, whomever each may go to: guesses
// are salted by its model's name.
func (q *request) firstRank() *worker.Rank {
	for _, ranks := range [...][]*worker.Rank{q.pool.Aggregated, q.pool.Prefill, q.pool.Decode} {
		if len(ranks) > 0 {
			return ranks[0]
		}
	}
	return nil
}

// maxUnaccountedBody is how long a body may be for what is made of its prompt to go uncounted.
const maxUnaccountedBody = 64 << 10

// accountPrompt counts what will be made of a long prompt: its ids, their hashes, and an
// engine's answer that tells them. Where the budget is spent, it says so, and the prompt
// goes by load alone.
func (q *request) accountPrompt() bool {
	if len(q.x.Doc.Body) <= maxUnaccountedBody {
		return true
	}
	kind := tokenizeKind(q.x.Endpoint.Kind)
	return q.derived.Acquire(q.settings.Tokenizer.EstimateMemory(kind, &q.x.Doc))
}

// tokenizePrompt asks the tokenizer, lending it a ready rank to ask in turn where the request
// does not hold the ids itself.
func (q *request) tokenizePrompt() {
	kind := tokenizeKind(q.x.Endpoint.Kind)
	if q.settings.Tokenizer.FromRequestIDs(&q.prompt, kind, &q.x.Doc) {
		return
	}
	var call upstream.Call
	var ep *upstream.Endpoint
	if r := q.tokenizerRank(); r != nil {
		ep = q.settings.Fleet.Endpoint(r)
		q.x.OnClientGone(call.Cancel)
		defer q.x.OnClientGone(nil)
	}
	q.settings.Tokenizer.Prompt(&q.prompt, kind, &q.x.Doc, ep, &call)
}

// tokenizerRank rotates over the candidates, prefill's first, so that tokenizing is
// not one worker's burden; engines that rest after a failure are passed over.
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

// findOverlap looks the prompt up in blocks of one size; fleets of one engine
// have one.
func (q *request) findOverlap(salt blockhash.Salt, size int) {
	if len(q.overlaps) < cap(q.overlaps) {
		q.overlaps = q.overlaps[:len(q.overlaps)+1] // the memory of its Overlap is kept
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

// choose picks the rank of one leg.
func (q *request) choose(leg schedule.LegKind, candidates []*worker.Rank) (schedule.Choice, bool) {
	q.query = q.newQuery(leg, candidates)
	q.query.Reservation = q.reservations.acquire()
	if leg == schedule.DecodeLeg {
		q.query.TransferRates = q.settings.Transfers.RatesFrom(q.handover.Prefill)
	}
	c, ok := q.chooseBelowLimits(&q.query)
	q.recordChosenRank(leg, c.Rank)
	q.publishChoice(c, ok)
	return c, ok
}

// adoptChoice takes in a choice that was made beside choose.
func (q *request) adoptChoice(leg schedule.LegKind, candidates []*worker.Rank, c schedule.Choice) {
	q.query = q.newQuery(leg, candidates)
	q.recordChosenRank(leg, c.Rank)
	q.publishChoice(c, true)
}

// publishChoice tells the approximate index and the recorder of a choice.
func (q *request) publishChoice(c schedule.Choice, ok bool) {
	if keys := q.approxKeys(c.Rank); ok && len(keys) > 0 {
		q.settings.Approx.Observe(c.Rank.Slot, keys)
	}
	q.r.forgetIfRemoved(c.Rank)
	q.record(c)
}

// newQuery is what a leg's rank is chosen from.
func (q *request) newQuery(leg schedule.LegKind, candidates []*worker.Rank) schedule.Query {
	query := schedule.Query{
		Leg:               leg,
		Candidates:        candidates,
		Overlaps:          q.overlaps,
		Approx:            &q.approx,
		ApproxBlockTokens: approxBlockTokens,
		PromptTokens:      q.prompt.Count + q.otherChoiceTokens,
		MaxTokens:         q.maxTokens,
		Keys:              q.keys,
		KeyTokens:         approxBlockTokens,
		Session:           q.steering.session,
		Excluded:          q.excluded,
		RequestID:         q.id,
		Attempt:           q.attemptsBefore + q.attempt,
	}
	if q.expectedOutput > 0 {
		query.MaxTokens = q.expectedOutput
	}
	if q.tuning != nil {
		query.OverlapWeight, query.Temperature = q.tuning.OverlapWeight, q.tuning.Temperature
	}
	return query
}

// record tells the recorder of a choice, with the prompt's blocks of the last
// size it was looked up by.
func (q *request) record(c schedule.Choice) {
	switch n := len(q.overlaps); {
	case q.settings.Recorder == nil:
	case n > 0:
		q.settings.Recorder.RecordChoice(&q.query, c, q.indexKeys, q.overlaps[n-1].BlockSize, true)
	default:
		q.settings.Recorder.RecordChoice(&q.query, c, q.keys, approxBlockTokens, false)
	}
}

// approxKeys are the blocks that the approximate index is told a rank will hold:
// those of a rank whose events do not tell now, and all where no tokens were found,
// for events speak of tokens only. Else nil: the engine's events tell, or it keeps
// nothing.
func (q *request) approxKeys(r *worker.Rank) []blockhash.Seq {
	if r == nil || !usesApprox(r) && len(q.prompt.Tokens) > 0 || !r.MayCache() {
		return nil
	}
	return q.keys
}

// usesApprox says whether what a rank holds is known from the router's own choices, alone
// or beside what a feed has brought so far: its engine tells no events, or they cannot
// be had, as where only HTTP gets through.
func usesApprox(r *worker.Rank) bool {
	return worker.FeedState(r.Feed.Load()) != worker.FeedLive
}

// reconfirmAfter is how long behind its choice a request's prompt counts as seen again.
const reconfirmAfter = 5 * time.Second

// learnCached compares what an engine found in its cache with what was foretold, and
// corrects the approximate index by it, where keys (approxKeys) says it counts.
// cached is -1 when the engine said nothing; took is how long ago the choice was.
//
// Where as much was found as was foretold there is nothing to correct: what was counted on
// is there, and what the request brought stays, also where another has counted on it
// since. But if that was long ago, it is told again that it was.
func (r *Runner) learnCached(rank *worker.Rank, keys []blockhash.Seq, tokens, predicted, cached int, elapsed time.Duration) {
	r.options().Observer.Cached(rank.ID, tokens, predicted, cached)
	if rank.RecordCacheHit(predicted, cached) {
		r.options().Log.Info("the engine reports no cached tokens where hits were foretold; none are any more, until it reports some", "rank", rank.ID.String())
		go func() { // a stream's loop must not wait for it
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

// forgetIfRemoved is called when something has been noted of a rank by its number. Where its worker
// has left, whoever forgot the rank for that may have done so before, and the number is
// another's next: so it is forgotten again.
func (r *Runner) forgetIfRemoved(rank *worker.Rank) {
	if rank == nil || !rank.Removed() {
		return
	}
	go func() { // a stream's loop must not wait for it
		r.options().Scheduler.Forget(rank.Slot)
		r.options().Approx.Clear(rank.Slot)
	}()
}
