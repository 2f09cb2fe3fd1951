package placement

import (
	"container/heap"
	"fmt"
	"slices"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Options describe a fleet and its load.
type Options struct {
	Engines  int
	KVTokens int // of each engine
	Engine   EngineOptions
	// Speed divides the times of the trace. 0 replays it in a closed loop, with Concurrency
	// requests at any time.
	Speed       float64
	Concurrency int
	// Advance waits for some time of the clock that package time shows: in a synctest bubble,
	// time.Sleep.
	Advance func(time.Duration)
	// Settle waits until no other goroutine of the run has anything to do: synctest.Wait. It is needed
	// with a Queue.
	Settle func()
	// Latency is the time from the choice of an engine until that has the request, and from a token
	// until the router has it.
	Latency time.Duration
	Targets Targets
	Queue   *QueueOptions // nil: no request waits in the router
}

// Targets are the times within which a request counts for Result.Goodput. The zero value means none.
type Targets struct {
	First    time.Duration // time to first token
	PerToken time.Duration // mean time of an output token after the first
}

// Variant is one way to choose engines.
type Variant struct {
	Name    string
	Options schedule.Options
	// Fixed, if not nil, is the engine of each request of the trace; the scheduler is not asked.
	Fixed []int
	// CountInFull makes the scheduler count a prompt in full until its first token.
	CountInFull bool
	// Pooled gives all engines one cache as large as theirs together: what one has computed, all have.
	Pooled bool
}

// Result is the outcome of one run. The first requests of the trace, which fill the caches, do not
// count.
type Result struct {
	Hit            float64 // cached share of the prompt tokens
	Predicted      float64 // the same as the router expected it
	Mean, P50, P99 time.Duration
	Imbalance      float64       // tokens computed by the busiest engine, as a multiple of the mean
	Busiest        float64       // requests of the busiest engine, likewise
	Requests       float64       // ended per second
	Output         float64       // output tokens per second
	Total          time.Duration // mean time of a request
	PerToken       time.Duration // mean time of an output token after the first
	Goodput        float64       // answers within Options.Targets, per second in which requests arrived
	Highest        time.Duration // 99th percentile of the time to first token of the highest class
	Refused        int
	Waited         int // requests that the queue has dispatched
}

// warmShare is the share of a trace's requests that fill the caches.
const warmShare = 0.2

const (
	eventDelay  = 3 * time.Millisecond // from the end of a step until the router has its events
	scrapeEvery = time.Second
)

// run is the state of one Run.
type run struct {
	o         Options
	v         Variant
	t         *Trace
	began     time.Time
	events    eventQueue
	order     uint64
	scheduler *schedule.Scheduler
	index     kvindex.Index
	ranks     []*worker.Rank
	engines   []*engine
	pool      *cache // nil: each engine has its own
	overlaps  []schedule.SizedOverlap
	next      int // request of a closed loop
	open      int
	ttfts     []time.Duration
	prompt    int
	cached    int
	predicted int
	output    int
	total     time.Duration
	decoding  time.Duration
	ended     int
	first     time.Duration // when the measurement began
	last      time.Duration // when the last request ended

	queue    *queue // nil: none
	highest  []time.Duration
	lastSent time.Duration // when the last request arrived
	good     int
	refused  int
	waited   int
}

type event struct {
	at    time.Duration
	order uint64
	fn    func()
}

type eventQueue []event

func (h eventQueue) Len() int { return len(h) }
func (h eventQueue) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].order < h[j].order
}
func (h eventQueue) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *eventQueue) Push(x any)   { *h = append(*h, x.(event)) }
func (h *eventQueue) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// Run plays a trace. It needs a clock that stands still while it computes (see Options.Advance),
// because the scheduler measures times.
func Run(t *Trace, o Options, v Variant) Result {
	r := &run{o: o, v: v, t: t, began: time.Now(), index: kvindex.New(kvindex.Options{MaxBytes: 4 << 30}), overlaps: make([]schedule.SizedOverlap, 1)}
	v.Options.Explain = -1
	t.number()
	r.scheduler = schedule.New(v.Options)
	r.overlaps[0].BlockSize = t.BlockTokens
	if v.Pooled {
		r.pool = newCache(len(t.seqs), t.BlockTokens, o.KVTokens*o.Engines)
	}
	for i := range o.Engines {
		w := worker.New(worker.Spec{ID: fmt.Sprintf("engine-%d", i), BlockSize: t.BlockTokens})
		w.SetInfo(&worker.Info{TotalBlocks: o.KVTokens / t.BlockTokens})
		k := w.Ranks[0]
		k.Slot = worker.Slot(i)
		k.Feed.Store(uint32(worker.FeedLive))
		k.EventBlockSize.Store(int64(t.BlockTokens))
		r.ranks = append(r.ranks, k)
		e := &engine{opt: &r.o.Engine, cache: r.pool}
		if e.cache == nil {
			e.cache = newCache(len(t.seqs), t.BlockTokens, o.KVTokens)
		}
		r.engines = append(r.engines, e)
	}
	r.after(0, r.scrape)
	if o.Speed > 0 {
		for i := range t.Requests {
			r.at(time.Duration(float64(t.Requests[i].At-t.Requests[0].At)/o.Speed), func() { r.arrive(i) })
		}
		r.open = len(t.Requests)
	} else {
		for range min(o.Concurrency, len(t.Requests)) {
			r.open++
			r.after(0, r.arriveNext)
		}
	}
	if o.Queue != nil {
		r.playQueued()
		return r.result()
	}
	for len(r.events) > 0 {
		e := heap.Pop(&r.events).(event)
		if d := e.at - r.now(); d > 0 {
			o.Advance(d)
		}
		e.fn()
	}
	return r.result()
}

func (r *run) now() time.Duration { return time.Since(r.began) }

func (r *run) at(at time.Duration, fn func()) {
	r.order++
	heap.Push(&r.events, event{at, r.order, fn})
}

func (r *run) after(d time.Duration, fn func()) { r.at(r.now()+d, fn) }

func (r *run) arriveNext() {
	if r.next < len(r.t.Requests) {
		r.next++
		r.arrive(r.next - 1)
	} else {
		r.open--
	}
}

// arrival is a request of the trace that has reached the router.
type arrival struct {
	*Request
	number   int
	at       time.Duration // of its arrival
	measured bool
}

// arrive receives a request, and chooses its engine unless it waits in the queue.
func (r *run) arrive(i int) {
	x := &arrival{Request: &r.t.Requests[i], number: i, at: r.now(), measured: i >= int(warmShare*float64(len(r.t.Requests)))}
	if x.measured && r.first == 0 {
		r.first = x.at
	}
	r.lastSent = x.at
	if r.queue != nil && r.queue.arrive(x) {
		return
	}
	c, ok := r.choose(x, nil)
	if !ok {
		panic("placement: no candidate")
	}
	r.send(x, c)
}

// query looks the prefix of a request up and returns what the scheduler is asked.
func (r *run) query(x *arrival) schedule.Query {
	r.index.Find(x.Blocks, &r.overlaps[0].Overlap)
	return schedule.Query{Leg: schedule.WholeLeg, Candidates: r.ranks, Overlaps: r.overlaps, PromptTokens: x.Prompt, MaxTokens: x.Output,
		Keys: x.Blocks, KeyTokens: r.t.BlockTokens, Attempt: 1}
}

// choose chooses the engine of a request among those that are not excluded. ok is false if there is none.
func (r *run) choose(x *arrival, excluded []*worker.Rank) (c schedule.Choice, ok bool) {
	if r.v.Fixed != nil {
		return schedule.Choice{Rank: r.ranks[r.v.Fixed[x.number]]}, true
	}
	if r.v.CountInFull {
		for _, k := range r.ranks {
			k.HeadSince.Store(int64(r.now()))
		}
	}
	q := r.query(x)
	q.Excluded = excluded
	return r.scheduler.Choose(&q)
}

// send gives a request to its engine.
func (r *run) send(x *arrival, c schedule.Choice) {
	if r.o.Latency > 0 {
		r.after(r.o.Latency, func() { r.receive(x, c) })
		return
	}
	r.receive(x, c)
}

// receive is send on the engine's side.
func (r *run) receive(x *arrival, c schedule.Choice) {
	slot, firstAt := int(c.Rank.Slot), time.Duration(0)
	e := r.engines[slot]
	e.add(x.Request, func(first bool, cached int) {
		r.afterLatency(func() {
			if first {
				firstAt = r.now()
				r.firstToken(x, c, cached)
			} else {
				r.end(x, c, firstAt, cached)
			}
		})
	})
	if !e.busy {
		r.step(slot)
	}
}

func (r *run) afterLatency(fn func()) {
	if r.o.Latency > 0 {
		r.after(r.o.Latency, fn)
	} else {
		fn()
	}
}

func (r *run) firstToken(x *arrival, c schedule.Choice, cached int) {
	c.Reservation.PrefillDone()
	if x.measured {
		r.ttfts = append(r.ttfts, r.now()-x.at)
		if x.Class == 0 {
			r.highest = append(r.highest, r.now()-x.at)
		}
		r.prompt += x.Prompt
		r.cached += cached
		r.predicted += c.CachedTokens
	}
}

func (r *run) end(x *arrival, c schedule.Choice, firstAt time.Duration, cached int) {
	c.Reservation.Report("", cached, x.Output)
	c.Reservation.Release()
	if x.measured {
		r.output += x.Output
		r.total += r.now() - x.at
		r.decoding += r.now() - firstAt
		r.ended++
		r.last = r.now()
		target := r.o.Targets
		if firstAt-x.at <= target.First && r.now()-firstAt <= time.Duration(max(1, x.Output-1))*target.PerToken {
			r.good++
		}
	}
	if r.o.Speed == 0 {
		r.arriveNext()
	} else {
		r.open--
	}
}

// step begins a step of an engine.
func (r *run) step(slot int) {
	e := r.engines[slot]
	d := e.begin()
	if d == 0 {
		return
	}
	r.after(d, func() {
		e.end()
		changes := e.cache.changes
		e.cache.changes = nil
		if len(changes) > 0 {
			r.after(eventDelay, func() {
				if r.pool == nil {
					r.apply(worker.Slot(slot), changes)
					return
				}
				for i := range r.ranks {
					r.apply(worker.Slot(i), changes)
				}
			})
		}
		if !e.busy {
			r.step(slot)
		}
	})
}

// apply applies an engine's KV events to the index.
func (r *run) apply(slot worker.Slot, changes []change) {
	for i := range changes {
		c := &changes[i]
		seqs := r.t.seqsOf(c.blocks)
		hashes := make([]kvindex.EngineHash, len(seqs))
		for k, s := range seqs {
			hashes[k] = kvindex.EngineHash(s)
		}
		if c.removed {
			r.index.Remove(slot, kvindex.Device, hashes)
			continue
		}
		x := kvindex.Exported{HasParent: c.hasParent, Engine: hashes, Seqs: seqs}
		if c.hasParent {
			x.ParentSeq = r.t.seqs[c.parent]
			x.Parent = kvindex.EngineHash(x.ParentSeq)
		}
		r.index.(kvindex.Importer).Import(slot, &x)
	}
	r.ranks[slot].CachedBlocks.Store(int64(r.index.CachedBlocks(slot)))
}

// scrape reads the engines' load as the fleet does.
func (r *run) scrape() {
	for i, e := range r.engines {
		k := r.ranks[i]
		k.Running.Store(int64(len(e.prefill) + len(e.decode)))
		k.Waiting.Store(int64(len(e.waiting)))
		k.SetKVUsage(e.cache.usage())
		k.CountReport()
	}
	if r.open > 0 {
		r.after(scrapeEvery, r.scrape)
	}
}

func (r *run) result() Result {
	v := Result{Hit: share(r.cached, r.prompt), Predicted: share(r.predicted, r.prompt)}
	sum := time.Duration(0)
	for _, d := range r.ttfts {
		sum += d
	}
	n := len(r.ttfts)
	slices.Sort(r.ttfts)
	v.Mean, v.P50, v.P99 = sum/time.Duration(n), r.ttfts[n/2], r.ttfts[n*99/100]
	computed, requests := make([]int, len(r.engines)), make([]int, len(r.engines))
	for i, e := range r.engines {
		computed[i], requests[i] = e.computed, e.requests
	}
	v.Imbalance, v.Busiest = mostByMean(computed), mostByMean(requests)
	elapsed := (r.last - r.first).Seconds()
	v.Requests, v.Output = float64(r.ended)/elapsed, float64(r.output)/elapsed
	v.Total, v.PerToken = r.total/time.Duration(r.ended), r.decoding/time.Duration(max(1, r.output-r.ended))
	if n := len(r.highest); n > 0 {
		slices.Sort(r.highest)
		v.Highest = r.highest[n*99/100]
	}
	v.Goodput, v.Refused, v.Waited = float64(r.good)/(r.lastSent-r.first).Seconds(), r.refused, r.waited
	return v
}

// mostByMean returns the largest number as a multiple of their mean.
func mostByMean(n []int) float64 {
	sum := 0
	for _, x := range n {
		sum += x
	}
	return float64(slices.Max(n)) * float64(len(n)) / float64(max(1, sum))
}

func share(part, whole int) float64 { return float64(part) / float64(max(1, whole)) }

// Bounds are what the cached share of a trace can be.
type Bounds struct {
	Infinite float64 // one cache without limit
	Pooled   float64 // one cache as large as all engines' together
	Families []int   // see familyHomes
}

// Bound computes the bounds of a trace, without time: requests run one after another.
func Bound(t *Trace, o Options) (b Bounds) {
	b.Infinite = sequential(t, t.promptTokens()*2+1<<20)
	b.Pooled = sequential(t, o.KVTokens*o.Engines)
	b.Families = familyHomes(t, o.Engines)
	return b
}

// sequential is the cached share with one cache.
func sequential(t *Trace, tokens int) float64 {
	t.number()
	c := newCache(len(t.seqs), t.BlockTokens, tokens)
	prompt, cached := 0, 0
	for i := range t.Requests {
		q := &t.Requests[i]
		depth := min(c.depth(q.numbers[:len(q.Blocks)]), (q.Prompt-1)/t.BlockTokens)
		if i >= int(warmShare*float64(len(t.Requests))) {
			prompt += q.Prompt
			cached += depth * t.BlockTokens
		}
		all := q.numbers
		c.reserve(all[:depth], len(all)-depth)
		n := c.store(all, depth, len(all))
		c.release(all, len(all)-depth-n)
		c.changes = nil
	}
	return share(cached, prompt)
}

// familyHomes gives each prefix family an engine: the oracle, which knows the trace. A family is the
// largest subtree of the prefix tree that has at most a quarter of an engine's share of the
// prompts' tokens. The largest families are placed first, each on the engine with the least.
func familyHomes(t *Trace, engines int) []int {
	weight := map[blockhash.Seq]int{}
	total := 0
	for i := range t.Requests {
		q := &t.Requests[i]
		total += q.Prompt
		for _, s := range q.Blocks {
			weight[s] += q.Prompt
		}
	}
	limit := total / (4 * engines)
	family := make([]blockhash.Seq, len(t.Requests))
	size := map[blockhash.Seq]int{}
	for i := range t.Requests {
		q := &t.Requests[i]
		f := blockhash.Seq(mix(uint64(i)))
		for _, s := range q.Blocks {
			if weight[s] <= limit {
				f = s
				break
			}
		}
		family[i] = f
		size[f] += q.Prompt
	}
	order := make([]blockhash.Seq, 0, len(size))
	for f := range size {
		order = append(order, f)
	}
	slices.SortFunc(order, func(a, b blockhash.Seq) int {
		if size[a] != size[b] {
			return size[b] - size[a]
		}
		if a < b {
			return -1
		}
		return 1
	})
	home, load := map[blockhash.Seq]int{}, make([]int, engines)
	for _, f := range order {
		least := 0
		for i := range load {
			if load[i] < load[least] {
				least = i
			}
		}
		home[f] = least
		load[least] += size[f]
	}
	fixed := make([]int, len(t.Requests))
	for i, f := range family {
		fixed[i] = home[f]
	}
	return fixed
}
