package worker

import "testing"

func TestCaches(t *testing.T) {
	var r Rank
	for i := range vainHits - 1 {
		if r.Found(64, 0) || !r.Caches() {
			t.Fatalf("given up after %d hits in vain", i+1)
		}
	}
	r.Found(0, 0)   // nothing was foretold
	r.Found(64, -1) // the engine said nothing
	if !r.Caches() {
		t.Error("given up for what says nothing")
	}
	if !r.Found(64, 0) || r.Caches() {
		t.Errorf("not given up after %d hits in vain", vainHits)
	}
	if r.Found(64, 0) {
		t.Error("told twice")
	}
	r.Found(0, 16)
	if !r.Caches() {
		t.Error("a hit that was not foretold does not count")
	}
	for range vainHits {
		r.Found(64, 0)
	}
	r.ForgetCaching()
	if !r.Caches() {
		t.Error("another process is taken for the one before")
	}
}
