package disagg

import (
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// vigil looks after a decode that has a handle and has shown nothing yet: when the
// engine that holds the KV goes down, decode would wait in vain, for minutes, and
// is cut. Whoever moves state on has the say: the look that finds the engine down,
// or settle.
type vigil struct {
	fleet *fleet.Fleet
	rank  *worker.Rank
	call  *upstream.Call
	timer *time.Timer
	since time.Time // it has been seen out of health; the looks' own
	state atomic.Int32
}

const (
	vigilLooks = iota
	vigilSettled
	vigilLost
)

// downFor is how long an engine that still listens must be seen out of health to
// count as down: one that computes a long prompt may leave probes unanswered.
const downFor = 5 * time.Second

func newVigil(f *fleet.Fleet, rank *worker.Rank, call *upstream.Call) *vigil {
	v := &vigil{fleet: f, rank: rank, call: call}
	v.timer = time.AfterFunc(time.Hour, v.look)
	v.timer.Reset(partyCheck) // only now: look uses timer
	return v
}

func (v *vigil) look() {
	if v.state.Load() != vigilLooks {
		return
	}
	if v.down(time.Now()) {
		if v.state.CompareAndSwap(vigilLooks, vigilLost) {
			v.call.Cut()
		}
		return
	}
	v.timer.Reset(partyCheck)
}

func (v *vigil) down(now time.Time) bool {
	state, _ := v.rank.Worker.State()
	switch {
	case v.fleet.Refuses(v.rank):
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

// settle ends the vigil; false: the engine went down, and the call was cut.
func (v *vigil) settle() bool {
	if v == nil {
		return true
	}
	v.timer.Stop()
	return v.state.CompareAndSwap(vigilLooks, vigilSettled) || v.state.Load() == vigilSettled
}

// settle lets decode's answer count: false, when the hand-over is lost and the
// call was cut for it.
func (q *request) settle() bool {
	up := q.vigil.settle()
	return q.wait.Settle() && up
}
