package schedule

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// Options of a Scheduler; see config.Schedule for the defaults. Weights are
// used as given: zero takes a term out.
type Options struct {
	OverlapWeight, PrefillWeight, DecodeWeight, QueueWeight float64
	// Temperature 0 takes the least cost. Above, a candidate is drawn with a
	// weight of exp(−x/Temperature), x being how far its cost lies above the
	// least, 0…1 of the range of costs: 0.1 is a little loose, 1 nearly random.
	Temperature float64
	// Policy is kv (the cost), round_robin, random or least_loaded; the last
	// three are there to compare with. Empty is kv, and so is a name not known:
	// config refuses those before.
	Policy string
	// Explain is how many requests' records are kept; below 0: none.
	Explain int    // [10000]
	Seed    uint64 // 0: random
}

// Scheduler chooses. Safe for concurrent use. A fleet has one: the load of a
// rank is what its own scheduler booked there.
//
// There is no lock on the way of a choice: costs are read from the ranks'
// atomics, and the booking is a compare-and-swap on the counter the cost was
// made from. A choice that lost the race for its rank is made anew, so a burst
// of requests sees the load of those before it. Big pools are chosen from on a
// board, which reads the same load from a ledger. The explain record is written
// under the mutex of that one record.
type Scheduler struct {
	weights     weights
	temperature float64
	policy      policy
	book        *book // nil: no records
	ledger      *ledger
	boards      boards
	started     time.Time
	seed        atomic.Uint64
	turn        [legs]atomic.Uint64 // round robin; by leg, or two legs over two workers each would always meet the same
	watch       atomic.Pointer[func(*Event)]
	scratch     sync.Pool
}

type policy uint8

const (
	byCost policy = iota
	roundRobin
	atRandom
	leastLoaded
)

var policyNames = [...]string{byCost: "kv", roundRobin: "round_robin", atRandom: "random", leastLoaded: "least_loaded"}

const (
	keepAll  = 64 // candidates of a choice that are all kept in its record
	keepBest = 8  // of more, the best few
	// retries bounds how often a lost race makes a choice anew; after that it
	// books what it found, at worst one request more than the best.
	retries = 8
)

// scratch is one choice under way.
type scratch struct {
	best   term
	usable int // candidates not excluded
	kept   []term
	costs  []float64 // of all candidates, for the temperature only
}

// New makes a Scheduler.
func New(opt Options) *Scheduler {
	s := &Scheduler{weights: newWeights(&opt), temperature: opt.Temperature, started: time.Now()}
	s.ledger = newLedger(&s.weights)
	for p, name := range policyNames {
		if name == opt.Policy {
			s.policy = policy(p)
		}
	}
	if opt.Seed == 0 {
		opt.Seed = rand.Uint64()
	}
	s.seed.Store(opt.Seed)
	if opt.Explain == 0 {
		opt.Explain = 10_000
	}
	if opt.Explain > 0 {
		s.book = newBook(opt.Explain)
	}
	s.scratch.New = func() any { return &scratch{kept: make([]term, 0, keepAll)} }
	return s
}

// Choose picks the candidate of least cost and books its load. ok is false
// when every candidate is excluded or there is none. It writes the decision
// with all its terms to the explain record of q.RequestID.
func (s *Scheduler) Choose(q *Query) (c Choice, ok bool) {
	f := newFrame(&s.weights, q)
	sc := s.scratch.Get().(*scratch)
	rng := s.random()
	lost := 0
	if s.fits(q) {
		if x := s.boards.find(q.Candidates); x != nil {
			sc.kept = sc.kept[:0]
			c.Reservation = new(Reservation)
			lost, ok = s.choose(x, &f, sc, &rng, c.Reservation)
		}
	}
	for !ok && s.pick(&f, q, sc, &rng) {
		if c.Reservation == nil {
			c.Reservation = new(Reservation)
		}
		if ok = c.Reservation.reserve(s.ledger, &f, &sc.best, s.blind() || lost >= retries); !ok {
			lost++
		}
	}
	if ok {
		t := &sc.best
		c = Choice{Rank: t.rank, OverlapBlocks: int(t.depth), CachedTokens: int(t.cached), Cost: t.cost, Reservation: c.Reservation}
	} else {
		c = Choice{}
	}
	if s.book != nil && q.RequestID != "" {
		s.book.decide(q, &f, sc, ok, lost)
	}
	if w := s.watch.Load(); w != nil {
		s.tell(*w, q, &f, &c)
	}
	s.scratch.Put(sc)
	return c, ok
}

// blind policies do not look at load, so there is no race to lose.
func (s *Scheduler) blind() bool { return s.policy == roundRobin || s.policy == atRandom }

// pick fills sc with the choice and the terms of its rivals.
func (s *Scheduler) pick(f *frame, q *Query, sc *scratch, rng *uint64) bool {
	sc.usable = 0
	sc.kept = sc.kept[:0]
	switch s.policy {
	case byCost:
		if s.temperature > 0 {
			return s.pickWarm(f, q, sc, rng)
		}
		return pickLeast(f, q, sc, rng, false)
	case leastLoaded:
		return pickLeast(f, q, sc, rng, true)
	}
	return s.pickBlind(f, q, sc, rng)
}

// random gives a fresh generator state; each choice has its own, so drawing
// needs no shared write beyond this one.
func (s *Scheduler) random() uint64 {
	return mix(s.seed.Add(0x9E3779B97F4A7C15))
}

func mix(z uint64) uint64 {
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return (z ^ (z >> 31)) | 1
}

// below draws from 0 to n-1.
func below(rng *uint64, n int) int {
	x := *rng
	x ^= x << 13
	x ^= x >> 7
	x ^= x << 17
	*rng = x
	return int((x >> 32) * uint64(n) >> 32)
}

// Event is told to the Watch function. Its pointer is valid for the call.
type Event struct {
	Kind      string // "chosen", "refused", "ended"
	At        time.Time
	RequestID string
	Leg       Leg          // of chosen and refused
	Attempt   int          //
	Rank      *worker.Rank // of chosen
	Prompt    int          // tokens
	Cached    int          // tokens predicted
	Cost      float64
	Outcome   Outcome // of ended
}

// Watch has f called at every choice and every end, on the request's own
// goroutine: f must return at once. One f at a time; nil takes it away, and
// then watching costs nothing.
func (s *Scheduler) Watch(f func(*Event)) {
	if f == nil {
		s.watch.Store(nil)
		return
	}
	s.watch.Store(&f)
}

func (s *Scheduler) tell(f func(*Event), q *Query, fr *frame, c *Choice) {
	e := Event{Kind: "chosen", At: time.Now(), RequestID: q.RequestID, Leg: q.Leg, Attempt: q.Attempt,
		Rank: c.Rank, Prompt: fr.prompt, Cached: c.CachedTokens, Cost: c.Cost}
	if c.Rank == nil {
		e.Kind = "refused"
	}
	f(&e)
}
