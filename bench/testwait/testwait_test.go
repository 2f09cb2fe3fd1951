package testwait

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		UntilWithin(t, time.Second, "300 ms have passed", func() bool { return time.Since(start) >= 300*time.Millisecond })
		if took := time.Since(start); took < 300*time.Millisecond || took > 300*time.Millisecond+maxPause {
			t.Errorf("returned after %v", took)
		}
	})
}

// TestPollEnds: a condition that never holds ends at the limit, and one that holds only at the limit is
// seen.
func TestPollEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if Poll(time.Second, func() bool { return false }) {
			t.Error("a condition that never holds was reported as true")
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("gave up after %v", took)
		}
		start = time.Now()
		if !Poll(time.Second, func() bool { return time.Since(start) >= time.Second }) {
			t.Error("a condition that holds at the limit was not seen")
		}
	})
}

func TestHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		Holds(t, time.Second, "less than 2 s have passed", func() bool { return time.Since(start) < 2*time.Second })
		if took := time.Since(start); took != time.Second {
			t.Errorf("returned after %v, want 1s", took)
		}
		f := &failure{TB: t}
		f.run(func() {
			Holds(f, time.Hour, "a second has not passed", func() bool { return time.Since(start) < 2*time.Second })
		})
		if took := time.Since(start); !f.failed || took > 2*time.Second+maxPause {
			t.Errorf("failed: %t after %v, want to fail after 2s", f.failed, took)
		}
	})
}

func TestSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		n := Settled(t, time.Second, "the count", func() int { return int(min(time.Since(start), 3*time.Second) / (500 * time.Millisecond)) })
		if took := time.Since(start); n != 6 || took < 4*time.Second || took > 4*time.Second+2*maxPause {
			t.Errorf("settled at %d after %v, want 6 after 4s", n, took)
		}
	})
}

func TestMedian(t *testing.T) {
	if m := Median(9, 1, 5); m != 5 {
		t.Errorf("median %d, want 5", m)
	}
	values := []float64{4, 1, 3, 2}
	if m := MedianOf(4, func() float64 { v := values[0]; values = values[1:]; return v }); m != 3 {
		t.Errorf("median %v, want 3", m)
	}
}

// failure is a test that may fail without failing the test that it runs in.
type failure struct {
	testing.TB
	failed bool
}

func (f *failure) Fatalf(string, ...any) {
	f.failed = true
	runtime.Goexit()
}

func (f *failure) run(test func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		test()
	}()
	<-done
}
