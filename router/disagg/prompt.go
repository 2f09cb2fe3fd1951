package disagg

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

// findPrompt finds the prompt's tokens and what every rank holds of them. It
// cannot fail: with nothing found, the choice goes by load alone.
func (q *request) findPrompt() {
	if !q.x.Endpoint.Disaggregable {
		q.approx.Reset() // what another request found
		return
	}
	if q.chosen() {
		q.skipPrompt()
		return
	}
	if !q.countPrompt() {
		q.skipPrompt()
		q.prompt.Err = "the memory for bodies (limits.body_budget) is spent"
		return
	}
	q.tokens()
	q.hintedTokens()
	q.salted = q.salt()
	q.lookUp(q.x.Received)
}

// lookUp finds what every rank holds of the prompt.
func (q *request) lookUp(now time.Time) {
	salt, opt := q.salted, q.r.opt()
	if len(q.prompt.Tokens) > 0 {
		c := q.census(now)
		q.keys = q.seqs(q.keys[:0], salt, approxBlockTokens)
		q.sized = q.sized[:0]
		if len(c.bases) > 1 && q.taking == nil { // else the salt is another request's
			for _, base := range c.bases {
				if other := q.saltOf(base); other != salt {
					for _, size := range c.sizes {
						q.findOverlap(other, size)
					}
				}
			}
		}
		for _, size := range c.sizes {
			q.findOverlap(salt, size)
		}
		if !c.guess {
			q.approx.Reset()
			return
		}
	} else {
		q.keys = blockhash.TextSeqs(q.keys[:0], salt, q.prompt.Text, approxBlockBytes)
	}
	q.approx.Reset()
	// Loads that wait for each other would take one miss of the caches after the other.
	q.ahead = opt.Scheduler.Ahead(q.id, q.keys) + opt.Approx.Ahead(q.keys)
	opt.Approx.Find(q.keys, &q.approx)
}

// salt separates prompts that share tokens but not KV. The model asked for may
// be an adapter or an alias: engines' events speak of the base model and name
// the adapter apart.
func (q *request) salt() blockhash.Salt {
	if r := q.firstRank(); r != nil {
		return q.saltOf(r.Worker.Info().Base)
	}
	return q.saltOf("")
}

// saltOf is the salt of prompts on engines that list base as their model's first name.
func (q *request) saltOf(base string) blockhash.Salt {
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

// uncountedBody is how long a body may be for what is made of its prompt to go uncounted.
const uncountedBody = 64 << 10

// countPrompt counts what will be made of a long prompt: its ids, their hashes, and an
// engine's answer that tells them. Where the budget is spent, it says so, and the prompt
// goes by load alone.
func (q *request) countPrompt() bool {
	if len(q.x.Doc.Body) <= uncountedBody {
		return true
	}
	kind := tokenizeKind(q.x.Endpoint.Kind)
	return q.derived.Take(q.r.opt().Tokenizer.Memory(kind, &q.x.Doc))
}

// tokens asks the tokenizer, lending it a ready rank to ask in turn where the request
// does not hold the ids itself.
func (q *request) tokens() {
	kind := tokenizeKind(q.x.Endpoint.Kind)
	if q.r.opt().Tokenizer.Given(&q.prompt, kind, &q.x.Doc) {
		return
	}
	var call upstream.Call
	var ep *upstream.Endpoint
	if r := q.askRank(); r != nil {
		ep = q.r.opt().Fleet.Endpoint(r)
		q.x.OnGone(call.Cut)
		defer q.x.OnGone(nil)
	}
	q.r.opt().Tokenizer.Prompt(&q.prompt, kind, &q.x.Doc, ep, &call)
}

// askRank rotates over the candidates, prefill's first, so that tokenizing is
// not one worker's burden; engines that rest after a failure are passed over.
func (q *request) askRank() *worker.Rank {
	ranks := q.plan.Prefill
	if q.plan.Family == nil {
		ranks = q.plan.Whole
	}
	if len(ranks) == 0 {
		return nil
	}
	const looks = 4
	first := int(q.r.next.Add(1))
	for i := range min(looks, len(ranks)) {
		if r := ranks[(first+i)%len(ranks)]; q.r.opt().Tokenizer.Asks(q.r.opt().Fleet.Endpoint(r)) {
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
	if len(q.sized) < cap(q.sized) {
		q.sized = q.sized[:len(q.sized)+1] // the memory of its Overlap is kept
	} else {
		q.sized = append(q.sized, schedule.SizedOverlap{})
	}
	s := &q.sized[len(q.sized)-1]
	s.BlockSize = size
	q.asked = q.keys
	if size != approxBlockTokens || salt != q.salted {
		q.keyRoom = q.seqs(q.keyRoom[:0], salt, size)
		q.asked = q.keyRoom
	}
	s.Overlap.Reset()
	q.r.opt().Index.Find(q.asked, &s.Overlap)
}

// choose picks the rank of one leg.
func (q *request) choose(leg schedule.Leg, candidates []*worker.Rank) (schedule.Choice, bool) {
	q.query = q.queryOf(leg, candidates)
	q.query.Reservation = q.rooms.next()
	if leg == schedule.DecodeLeg {
		q.query.Pulls = q.r.opt().Transfers.From(q.pair.Prefill)
	}
	c, ok := q.chooseWithin(&q.query)
	q.noteChoice(leg, c.Rank)
	q.tell(c, ok)
	return c, ok
}

// chose takes in a choice that was made beside choose.
func (q *request) chose(leg schedule.Leg, candidates []*worker.Rank, c schedule.Choice) {
	q.query = q.queryOf(leg, candidates)
	q.noteChoice(leg, c.Rank)
	q.tell(c, true)
}

// tell tells the approximate index and the recorder of a choice.
func (q *request) tell(c schedule.Choice, ok bool) {
	if keys := q.guessKeys(c.Rank); ok && len(keys) > 0 {
		q.r.opt().Approx.Observe(c.Rank.Slot, keys)
	}
	q.r.noted(c.Rank)
	q.record(c)
}

// queryOf is what a leg's rank is chosen from.
func (q *request) queryOf(leg schedule.Leg, candidates []*worker.Rank) schedule.Query {
	query := schedule.Query{
		Leg:               leg,
		Candidates:        candidates,
		Overlaps:          q.sized,
		Approx:            &q.approx,
		ApproxBlockTokens: approxBlockTokens,
		PromptTokens:      q.prompt.Count + q.besides,
		MaxTokens:         q.maxTokens,
		Keys:              q.keys,
		KeyTokens:         approxBlockTokens,
		Session:           q.steering.session,
		Excluded:          q.excluded,
		RequestID:         q.id,
		Attempt:           q.before + q.attempt,
	}
	if q.output > 0 {
		query.MaxTokens = q.output
	}
	if q.tuned != nil {
		query.OverlapWeight, query.Temperature = q.tuned.OverlapWeight, q.tuned.Temperature
	}
	return query
}

// record tells the recorder of a choice, with the prompt's blocks of the last
// size it was looked up by.
func (q *request) record(c schedule.Choice) {
	switch n := len(q.sized); {
	case q.r.opt().Recorder == nil:
	case n > 0:
		q.r.opt().Recorder.Chose(&q.query, c, q.asked, q.sized[n-1].BlockSize, true)
	default:
		q.r.opt().Recorder.Chose(&q.query, c, q.keys, approxBlockTokens, false)
	}
}

// guessKeys are the blocks that the approximate index is told a rank will hold:
// those of a rank whose events do not tell now, and all where no tokens were found,
// for events speak of tokens only. Else nil: the engine's events tell, or it keeps
// nothing.
func (q *request) guessKeys(r *worker.Rank) []blockhash.Seq {
	if r == nil || !guessed(r) && len(q.prompt.Tokens) > 0 || !r.Caches() {
		return nil
	}
	return q.keys
}

// guessed says whether what a rank holds is known from the router's own choices, alone
// or beside what a feed has brought so far: its engine tells no events, or they cannot
// be had, as where only HTTP gets through.
func guessed(r *worker.Rank) bool {
	return worker.FeedState(r.Feed.Load()) != worker.FeedLive
}

// confirmAfter is how long behind its choice a request's prompt counts as seen again.
const confirmAfter = 5 * time.Second

// learn compares what an engine found in its cache with what was foretold, and
// corrects the approximate index by it, where keys (guessKeys) says it counts.
// cached is -1 when the engine said nothing; took is how long ago the choice was.
//
// Where as much was found as was foretold there is nothing to correct: what was counted on
// is there, and what the request brought stays, also where another has counted on it
// since. But if that was long ago, it is told again that it was.
func (r *Runner) learn(rank *worker.Rank, keys []blockhash.Seq, tokens, predicted, cached int, took time.Duration) {
	r.opt().Observer.Cached(rank.ID, tokens, predicted, cached)
	if rank.Found(predicted, cached) {
		r.opt().Log.Info("the engine reports no cached tokens where hits were foretold; none are any more, until it reports some", "rank", rank.ID.String())
		go func() { // a stream's loop must not wait for it
			r.opt().Scheduler.Forget(rank.Slot)
			r.opt().Approx.Clear(rank.Slot)
		}()
	}
	foretold, found := predicted/approxBlockTokens, cached/approxBlockTokens
	if cached >= 0 && len(keys) > 0 && (found != foretold || found > 0 && took > confirmAfter) {
		r.opt().Approx.Confirm(rank.Slot, keys, found)
	}
	r.noted(rank)
}

// noted is called when something has been noted of a rank by its number. Where its worker
// has left, whoever forgot the rank for that may have done so before, and the number is
// another's next: so it is forgotten again.
func (r *Runner) noted(rank *worker.Rank) {
	if rank == nil || !rank.Left() {
		return
	}
	go func() { // a stream's loop must not wait for it
		r.opt().Scheduler.Forget(rank.Slot)
		r.opt().Approx.Clear(rank.Slot)
	}()
}
