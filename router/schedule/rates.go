package schedule

import (
	"math"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// Rates are the costs of work, in ms. In Options a rate above 0 is fixed; 0 is learned per worker,
// starting from the assumptions in doc.go.
type Rates struct {
	Prefill  float64 `json:"prefill"`  // per prompt token computed
	Transfer float64 `json:"transfer"` // per prompt token pulled
	Block    float64 `json:"block"`    // per KV block resident in the batch, over a request's decode
}

// The rates that are assumed until something is learned; doc.go gives their source.
const (
	prefillMS  = 0.1
	transferMS = 0.005
	blockMS    = 0.15
	// decodeSteps is the number of steps for which a resident block is charged: the learned rate of
	// worker.Decoding is the cost of one step.
	decodeSteps = 256
	// Typical amounts of work, by which worker.Speed weights its first rate.
	typicalTokens, typicalBlocks = 1024, 256
	// minRateTokens is the work that a leg must have to contribute to the rate, and minRateOutput
	// the number of generated tokens.
	minRateTokens, minRateOutput = 64, 8
	// minOwnLegs is the number of its own legs after which a worker's rates are used; until then
	// the fleet's are.
	minOwnLegs = 8
	// ownRateTTL is how long they are used after the last leg: a worker that was slow once and is
	// not chosen any more must get another chance.
	ownRateTTL = 2 * time.Minute
	// A worker's own rate is used once it differs from the fleet's by a factor of rateApart, as far
	// as its legs' times bear it out (limitRatio), and these by rateNear, until the rates are
	// within rateNear again. Smaller differences are
	// noise between equal workers; with one request at a time the worker that looks cheaper would
	// get every new prompt, and the others no leg to show that they are as fast.
	rateApart, rateNear = 1.4, 1.25
)

// price is the cost of a unit of work, in ns: fixed by the options, otherwise learned from all
// workers together. Both may be read while Reload changes fixed; learning never writes fixed.
type price struct {
	fixed atomic.Int64 // 0: not fixed
	ns    atomic.Int64
}

type counter interface {
	Load() int64
	Store(int64)
}

// rates are the scheduler's knowledge of the cost of work. A rank's own are in its Price, 0 while
// it has none; they apply if nothing is fixed.
type rates struct {
	common [worker.NumWork]price
	fleet  worker.Speed
}

func (r *rates) init() {
	for w, ms := range [worker.NumWork]float64{worker.Prefilling: prefillMS, worker.Pulling: transferMS, worker.Decoding: blockMS} {
		r.common[w].ns.Store(priceOf(ms))
	}
}

// setFixed fixes the rates above 0. The others use what was learned before they were fixed.
func (r *rates) setFixed(o *Rates) {
	for w, ms := range [worker.NumWork]float64{worker.Prefilling: o.Prefill, worker.Pulling: o.Transfer, worker.Decoding: o.Block} {
		ns := int64(0)
		if ms > 0 {
			ns = priceOf(ms)
		}
		r.common[w].fixed.Store(ns)
	}
}

// priceOf converts ms per unit to ns.
func priceOf(ms float64) int64 {
	return int64(min(max(math.Round(ms*nsPerMS), 1), math.MaxInt32))
}

// price returns the price of one unit of work on a rank, in ns.
func (r *rates) price(rank *worker.Rank, w worker.Work) int64 {
	if p := r.common[w].fixed.Load(); p > 0 {
		return p
	}
	if p := rank.Price[w].Load(); p > 0 {
		return p
	}
	return r.common[w].ns.Load()
}

// isKnown reports whether the rate of w is fixed, or has been learned from any worker.
func (r *rates) isKnown(w worker.Work) bool {
	if r.common[w].fixed.Load() > 0 {
		return true
	}
	_, _, legs := r.fleet.Rate(w)
	return legs >= minOwnLegs
}

// assumed are the initial rates, in ms per unit as in worker.Speed.
var assumed = [worker.NumWork]float64{worker.Prefilling: prefillMS, worker.Pulling: transferMS, worker.Decoding: blockMS / decodeSteps}

// learn adds the time of one leg to the fleet's rate and to its worker's.
func (r *rates) learn(rank *worker.Rank, w worker.Work, units, ms float64, now int64) {
	c := &r.common[w]
	if c.fixed.Load() != 0 {
		return
	}
	typical := float64(typicalTokens)
	if w == worker.Decoding {
		typical = typicalBlocks
	}
	r.fleet.Observe(w, units, ms, assumed[w], typical)
	before, base, legs := r.fleet.Rate(w)
	if legs == 0 {
		return // the first leg met another in progress, or took no time: nothing is learned
	}
	usual := base + before*units
	before = clampBlockRate(before, w)
	c.update(before, w)
	own := &rank.Worker.Speed
	own.Observe(w, units, ms, before, typical)
	own.Last[w].Store(now)
	rate, base, legs := own.Rate(w)
	level := (base + rate*units) / usual
	rate = clampBlockRate(rate, w)
	if legs < minOwnLegs || w == worker.Decoding && legs < 8*minOwnLegs {
		return // a slope of small differences needs more samples
	}
	ratio := limitRatio(rate/before, level)
	for _, sibling := range rank.Worker.Ranks {
		switch own := &sibling.Price[w]; {
		case isWithin(ratio, rateNear):
			own.Store(0)
		case !isWithin(ratio, rateApart) && !isWithin(level, rateNear) || own.Load() != 0:
			updatePrice(own, before*ratio, w)
		}
	}
}

// isWithin reports whether two values with a ratio differ by less than a factor.
func isWithin(ratio, factor float64) bool { return max(ratio, 1/ratio) < factor }

// limitRatio bounds the ratio of a worker's own rate to the fleet's by that of the times of legs. Prompts of
// similar length determine the time of a leg, but not which part of it belongs to the length: between equal
// workers the rates may come out a hundredfold apart, one with all of the time in the base and one with none,
// and all requests would go to the first. Where legs take equally long, the rates count as equal. Where half
// of the time or less is in the base, the square of level does not bound a real difference.
func limitRatio(ratio, level float64) float64 {
	if level > 1 {
		return min(max(ratio, 1), level*level)
	}
	return max(min(ratio, 1), level*level)
}

// clampBlockRate keeps the block rate near what memory bandwidth allows: it is the slope of small
// differences, and an error in it sends requests away from their caches.
func clampBlockRate(rate float64, w worker.Work) float64 {
	if w != worker.Decoding {
		return rate
	}
	return min(max(rate, assumed[w]/8), assumed[w]*4)
}

// update sets a learned rate.
func (p *price) update(ms float64, w worker.Work) { updatePrice(&p.ns, ms, w) }

// updatePrice changes a price only if the learned rate differs by a twentieth: otherwise equal
// workers would never have equal prices, and noise would decide every choice.
func updatePrice(p counter, ms float64, w worker.Work) {
	if w == worker.Decoding {
		ms *= decodeSteps
	}
	next, old := priceOf(ms), p.Load()
	if d := next - old; d > old/20 || d < -old/20 {
		p.Store(next)
	}
}

// expireOwn drops what was learned from a worker's own legs too long ago. It drops all of it,
// because the few legs that the worker then gets would have no weight against many old ones.
func (r *rates) expireOwn(rank *worker.Rank, now int64) {
	for w := range rank.Price {
		own := &rank.Worker.Speed
		if rank.Price[w].Load() == 0 || now-own.Last[w].Load() <= int64(ownRateTTL) || !own.Forget(worker.Work(w)) {
			continue
		}
		for _, sibling := range rank.Worker.Ranks {
			sibling.Price[w].Store(0)
		}
	}
}

// ForgetRates drops what was learned from a worker's own legs, and how fast its engine starts requests and how
// many it runs: the engine has left or restarted.
func (s *Scheduler) ForgetRates(w *worker.Worker) {
	for _, r := range w.Ranks {
		r.Pace.Forget()
	}
	for work := range worker.NumWork {
		w.Speed.Forget(work)
		for _, r := range w.Ranks {
			r.Price[work].Store(0)
		}
	}
}

// observe learns from a leg that ended: its time from choice to first token for the work before it,
// and the time per token with that many resident blocks.
func (s *Scheduler) observe(res *Reservation, now int64) {
	first := res.first.Load()
	if first == 0 {
		return
	}
	cached := res.cached
	if res.reported >= 0 {
		cached = res.reported
	}
	todo := int64(res.prompt) - int64(cached)
	waited := float64(first-res.started) / nsPerMS
	if res.leg == DecodeLeg {
		if todo >= minRateTokens && !res.noPull {
			s.rates.learn(res.rank, worker.Pulling, float64(todo), waited, now)
		}
	} else if work := max(1, todo) + res.tokensBefore; work >= minRateTokens {
		s.rates.learn(res.rank, worker.Prefilling, float64(work), waited, now)
	}
	if res.leg != PrefillLeg && res.generated >= minRateOutput {
		blocks := (res.blocksBefore + res.rank.DecodeBlocks.Load() + res.blocks) / 2
		// Prompts computed meanwhile on the same rank took their share of the time.
		others := float64(res.rank.Computed.Load()-res.computed) * float64(s.rates.price(res.rank, worker.Prefilling))
		if elapsed := float64(now-first) - others; elapsed > 0 {
			s.rates.learn(res.rank, worker.Decoding, float64(max(1, blocks)), elapsed/nsPerMS/float64(res.generated-1), now)
		}
	}
}

// RatesOf returns the rates that are used for a rank now.
func (s *Scheduler) RatesOf(r *worker.Rank) Rates {
	ms := func(w worker.Work) float64 { return float64(s.rates.price(r, w)) / nsPerMS }
	return Rates{Prefill: ms(worker.Prefilling), Transfer: ms(worker.Pulling), Block: ms(worker.Decoding)}
}
