package upstream

import (
	"testing"
	"time"
)

// An engine is taken to wait after a few sightings, and not any more when those go on
// although it is acknowledged at once; silences of other lengths are none.
func TestDelayedACKDetector(t *testing.T) {
	ep, err := NewEndpoint("http://127.0.0.1:1", Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := &Response{c: &conn{ep: ep}}
	for _, d := range []time.Duration{0, 10 * time.Millisecond, 35 * time.Millisecond, 53 * time.Millisecond, time.Second} {
		for range 2 * delayedACKClear {
			r.NoteDelayedEvents(d)
		}
	}
	if ep.delayedACK.detected() {
		t.Error("silences of other lengths are taken for it")
	}
	for i := range 3 * delayedACKClear {
		r.NoteDelayedEvents(40 * time.Millisecond)
		if want := i+1 >= delayedACKThreshold && i+1 < delayedACKClear; ep.delayedACK.detected() != want {
			t.Errorf("after %d sightings: %t, want %t", i+1, ep.delayedACK.detected(), want)
		}
	}
}
