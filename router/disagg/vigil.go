package disagg

import (
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/patrol"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// vigil looks after a decode that has a handle and has shown nothing yet: when the
// engine that holds the KV goes down, decode would wait in vain, for minutes, and
// is cut. It is a request's for good, so that beginning one allocates nothing, and
// looked at every partyCheck (newVigils).
type vigil struct {
	mu    sync.Mutex // between its request's goroutine and look, for a few stores
	on    bool
	lost  bool // look found the engine down and cut the call
	fleet *fleet.Fleet
	rank  *worker.Rank
	call  *upstream.Call
	since time.Time // it has been seen out of health
	lives uint32    // Fleet.Lives of rank when its prefill leg began
}

// downFor is how long an engine that still listens must be seen out of health to
// count as down: one that computes a long prompt may leave probes unanswered.
const downFor = 5 * time.Second

// newVigils is the patrol that looks at all vigils of a Runner.
func newVigils() *patrol.Patrol[vigil] { return patrol.New(partyCheck, (*vigil).look) }

// guardOver begins the vigil over prefill's engine for call.
func (q *request) guardOver(rank *worker.Rank, call *upstream.Call) {
	if q.vigil == nil {
		q.vigil = new(vigil)
		q.r.vigils.Join(q.vigil)
	}
	f := q.r.opt().Fleet
	lives := f.Lives(rank)
	if c := &q.chosenFor[schedule.PrefillLeg]; c.rank == rank {
		lives = c.restarts
	}
	q.vigil.begin(f, rank, lives, call)
	q.r.vigils.OnDuty()
}

// begin watches rank for call, until settle. lives is Fleet.Lives of rank when the engine
// got the prefill leg.
func (v *vigil) begin(f *fleet.Fleet, rank *worker.Rank, lives uint32, call *upstream.Call) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.on, v.lost, v.since = true, false, time.Time{}
	v.fleet, v.rank, v.lives, v.call = f, rank, lives, call
}

// look says whether the vigil goes on.
func (v *vigil) look(now time.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.on && v.down(now) {
		v.lost = true
		v.call.Cut()
		v.stop()
	}
	return v.on
}

func (v *vigil) down(now time.Time) bool {
	state, _ := v.rank.Worker.State()
	switch {
	case v.fleet.Refuses(v.rank), v.fleet.IsFrozen(v.rank):
		return true
	case v.fleet.Lives(v.rank) != v.lives: // it came back, without the KV
		return true
	case state != worker.Unhealthy:
		v.since = time.Time{}
	case v.since.IsZero():
		v.since = now
	default:
		return now.Sub(v.since) >= downFor
	}
	return false
}

// settle ends the vigil; false: the engine went down, and the call was cut. A nil
// vigil, as all of a request that had none, answers true.
func (v *vigil) settle() bool {
	if v == nil {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	return !v.lost
}

// forget ends the vigil of an attempt that is over, and what it found.
func (v *vigil) forget() {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	v.lost = false
}

func (v *vigil) stop() {
	v.on = false
	v.fleet, v.rank, v.call = nil, nil, nil
}

// watches says whether the vigil is over this attempt's decode, or was until it cut it.
func (v *vigil) watches() bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.on || v.lost
}

// settle lets decode's answer count: false, when the hand-over is lost and the
// call was cut for it.
func (q *request) settle() bool {
	up := q.vigil.settle()
	return q.wait.Settle() && up
}
