package schedule

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/objpool"
	"sluice/router/blockhash"
	"sluice/router/worker"
)

// Options configures a Scheduler; config.Schedule has the defaults. Weights are used as given: zero
// removes a term.
type Options struct {
	OverlapWeight, PrefillWeight, DecodeWeight, QueueWeight float64
	// HostWeight and DiskWeight are the value of a token in a slower tier, 0…1 of one on the
	// device. InFlightWeight is the same for tokens just sent to a rank that no event has reported
	// yet; 0 disables it.
	HostWeight, DiskWeight, InFlightWeight float64
	// EvictionWeight is the value of a cached token that a placement displaces and that is expected to
	// be asked for again, relative to one that is computed. OthersWeight is what other requests pay for
	// a token that is computed, as a multiple of what its own pays, while ranks are busy.
	EvictionWeight, OthersWeight float64
	// Rates above 0 are fixed, the others learned.
	Rates Rates
	// Temperature 0 chooses the lowest cost. Otherwise a candidate is drawn with weight
	// exp(−x/Temperature), where x is the distance of its cost from the lowest, 0…1 of the range of
	// costs: 0.1 is slightly random, 1 almost uniform.
	Temperature float64
	// Policy is kv (the cost), round_robin, random, least_loaded or session (by the hash of
	// Query.Session); the last four are for comparison. Empty and unknown names mean kv; config
	// rejects unknown names.
	Policy string
	// Explain is the number of records to keep; below 0: none.
	Explain int    // [10000]
	Seed    uint64 // 0: random
	// OnEnd, if set, receives every outcome on the request's goroutine: it must return at once.
	OnEnd func(requestID string, out Outcome)
}

// Scheduler chooses ranks. It is safe for concurrent use. A fleet has one: the load of a rank is
// what its own scheduler has reserved there.
//
// A choice takes no lock: costs are computed from the ranks' atomics, and the reservation is a
// compare-and-swap on the counter from which the cost was computed. A choice that loses the race
// for its rank is repeated, so a burst of requests sees the load of the earlier ones. Large pools
// are chosen from an index, which reads the same load from loadCounters. The explain record is
// written under its own mutex.
type Scheduler struct {
	settings     atomic.Pointer[settings]
	rates        rates
	inFlight     *inFlightTable
	reuse        *reuseTable
	busy         atomicFloat // share of ranks that compute a prompt
	records      *recordRing // nil: no records
	load         *loadCounters
	ended        func(string, Outcome)
	indexes      candidateIndexes
	clock        monotime.Clock // of all times in ns
	seed         atomic.Uint64
	expiredAt    atomic.Int64           // when small pools were last checked for expired rates
	nextTurn     [numLegs]atomic.Uint64 // round robin; per leg, because two legs over two workers each would otherwise always meet the same
	observer     atomic.Pointer[func(*Event)]
	onCapacity   atomic.Pointer[func()]
	scratch      objpool.Pool[scratch]
	jointStates  objpool.Pool[jointState]
	transferRate atomic.Pointer[TransferRate]
}

type policy uint8

const (
	byCost policy = iota
	roundRobin
	atRandom
	leastLoaded
	bySession
)

var policyNames = [...]string{byCost: "kv", roundRobin: "round_robin", atRandom: "random", leastLoaded: "least_loaded", bySession: "session"}

const (
	maxAllRecorded  = 16 // up to this many candidates, a record has all of them
	maxBestRecorded = 8  // of more, the best few
	// retries bounds how often a lost race repeats a choice; after that it reserves what it has
	// found, at worst one request more than the best.
	retries = 8
)

// scratch is the state of one choice.
type scratch struct {
	ctx        choiceContext
	scan       scan
	rng        uint64
	recorded   bool
	atSession  bool // the session decided between ranks that were equally good
	best       candidateState
	usable     int // candidates that are not excluded
	candidates []candidateState
	encoded    []byte // the decision as encoded for the record
	buf        [maxEncodedTerm * (maxAllRecorded + 3)]byte
	costs      []float64 // of all candidates, for the temperature only
	inFlight   []inFlightBlocks
	used       []usedPrompt
}

// New returns a Scheduler.
func New(opt Options) *Scheduler {
	s := &Scheduler{inFlight: newInFlightTable(), reuse: newReuseTable(), clock: monotime.StartClock(), ended: opt.OnEnd}
	s.rates.init()
	s.busy.store(busyAtStart)
	s.Reload(opt)
	s.load = new(loadCounters)
	if opt.Seed == 0 {
		opt.Seed = rand.Uint64()
	}
	s.seed.Store(opt.Seed)
	if opt.Explain == 0 {
		opt.Explain = 10_000
	}
	if opt.Explain > 0 {
		s.records = newRecordRing(opt.Explain)
	}
	s.scratch.New = func() *scratch {
		sc := &scratch{candidates: make([]candidateState, 0, maxAllRecorded), inFlight: make([]inFlightBlocks, 0, maxInFlightRanks), used: make([]usedPrompt, 0, maxReused)}
		sc.encoded = sc.buf[:0]
		return sc
	}
	s.jointStates.New = func() *jointState { return new(jointState) }
	return s
}

// Choose chooses the candidate with the lowest cost and reserves its load. ok is false if there is
// no candidate or all are excluded. It writes the decision with all its terms to the explain record
// of q.RequestID.
func (s *Scheduler) Choose(q *Query) (c Choice, ok bool) {
	sc := s.scratch.Get()
	f, rng := &sc.ctx, &sc.rng
	*f, *rng = s.newChoiceContext(q), s.random()
	f.now = s.now()
	f.scaleOthers(s)
	f.reuse = s.reuse.at(f.now)
	sc.recorded, sc.atSession = s.records != nil && q.RequestID != "", false
	awaits := f.weights.inFlight > 0 && len(q.Keys) > 0 && q.Leg != DecodeLeg && s.currentSettings().policy == byCost
	if awaits {
		sc.inFlight = s.inFlight.find(sc.inFlight[:0], q.Keys, q.KeyTokens, f.now)
		f.inFlight = sc.inFlight
		f.reuse.find(sc.used[:0], q.Keys)
	}
	lost := 0
	res := q.Reservation
	if s.usesIndex(q) {
		if x := s.indexes.find(q.Candidates); x != nil {
			sc.candidates = sc.candidates[:0]
			f.transferRates = nil // the index's bounds use the ranks' own rates
			res = reservationFor(res)
			lost, ok = s.chooseIndexed(x, f, sc, rng, res)
		}
	}
	if last := s.expiredAt.Load(); !ok && f.now-last > int64(time.Second) && s.expiredAt.CompareAndSwap(last, f.now) {
		for _, r := range q.Candidates { // an index does this in its refresh
			s.rates.expireOwn(r, f.now)
		}
	}
	for !ok && s.pick(f, q, sc, rng) {
		res = reservationFor(res)
		if ok = res.reserve(s, f, &sc.best, s.ignoresLoad() || lost >= retries); !ok {
			lost++
		}
	}
	if ok {
		t := &sc.best
		if q.Leg != DecodeLeg {
			s.lookBusy(q.Candidates, rng)
		}
		c = Choice{Rank: t.rank, OverlapBlocks: int(t.depth), CachedTokens: int(t.cached), Cost: t.cost, Reservation: res}
		if awaits && t.rank.MayCache() {
			s.inFlight.add(t.rank.Slot, q.Keys, t.confirmedBlocks(q.KeyTokens), f.now, time.Duration(min(f.ownTime(t)*nsPerMS, float64(maxInFlight)))+eventLag)
			f.reuse.place(t.rank.Slot, q.Keys, f.tokensKept(), int(t.cached))
		}
	}
	if sc.recorded {
		s.records.addDecision(q, f, sc, ok, lost)
	}
	if w := s.observer.Load(); w != nil {
		s.notify(*w, q, f, c)
	}
	s.scratch.Put(sc)
	return c, ok
}

// Prefetch loads the memory that a choice with these keys will read, in several places, so that it
// arrives while the caller does other work. The sum of the loaded words only keeps the loads from
// being removed.
func (s *Scheduler) Prefetch(requestID string, keys []blockhash.Seq) (sum uint64) {
	if s.records != nil && requestID != "" {
		sum = s.records.buckets[hashID(clipID(requestID))&s.records.mask][0].Load()
	}
	for d := nextDepth(len(keys) + 1); d > 0; d = nextDepth(d) {
		b, _ := s.inFlight.cell(keys[d-1])
		sum += b[0].Load()
	}
	return sum
}

// reservationFor returns the caller's Reservation, reset, or a new one.
func reservationFor(res *Reservation) *Reservation {
	if res == nil {
		return new(Reservation)
	}
	res.state.Store(0)
	res.first.Store(0)
	return res
}

// Forget removes what is known of the cache of a rank whose engine has restarted or left.
func (s *Scheduler) Forget(slot worker.Slot) {
	s.inFlight.remove(slot)
	s.reuse.forget(slot)
}

// now is the scheduler's clock, ns since its start.
func (s *Scheduler) now() int64 { return int64(s.clock.Now()) }

// ignoresLoad reports whether the policy ignores load, so that there is no race to lose.
func (s *Scheduler) ignoresLoad() bool {
	return s.currentSettings().policy == roundRobin || s.currentSettings().policy == atRandom || s.currentSettings().policy == bySession
}

// pick sets sc to the choice and the terms of its rivals.
func (s *Scheduler) pick(f *choiceContext, q *Query, sc *scratch, rng *uint64) bool {
	sc.usable, sc.atSession = 0, false
	sc.candidates = sc.candidates[:0]
	switch s.currentSettings().policy {
	case byCost:
		if q.Session != 0 || q.SessionRank != nil {
			return s.pickBySession(f, q, sc, rng)
		}
		return s.pickByCost(f, q, sc, rng)
	case leastLoaded:
		return cheapestOf(f, q, sc, rng, true)
	case bySession:
		return s.pickBySessionHash(f, q, sc, rng)
	}
	return s.pickIgnoringLoad(f, q, sc, rng)
}

// random returns a fresh generator state; each choice has its own, so drawing needs no other shared
// write.
func (s *Scheduler) random() uint64 {
	return mixSeed(s.seed.Add(0x9E3779B97F4A7C15))
}

func mixSeed(z uint64) uint64 {
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return (z ^ (z >> 31)) | 1
}

// randomBelow draws from 0 to n-1.
func randomBelow(rng *uint64, n int) int {
	x := *rng
	x ^= x << 13
	x ^= x >> 7
	x ^= x << 17
	*rng = x
	return int((x >> 32) * uint64(n) >> 32)
}

// Event is passed to the observer. Its pointer is valid during the call.
type Event struct {
	Kind      string // "chosen", "refused", "hit", "ended"
	At        time.Time
	RequestID string
	Leg       LegKind      // of chosen and refused
	Attempt   int          //
	Rank      *worker.Rank // of chosen and hit
	Prompt    int          // tokens
	Cached    int          // predicted tokens
	Cost      float64
	// Of chosen and hit, in full blocks of the rank: the prompt's, and those predicted to be
	// cached; of hit, those that the engine reported.
	Blocks, Overlap, Reported int
	Outcome                   Outcome // of ended
}

// SetObserver makes f be called at every choice and every end, on the request's goroutine: f must
// return at once. There is one observer; nil removes it, and then observing costs nothing.
func (s *Scheduler) SetObserver(f func(*Event)) {
	if f == nil {
		s.observer.Store(nil)
		return
	}
	s.observer.Store(&f)
}

func (s *Scheduler) notify(f func(*Event), q *Query, fr *choiceContext, c Choice) {
	e := Event{Kind: "chosen", At: time.Now(), RequestID: q.RequestID, Leg: q.Leg, Attempt: q.Attempt,
		Rank: c.Rank, Prompt: fr.prompt, Cached: c.CachedTokens, Cost: c.Cost}
	if c.Rank == nil {
		e.Kind = "refused"
	} else {
		size := sizeOf(c.Rank)
		e.Blocks, e.Overlap = fr.prompt/size, c.CachedTokens/size
	}
	f(&e)
}
