package upstream

import (
	"sync/atomic"
	"time"
)

// delayedACKDetector detects engines that wait for acknowledgements. A server that does not set
// TCP_NODELAY sends no small packet while another is unacknowledged (Nagle's algorithm, RFC 896).
// While a stream is detached, acknowledgements may be delayed, which saves a packet for every other
// event (dupDescriptor). Such an engine then pauses for as long as Linux delays an acknowledgement,
// and sends the events of that time in one piece. The relay observes that pattern
// (Response.NoteDelayedEvents). After a few observations the engine's packets are acknowledged at
// the kernel's default pace. If the pattern persists it has another cause, for example a machine
// without CPU time or a prefill of that length, and is ignored from then on.
//
// Memory order: one number that only grows. A reader of an old value is late by a stream.
type delayedACKDetector struct{ score atomic.Int32 }

const (
	delayedACKThreshold = 3                        // observations after which an engine is assumed to wait
	delayedACKClear     = delayedACKThreshold + 16 // and after which it no longer is
	delayedACKMin       = 36 * time.Millisecond    // Linux's delay is 40 ms, by a clock of 4 ms …
	delayedACKMax       = 52 * time.Millisecond    // … plus the relay's own delay
)

// observe records one observation.
func (h *delayedACKDetector) observe() {
	if h.score.Load() < delayedACKClear {
		h.score.Add(1)
	}
}

// detected reports whether acknowledgements must not be delayed.
func (h *delayedACKDetector) detected() bool {
	n := h.score.Load()
	return n >= delayedACKThreshold && n < delayedACKClear
}

// NoteDelayedEvents records that several events came together after a silence, whose length may
// show that the engine waited for an acknowledgement. It may be called while the connection is
// detached.
func (r *Response) NoteDelayedEvents(silence time.Duration) {
	if silence >= delayedACKMin && silence <= delayedACKMax {
		r.c.ep.delayedACK.observe()
	}
}
