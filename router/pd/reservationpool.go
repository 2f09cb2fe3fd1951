package pd

import (
	"strings"
	"unsafe"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// When a request is over, a stream, a concurrent prefill leg or an abort may still use what
// its legs had: a Call, a decodeAbort, a Reservation. Otherwise the next request uses it.

// newCall returns a Call for the next leg: the last leg's, unless another goroutine may still
// cancel that.
func (q *request) newCall() *upstream.Call {
	q.legSent = true
	if q.call == nil || q.call.Cancelled() || q.decodeAbort.wasStarted() || q.downMonitor.inUse() {
		q.call = new(upstream.Call)
	} else {
		q.call.Reset()
	}
	return q.call
}

// newDecodeAbort returns a decodeAbort that has not been started.
func (q *request) newDecodeAbort() *decodeAbort {
	if q.decodeAbort == nil || q.decodeAbort.wasStarted() {
		q.decodeAbort = new(decodeAbort)
		q.decodeAbort.onGone = q.decodeAbort.start
	}
	return q.decodeAbort
}

// reservationPool has the Reservations for a request's choices.
type reservationPool struct {
	slots [2]*schedule.Reservation // for prefill and decode, or for the only leg
	used  int
}

// acquire returns a Reservation for one more choice, or nil when the pool has none; the choice
// then allocates its own.
func (r *reservationPool) acquire() *schedule.Reservation {
	if r.used == len(r.slots) {
		return nil
	}
	if r.slots[r.used] == nil {
		r.slots[r.used] = new(schedule.Reservation)
	}
	r.used++
	return r.slots[r.used-1]
}

// replace removes res from the pool, because its new owner may release it after the request,
// and puts with in its place, which is released or nil. It returns res.
func (r *reservationPool) replace(res, with *schedule.Reservation) *schedule.Reservation {
	for i := range r.slots {
		if r.slots[i] == res {
			r.slots[i] = with
		}
	}
	return res
}

// detach removes all from the pool, because their new owner may release them later.
func (r *reservationPool) detach() { *r = reservationPool{used: len(r.slots)} }

// idle returns a pool of those that are released.
func (r *reservationPool) idle() (free reservationPool) {
	for i, res := range r.slots {
		if res.IsReleased() {
			free.slots[i] = res
		}
	}
	return free
}

// internModel replaces q.model, which borrows from the body, by a string that outlives it: the
// pool's where they are equal.
func (q *request) internModel() {
	if q.pool != nil && q.pool.Model == q.model {
		q.model = q.pool.Model
	} else {
		q.model = strings.Clone(q.model)
	}
}

// unsafeString returns b as a string without a copy. It is valid while b does not change.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
