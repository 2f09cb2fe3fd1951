package sse

import "testing"

// TestLoneCREventsAreNotDelayed checks that an event that ends with CR is passed on by the read that
// brings it, though an LF may follow.
func TestLoneCREventsAreNotDelayed(t *testing.T) {
	var f Framer
	for i, piece := range []string{"data: a\r\r", "data: b\r\r", "\ndata: c\r\n\r", "\n", "data: d\r", "\r"} {
		p, events := []byte(piece), 0
		f.Normalize(p)
		for len(p) > 0 {
			n, event, _ := f.Next(p)
			if p = p[n:]; event != nil {
				events++
				f.Release()
			}
		}
		if want := []int{1, 1, 1, 0, 0, 1}[i]; events != want {
			t.Errorf("piece %d, %q: %d events, want %d", i, piece, events, want)
		}
	}
	if !f.AtBoundary() {
		t.Error("the framer is not at a boundary")
	}
}
