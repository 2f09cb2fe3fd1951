package schedule

import (
	"math"

	"sluice/router/kvindex"
	"sluice/router/kvtransfer/completion"
	"sluice/router/worker"
)

const (
	nsPerMS           = 1e6
	waitingTokens     = 1024 // assumed prompt of a request placed by another router
	pressureThreshold = 0.9  // fraction of KV blocks in use from which a rank of a large pool is short of them
	fullThreshold     = 0.06 // fraction of KV blocks without content below which a rank of a large pool is full
)

// candidateState is one candidate as seen by a choice: the inputs of its cost. The terms of the
// cost follow from them (see termsOf), so a record contains only these.
type candidateState struct {
	rank          *worker.Rank
	cost          float64 // ms
	credit        float64 // tokens that the overlap saves, weighted
	reserved      int64   // prompt tokens to prefill, of this router: Rank.PrefillTokens
	queued        int64   // of reserved, those that are expected to be uncomputed still
	price         [worker.NumWork]int32
	blocks        int32 // decode blocks, of this router
	work          int64 // block-steps expected for these
	requests      int32 // of this router
	waiting       int32 // as reported by the engine, -1 if never
	otherTokens   int64 // prompt tokens of other requests waiting there, reported or assumed
	cached        int32 // predicted tokens, in any tier
	depth         int32 // blocks of overlap
	host          int32 // of depth, those on the host only
	disk          int32 // of depth, those on disk only
	lackingTokens int32 // tokens of this request's blocks that do not fit
	evicted       int32 // cached tokens of other prompts that this request's new blocks displace and that are expected to be asked for again
	feed          worker.FeedState
	approx        bool // the overlap comes from Approx: text mode or the router's own choices
	inFlight      bool // the overlap was just sent there; no event has reported it yet
	excluded      bool
}

// choiceContext is what is constant over the candidates of one choice.
type choiceContext struct {
	weights       *weights
	rates         *rates
	leg           LegKind
	prompt        int
	promptKnown   int // prompt length from the query, 0 unknown
	output        int
	exact         *kvindex.Overlap // nil if no rank has any block
	sized         []SizedOverlap   // instead of exact
	approx        *kvindex.Overlap
	approxTokens  int
	inFlight      []inFlightBlocks // blocks sent recently
	transferRates *completion.Row  // measured transfers from the prefill rank; nil: none, or the rate is fixed
	textOnly      bool             // no tokens were found: Approx applies to every rank
	leadingWork   worker.Work
	unseen        bool
	reuse         reuse
	scaled        weights // see scaleOthers
	now           int64   // ns since the scheduler's start
	inFull        bool    // a large pool: prompts count in full until their first token, as in loadCounters
}

// weights are the weights of the Options.
type weights struct {
	overlap, host, disk, inFlight float64
	prefill, queue, decode        float64
	eviction, others              float64
	overlap16                     int64 // overlap weight in 1/65,536
}

func newWeights(o *Options) weights {
	return weights{overlap: o.OverlapWeight, overlap16: int64(o.OverlapWeight*(1<<16) + 0.5), host: o.HostWeight, disk: o.DiskWeight, inFlight: o.InFlightWeight,
		prefill: o.PrefillWeight, queue: o.QueueWeight, decode: o.DecodeWeight, eviction: o.EvictionWeight, others: o.OthersWeight}
}

// A computed token delays the requests that arrive while it is computed and until its rank has caught
// up: as many as the share of time that ranks are busy, relative to the share that they are not. The
// weight applies in full from a busy share of 0.8, and by its least part up to one of a third.
const (
	othersPerBusy  = 0.25
	leastOthers    = 0.125
	busyAtStart    = 0.8 // until it is known
	busyOfOneLook  = 1.0 / 128
	mostBusyShared = 0.99
)

// othersFactor returns what applies of the weight of others at the present load.
func (s *Scheduler) othersFactor() float64 {
	busy := min(s.busy.load(), mostBusyShared)
	return min(max(othersPerBusy*busy/(1-busy), leastOthers), 1)
}

// lookBusy looks at one candidate: whether it computes a prompt of this router.
func (s *Scheduler) lookBusy(candidates []*worker.Rank, rng *uint64) {
	busy := 0.0
	if candidates[randomBelow(rng, len(candidates))].PrefillTokens.Load() > 0 {
		busy = 1
	}
	s.busy.approach(busy, busyOfOneLook)
}

// scaleOthers applies othersFactor to the weights. f must not be copied afterwards.
func (f *choiceContext) scaleOthers(s *Scheduler) {
	f.scaled = *f.weights
	f.scaled.others *= s.othersFactor()
	f.weights = &f.scaled
}

// temperature returns the temperature of a query.
func (s *Scheduler) temperature(q *Query) float64 {
	if q.Temperature != nil {
		return *q.Temperature
	}
	return s.currentSettings().temperature
}

func (s *Scheduler) newChoiceContext(q *Query) choiceContext {
	f := choiceContext{weights: &s.currentSettings().weights, rates: &s.rates, leg: q.Leg, prompt: q.PromptTokens, promptKnown: max(0, q.PromptTokens), inFull: len(q.Candidates) > maxAllRecorded, output: outputTokens(q.MaxTokens), unseen: q.Unseen,
		textOnly: q.Overlap == nil && len(q.Overlaps) == 0, leadingWork: worker.Prefilling}
	if q.OverlapWeight != nil {
		own := s.currentSettings().weights
		own.overlap, own.overlap16 = *q.OverlapWeight, int64(*q.OverlapWeight*(1<<16)+0.5)
		f.weights = &own
	}
	if f.prompt <= 0 {
		f.prompt = assumedPrompt
	}
	if f.leg == DecodeLeg {
		f.leadingWork = worker.Pulling
		if s.rates.common[worker.Pulling].fixed.Load() == 0 {
			f.transferRates = q.TransferRates
		}
	}
	// An overlap that no rank has is dropped here instead of being checked per rank.
	for i := range q.Overlaps {
		if q.Overlaps[i].Overlap.Max() > 0 {
			f.sized = q.Overlaps
		}
	}
	if len(q.Overlaps) == 0 && q.Overlap != nil && q.Overlap.Max() > 0 {
		f.exact = q.Overlap
	}
	if q.Approx != nil && q.ApproxBlockTokens > 0 && q.Approx.Max() > 0 {
		f.approx, f.approxTokens = q.Approx, q.ApproxBlockTokens
	}
	return f
}

// evaluate reads a candidate's inputs and computes its cost. Each load is one atomic; together they
// are an estimate, not a snapshot.
func (f *choiceContext) evaluate(r *worker.Rank, t *candidateState) { f.evaluateAt(r, t, -1) }

// evaluateAt is evaluate for a rank whose depth in the index is known, or -1.
func (f *choiceContext) evaluateAt(r *worker.Rank, t *candidateState, depth int) {
	*t = candidateState{rank: r, reserved: r.PrefillTokens.Load(), blocks: int32(r.DecodeBlocks.Load()), work: r.DecodeWork.Load(), requests: int32(r.Requests.Load()),
		waiting: int32(r.Waiting.Load()), otherTokens: tokensOfOthers(r), feed: worker.FeedState(r.Feed.Load())}
	for w := range t.price {
		t.price[w] = int32(f.rates.price(r, worker.Work(w)))
	}
	if f.transferRates != nil {
		if ns := f.transferRates.NSPerToken(int(r.Slot)); ns > 0 {
			t.price[worker.Pulling] = int32(min(max(ns, 1), math.MaxInt32))
		}
	}
	if f.exact != nil || f.sized != nil || f.approx != nil || len(f.inFlight) > 0 {
		f.overlap(r, t, depth)
	}
	// Blocks in flight are those of the queue: an engine that begins this prompt before they are stored
	// computes them again, so the wait for them is not shortened.
	if t.queued = t.reserved; !f.inFull && !t.inFlight {
		t.queued = uncomputed(r, t.reserved, r.Pending.Load(), int64(t.price[worker.Prefilling]), f.now)
	}
	f.setDisplacement(r, t)
	p := f.weights.termsOf(f.leg, f.prompt, t)
	t.cost = p.sum()
}

// overdueFactor is the multiple of its expected time after which the first prompt of a queue counts in
// full again: the forecast is wrong, and an engine that hangs must not look idle.
const overdueFactor = 2

// uncomputed returns how many of the tokens reserved on a rank for a number of prompts are expected to be
// uncomputed at a time. A reservation counts in full until its first token, although half of a long prompt
// is computed by then on average; a queue that looks longer than it is sends requests away from their
// cached prefixes. As in Backlog, only the first prompt shrinks, by the time since the last first token,
// and counts as one of mean length. price is that of a token, in ns.
func uncomputed(r *worker.Rank, reserved, prompts, price, now int64) int64 {
	if prompts <= 0 || reserved <= 0 || price <= 0 {
		return reserved
	}
	first, done := reserved/prompts, max(0, now-r.HeadSince.Load())/price
	if done > overdueFactor*first {
		return reserved
	}
	return reserved - min(done, first)
}

// tokensOfOthers returns the prompt tokens that wait on a rank and do not belong to this router's
// requests: what the engine reports beyond this router's reservations or, if the engine reports
// only requests, an assumed prompt for each request beyond this router's.
func tokensOfOthers(r *worker.Rank) int64 {
	if n, ok := r.OthersTokens(); ok {
		return n
	}
	return waitingTokens * r.WaitingOfOthers()
}

// lowerBound returns a lower bound of evaluate's cost with fewer loads, exact if the rank has none
// of the prompt. It is for passes over many ranks.
func (f *choiceContext) lowerBound(r *worker.Rank, t *candidateState) float64 {
	f.evaluate(r, t)
	return t.cost
}

// overlap sets the candidate's overlap. It uses the index for ranks whose feed is live. While a
// feed is syncing its content is correct but incomplete, so the better of the index and the
// prediction is used. Otherwise only the prediction from the router's own choices remains.
func (f *choiceContext) overlap(r *worker.Rank, t *candidateState, known int) {
	if t.feed == worker.FeedLive || t.feed == worker.FeedSyncing {
		if o, d, size := f.cachedBlocks(r, known); d > 0 {
			t.depth = int32(d)
			t.cached = int32(f.usable(d*size, size))
			t.credit = float64(t.cached)
			if o.AnyLowerTier() {
				host, disk := o.LowerTiers(r.Slot)
				t.host, t.disk = int32(host), int32(disk)
				t.credit = max(0, t.credit-f.weights.lowerTierLoss(host, disk, size))
			}
		}
	}
	if f.approx != nil && (t.feed != worker.FeedLive || f.textOnly) {
		if d := f.approx.Depth(r.Slot); d > 0 {
			if c := int32(f.usable(d*f.approxTokens, r.BlockSize())); float64(c) > t.credit {
				t.depth, t.cached, t.credit, t.approx = int32(d), c, float64(c), true
				t.host, t.disk = 0, 0
			}
		}
	}
	for i := range f.inFlight {
		if a := &f.inFlight[i]; a.slot == r.Slot {
			n := f.usable(a.tokens, r.BlockSize())
			if c := f.weights.inFlight * float64(n); c > t.credit {
				t.depth, t.cached, t.credit, t.inFlight = int32(a.blocks), int32(n), c, true
				t.approx, t.host, t.disk = false, 0, 0
			}
		}
	}
	t.credit *= f.weights.overlap
}

// usable returns how many tokens an engine takes from its cache if it has the prompt's first n, with
// blocks of size tokens, 0 if unknown: whole blocks, and not the block of the prompt's last token,
// which engines compute in any case for its logits. Decode engines compute nothing of a prompt whose
// KV they pull, so the exception is not theirs.
func (f *choiceContext) usable(n, size int) int {
	n = min(n, f.prompt)
	if size <= 0 {
		return n
	}
	if f.leg != DecodeLeg {
		n = min(n, f.prompt-1)
	}
	return n / size * size
}

// lowerTierLoss returns how many tokens less blocks in slower tiers are worth than on the device,
// at size tokens per block.
func (w *weights) lowerTierLoss(host, disk, size int) float64 {
	return float64(size) * ((1-w.host)*float64(host) + (1-w.disk)*float64(disk))
}

// confirmedBlocks returns how many leading blocks of size tokens events have reported for the rank.
func (t *candidateState) confirmedBlocks(size int) int {
	if t.approx || t.inFlight || size <= 0 {
		return 0
	}
	return int(t.cached) / size
}

// cachedBlocks returns how many blocks the index has for r, and their size in tokens. known is the
// depth if it is known already, or -1.
func (f *choiceContext) cachedBlocks(r *worker.Rank, known int) (o *kvindex.Overlap, depth, size int) {
	if f.exact != nil {
		if depth = depthIn(f.exact, r.Slot, known); depth > 0 {
			size = sizeOf(r)
		}
		return f.exact, depth, size
	}
	if len(f.sized) > 0 {
		size = sizeOf(r)
		for i := range f.sized {
			if f.sized[i].BlockSize == size {
				o = &f.sized[i].Overlap
				if depth = depthIn(o, r.Slot, known); depth > 0 {
					return o, depth, size
				}
			}
		}
	}
	return o, 0, size
}

// depthIn is o.Depth without the table of all depths that Depth computes for many groups: here only
// a few depths are needed.
func depthIn(o *kvindex.Overlap, slot worker.Slot, known int) int {
	if known >= 0 {
		return known
	}
	n := o.DepthGroups()
	if n <= 4 || n > 256 {
		return o.Depth(slot)
	}
	word, bit := int(slot)/64, uint(slot)%64
	for i := range n {
		if depth, words := o.DepthGroup(i); word < len(words) && words[word]>>bit&1 != 0 {
			return depth
		}
	}
	return 0
}

// tokensKept returns how many tokens of this request the rank's cache has when the leg ends.
func (f *choiceContext) tokensKept() int {
	if f.leg == PrefillLeg {
		return f.prompt
	}
	return f.prompt + f.output
}

// setDisplacement sets the tokens of this request that do not fit beside the running ones, and those of
// other prompts that its new blocks displace from the cache.
func (f *choiceContext) setDisplacement(r *worker.Rank, t *candidateState) {
	total := r.Worker.Info().TotalBlocks
	if total <= 0 {
		return
	}
	output := f.output
	if f.leg == PrefillLeg {
		output = 0
	}
	size, need := sizeOf(r), blocksFor(r, f.prompt, output)
	fresh := need - int(t.depth-t.host-t.disk)
	if f.leg != PrefillLeg {
		lacking := fresh - max(0, total-blocksInUse(r, total))
		t.lackingTokens = int32(min(max(0, lacking)*size, math.MaxInt32))
	}
	if f.leg != DecodeLeg && f.weights.eviction > 0 {
		displaced := max(0, fresh-emptyBlocks(r, total)) * size
		if displaced > 0 {
			displaced = f.reuse.displaced(r.Slot, displaced, total*size)
		}
		t.evicted = int32(min(displaced, math.MaxInt32))
	}
}

// blocksInUse returns how many of a rank's blocks running requests use. A report of the engine is up
// to a second old and has no waiting requests, so this router's reservations there count if they are
// more. They count a prefix once for each request that shares it; therefore no more counts than the
// reported blocks of a running request for each request that this router has there.
func blocksInUse(r *worker.Rank, total int) int {
	reported, reserved := min(max(r.KVUsage(), 0), 1)*float64(total), float64(r.DecodeBlocks.Load())
	if running := r.Running.Load(); running > 0 && reported > 0 {
		reserved = min(reserved, reported/float64(running)*float64(r.Requests.Load()))
	}
	return int(max(reported, reserved))
}

// emptyBlocks returns how many of a rank's blocks have no content: neither the cached ones nor those
// that running requests will fill. Blocks that only finished sessions have used count as empty: nobody
// will ask for them. It errs on the low side, because cached blocks may be in use, and
// returns the total if events do not report the cache: then nothing is known of what is displaced.
func emptyBlocks(r *worker.Rank, total int) int {
	if s := worker.FeedState(r.Feed.Load()); s != worker.FeedLive && s != worker.FeedSyncing {
		return total
	}
	cached := r.CachedBlocks.Load()
	cached -= min(cached, r.UnusedBlocks.Load())
	return max(0, total-int(cached+r.DecodeBlocks.Load()))
}

// Terms are the summands of a cost, in ms.
type Terms struct {
	Prefill  float64 `json:"prefill,omitempty"`
	Transfer float64 `json:"transfer,omitempty"`
	Queue    float64 `json:"queue,omitempty"`
	Waiting  float64 `json:"waiting,omitempty"`
	Decode   float64 `json:"decode,omitempty"`
	Pressure float64 `json:"pressure,omitempty"`
	Eviction float64 `json:"eviction,omitempty"`
	Others   float64 `json:"others,omitempty"`
}

func (p *Terms) sum() float64 {
	return p.own() + p.Eviction + p.Others
}

// own is the time of this request alone.
func (p *Terms) own() float64 {
	return p.Prefill + p.Transfer + p.Queue + p.Waiting + p.Decode + p.Pressure
}

// ownTime returns the part of a candidate's cost that is the time of this request.
func (f *choiceContext) ownTime(t *candidateState) float64 {
	p := f.weights.termsOf(f.leg, f.prompt, t)
	return p.own()
}

// termsOf splits a candidate's cost into its terms.
func (w *weights) termsOf(leg LegKind, prompt int, t *candidateState) Terms {
	todo := max(0, float64(prompt)-t.credit)
	prefill := float64(t.price[worker.Prefilling]) / nsPerMS
	p := Terms{Waiting: w.queue * prefill * float64(t.otherTokens)}
	if leg == DecodeLeg {
		p.Transfer = w.prefill * float64(t.price[worker.Pulling]) / nsPerMS * todo
	} else {
		p.Prefill = w.prefill * prefill * todo
		p.Queue = w.queue * prefill * float64(t.queued)
	}
	if leg != PrefillLeg {
		p.Decode = w.decode * float64(t.price[worker.Decoding]) / nsPerMS * float64(t.work) / decodeSteps
		p.Pressure = w.decode * prefill * float64(t.lackingTokens)
	}
	if leg != DecodeLeg {
		p.Eviction = w.eviction * prefill * float64(t.evicted)
		p.Others = w.others * (p.Prefill + p.Eviction + p.Pressure)
	}
	return p
}
