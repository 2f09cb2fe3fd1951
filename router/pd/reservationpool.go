package pd

import (
	"strings"
	"unsafe"

	"sluice/router/schedule"
)

// After a request has ended, a stream, a concurrent prefill leg or an abort may still use objects
// of its legs: a Call, an abort.Decode, a Reservation. Only objects that nothing uses any more pass
// to the next request.

// reservationPool holds the Reservations for a request's choices.
type reservationPool struct {
	slots [2]*schedule.Reservation // for prefill and decode, or only the first for a single leg
	used  int
}

// acquire returns a Reservation for one more choice. It returns nil if the pool is empty; the
// choice then allocates its own.
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

// replace removes res from the pool, because its new owner may release it after the request, and
// adds with, which is released or nil. It returns res.
func (r *reservationPool) replace(res, with *schedule.Reservation) *schedule.Reservation {
	for i := range r.slots {
		if r.slots[i] == res {
			r.slots[i] = with
		}
	}
	return res
}

// detach removes all Reservations from the pool, because their new owners may release them later.
func (r *reservationPool) detach() { *r = reservationPool{used: len(r.slots)} }

// idle returns a pool of the released Reservations.
func (r *reservationPool) idle() (free reservationPool) {
	for i, res := range r.slots {
		if res.IsReleased() {
			free.slots[i] = res
		}
	}
	return free
}

// internModel replaces q.model, which borrows from the body, with a string that outlives the body:
// the pool's model name if they are equal.
func (q *request) internModel() {
	if q.pool != nil && q.pool.Model == q.model {
		q.model = q.pool.Model
	} else {
		q.model = strings.Clone(q.model)
	}
}

// unsafeString returns b as a string without a copy. The string is valid as long as b does not
// change.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
