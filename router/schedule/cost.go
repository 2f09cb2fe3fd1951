package schedule

import (
	"math"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// The rates of the cost formula; doc.go says where they come from.
const (
	prefillMS     = 0.1   // per prompt token computed
	transferMS    = 0.005 // per prompt token pulled
	blockMS       = 0.15  // per block resident in the batch
	waitingTokens = 1024  // assumed prompt of a request somebody else placed
	pressureFrom  = 0.9   // share of blocks in use from which room is doubted
)

// term is one candidate as it was seen: the inputs of its cost. The cost's
// terms follow from them (see termsOf), so only these are kept in a record.
type term struct {
	rank     *worker.Rank
	cost     float64
	reserved int64 // prompt tokens to prefill, ours
	blocks   int32 // decode blocks, ours
	requests int32 // ours
	waiting  int32 // as the engine said, -1 never
	cached   int32 // tokens predicted
	depth    int32 // blocks of overlap
	unfit    int32 // tokens of this request's blocks that do not fit
	feed     worker.FeedState
	approx   bool // the overlap is the text mode's
	excluded bool
}

// frame is what is constant over the candidates of one choice.
type frame struct {
	w             *weights
	leg           Leg
	prompt        int
	output        int
	exact         *kvindex.Overlap // nil when nobody holds anything
	sized         []SizedOverlap   // instead of exact
	approx        *kvindex.Overlap
	approxTokens  int
	queue, decode float64 // the weights, or 0 where the leg has no such term
	rate          float64 // of the request's own tokens
	uncached      float64 // own(0)
	textOnly      bool    // no tokens were found: Approx is for every rank
}

// weights are the Options with the rates multiplied in, in ms.
type weights struct {
	overlap                  float64
	prefill, transfer, queue float64 // per token
	decode, waiting, unfit   float64 // per block, request, token
}

func newWeights(o *Options) weights {
	return weights{
		overlap:  o.OverlapWeight,
		prefill:  o.PrefillWeight * prefillMS,
		transfer: o.PrefillWeight * transferMS,
		queue:    o.QueueWeight * prefillMS,
		decode:   o.DecodeWeight * blockMS,
		waiting:  o.QueueWeight * waitingTokens * prefillMS,
		unfit:    o.DecodeWeight * prefillMS,
	}
}

func newFrame(w *weights, q *Query) frame {
	f := frame{w: w, leg: q.Leg, prompt: q.PromptTokens, output: outputTokens(q.MaxTokens), textOnly: q.Overlap == nil && len(q.Overlaps) == 0}
	if f.prompt <= 0 {
		f.prompt = assumedPrompt
	}
	// An overlap nobody shares is dropped here rather than asked per rank.
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
	if f.leg != DecodeLeg {
		f.queue = w.queue
	}
	if f.leg != PrefillLeg {
		f.decode = w.decode
	}
	f.rate = w.prefill
	if f.leg == DecodeLeg {
		f.rate = w.transfer
	}
	f.uncached = f.own(0)
	return f
}

// look reads a candidate's inputs and sets its cost. Each load is one atomic;
// together they are an estimate, not a snapshot.
func (f *frame) look(r *worker.Rank, t *term) {
	t.rank = r
	t.reserved = r.PrefillTokens.Load()
	t.blocks = int32(r.DecodeBlocks.Load())
	t.requests = int32(r.Requests.Load())
	t.waiting = int32(r.Waiting.Load())
	t.cached, t.depth, t.unfit = 0, 0, 0
	t.approx, t.excluded = false, false
	t.feed = worker.FeedState(r.Feed.Load())
	if f.exact != nil || f.sized != nil || f.approx != nil {
		f.overlap(r, t)
	}
	if f.leg != PrefillLeg {
		if u := r.KVUsage(); u >= pressureFrom {
			t.unfit = f.unfitTokens(r, u)
		}
	}
	t.cost = f.sum(f.own(t.cached), t.reserved, int64(t.blocks), int64(t.waiting)-int64(t.requests)) + f.w.unfit*float64(t.unfit)
}

// own is the cost of this request's own prompt, of which cached tokens are held.
func (f *frame) own(cached int32) float64 {
	return f.rate * max(0, float64(f.prompt)-f.w.overlap*float64(cached))
}

// sum adds the load of others. Factors of terms that the leg does not have are 0.
func (f *frame) sum(own float64, reserved, blocks, foreign int64) float64 {
	if foreign < 0 {
		foreign = 0
	}
	return own + f.queue*float64(reserved) + f.decode*float64(blocks) + f.w.waiting*float64(foreign)
}

// glance is look's cost without the term, for passes over many ranks.
func (f *frame) glance(r *worker.Rank, t *term) float64 {
	if f.exact != nil && f.exact.Depth(r.Slot) > 0 || f.sized != nil || f.approx != nil || f.leg != PrefillLeg && r.KVUsage() >= pressureFrom {
		f.look(r, t)
		return t.cost
	}
	return f.sum(f.uncached, r.PrefillTokens.Load(), r.DecodeBlocks.Load(), r.Waiting.Load()-r.Requests.Load())
}

// overlap trusts the index for ranks whose feed is contiguous. While a feed is
// syncing what it brought so far is true but not all: the better of both
// counts. Elsewhere only the text mode's guess remains.
func (f *frame) overlap(r *worker.Rank, t *term) {
	if t.feed == worker.FeedLive || t.feed == worker.FeedSyncing {
		if d, size := f.held(r); d > 0 {
			t.depth = int32(d)
			t.cached = int32(min(d*size, f.prompt))
		}
	}
	if f.approx != nil && (t.feed != worker.FeedLive || f.textOnly) {
		if d := f.approx.Depth(r.Slot); d > 0 {
			if c := int32(min(d*f.approxTokens, f.prompt)); c > t.cached {
				t.depth, t.cached, t.approx = int32(d), c, true
			}
		}
	}
}

// held is how many blocks, of how many tokens, the index has for r.
func (f *frame) held(r *worker.Rank) (depth, size int) {
	if f.exact != nil {
		if depth = f.exact.Depth(r.Slot); depth > 0 {
			size = sizeOf(r)
		}
		return depth, size
	}
	if len(f.sized) > 0 {
		size = sizeOf(r)
		for i := range f.sized {
			if f.sized[i].BlockSize == size {
				return f.sized[i].Overlap.Depth(r.Slot), size
			}
		}
	}
	return 0, 0
}

func (f *frame) unfitTokens(r *worker.Rank, usage float64) int32 {
	total := r.Worker.Info().TotalBlocks
	if total <= 0 {
		return 0
	}
	size := sizeOf(r)
	free := int((1 - min(usage, 1)) * float64(total))
	return int32(min(max(0, blocksFor(r, f.prompt, f.output)-free)*size, math.MaxInt32))
}

// Terms are the summands of a cost, in ms.
type Terms struct {
	Prefill  float64 `json:"prefill,omitempty"`
	Transfer float64 `json:"transfer,omitempty"`
	Queue    float64 `json:"queue,omitempty"`
	Waiting  float64 `json:"waiting,omitempty"`
	Decode   float64 `json:"decode,omitempty"`
	Pressure float64 `json:"pressure,omitempty"`
}

// termsOf splits the cost that look summed.
func (w *weights) termsOf(leg Leg, prompt int, t *term) Terms {
	todo := max(0, float64(prompt)-w.overlap*float64(t.cached))
	p := Terms{Waiting: w.waiting * float64(max(0, t.waiting-t.requests))}
	if leg == DecodeLeg {
		p.Transfer = w.transfer * todo
	} else {
		p.Prefill = w.prefill * todo
		p.Queue = w.queue * float64(t.reserved)
	}
	if leg != PrefillLeg {
		p.Decode = w.decode * float64(t.blocks)
		p.Pressure = w.unfit * float64(t.unfit)
	}
	return p
}
