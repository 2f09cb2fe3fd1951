package relay

import (
	"testing"
	"time"

	"sluice/dataplane/eventloop"
)

// A client that takes MinProgress in the timeout is slow, one that takes less has stopped,
// whatever its socket took meanwhile; the time is that since it last took something.
func TestStallDetector(t *testing.T) {
	const most = 32 * time.Second // a look a second
	type look struct {
		after  time.Duration
		took   int // by the socket since the look before
		unsent int
		lasts  bool
	}
	const full = 180 << 10
	for name, looks := range map[string][]look{
		"stopped":                            {{0, 0, full, true}, {most - 1, 0, full, true}, {1, 0, full, false}},
		"stopped, and its socket takes more": {{0, 0, full, true}, {time.Second, 16 << 10, full + 16<<10, true}, {most - time.Second, 0, full + 16<<10, false}},
		"stopped between two writes":         {{0, 3000, full, true}, {most / 2, 3000, full + 3000, true}, {most / 2, 0, full + 3000, false}},
		"next to nothing":                    {{0, 0, full, true}, {most / 2, 0, full - eventloop.MinProgress + 1, true}, {most / 2, 0, full - eventloop.MinProgress + 1, false}},
		"slow":                               {{0, 0, full, true}, {most - 1, 0, full - eventloop.MinProgress, true}, {most - 1, 0, full - eventloop.MinProgress, true}, {1, 0, full - eventloop.MinProgress, false}},
		"slow, and its socket full again":    {{0, 0, full, true}, {most, eventloop.MinProgress, full, true}, {most, eventloop.MinProgress, full, true}},
		"it has nearly all":                  {{0, 0, 500, true}, {10 * most, 400, 900, true}, {10 * most, 0, 900, true}},
		"unknown":                            {{0, 0, -1, true}, {most - 1, eventloop.MinProgress - 1, -1, true}, {1, 0, -1, false}},
		"unknown, and slow":                  {{0, 0, -1, true}, {most, eventloop.MinProgress, -1, true}, {most, 0, -1, false}},
	} {
		var p StallDetector
		now := time.Now()
		last := now
		for i, l := range looks {
			now = now.Add(l.after)
			p.Wrote(l.took)
			by, lasts := p.Check(l.unsent, now, most)
			if lasts != l.lasts {
				t.Errorf("%s, look %d: lasts %v, want %v", name, i, lasts, l.lasts)
				continue
			}
			if p.progressAt == now {
				last = now
			}
			if want := min(time.Second, last.Add(most).Sub(now)); lasts && by.Sub(now) != want {
				t.Errorf("%s, look %d: the next after %v, want %v", name, i, by.Sub(now), want)
			}
		}
	}
}
