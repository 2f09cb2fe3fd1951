package relay

import (
	"testing"
	"time"

	"sluice/dataplane/loop"
)

// A client that takes MinProgress in the time-out is slow, one that takes less has stopped,
// whatever its socket took meanwhile; the time is that since it last took something.
func TestPatience(t *testing.T) {
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
		"next to nothing":                    {{0, 0, full, true}, {most / 2, 0, full - loop.MinProgress + 1, true}, {most / 2, 0, full - loop.MinProgress + 1, false}},
		"slow":                               {{0, 0, full, true}, {most - 1, 0, full - loop.MinProgress, true}, {most - 1, 0, full - loop.MinProgress, true}, {1, 0, full - loop.MinProgress, false}},
		"slow, and its socket full again":    {{0, 0, full, true}, {most, loop.MinProgress, full, true}, {most, loop.MinProgress, full, true}},
		"it has nearly all":                  {{0, 0, 500, true}, {10 * most, 400, 900, true}, {10 * most, 0, 900, true}},
		"unknown":                            {{0, 0, -1, true}, {most - 1, loop.MinProgress - 1, -1, true}, {1, 0, -1, false}},
		"unknown, and slow":                  {{0, 0, -1, true}, {most, loop.MinProgress, -1, true}, {most, 0, -1, false}},
	} {
		var p Patience
		now := time.Now()
		last := now
		for i, l := range looks {
			now = now.Add(l.after)
			p.Took(l.took)
			by, lasts := p.Lasts(l.unsent, now, most)
			if lasts != l.lasts {
				t.Errorf("%s, look %d: lasts %v, want %v", name, i, lasts, l.lasts)
				continue
			}
			if p.since == now {
				last = now
			}
			if want := min(time.Second, last.Add(most).Sub(now)); lasts && by.Sub(now) != want {
				t.Errorf("%s, look %d: the next after %v, want %v", name, i, by.Sub(now), want)
			}
		}
	}
}
