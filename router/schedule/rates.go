package schedule

import (
	"math"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// Rates are what work costs, in ms. In Options a rate above 0 is fixed; 0 is
// learned, worker by worker, from the assumption that doc.go gives.
type Rates struct {
	Prefill  float64 `json:"prefill"`  // per prompt token computed
	Transfer float64 `json:"transfer"` // per prompt token pulled
	Block    float64 `json:"block"`    // per KV block resident in the batch, over a request's decode
}

// The rates assumed until something is learned; doc.go says where they come from.
const (
	prefillMS  = 0.1
	transferMS = 0.005
	blockMS    = 0.15
	// decodeSteps is over how many steps a resident block is paid for: what is
	// learned of Decoding is the cost of one step.
	decodeSteps = 256
	// typical amounts of work, by which worker.Speed weighs its first rate.
	typicalTokens, typicalBlocks = 1024, 256
	// minRateTokens of work that a leg must have to say something of the rate, and
	// minRateOutput of tokens generated.
	minRateTokens, minRateOutput = 64, 8
	// minOwnLegs is how many legs of its own a worker must have told of before it
	// is judged by them; until then it is judged as the fleet.
	minOwnLegs = 8
	// ownRateTTL is how long it stays judged by them after the last: a worker that
	// was slow once and is not chosen any more must get another chance.
	ownRateTTL = 2 * time.Minute
	// A worker is judged by its own rate when that is apart from the fleet's by a
	// factor of apart, and what its legs take by one of near; until it is within
	// near again. Less is noise between equal workers, and with one request at a
	// time the one that looks cheaper would get every new prompt, and the others no
	// leg to show that they are as fast.
	rateApart, rateNear = 1.4, 1.25
)

// price is what a unit of work costs, in ns: fixed by the options, else learned from
// all workers together. Both may be read while Tune changes fixed: what is fixed is
// never written by who learns.
type price struct {
	fixed atomic.Int64 // 0: not
	ns    atomic.Int64
}

type counter interface {
	Load() int64
	Store(int64)
}

// rates are what the scheduler knows of the cost of work. A rank's own stand in its
// Price, 0 where it has none yet; they count where nothing is fixed.
type rates struct {
	common [worker.NumWork]price
	fleet  worker.Speed
}

func (r *rates) init() {
	for w, ms := range [worker.NumWork]float64{worker.Prefilling: prefillMS, worker.Pulling: transferMS, worker.Decoding: blockMS} {
		r.common[w].ns.Store(priceOf(ms))
	}
}

// setFixed fixes what is above 0; of what is not, that counts which was learned until it was
// fixed.
func (r *rates) setFixed(o *Rates) {
	for w, ms := range [worker.NumWork]float64{worker.Prefilling: o.Prefill, worker.Pulling: o.Transfer, worker.Decoding: o.Block} {
		ns := int64(0)
		if ms > 0 {
			ns = priceOf(ms)
		}
		r.common[w].fixed.Store(ns)
	}
}

// priceOf is ms per unit as ns.
func priceOf(ms float64) int64 {
	return int64(min(max(math.Round(ms*nsPerMS), 1), math.MaxInt32))
}

// price is the price of one unit of work on a rank, in ns.
func (r *rates) price(rank *worker.Rank, w worker.Work) int64 {
	if p := r.common[w].fixed.Load(); p > 0 {
		return p
	}
	if p := rank.Price[w].Load(); p > 0 {
		return p
	}
	return r.common[w].ns.Load()
}

// assumed are the rates that learning begins with, in ms per unit as Speed has it.
var assumed = [worker.NumWork]float64{worker.Prefilling: prefillMS, worker.Pulling: transferMS, worker.Decoding: blockMS / decodeSteps}

// learn adds what one leg took: to the fleet's rate and to its worker's.
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
		return // the first leg met another under way, or took no time: nothing is learned
	}
	usual := base + before*units
	before = clampBlockRate(before, w)
	c.update(before, w)
	own := &rank.Worker.Speed
	own.Observe(w, units, ms, before, typical)
	own.Last[w].Store(now)
	rate, base, legs := own.Rate(w)
	perUnit := base + rate*units
	rate = clampBlockRate(rate, w)
	if legs < minOwnLegs || w == worker.Decoding && legs < 8*minOwnLegs {
		return // a slope of small differences needs more
	}
	from, level := max(rate/before, before/rate), max(perUnit/usual, usual/perUnit)
	for _, sibling := range rank.Worker.Ranks {
		switch own := &sibling.Price[w]; {
		case from < rateNear:
			own.Store(0)
		case from > rateApart && level > rateNear || own.Load() != 0:
			updatePrice(own, rate, w)
		}
	}
}

// clampBlockRate keeps the block rate near what memory can do: it is the slope of small
// differences, and what is wrong in it sends requests away from their caches.
func clampBlockRate(rate float64, w worker.Work) float64 {
	if w != worker.Decoding {
		return rate
	}
	return min(max(rate, assumed[w]/8), assumed[w]*4)
}

// update takes a learned rate over.
func (p *price) update(ms float64, w worker.Work) { updatePrice(&p.ns, ms, w) }

// A price follows what is learned only when that differs by a twentieth: equal
// workers would else never be equal, and every choice would fall by noise.
func updatePrice(p counter, ms float64, w worker.Work) {
	if w == worker.Decoding {
		ms *= decodeSteps
	}
	next, old := priceOf(ms), p.Load()
	if d := next - old; d > old/20 || d < -old/20 {
		p.Store(next)
	}
}

// expireOwn lets go of what a worker's own legs told too long ago. All of it: of the few
// legs that it gets then none would weigh anything against many old ones.
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

// observe learns from a leg that ended: how long it took from the choice to its
// first token for the work that lay before it, and how long a token took beside
// so many blocks.
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

// RatesOf are the rates that a rank is judged by now.
func (s *Scheduler) RatesOf(r *worker.Rank) Rates {
	ms := func(w worker.Work) float64 { return float64(s.rates.price(r, w)) / nsPerMS }
	return Rates{Prefill: ms(worker.Prefilling), Transfer: ms(worker.Pulling), Block: ms(worker.Decoding)}
}
