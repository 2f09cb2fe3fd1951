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

// Variant is one way to choose.
type Variant struct {
	Name     string
	Recorded bool               // the recorded choices again
	Policy   string             // of schedule.Options
	Weights  map[string]float64 // by their names in the configuration
}

// Rates are the model's times.
type Rates struct {
	PerToken time.Duration // to compute one prompt token
	Base     time.Duration // of every first token beside that
}

// Result is what one way of choosing led to.
type Result struct {
	Variant   Variant
	Requests  int
	HitRate   float64 // cached prompt tokens over all
	Imbalance float64 // tokens computed on the busiest rank over the mean of its role's
	P50, P99  time.Duration
	Fidelity  Fidelity
}

// Fidelity compares the model's cached tokens with what engines reported; it means
// something for the recorded choices only.
type Fidelity struct {
	Requests           int     // with a report
	Modelled, Reported int     // cached tokens
	WithinOneBlock     int     // requests
	MeanError          float64 // tokens a request
}

// DefaultRates are used where the recording has no times to first token.
var DefaultRates = Rates{PerToken: 100 * time.Microsecond}

// replayRun is one Run under way.
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
	busy      []time.Duration // until when a rank computes
	computed  []int           // tokens
	overlap   kvindex.Overlap
	events    eventQueue
	ttfts     []time.Duration
	prompt    int
	cached    int
	out       Result
}

// event is something that happens at a moment of the model's time.
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

// Run plays the trace under v.
func (t *Trace) Run(v Variant, rates Rates) Result {
	w := func(name string) float64 { return v.Weights[name] }
	r := &replayRun{t: t, v: v, rates: rates, index: kvindex.New(kvindex.Options{MaxBytes: 16 << 30}),
		scheduler: schedule.New(schedule.Options{
			OverlapWeight: w("overlap_weight"), PrefillWeight: w("prefill_weight"), DecodeWeight: w("decode_weight"), QueueWeight: w("queue_weight"),
			HostWeight: w("host_weight"), DiskWeight: w("disk_weight"), Temperature: w("temperature"), Policy: v.Policy, Explain: -1, Seed: 1,
			// What was just sent is in the index at once here: it need not be awaited.
			// Rates are learned by the clock, and the model's is another: they stand.
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

// fillCaches fills the caches with what ranks held. The recording does not say what they
// had used last: beginnings are taken to be newer than what follows them, so that a
// cache that holds less than was held lacks ends of prompts.
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

// storeBlocks has the index hold blocks of a rank.
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

// runUntil does what is due to a moment.
func (r *replayRun) runUntil(at time.Duration) {
	for len(r.events) > 0 && r.events[0].at <= at {
		heap.Pop(&r.events).(event).fn()
	}
}

func (r *replayRun) schedule(at time.Duration, what func()) { heap.Push(&r.events, event{at, what}) }

// choose gives the rank of a leg: the recorded one, or the scheduler's.
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

// arrive chooses for a request and has its rank compute it after what that has to
// do already. Its blocks count as held from here on: whoever comes after it to the
// same rank is computed after it.
func (r *replayRun) arrive(q *Request) {
	at := q.At
	i, booked := r.choose(q, q.Leg, q.Pool, q.Chosen)
	if i < 0 {
		return
	}
	cached := min(r.holdPrompt(i, q.Seqs)*q.BlockSize, max(q.Prompt-1, 0)) // an engine computes the last token always
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

// holdPrompt has a rank hold a prompt from now on and gives how deep it held it before.
func (r *replayRun) holdPrompt(i int, seqs []blockhash.Seq) int {
	c, slot := r.caches[i], r.ranks[i].Slot
	depth := c.matchLength(seqs)
	gone := c.insert(seqs)
	if r.v.Recorded {
		return depth // nobody asks the index
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

// imbalance is over the ranks that could have been chosen to compute prompts.
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

// Quantile is the q-th of durations, which it sorts; 0 of none.
func Quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(int(q*float64(len(d))), len(d)-1)]
}

// Measured is what the recording itself says: hit rate by the engines' reports,
// times to first token of streams, imbalance of the prompts' uncached tokens.
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

// Calibrate sets the model's rates by the recording: the base is what nearly every
// first token took at least, the time a token such that the recorded choices lead
// to the recorded median. ok is false where there are no times to go by.
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
