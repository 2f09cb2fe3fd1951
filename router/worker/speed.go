package worker

import (
	"math"
	"sync/atomic"
)

// Work is a kind of work whose cost is learned.
type Work uint8

// The kinds of work, with the unit of their cost.
const (
	Prefilling Work = iota // prompt token computed
	Pulling                // prompt token whose KV is pulled from a prefill worker
	Decoding               // KV block resident in the batch, for one step
	NumWork
)

var workNames = [NumWork]string{"prefill", "transfer", "decode"}

// String returns the name as it appears in metrics and the admin API.
func (w Work) String() string {
	if w < NumWork {
		return workNames[w]
	}
	return "unknown"
}

// Speed learns the cost of a worker's work from legs that ended well: a line time = base + rate ×
// work, fitted by least squares over about the last fifty legs, of which the rate is used. The base
// absorbs the part that is the same for every leg (the network, the first step).
//
// Few samples do not move the fit much: each is clamped to a few times the usual error before it
// counts, and the rate stays within a factor of rateLimit of its first value. Observe may be called
// from any goroutine and never waits: a sample that meets another in progress is dropped. The zero
// value has learned nothing.
type Speed struct {
	busy  atomic.Bool
	fits  [NumWork]costFit
	rates [NumWork]atomic.Uint64 // math.Float64bits of ms per unit
	bases [NumWork]atomic.Uint64 // math.Float64bits of ms
	means [NumWork]atomic.Uint64 // math.Float64bits of units
	seen  [NumWork]atomic.Int64
	// Last is when the last leg was observed, by the caller's clock; the caller sets it.
	Last [NumWork]atomic.Int64
}

const (
	decay       = 0.98 // factor by which a sample's weight shrinks with each later one
	priorWeight = 4    // the weight of the first rate, in samples
	maxOutlier  = 3    // the largest error of a sample, in multiples of the usual one
	rateLimit   = 50   // the largest factor between a rate and the first one
)

// costFit is a weighted least-squares fit; the sums are of x and y in units and ms.
type costFit struct {
	first, typical        float64
	n, sx, sy, sxx, sxy   float64
	base, rate, meanError float64
}

// Observe adds one leg: units of work took ms. before is the rate to start with, typical a usual
// number of units.
func (s *Speed) Observe(w Work, units, ms, before, typical float64) {
	if !(units > 0) || !(ms > 0) || math.IsInf(ms, 0) || before <= 0 || !s.busy.CompareAndSwap(false, true) {
		return
	}
	defer s.busy.Store(false)
	l := &s.fits[w]
	if l.n == 0 {
		l.init(before, typical)
	}
	l.add(units, ms)
	s.rates[w].Store(math.Float64bits(l.rate))
	s.bases[w].Store(math.Float64bits(l.base))
	s.means[w].Store(math.Float64bits(l.sx / l.n))
	s.seen[w].Add(1)
}

// Forget discards what was learned of w; it returns false while a leg is being added.
func (s *Speed) Forget(w Work) bool {
	if !s.busy.CompareAndSwap(false, true) {
		return false
	}
	defer s.busy.Store(false)
	s.fits[w] = costFit{}
	s.seen[w].Store(0)
	s.rates[w].Store(0)
	s.bases[w].Store(0)
	s.means[w].Store(0)
	return true
}

// MeanUnits returns the mean work of the legs, 0 before the first.
func (s *Speed) MeanUnits(w Work) float64 { return math.Float64frombits(s.means[w].Load()) }

// Rate returns the learned cost in ms per unit and the number of legs; 0, 0 before the first. base
// is the part, in ms, that does not depend on the work.
func (s *Speed) Rate(w Work) (rate, base float64, legs int64) {
	n := s.seen[w].Load()
	if n == 0 {
		return 0, 0, 0
	}
	return math.Float64frombits(s.rates[w].Load()), math.Float64frombits(s.bases[w].Load()), n
}

func (l *costFit) init(rate, typical float64) {
	*l = costFit{first: rate, typical: typical, rate: rate, meanError: rate * typical}
	// Half of the prior is at no work, so that it determines the base too.
	l.n, l.sx, l.sy = priorWeight, priorWeight/2*typical, priorWeight/2*typical*rate
	l.sxx, l.sxy = priorWeight/2*typical*typical, priorWeight/2*typical*typical*rate
}

func (l *costFit) add(x, y float64) {
	excess := l.base + l.rate*x
	miss := y - excess
	maxMiss := maxOutlier * max(l.meanError, 0.02*excess)
	miss = min(max(miss, -maxMiss), maxMiss)
	l.meanError += 0.1 * (math.Abs(miss) - l.meanError)
	y = excess + miss
	l.n, l.sx, l.sy, l.sxx, l.sxy = l.n*decay+1, l.sx*decay+x, l.sy*decay+y, l.sxx*decay+x*x, l.sxy*decay+x*y
	// A pull towards the first rate with the weight of one sample: constant amounts of work do not
	// determine the slope, and the sums alone would then be meaningless.
	pull := l.typical * l.typical / 4
	sxx, sxy := l.sxx+pull, l.sxy+pull*l.rate
	den := l.n*sxx - l.sx*l.sx
	if den > 0 {
		l.rate = (l.n*sxy - l.sx*l.sy) / den
	}
	l.rate = min(max(l.rate, l.first/rateLimit), l.first*rateLimit)
	l.base = max(0, (l.sy-l.rate*l.sx)/l.n)
	if l.base == 0 { // then the line passes through the origin
		l.rate = min(max(l.sxy/l.sxx, l.first/rateLimit), l.first*rateLimit)
	}
}
