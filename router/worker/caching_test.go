package worker

import "testing"

func TestCaches(t *testing.T) {
	var r Rank
	for i := range maxMissedHits - 1 {
		if r.RecordCacheHit(64, 0) || !r.MayCache() {
			t.Fatalf("given up after %d missed hits", i+1)
		}
	}
	r.RecordCacheHit(0, 0)   // nothing was predicted
	r.RecordCacheHit(64, -1) // the engine said nothing
	if !r.MayCache() {
		t.Error("given up for what says nothing")
	}
	if !r.RecordCacheHit(64, 0) || r.MayCache() {
		t.Errorf("not given up after %d missed hits", maxMissedHits)
	}
	if r.RecordCacheHit(64, 0) {
		t.Error("reported twice")
	}
	r.RecordCacheHit(0, 16)
	if !r.MayCache() {
		t.Error("a hit that was not predicted does not count")
	}
	for range maxMissedHits {
		r.RecordCacheHit(64, 0)
	}
	r.ResetCaching()
	if !r.MayCache() {
		t.Error("another process is taken for the one before")
	}
}
