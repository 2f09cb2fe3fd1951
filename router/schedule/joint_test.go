package schedule

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"sluice/router/worker"
)

// sides makes two pools with slots of their own.
func sides(n int) (prefill, decode []*worker.Rank) {
	all := ranks(2 * n)
	for _, r := range all {
		r.Feed.Store(uint32(worker.FeedLive))
		r.EventBlockSize.Store(16)
	}
	return all[:n:n], all[n:]
}

func pairOf(p, d []*worker.Rank, tokens int) *JointQuery {
	return &JointQuery{Query: Query{PromptTokens: tokens, MaxTokens: 64, Attempt: 1}, Prefill: p, Decode: d}
}

// Without a TransferRate the costs part, so the pair is the best of each side, as
// Choose finds them.
func TestJointIsTheBestOfEachSide(t *testing.T) {
	// Queues shrink with time, so the two choices must be made at the same moment.
	synctest.Test(t, func(t *testing.T) {
		for _, n := range []int{1, 5, 12, 40, 200} {
			p, d := sides(n)
			s := New(testOptions)
			for i := range n {
				addLoad(s, p[i], 100+37*((i*7)%n))
				c, _ := s.Choose(&Query{Leg: DecodeLeg, Candidates: d[i : i+1 : i+1], PromptTokens: 200 + 64*((i*11)%n), MaxTokens: 256})
				_ = c
			}
			q := pairOf(p, d, 900)
			for range 3 { // the pools are known from their second sight
				wantP, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: p, PromptTokens: 900, MaxTokens: 64})
				wantD, _ := s.Choose(&Query{Leg: DecodeLeg, Candidates: d, PromptTokens: 900, MaxTokens: 64})
				wantP.Reservation.Release()
				wantD.Reservation.Release()
				c, ok := s.ChooseJoint(q)
				if !ok || c.Local || c.Reason != ReasonNotConsidered {
					t.Fatalf("%d a side: %+v, %v", n, c, ok)
				}
				if c.Prefill.Rank != wantP.Rank || c.Decode.Rank != wantD.Rank {
					t.Errorf("%d a side: %v and %v, want %v and %v", n, c.Prefill.Rank.ID, c.Decode.Rank.ID, wantP.Rank.ID, wantD.Rank.ID)
				}
				c.Prefill.Reservation.Release()
				c.Decode.Reservation.Release()
			}
		}
	})
}

// With rates by pair, the best few of each side are weighed as pairs: in a small
// pool that is every pair, so nothing is better than what was chosen.
func TestTransferRatesDecide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // queues shrink with time
		const n, tokens = 8, 4000
		p, d := sides(n)
		opt := testOptions
		opt.Rates = Rates{Prefill: 0.1, Block: 0.15} // transfer begins at 0.005
		s := New(opt)
		for i := range n {
			addLoad(s, p[i], 64*((i*5)%n+1))
			s.Choose(&Query{Leg: DecodeLeg, Candidates: d[i : i+1 : i+1], PromptTokens: 128 * ((i*3)%n + 1), MaxTokens: 256})
		}
		rate := func(a, b *worker.Rank) float64 {
			return 0.001 * float64(1+(int(a.Slot)*31+int(b.Slot)*17)%23)
		}
		s.SetTransferRate(rate)
		c, ok := s.ChooseJoint(pairOf(p, d, tokens))
		if !ok {
			t.Fatal("nothing chosen")
		}
		c.Prefill.Reservation.Release()
		c.Decode.Reservation.Release()
		cost := func(x, y *worker.Rank) float64 {
			a, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: []*worker.Rank{x}, PromptTokens: tokens})
			a.Reservation.Release()
			b, _ := s.Choose(&Query{Leg: DecodeLeg, Candidates: []*worker.Rank{y}, PromptTokens: tokens, MaxTokens: 64})
			b.Reservation.Release()
			return a.Cost + b.Cost + tokens*(rate(x, y)-0.005)
		}
		least := math.Inf(1)
		for _, x := range p {
			for _, y := range d {
				least = min(least, cost(x, y))
			}
		}
		if got := cost(c.Prefill.Rank, c.Decode.Rank); got > least+1e-6 {
			t.Errorf("chose %v and %v at %.3f ms, the least of all pairs is %.3f", c.Prefill.Rank.ID, c.Decode.Rank.ID, got, least)
		}
	})
}

func TestLocalOrRemote(t *testing.T) {
	for _, c := range []struct {
		name   string
		prompt int
		tokens int
		faster bool
		load   func(s *Scheduler, p, d []*worker.Rank)
		local  bool
		why    string
	}{
		{"nothing asked", 1000, 0, false, nil, false, ReasonNotConsidered},
		{"few tokens", 1000, 1001, false, nil, true, ReasonFewUncached},
		{"as many as N", 1000, 1000, false, nil, false, ReasonUncached},
		{"a prompt of unknown length", 0, 1000, true, nil, false, ReasonPromptUnknown},
		{"both idle: the hand-over costs more", 1000, 0, true, nil, true, ReasonFaster},
		{"decode busy with prompts", 1000, 0, true, func(s *Scheduler, _, d []*worker.Rank) { addLoad(s, d[0], 5000); addLoad(s, d[1], 5000) }, false, ReasonFaster},
		{"both busy", 1000, 0, true, func(s *Scheduler, p, d []*worker.Rank) {
			for _, r := range append(append([]*worker.Rank(nil), p...), d...) {
				addLoad(s, r, 5000)
			}
		}, true, ReasonFaster},
		{"decode is slow at prefill", 1000, 0, true, func(_ *Scheduler, _, d []*worker.Rank) {
			for _, r := range d {
				r.Price[worker.Prefilling].Store(4e5)
			}
		}, false, ReasonFaster},
		{"a queue of others at prefill", 1000, 0, true, func(_ *Scheduler, p, d []*worker.Rank) {
			for _, r := range d {
				r.Price[worker.Prefilling].Store(2e5)
			}
			for _, r := range p {
				r.Waiting.Store(4)
			}
		}, true, ReasonFaster},
		{"few tokens win over the estimate", 100, 101, true, func(_ *Scheduler, _, d []*worker.Rank) {
			for _, r := range d {
				r.Price[worker.Prefilling].Store(4e6)
			}
		}, true, ReasonFewUncached},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := sides(2)
			s := New(testOptions)
			s.expiredAt.Store(math.MaxInt64 / 2) // what the case says of speeds is not forgotten
			if c.load != nil {
				c.load(s, p, d)
			}
			q := pairOf(p, d, c.prompt)
			q.LocalTokens, q.LocalWhenFaster, q.RequestID = c.tokens, c.faster, "r"
			got, ok := s.ChooseJoint(q)
			if !ok || got.Local != c.local || got.Reason != c.why {
				t.Fatalf("%v: local %v because %q, want %v because %q", ok, got.Local, got.Reason, c.local, c.why)
			}
			if (got.Prefill.Rank == nil) != c.local || got.Decode.Rank == nil {
				t.Errorf("prefill %v, decode %v", got.Prefill.Rank, got.Decode.Rank)
			}
			if c.local && got.Decode.Rank.PrefillTokens.Load() < int64(c.prompt) {
				t.Error("the prompt is not booked on the rank that computes it")
			}
			body, _ := s.Explain("r")
			var rec Record
			if err := json.Unmarshal(body, &rec); err != nil || len(rec.Joint) != 1 {
				t.Fatalf("%v: %s", err, body)
			}
			e := rec.Joint[0]
			for _, name := range []string{"reason", "why"} { // why is the name in the previous release
				if !strings.Contains(string(body), fmt.Sprintf(`"%s":%q`, name, c.why)) {
					t.Errorf("%s is not %q in %s", name, c.why, body)
				}
			}
			var former JointDecision
			if err := json.Unmarshal(fmt.Appendf(nil, `{"why":%q}`, c.why), &former); err != nil || former.Reason != c.why {
				t.Errorf("the record of a router of the previous release: %v, reason %q", err, former.Reason)
			}
			if e.Reason != c.why || (e.Plan == "local") != c.local || (e.Local == nil) != (c.why == ReasonNotConsidered || c.why == ReasonPromptUnknown) {
				t.Errorf("explained as %+v", e)
			}
			if e.Local != nil && c.why == ReasonFaster && (e.Local.Cost < e.Remote.Cost) != c.local {
				t.Errorf("%s at %.3f ms remote, %.3f local", e.Plan, e.Remote.Cost, e.Local.Cost)
			}
			if want := map[bool]int{true: 1, false: 2}[c.local]; len(rec.Decisions) != want {
				t.Errorf("%d decisions, want %d", len(rec.Decisions), want)
			}
		})
	}
}

// A pair that cannot be had books nothing, and the records stay as they were.
func TestNoJointChoice(t *testing.T) {
	p, d := sides(2)
	s := New(testOptions)
	for _, q := range []*JointQuery{pairOf(nil, d, 10), pairOf(p, nil, 10), pairOf(p, d, 10)} {
		q.RequestID = "none"
		q.Excluded = d
		if c, ok := s.ChooseJoint(q); ok {
			t.Errorf("chose %+v", c)
		}
	}
	if _, ok := s.Explain("none"); ok {
		t.Error("a record of no choice")
	}
	mustZero(t, p)
	mustZero(t, d)
}

// A burst spreads over both sides, and all that was booked is taken off again.
func TestJointBurstSpreads(t *testing.T) {
	for _, n := range []int{8, 50} {
		p, d := sides(n)
		s := New(testOptions)
		var wg sync.WaitGroup
		res := make([][]*Reservation, 20)
		for g := range res {
			wg.Go(func() {
				for i := range 2 * n {
					q := pairOf(p, d, 1000)
					q.RequestID = fmt.Sprint(g, "-", i)
					c, ok := s.ChooseJoint(q)
					if !ok {
						t.Error("nothing chosen")
						return
					}
					res[g] = append(res[g], c.Prefill.Reservation, c.Decode.Reservation)
				}
			})
		}
		wg.Wait()
		for _, r := range append(append([]*worker.Rank(nil), p...), d...) {
			if got := r.Requests.Load(); got < 34 || got > 46 {
				t.Errorf("%d a side: %v has %d requests, want 40", n, r.ID, got)
			}
		}
		for _, rr := range res {
			for _, r := range rr {
				r.PrefillDone()
				r.Release()
			}
		}
		mustZero(t, p)
		mustZero(t, d)
		for leg := range s.load.load {
			for i := range s.load.load[leg] {
				if v := s.load.load[leg][i].Load(); v != 0 {
					t.Errorf("%v: %d ns left over at slot %d", LegKind(leg), v, i)
				}
			}
		}
	}
}

// With room for the reservations brought along, a pair is chosen without a new one.
func TestJointAllocates(t *testing.T) {
	if raceEnabled {
		t.Skip("pools drop what they are given under the race detector")
	}
	for _, n := range []int{8, 200} {
		p, d := sides(n)
		opt := testOptions
		opt.Explain = 64
		s := New(opt)
		q := pairOf(p, d, 1000)
		q.LocalWhenFaster, q.RequestID = true, "r"
		q.Reservations = [2]*Reservation{new(Reservation), new(Reservation)}
		run := func() {
			c, _ := s.ChooseJoint(q)
			c.Prefill.Reservation.Release()
			c.Decode.Reservation.Release()
		}
		for range 2000 { // every slot of the ring gets its room
			run()
		}
		if a := testing.AllocsPerRun(500, run); a > 0 {
			t.Errorf("%d a side: %.1f allocations", n, a)
		}
	}
}
