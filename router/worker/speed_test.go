package worker

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
)

func near(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if math.Abs(got-want) > share*want {
		t.Errorf("%s: %v, want %v ± %v %%", what, got, want, 100*share)
	}
}

func TestSpeedIsLearned(t *testing.T) {
	for _, c := range []struct{ rate, base float64 }{{0.1, 0}, {0.02, 15}, {0.4, 5}, {1.5, 40}} {
		var s Speed
		rng := rand.New(rand.NewPCG(1, uint64(c.rate*1000)))
		for range 150 {
			x := 100 + rng.Float64()*8000
			s.Observe(Prefilling, x, (c.base+c.rate*x)*(0.95+rng.Float64()/10), 0.1, 1024)
		}
		rate, _, n := s.Rate(Prefilling)
		near(t, "rate", rate, c.rate, 0.08)
		if n != 150 {
			t.Errorf("%d legs", n)
		}
		// A few wild ones do next to nothing.
		for range 3 {
			s.Observe(Prefilling, 1000, 1e6, 0.1, 1024)
			s.Observe(Prefilling, 8000, 0.001, 0.1, 1024)
		}
		after, _, _ := s.Rate(Prefilling)
		near(t, "rate after outliers", after, rate, 0.1)
		// A lasting change is followed.
		for range 300 {
			x := 100 + rng.Float64()*8000
			s.Observe(Prefilling, x, c.base+2*c.rate*x, 0.1, 1024)
		}
		rate, _, _ = s.Rate(Prefilling)
		near(t, "rate after a change", rate, 2*c.rate, 0.1)
	}
}

func TestSpeedOfWorkThatNeverVaries(t *testing.T) {
	var s Speed
	for range 500 {
		s.Observe(Prefilling, 1000, 50, 0.1, 1024)
	}
	rate, base, _ := s.Rate(Prefilling)
	near(t, "what it tells for that work", base+1000*rate, 50, 0.05)
	if rate <= 0 || base < 0 {
		t.Errorf("rate %v, base %v", rate, base)
	}
}

func TestSpeedStaysWithinItsLimits(t *testing.T) {
	var s Speed
	if r, b, n := s.Rate(Decoding); r != 0 || b != 0 || n != 0 {
		t.Errorf("before the first: %v %v %v", r, b, n)
	}
	s.Observe(Prefilling, 0, 1, 0.1, 1024)
	s.Observe(Prefilling, math.NaN(), 1, 0.1, 1024)
	s.Observe(Prefilling, 1, math.Inf(1), 0.1, 1024)
	if _, _, n := s.Rate(Prefilling); n != 0 {
		t.Errorf("%d impossible samples counted", n)
	}
	for range 5000 {
		s.Observe(Prefilling, 1e4, 1e9, 0.1, 1024)
	}
	if r, _, _ := s.Rate(Prefilling); r > 0.1*rateLimit*1.0001 {
		t.Errorf("rate %v", r)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 1000 {
				s.Observe(Work(i%3), float64(1+i), float64(i+1), 1, 100)
				s.Rate(Work(i % 3))
			}
		})
	}
	wg.Wait()
}
