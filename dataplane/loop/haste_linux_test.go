package loop

import (
	"testing"
	"time"
)

// TestHaste: a loop waits awake for a while behind the last bytes, whether the stream
// they were of goes on or has ended.
func TestHaste(t *testing.T) {
	begun := time.Now()
	for name, c := range map[string]struct {
		count, again int
		quiet        time.Duration
		want         haste
	}{
		"between two events":   {1, 0, awakeFor - 1, awake},
		"a quiet stream":       {1, 0, awakeFor, asleep},
		"between two streams":  {0, 0, awakeFor - 1, awake},
		"no streams any more":  {0, 0, awakeFor, asleep},
		"somebody is not done": {1, 1, awakeFor, atOnce},
	} {
		l := &Loop{count: c.count, again: make([]*Task, c.again), lastIn: begun, now: begun.Add(c.quiet)}
		if got := l.haste(); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if l := (&Loop{now: begun}); l.haste() != asleep {
		t.Error("a loop that never had a stream does not sleep")
	}
}
