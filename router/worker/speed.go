package worker

import (
	"math"
	"sync/atomic"
)

// Work is a kind of work whose cost is learned.
type Work uint8

// The kinds of work, with the unit that their cost is per.
const (
	Prefilling Work = iota // prompt token computed
	Pulling                // prompt token whose KV is pulled from a prefill worker
	Decoding               // KV block resident in the batch, for the time of one step
	NumWork
)

var workNames = [NumWork]string{"prefill", "transfer", "decode"}

// String gives the name as it stands in metrics and the admin API.
func (w Work) String() string {
	if w < NumWork {
		return workNames[w]
	}
	return "unknown"
}

// Speed learns what a worker's work costs from legs that ended well: a line
// time = base + rate × work, fitted by least squares over about the last fifty,
// of which the rate is used. The base takes up what is the same for every leg
// (the network, the first step), so that it does not count as work.
//
// No few samples move it much: each is drawn in to a few times the usual error
// before it counts, and the rate stays within a factor of limit of the one it
// began with. Observe may be called from any goroutine and never waits: a sample
// that meets another under way is dropped. The zero value has learned nothing.
type Speed struct {
	busy  atomic.Bool
	fits  [NumWork]costFit
	rates [NumWork]atomic.Uint64 // math.Float64bits of ms per unit
	bases [NumWork]atomic.Uint64 // of ms
	seen  [NumWork]atomic.Int64
	// Last is when the last leg was told of, by the caller's clock; the caller's.
	Last [NumWork]atomic.Int64
}

const (
	decay       = 0.98 // what a sample's weight shrinks by with each later one
	priorWeight = 4    // samples that the rate it begins with is worth
	maxOutlier  = 3    // times the usual error that a sample may count at most
	rateLimit   = 50   // times the first rate, up and down
)

// costFit is a weighted least-squares fit; sums of x, y in units and ms.
type costFit struct {
	first, typical        float64
	n, sx, sy, sxx, sxy   float64
	base, rate, meanError float64
}

// Observe adds one leg: ms that units of work took. before is the rate to begin
// with, typical a usual number of units.
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
	s.seen[w].Add(1)
}

// Forget lets go of what was learned of w; false when a leg is just being added.
func (s *Speed) Forget(w Work) bool {
	if !s.busy.CompareAndSwap(false, true) {
		return false
	}
	defer s.busy.Store(false)
	s.fits[w] = costFit{}
	s.seen[w].Store(0)
	s.rates[w].Store(0)
	s.bases[w].Store(0)
	return true
}

// Rate is the learned cost in ms per unit and of how many legs; 0, 0 before the
// first. base is the part, in ms, that does not depend on the work.
func (s *Speed) Rate(w Work) (rate, base float64, legs int64) {
	n := s.seen[w].Load()
	if n == 0 {
		return 0, 0, 0
	}
	return math.Float64frombits(s.rates[w].Load()), math.Float64frombits(s.bases[w].Load()), n
}

func (l *costFit) init(rate, typical float64) {
	*l = costFit{first: rate, typical: typical, rate: rate, meanError: rate * typical}
	// Half of the prior lies at no work, so that it says something of the base too.
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
	// A pull to the first rate, worth a sample: work that never varies says
	// nothing of the slope, and the sums alone would then mean anything.
	pull := l.typical * l.typical / 4
	sxx, sxy := l.sxx+pull, l.sxy+pull*l.rate
	den := l.n*sxx - l.sx*l.sx
	if den > 0 {
		l.rate = (l.n*sxy - l.sx*l.sy) / den
	}
	l.rate = min(max(l.rate, l.first/rateLimit), l.first*rateLimit)
	l.base = max(0, (l.sy-l.rate*l.sx)/l.n)
	if l.base == 0 { // through the origin, then
		l.rate = min(max(l.sxy/l.sxx, l.first/rateLimit), l.first*rateLimit)
	}
}
