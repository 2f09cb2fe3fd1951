package eventloop

import (
	"testing"
	"time"
)

// TestPollMode: a loop waits awake for a while behind the last bytes, whether the stream
// they were of goes on or has ended.
func TestPollMode(t *testing.T) {
	begun := time.Now()
	for name, c := range map[string]struct {
		count, again int
		quiet        time.Duration
		want         pollMode
	}{
		"between two events":   {1, 0, pollBriefFor - 1, pollBrief},
		"a quiet stream":       {1, 0, pollBriefFor, pollBlocking},
		"between two streams":  {0, 0, pollBriefFor - 1, pollBrief},
		"no streams any more":  {0, 0, pollBriefFor, pollBlocking},
		"a stream is not done": {1, 1, pollBriefFor, pollImmediate},
	} {
		l := &Loop{count: c.count, readAgain: make([]*Task, c.again), lastIn: begun, now: begun.Add(c.quiet)}
		if got := l.pollMode(); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if l := (&Loop{now: begun}); l.pollMode() != pollBlocking {
		t.Error("a loop that never had a stream does not sleep")
	}
}
