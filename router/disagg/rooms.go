package disagg

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
	q.engaged = true
	if q.call == nil || q.call.WasCut() || q.left.wasTold() || q.vigil.watches() {
		q.call = new(upstream.Call)
	} else {
		q.call.Renew()
	}
	return q.call
}

// newLeaving is a leaving that nobody has been told of.
func (q *request) newLeaving() *leaving {
	if q.left == nil || q.left.wasTold() {
		q.left = new(leaving)
		q.left.begin = q.left.gone
	}
	return q.left
}

// rooms are the Reservations that a request's choices are made in.
type rooms struct {
	all  [2]*schedule.Reservation // of prefill and decode, or of the whole
	used int
}

// next is memory for one more choice; nil when there is none, and the choice makes its own.
func (r *rooms) next() *schedule.Reservation {
	if r.used == len(r.all) {
		return nil
	}
	if r.all[r.used] == nil {
		r.all[r.used] = new(schedule.Reservation)
	}
	r.used++
	return r.all[r.used-1]
}

// handOver leaves one to somebody else, who may release it after the request, and takes
// another in its place, which holds nothing; nil: there is none. It gives the one left.
func (r *rooms) handOver(res, instead *schedule.Reservation) *schedule.Reservation {
	for i := range r.all {
		if r.all[i] == res {
			r.all[i] = instead
		}
	}
	return res
}

// handOn leaves those in use to somebody else, who may release them after the request.
func (r *rooms) handOn() { *r = rooms{used: len(r.all)} }

// again are those that hold nothing any more.
func (r *rooms) again() (free rooms) {
	for i, res := range r.all {
		if res.Idle() {
			free.all[i] = res
		}
	}
	return free
}

// nameModel makes q.model, which borrows from the body, a string that outlives it: the
// pool's own where it is the same.
func (q *request) nameModel() {
	if q.pool != nil && q.pool.Model == q.model {
		q.model = q.pool.Model
	} else {
		q.model = strings.Clone(q.model)
	}
}

// borrow makes a string of b without a copy; it lives as long as b's bytes.
func borrow(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
