package testwait

import (
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
		if poll(time.Second, func() bool { return false }) {
			t.Error("a condition that never holds was reported as true")
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("gave up after %v", took)
		}
		start = time.Now()
		if !poll(time.Second, func() bool { return time.Since(start) >= time.Second }) {
			t.Error("a condition that holds at the limit was not seen")
		}
	})
}
