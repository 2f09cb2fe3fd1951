package upstream

import (
	"sync/atomic"
	"time"
)

// delayedACKDetector is whether an engine waits for acknowledgements: one whose server does not
// set TCP_NODELAY sends no small packet while another is not acknowledged (Nagle's
// algorithm, RFC 896). While a stream is lent, acknowledgements may come late, which
// saves a packet for every other event (dupDescriptor); such an engine then stands still for
// as long as Linux puts one off, and sends what it had to say meanwhile in one piece.
// That is what a relay can see of it (Response.NoteDelayedEvents). An engine that was seen to do
// so a few times is acknowledged as the kernel sees fit; where that changes nothing it
// was something else, a machine without time for instance, or a prefill of that length,
// and is not looked at any more.
//
// Memory order: one number that only grows; who reads an old one is late by a stream.
type delayedACKDetector struct{ score atomic.Int32 }

const (
	delayedACKThreshold = 3                        // sightings after which an engine is taken to wait
	delayedACKClear     = delayedACKThreshold + 16 // and after which it is not any more
	delayedACKMin       = 36 * time.Millisecond    // Linux's delay is 40 ms, by a clock of 4 ms …
	delayedACKMax       = 52 * time.Millisecond    // … and our own lateness
)

// observe notes one more.
func (h *delayedACKDetector) observe() {
	if h.score.Load() < delayedACKClear {
		h.score.Add(1)
	}
}

// detected says whether acknowledgements must not be late.
func (h *delayedACKDetector) detected() bool {
	n := h.score.Load()
	return n >= delayedACKThreshold && n < delayedACKClear
}

// NoteDelayedEvents tells that several events came together after a silence of so long, which
// says, by its length, that the engine may have waited for an acknowledgement. It may be
// called while the connection is lent.
func (r *Response) NoteDelayedEvents(silence time.Duration) {
	if silence >= delayedACKMin && silence <= delayedACKMax {
		r.c.ep.delayedACK.observe()
	}
}
