package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"sluice/router/tokenize"
	"sluice/router/worker"
)

// A decoded record equals the decision, to the digit that is shown.
func TestDecisionEncoding(t *testing.T) {
	rs := ranks(400) // their numbers take one byte and two
	ranks := newRankIDs()
	rng := rand.New(rand.NewPCG(1, 2))
	// some is a number of up to bits bits, of either sign where any is; half of them are 0.
	some := func(bits int, any bool) int64 {
		n := int64(rng.Uint64() >> (64 - rng.IntN(bits) - 1))
		if any && rng.IntN(8) == 0 {
			n = -n
		}
		return n * int64(rng.IntN(2))
	}
	some32 := func() int32 { return int32(some(31, true)) }
	for range 2000 {
		var packed []byte
		var want []decision
		var wantTerms [][]candidateState
		for range 1 + rng.IntN(3) {
			d := decision{session: uint32(some32()), atSession: some32()&1 == 0, at: time.Duration(some(50, false)), attempt: some32(), prompt: some32(), output: some32(),
				candidates: some32(), excluded: some32(), chosen: int32(rng.IntN(18)) - 1, races: some32(), leg: LegKind(rng.IntN(int(numLegs))), source: tokenize.Source(rng.IntN(8))}
			var terms []candidateState
			for range rng.IntN(18) {
				c := candidateState{rank: rs[rng.IntN(len(rs))], cost: rng.ExpFloat64() * 1000, queued: some(63, true), blocks: some32(),
					work: some(63, true), requests: some32(), waiting: some32(), otherTokens: some(63, true),
					cached: some32(), depth: some32(), host: some32(), disk: some32(), lackingTokens: some32(), evicted: some32(), feed: worker.FeedState(rng.IntN(5)),
					approx: rng.IntN(2) == 0, inFlight: rng.IntN(2) == 0, excluded: rng.IntN(2) == 0}
				if c.credit = float64(c.cached); rng.IntN(2) == 0 {
					c.credit *= rng.Float64()
				}
				if len(terms) > 0 && rng.IntN(2) == 0 {
					c.price = terms[len(terms)-1].price
				} else {
					c.price = [worker.NumWork]int32{some32(), some32(), some32()}
				}
				if rng.IntN(50) == 0 { // all that a term can take
					const least = math.MinInt32
					c.queued, c.work, c.otherTokens, c.cost = math.MinInt64, math.MinInt64, math.MinInt64, 1e15
					c.blocks, c.requests, c.waiting, c.cached, c.depth = least, least, least, least, least
					c.host, c.disk, c.lackingTokens, c.evicted, c.price = least, least, least, least, [worker.NumWork]int32{least, least, least}
				}
				terms = append(terms, c)
			}
			packed = encodeDecision(packed, &d, terms, ranks)
			want, wantTerms = append(want, d), append(wantTerms, terms)
		}
		var d decision
		var terms []candidateState
		for i := range want {
			d, terms, packed = decodeDecision(packed, terms, ranks)
			if d != want[i] || len(terms) != len(wantTerms[i]) {
				t.Fatalf("%+v of %d candidates came back as %+v of %d", want[i], len(wantTerms[i]), d, len(terms))
			}
			for k := range terms {
				c := wantTerms[i][k]
				if c.cost = round3(c.cost); terms[k] != c {
					t.Fatalf("%+v came back as %+v", c, terms[k])
				}
			}
		}
		if len(packed) != 0 {
			t.Fatalf("%d bytes are left", len(packed))
		}
	}
}

// TestStreamSize: there are as many records as streams. What one of a choice among three is
// takes fits a size class of 96 bytes, its id included; it was 24, 48 and 288.
func TestStreamSize(t *testing.T) {
	rs := ranks(3)
	s := New(testOptions)
	for i := range 3000 {
		s.Choose(&Query{Candidates: rs, PromptTokens: 64, MaxTokens: 30, RequestID: fmt.Sprintf("%022d", i), Attempt: 1})
	}
	r := s.records.at(3000)
	if n := cap(r.data); n > 96 {
		t.Errorf("the last of 3,000 records has %d bytes", n)
	}
	d := decode(t, s, string(r.id())).Decisions[0]
	if len(d.Shown) != 3 || d.Shown[0].Requests != 1000 && d.Shown[1].Requests != 1000 {
		t.Errorf("its decision: %+v", d)
	}
}

// A record names the ranks of the choice, even if other ranks have their slots by then, and ranks
// that no record names are let go of.
func TestRecordsNameRemovedRanks(t *testing.T) {
	opt := testOptions
	opt.Explain = 64
	s := New(opt)
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			kept := map[string]string{}
			for i := range 2000 {
				rs := make([]*worker.Rank, 2)
				for k := range rs {
					w := worker.New(worker.Spec{ID: fmt.Sprintf("w%d-%d-%d", g, i, k), BlockSize: 16})
					rs[k] = w.Ranks[0]
					rs[k].Slot = worker.Slot(10*g + k + i%3)
				}
				for k := range 3 {
					id := fmt.Sprintf("r%d-%d-%d", g, i, k)
					c, _ := s.Choose(&Query{Candidates: rs, PromptTokens: 64, RequestID: id, Attempt: 1})
					kept[id] = c.Rank.ID.String()
					c.Reservation.Release()
				}
				if i%50 > 0 {
					continue
				}
				for _, r := range s.Recent(64) {
					if want, ours := kept[r.RequestID]; ours && (r.Decisions[0].Chosen != want || len(r.Decisions[0].Shown) != 2) {
						t.Errorf("%s was given to %s; its record: %+v", r.RequestID, want, r.Decisions[0])
					}
				}
			}
		})
	}
	all.Wait()
	r := s.records.ranks
	r.sweepAt = 0
	if s.records.sweepRankIDs(); len(r.numbers) > 64*2+4*4 {
		t.Errorf("%d ranks have numbers, with 64 records of two and 16 slots", len(r.numbers))
	}
}

// TestRankNumbersAreReused: the numbers of ranks that no record names are assigned again, so the
// table of numbers stays small however many ranks come and go.
func TestRankNumbersAreReused(t *testing.T) {
	opt := testOptions
	opt.Explain = 64
	s := New(opt)
	for i := range 2000 {
		w := worker.New(worker.Spec{ID: fmt.Sprintf("w%d", i), BlockSize: 16})
		w.Ranks[0].Slot = worker.Slot(i % 8)
		c, _ := s.Choose(&Query{Candidates: w.Ranks, PromptTokens: 64, RequestID: fmt.Sprintf("r%d", i), Attempt: 1})
		c.Reservation.Release()
	}
	if n := len(*s.records.ranks.ranks.Load()); n > 1000 {
		t.Errorf("2,000 ranks used %d numbers; want at most 1,000", n)
	}
}
