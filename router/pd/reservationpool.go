package pd

import (
	"strings"
	"unsafe"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// What a request's legs need beyond the request's scratch (a Call, a leaving, a
// Reservation) may be held by somebody else when the request is over: a stream, a leg
// beside, a client's leaving. Where it is not, it serves the next request.

// newCall is a Call for the next leg: the last one's, where nobody else can cut that yet.
func (q *request) newCall() *upstream.Call {
	q.legSent = true
	if q.call == nil || q.call.Cancelled() || q.decodeAbort.wasStarted() || q.downMonitor.inUse() {
		q.call = new(upstream.Call)
	} else {
		q.call.Reset()
	}
	return q.call
}

// newDecodeAbort is a leaving that nobody has been told of.
func (q *request) newDecodeAbort() *decodeAbort {
	if q.decodeAbort == nil || q.decodeAbort.wasStarted() {
		q.decodeAbort = new(decodeAbort)
		q.decodeAbort.onGone = q.decodeAbort.start
	}
	return q.decodeAbort
}

// reservationPool are the Reservations that a request's choices are made in.
type reservationPool struct {
	slots [2]*schedule.Reservation // of prefill and decode, or of the whole
	used  int
}

// acquire is memory for one more choice; nil when there is none, and the choice makes its own.
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

// replace leaves one to somebody else, who may release it after the request, and takes
// another in its place, which holds nothing; nil: there is none. It gives the one left.
func (r *reservationPool) replace(res, with *schedule.Reservation) *schedule.Reservation {
	for i := range r.slots {
		if r.slots[i] == res {
			r.slots[i] = with
		}
	}
	return res
}

// detach leaves those in use to somebody else, who may release them after the request.
func (r *reservationPool) detach() { *r = reservationPool{used: len(r.slots)} }

// idle are those that hold nothing any more.
func (r *reservationPool) idle() (free reservationPool) {
	for i, res := range r.slots {
		if res.IsReleased() {
			free.slots[i] = res
		}
	}
	return free
}

// internModel makes q.model, which borrows from the body, a string that outlives it: the
// pool's own where it is the same.
func (q *request) internModel() {
	if q.pool != nil && q.pool.Model == q.model {
		q.model = q.pool.Model
	} else {
		q.model = strings.Clone(q.model)
	}
}

// unsafeString makes a string of b without a copy; it lives as long as b's bytes.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
