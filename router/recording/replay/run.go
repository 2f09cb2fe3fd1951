package replay

import (
	"container/heap"
	"math"
	"slices"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Variant is one way to choose ranks.
type Variant struct {
	Name     string
	Recorded bool               // use the recorded choices
	Policy   string             // policy of schedule.Options
	Weights  map[string]float64 // by their names in the configuration
}

// Rates are the durations that the model uses.
type Rates struct {
	PerToken time.Duration // to compute one prompt token
	Base     time.Duration // of every first token, in addition to PerToken
}

// Result is the outcome of one Variant.
type Result struct {
	Variant   Variant
	Requests  int
	HitRate   float64 // cached prompt tokens divided by all prompt tokens
	Imbalance float64 // tokens computed on the busiest rank divided by the mean of its role
	P50, P99  time.Duration
	Fidelity  Fidelity
}

// Fidelity compares the model's cached tokens with the engines' reports. It is meaningful only
// for the recorded choices.
type Fidelity struct {
	Requests           int     // requests with a report
	Modelled, Reported int     // cached tokens
	WithinOneBlock     int     // requests that differ by at most one block
	MeanError          float64 // tokens per request
}

// DefaultRates apply when the recording contains no times to first token.
var DefaultRates = Rates{PerToken: 100 * time.Microsecond}

// replayRun is the state of one Run.
type replayRun struct {
	t         *Trace
	v         Variant
	rates     Rates
	scheduler *schedule.Scheduler
	index     kvindex.Index
	workers   []*worker.Worker
	ranks     []*worker.Rank
	pools     [][]*worker.Rank
	caches    []*cache
	busy      []time.Duration // by rank, when it finishes its computation
	computed  []int           // tokens
	overlap   kvindex.Overlap
	events    eventQueue
	ttfts     []time.Duration
	prompt    int
	cached    int
	out       Result
}

// event is an action at a moment of simulated time.
type event struct {
	at time.Duration
	fn func()
}

type eventQueue []event

func (h eventQueue) Len() int           { return len(h) }
func (h eventQueue) Less(i, j int) bool { return h[i].at < h[j].at }
func (h eventQueue) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *eventQueue) Push(x any)        { *h = append(*h, x.(event)) }
func (h *eventQueue) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// Run plays the trace with v.
func (t *Trace) Run(v Variant, rates Rates) Result {
	w := func(name string) float64 { return v.Weights[name] }
	r := &replayRun{t: t, v: v, rates: rates, index: kvindex.New(kvindex.Options{MaxBytes: 16 << 30}),
		scheduler: schedule.New(schedule.Options{
			OverlapWeight: w("overlap_weight"), PrefillWeight: w("prefill_weight"), DecodeWeight: w("decode_weight"), QueueWeight: w("queue_weight"),
			HostWeight: w("host_weight"), DiskWeight: w("disk_weight"), EvictionWeight: w("eviction_weight"), OthersWeight: w("others_weight"), Temperature: w("temperature"), Policy: v.Policy, Explain: -1, Seed: 1,
			// The model's index contains a chosen prompt at once, so there are no blocks in
			// flight. Rates are learned by the wall clock, but the model has its own clock:
			// they stay constant.
			Rates: schedule.Rates{Prefill: float64(rates.PerToken) / float64(time.Millisecond), Transfer: orDefault(w("transfer_ms"), 0.005), Block: orDefault(w("block_ms"), 0.15)},
		})}
	for i := range t.Ranks {
		rank := &t.Ranks[i]
		wk := worker.New(worker.Spec{ID: rank.ID.String(), Role: rank.Role})
		wk.SetInfo(&worker.Info{TotalBlocks: rank.Capacity})
		k := wk.Ranks[0]
		k.Slot = worker.Slot(i)
		k.Feed.Store(uint32(worker.FeedLive))
		r.workers, r.ranks = append(r.workers, wk), append(r.ranks, k)
		r.caches = append(r.caches, newCache(rank.Capacity))
	}
	for _, p := range t.pools {
		var ranks []*worker.Rank
		for _, i := range p {
			ranks = append(ranks, r.ranks[i])
		}
		r.pools = append(r.pools, ranks)
	}
	r.busy, r.computed = make([]time.Duration, len(t.Ranks)), make([]int, len(t.Ranks))
	r.fillCaches()
	for i := range t.Requests {
		q := &t.Requests[i]
		r.runUntil(q.At)
		r.arrive(q)
	}
	r.runUntil(math.MaxInt64)
	return r.result()
}

// fillCaches fills the caches with the initial blocks. The recording does not contain the time
// of their last use. fillCaches assumes that the beginning of a chain was used later than its
// end, so that a cache smaller than the initial blocks lacks the ends of prompts.
func (r *replayRun) fillCaches() {
	for i := len(r.t.initialChains) - 1; i >= 0; i-- {
		h := &r.t.initialChains[i]
		r.caches[h.rank].insert(h.seqs)
	}
	if r.v.Recorded {
		return
	}
	for i := range r.t.initialChains {
		h := &r.t.initialChains[i]
		if depth := r.caches[h.rank].matchLength(h.seqs); depth > 0 {
			r.storeBlocks(r.ranks[h.rank].Slot, h.hasParent, h.parent, h.seqs[:depth])
		}
	}
}

// storeBlocks adds blocks of a rank to the index.
func (r *replayRun) storeBlocks(slot worker.Slot, hasParent bool, parent blockhash.Seq, seqs []blockhash.Seq) {
	x := kvindex.Exported{Seqs: seqs, HasParent: hasParent, Parent: kvindex.EngineHash(parent), ParentSeq: parent}
	for _, s := range seqs {
		x.Engine = append(x.Engine, kvindex.EngineHash(s))
	}
	r.index.(kvindex.Importer).Import(slot, &x)
}

func orDefault(v, otherwise float64) float64 {
	if v > 0 {
		return v
	}
	return otherwise
}

// runUntil runs the events that are due at the given time.
func (r *replayRun) runUntil(at time.Duration) {
	for len(r.events) > 0 && r.events[0].at <= at {
		heap.Pop(&r.events).(event).fn()
	}
}

func (r *replayRun) schedule(at time.Duration, what func()) { heap.Push(&r.events, event{at, what}) }

// choose returns the rank for a leg: the recorded one, or the scheduler's choice.
func (r *replayRun) choose(q *Request, leg schedule.LegKind, pool, recorded int) (int, *schedule.Reservation) {
	if r.v.Recorded {
		return recorded, nil
	}
	candidates := r.pools[pool]
	for _, k := range candidates {
		k.EventBlockSize.Store(int64(q.BlockSize))
	}
	r.index.Find(q.Seqs, &r.overlap)
	c, ok := r.scheduler.Choose(&schedule.Query{Leg: leg, Candidates: candidates, Overlap: &r.overlap, PromptTokens: q.Prompt, MaxTokens: q.MaxTokens, Attempt: 1})
	if !ok {
		return -1, nil
	}
	return int(c.Rank.Slot), c.Reservation
}

// arrive chooses a rank for a request, which computes it after its earlier requests. The blocks
// count as held from now on, because a later request to the same rank is computed later.
func (r *replayRun) arrive(q *Request) {
	at := q.At
	i, booked := r.choose(q, q.Leg, q.Pool, q.Chosen)
	if i < 0 {
		return
	}
	cached := min(r.holdPrompt(i, q.Seqs)*q.BlockSize, max(q.Prompt-1, 0)) // an engine always computes the last token
	compute := max(q.Prompt-cached, 1)
	r.busy[i] = max(r.busy[i], at) + time.Duration(compute)*r.rates.PerToken
	r.computed[i] += compute
	r.prompt += q.Prompt
	r.cached += cached
	first := r.busy[i]
	r.ttfts = append(r.ttfts, first-at+r.rates.Base)
	r.compare(q, cached)
	if q.DecodePool < 0 {
		r.schedule(first, booked.PrefillDone)
		r.schedule(first+q.Decode, booked.Release)
		return
	}
	r.schedule(first, func() {
		booked.Release()
		d, holds := r.choose(q, schedule.DecodeLeg, q.DecodePool, q.DecodeChosen)
		if d < 0 {
			return
		}
		r.holdPrompt(d, q.Seqs)
		holds.PrefillDone()
		r.schedule(first+q.Decode, holds.Release)
	})
}

// holdPrompt adds a prompt to a rank's cache and returns the number of leading blocks that the
// cache held before.
func (r *replayRun) holdPrompt(i int, seqs []blockhash.Seq) int {
	c, slot := r.caches[i], r.ranks[i].Slot
	depth := c.matchLength(seqs)
	gone := c.insert(seqs)
	if r.v.Recorded {
		return depth // the recorded choices do not use the index
	}
	seqs = seqs[:min(len(seqs), c.capacity)]
	if len(gone) > 0 {
		r.index.Remove(slot, kvindex.Device, gone)
	}
	if depth < len(seqs) {
		parent := blockhash.Seq(0)
		if depth > 0 {
			parent = seqs[depth-1]
		}
		r.storeBlocks(slot, depth > 0, parent, seqs[depth:])
	}
	return depth
}

func (r *replayRun) compare(q *Request, cached int) {
	if q.Cached < 0 {
		return
	}
	f := &r.out.Fidelity
	f.Requests++
	f.Modelled += cached
	f.Reported += q.Cached
	off := max(cached-q.Cached, q.Cached-cached)
	if off <= q.BlockSize {
		f.WithinOneBlock++
	}
	f.MeanError += float64(off)
}

func (r *replayRun) result() Result {
	o := r.out
	o.Variant, o.Requests = r.v, len(r.ttfts)
	if r.prompt > 0 {
		o.HitRate = float64(r.cached) / float64(r.prompt)
	}
	if o.Fidelity.Requests > 0 {
		o.Fidelity.MeanError /= float64(o.Fidelity.Requests)
	}
	o.P50, o.P99 = Quantile(r.ttfts, 0.5), Quantile(r.ttfts, 0.99)
	o.Imbalance = imbalance(r.t, r.computed)
	return o
}

// imbalance considers the ranks that could have been chosen to compute prompts.
func imbalance(t *Trace, computed []int) float64 {
	could := make([]bool, len(computed))
	for i := range t.Requests {
		for _, k := range t.pools[t.Requests[i].Pool] {
			could[k] = true
		}
	}
	most, sum, n := 0, 0, 0
	for i, v := range computed {
		if could[i] {
			most, sum, n = max(most, v), sum+v, n+1
		}
	}
	if sum == 0 {
		return 1
	}
	return float64(most) * float64(n) / float64(sum)
}

// Quantile sorts d and returns its q-th quantile; 0 for an empty d.
func Quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(int(q*float64(len(d))), len(d)-1)]
}

// Measured returns the values in the recording itself: the hit rate from the engines' reports,
// the times to first token of streams, and the imbalance of the prompts' uncached tokens.
func (t *Trace) Measured() (r Result, ok bool) {
	var ttfts []time.Duration
	prompt, cached := 0, 0
	computed := make([]int, len(t.Ranks))
	for i := range t.Requests {
		q := &t.Requests[i]
		if q.TTFT > 0 {
			ttfts = append(ttfts, q.TTFT)
		}
		if q.Cached >= 0 {
			prompt += q.Prompt
			cached += q.Cached
			computed[q.Chosen] += max(q.Prompt-q.Cached, 1)
			r.Requests++
		}
	}
	if prompt > 0 {
		r.HitRate = float64(cached) / float64(prompt)
	}
	r.Imbalance = imbalance(t, computed)
	r.P50, r.P99 = Quantile(ttfts, 0.5), Quantile(ttfts, 0.99)
	return r, r.Requests > 0 && len(ttfts) > 0
}

// Calibrate derives the model's rates from the recording. Base is the first percentile of the
// recorded times to first token. PerToken is chosen such that the recorded choices yield the
// recorded median. ok is false when the recording contains no times to first token.
func (t *Trace) Calibrate() (rates Rates, ok bool) {
	var ttfts []time.Duration
	for i := range t.Requests {
		if d := t.Requests[i].TTFT; d > 0 {
			ttfts = append(ttfts, d)
		}
	}
	if len(ttfts) == 0 {
		return DefaultRates, false
	}
	want := Quantile(ttfts, 0.5)
	rates.Base = Quantile(ttfts, 0.01)
	low, high := time.Duration(0), 10*time.Millisecond
	for high-low > 200*time.Nanosecond {
		rates.PerToken = (low + high) / 2
		if t.Run(Variant{Recorded: true}, rates).P50 < want {
			low = rates.PerToken
		} else {
			high = rates.PerToken
		}
	}
	rates.PerToken = high
	return rates, true
}
