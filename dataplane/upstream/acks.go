package upstream

import (
	"sync/atomic"
	"time"
)

// ackHabit is whether an engine waits for acknowledgements: one whose server does not
// set TCP_NODELAY sends no small packet while another is not acknowledged (Nagle's
// algorithm, RFC 896). While a stream is lent, acknowledgements may come late, which
// saves a packet for every other event (takeOut); such an engine then stands still for
// as long as Linux puts one off, and sends what it had to say meanwhile in one piece.
// That is what a relay can see of it (Response.HeldBack). An engine that was seen to do
// so a few times is acknowledged as the kernel sees fit; where that changes nothing it
// was something else, a machine without time for instance, or a prefill of that length,
// and is not looked at any more.
//
// Memory order: one number that only grows; who reads an old one is late by a stream.
type ackHabit struct{ seen atomic.Int32 }

const (
	ackWaits  = 3                     // sightings after which an engine is taken to wait
	ackDoubts = ackWaits + 16         // and after which it is not any more
	ackSoon   = 36 * time.Millisecond // Linux's delay is 40 ms, by a clock of 4 ms …
	ackLate   = 52 * time.Millisecond // … and our own lateness
)

// sighted notes one more.
func (h *ackHabit) sighted() {
	if h.seen.Load() < ackDoubts {
		h.seen.Add(1)
	}
}

// waits says whether acknowledgements must not be late.
func (h *ackHabit) waits() bool {
	n := h.seen.Load()
	return n >= ackWaits && n < ackDoubts
}

// HeldBack tells that several events came together after a silence of so long, which
// says, by its length, that the engine may have waited for an acknowledgement. It may be
// called while the connection is lent.
func (r *Response) HeldBack(silence time.Duration) {
	if silence >= ackSoon && silence <= ackLate {
		r.c.ep.acks.sighted()
	}
}
