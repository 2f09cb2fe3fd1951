package schedule

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/worker"
)

// serve runs one leg of a worker whose work costs rate ms a token and 5 ms more.
func serve(s *Scheduler, r *worker.Rank, leg LegKind, tokens int, rate float64) {
	c, _ := s.Choose(&Query{Leg: leg, Candidates: []*worker.Rank{r}, PromptTokens: tokens, MaxTokens: 32})
	time.Sleep(time.Duration((5 + rate*float64(tokens)) * nsPerMS)) // in a bubble
	c.Reservation.PrefillDone()
	c.Reservation.Report("", 0, 1)
	c.Reservation.Release()
}

func TestRatesAreLearnedPerWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rs := ranks(3)
		opt := testOptions
		opt.Rates.Transfer = 0.25
		s := New(opt)
		if got := s.RatesOf(rs[0]); got != (Rates{prefillMS, 0.25, blockMS}) {
			t.Errorf("at the start: %+v", got)
		}
		for i := range 60 {
			serve(s, rs[0], PrefillLeg, 500+i*97%3000, 0.02)
			serve(s, rs[1], PrefillLeg, 500+i*89%3000, 0.2)
			serve(s, rs[1], DecodeLeg, 500+i*89%3000, 0.01)
		}
		fast, slow, idle := s.RatesOf(rs[0]).Prefill, s.RatesOf(rs[1]).Prefill, s.RatesOf(rs[2]).Prefill
		if fast < 0.018 || fast > 0.024 || slow < 0.18 || slow > 0.22 {
			t.Errorf("learned %v and %v ms a token, want about 0.02 and 0.2", fast, slow)
		}
		if idle <= fast || idle >= slow {
			t.Errorf("a worker without legs is judged by %v, the fleet lies between %v and %v", idle, fast, slow)
		}
		if got := s.RatesOf(rs[1]).Transfer; got != 0.25 {
			t.Errorf("a fixed rate has become %v", got)
		}
		// The slower worker is worth its cache only: 10 times the tokens elsewhere.
		c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs[:2], PromptTokens: 1000, RequestID: "x", Attempt: 1})
		if c.Rank != rs[0] {
			t.Errorf("chose the slow worker")
		}
		for _, x := range decode(t, s, "x").Decisions[0].Shown {
			if x.Rates.Prefill <= 0 || x.Terms.Prefill < 900*x.Rates.Prefill {
				t.Errorf("the record shows %+v", x)
			}
		}
		c.Reservation.Release()
		mustZero(t, rs)
	})
}

// Equal workers whose legs take now more, now less: with one request at a time
// each goes on getting its share of what is new.
func TestNoiseExcludesNoRank(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			rs := ranks(2)
			s := New(testOptions)
			rnd := rand.New(rand.NewPCG(seed, 1))
			last, run := rs[0], 0
			for i := range 300 {
				c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 200 + rnd.IntN(100)})
				took := (5 + 0.1*float64(c.Reservation.prompt)) * (0.6 + rnd.ExpFloat64()/2)
				time.Sleep(time.Duration(took * nsPerMS))
				c.Reservation.PrefillDone()
				c.Reservation.Release()
				if run++; c.Rank != last {
					last, run = c.Rank, 0
				}
				if run == 100 {
					t.Fatalf("seed %d: 100 requests on end went to %v, the last of %d", seed, last.ID, i+1)
				}
			}
		})
	}
}

// Prompts of similar length say little of which part of a leg's time belongs to the length. The rates of equal
// workers stay near each other all the same.
func TestSimilarPromptsKeepRatesTogether(t *testing.T) {
	worst, at := 1.0, ""
	for seed := range uint64(150) {
		rs := ranks(2)
		s := New(testOptions)
		rnd := rand.New(rand.NewPCG(seed, 1))
		for i := range 600 {
			tokens := float64(200 + rnd.IntN(100))
			s.rates.learn(rs[rnd.IntN(2)], worker.Prefilling, tokens, (40+0.05*tokens)*(0.6+rnd.ExpFloat64()/2), int64(i))
			a, b := s.RatesOf(rs[0]).Prefill, s.RatesOf(rs[1]).Prefill
			if ratio := max(a/b, b/a); ratio > worst {
				worst, at = ratio, fmt.Sprintf("%.4f and %.4f ms per token after %d legs, seed %d", a, b, i+1, seed)
			}
		}
	}
	if worst > 2 {
		t.Errorf("the rates of equal workers differ by a factor of %.1f (%s); want at most 2", worst, at)
	}
}

// The time per token is that of the prompts, also where their lengths are so similar that the rate has only a
// part of it, or too much.
func TestTimePerToken(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rs := ranks(1)
			s := New(testOptions)
			if got := s.TimePerToken(rs[0]); got != 100*time.Microsecond {
				t.Errorf("at the start: %v; want 100µs", got)
			}
			rnd := rand.New(rand.NewPCG(seed, 2))
			for range 300 {
				tokens := 950 + rnd.IntN(100)
				serve(s, rs[0], PrefillLeg, tokens, 0.4*(0.7+0.6*rnd.Float64()))
			}
			if got := s.TimePerToken(rs[0]); got < 320*time.Microsecond || got > 480*time.Microsecond {
				t.Errorf("seed %d: prompts of 1,000 tokens that take 400 ms: %v per token, at a rate of %.3f ms; want about 400µs", seed, got, s.RatesOf(rs[0]).Prefill)
			}
			opt := testOptions
			opt.Rates.Prefill = 0.25
			s.Reload(opt)
			if got := s.TimePerToken(rs[0]); got != 250*time.Microsecond {
				t.Errorf("with a fixed rate of 0.25 ms: %v", got)
			}
		})
	}
}

// A rate may be fixed and let go of while requests run.
func TestRatesAreFixedWhileItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rs := ranks(2)
		s := New(testOptions)
		teach := func() {
			for i := range 60 {
				serve(s, rs[0], PrefillLeg, 500+i*97%3000, 0.02)
			}
		}
		teach()
		learned, fleet := s.RatesOf(rs[0]).Prefill, s.RatesOf(rs[1]).Prefill
		opt := testOptions
		opt.Rates = Rates{Prefill: 0.5, Block: 0.25}
		s.Reload(opt)
		teach()
		for _, r := range rs {
			if got := s.RatesOf(r); got != (Rates{0.5, transferMS, 0.25}) {
				t.Errorf("fixed: %+v", got)
			}
		}
		s.Reload(testOptions)
		if own, common := s.RatesOf(rs[0]).Prefill, s.RatesOf(rs[1]).Prefill; own != learned || common != fleet {
			t.Errorf("let go of: %v and %v, want %v and %v as they were learned before", own, common, learned, fleet)
		}
	})
}

// Legs that fail, and outliers, teach nothing.
func TestFailuresTeachNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rs := ranks(1)
		s := New(testOptions)
		for i := range 40 {
			serve(s, rs[0], PrefillLeg, 500+i*97%3000, 0.05)
		}
		before := s.RatesOf(rs[0]).Prefill
		for range 50 { // no PrefillDone: it failed
			c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 1000})
			time.Sleep(time.Minute / 100)
			c.Reservation.Release()
		}
		if got := s.RatesOf(rs[0]).Prefill; got != before {
			t.Errorf("failures changed %v into %v", before, got)
		}
		for range 3 {
			serve(s, rs[0], PrefillLeg, 1000, 20)
		}
		if got := s.RatesOf(rs[0]).Prefill; got > before*1.3 {
			t.Errorf("three legs of 20 s changed %v into %v", before, got)
		}
	})
}

// A first leg that the line did not take leaves what was assumed.
func TestNothingLearnedChangesNothing(t *testing.T) {
	rs := ranks(1)
	s := New(testOptions)
	before := s.RatesOf(rs[0])
	for w := range worker.NumWork {
		s.rates.learn(rs[0], w, 1000, 0, 1)
	}
	if got := s.RatesOf(rs[0]); got != before {
		t.Errorf("legs that took no time changed %+v into %+v", before, got)
	}
}

// A worker that was slow and is not chosen any more gets another chance.
func TestOwnRatesExpire(t *testing.T) {
	for _, n := range []int{8, 40} { // a small pool, and one with a board
		synctest.Test(t, func(t *testing.T) { expireRates(t, ranks(n)) })
	}
}

// A worker whose engine has restarted is judged by the fleet's rates, and then by what the new engine does.
func TestForgetRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, rs := New(testOptions), ranks(4)
		for i := range 20 {
			serve(s, rs[0], PrefillLeg, 500+i*97%3000, 2)
			for _, r := range rs[1:4] {
				serve(s, r, PrefillLeg, 500+i*97%3000, 0.05)
			}
		}
		slow := s.RatesOf(rs[0]).Prefill
		s.ForgetRates(rs[0].Worker)
		if got, other := s.RatesOf(rs[0]).Prefill, s.RatesOf(rs[1]).Prefill; got > slow/2 || got < other {
			t.Errorf("after a restart judged by %v ms a token, before by %v, others by %v", got, slow, other)
		}
		for i := range 2 * minOwnLegs {
			serve(s, rs[0], PrefillLeg, 500+i*97%3000, 0.05)
		}
		if got := s.RatesOf(rs[0]).Prefill; got > slow/2 {
			t.Errorf("after %d fast legs of the new engine judged by %v ms a token, was %v", 2*minOwnLegs, got, slow)
		}
	})
}

func expireRates(t *testing.T, rs []*worker.Rank) {
	s := New(testOptions)
	for i := range 20 {
		serve(s, rs[0], PrefillLeg, 500+i*97%3000, 2)
		for _, r := range rs[1:4] {
			serve(s, r, PrefillLeg, 500+i*97%3000, 0.05)
		}
	}
	slow := s.RatesOf(rs[0]).Prefill
	time.Sleep(ownRateTTL + time.Second) // in a bubble
	for range 3 {
		c, _ := s.Choose(&Query{Leg: PrefillLeg, Candidates: rs, PromptTokens: 100})
		c.Reservation.Release()
	}
	if got := s.RatesOf(rs[0]).Prefill; got > slow/2 {
		t.Errorf("after %v without a leg still judged by %v of %v ms a token", ownRateTTL, got, slow)
	}
	// It is fast now, and few legs show it: none of the old ones stands against them.
	for i := range 3 * minOwnLegs {
		serve(s, rs[0], PrefillLeg, 500+i*97%3000, 0.05)
	}
	if got := s.RatesOf(rs[0]).Prefill; got > 0.1 {
		t.Errorf("after %d fast legs judged by %v ms a token, was %v", 3*minOwnLegs, got, slow)
	}
}

// 1,000 requests within 10 ms, each of another prompt, over 8 equal ranks.
func TestThousandInTenMilliseconds(t *testing.T) {
	for leg := range numLegs {
		rs := ranks(8)
		s := New(testOptions)
		began := time.Now()
		for i := range 1000 {
			s.Choose(&Query{Leg: leg, Candidates: rs, PromptTokens: 2000, MaxTokens: 200, RequestID: fmt.Sprint(i), Attempt: 1})
		}
		t.Logf("%v: 1,000 choices in %v", leg, time.Since(began))
		for _, r := range rs {
			if n := r.Requests.Load(); n < 113 || n > 137 {
				t.Errorf("%v: %v got %d of 1,000, want 125 ± 10 %%", leg, r.ID, n)
			}
		}
	}
}

// The remaining time of a prefill is that of its own tokens and of those reserved before
// it, less the time since it was reserved.
func TestRemainingOfAPrefill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rs := ranks(1)
		opt := testOptions
		opt.Rates.Prefill = 2 // ms a token
		s := New(opt)
		book := func(leg LegKind, tokens int) *Reservation {
			c, _ := s.Choose(&Query{Leg: leg, Candidates: rs, PromptTokens: tokens, MaxTokens: 32})
			return c.Reservation
		}
		want := func(what string, res *Reservation, d time.Duration) {
			t.Helper()
			if got := res.Remaining(); got != d {
				t.Errorf("%s: %v remain, want %v", what, got, d)
			}
		}
		first := book(PrefillLeg, 500)
		second := book(PrefillLeg, 100)
		decode := book(DecodeLeg, 100)
		want("500 tokens", first, time.Second)
		want("100 tokens behind 500", second, 1200*time.Millisecond)
		want("a decode", decode, 0)
		want("nothing", nil, 0)
		time.Sleep(1100 * time.Millisecond)
		want("500 tokens, late", first, -100*time.Millisecond)
		want("100 tokens behind 500, later", second, 100*time.Millisecond)
		for _, res := range []*Reservation{first, second, decode} {
			res.Release()
		}
		mustZero(t, rs)
	})
}
