package relay

import (
	"fmt"
	"os"
	"time"

	"sluice/dataplane/eventloop"
)

// ErrStalled is the error of a client that accepted next to nothing within WriteTimeout. A Write
// that detects stalls returns it.
var ErrStalled = fmt.Errorf("the client read less than %d bytes within the write timeout: %w", eventloop.MinProgress, os.ErrDeadlineExceeded)

// checksPerTimeout is how often within WriteTimeout an unfinished write checks its client. A
// stalled client may live longer by one interval.
const checksPerTimeout = 32

// StallCheckInterval returns how long an unfinished write waits before it checks its client.
func StallCheckInterval(timeout time.Duration) time.Duration { return timeout / checksPerTimeout }

// StallDetector distinguishes a slow client from a stalled one over the life of a stream. It counts
// what the client's side has acknowledged, because the state of the socket misleads: a full socket
// accepts some KiB more on retry though its client reads nothing, and becomes writable only when a
// third of it is free though its client reads. The zero value is ready to use. It is used by one
// goroutine at a time.
type StallDetector struct {
	progressAt time.Time // when the client last made progress, or was first checked
	written    int       // bytes that the socket accepted since then
	unsent     int       // bytes that the socket held then; -1: unknown
}

// Wrote records that the socket accepted n bytes.
func (p *StallDetector) Wrote(n int) { p.written += n }

// Observe samples the bytes that the socket holds (-1: unknown). It is called now and then also
// while writes succeed, because the socket of a stalled client fills for seconds. If unsent is
// unknown, the bytes that the socket accepts count as progress.
func (p *StallDetector) Observe(unsent int, now time.Time) {
	progress := p.written
	if unsent >= 0 && p.unsent >= 0 {
		progress += p.unsent - unsent
	}
	if p.progressAt.IsZero() || progress >= eventloop.MinProgress || unsent >= 0 && unsent < eventloop.MinProgress {
		*p = StallDetector{progressAt: now, unsent: unsent}
	}
}

// Check is called after a write has failed for its deadline. ok: keep waiting, and check again at
// next. timeout is how long a client may make next to no progress.
func (p *StallDetector) Check(unsent int, now time.Time, timeout time.Duration) (next time.Time, ok bool) {
	if p.Observe(unsent, now); now.Sub(p.progressAt) >= timeout {
		return now, false
	}
	if next = now.Add(StallCheckInterval(timeout)); next.After(p.progressAt.Add(timeout)) {
		next = p.progressAt.Add(timeout)
	}
	return next, true
}
