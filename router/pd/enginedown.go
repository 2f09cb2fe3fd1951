package pd

import (
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/schedule"
	"sluice/router/sweeper"
	"sluice/router/worker"
)

// engineDownMonitor looks after a decode that has a handle and has shown nothing yet: when the
// engine that holds the KV goes down, decode would wait in vain, for minutes, and
// is cut. It is a request's for good, so that beginning one allocates nothing, and
// looked at every peerCheckInterval (newDownMonitors).
type engineDownMonitor struct {
	mu             sync.Mutex // between its request's goroutine and look, for a few stores
	active         bool
	lost           bool // look found the engine down and cut the call
	fleet          *fleet.Fleet
	rank           *worker.Rank
	call           *upstream.Call
	unhealthySince time.Time // it has been seen out of health
	incarnation    uint32    // Fleet.Lives of rank when its prefill leg began
}

// unhealthyLimit is how long an engine that still listens must be seen out of health to
// count as down: one that computes a long prompt may leave probes unanswered.
const unhealthyLimit = 5 * time.Second

// newDownMonitors is the patrol that looks at all vigils of a Runner.
func newDownMonitors() *sweeper.Sweeper[engineDownMonitor] {
	return sweeper.New(peerCheckInterval, (*engineDownMonitor).check)
}

// monitorPrefill begins the vigil over prefill's engine for call.
func (q *request) monitorPrefill(rank *worker.Rank, call *upstream.Call) {
	if q.downMonitor == nil {
		q.downMonitor = new(engineDownMonitor)
		q.r.downMonitors.Add(q.downMonitor)
	}
	f := q.settings.Fleet
	incarnation := f.Incarnation(rank)
	if c := &q.chosenFor[schedule.PrefillLeg]; c.rank == rank {
		incarnation = c.incarnation
	}
	q.downMonitor.start(f, rank, incarnation, call)
	q.r.downMonitors.Wake()
}

// start watches rank for call, until settle. lives is Fleet.Lives of rank when the engine
// got the prefill leg.
func (v *engineDownMonitor) start(f *fleet.Fleet, rank *worker.Rank, incarnation uint32, call *upstream.Call) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.active, v.lost, v.unhealthySince = true, false, time.Time{}
	v.fleet, v.rank, v.incarnation, v.call = f, rank, incarnation, call
}

// check says whether the vigil goes on.
func (v *engineDownMonitor) check(now time.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.active && v.isDown(now) {
		v.lost = true
		v.call.Cancel()
		v.stop()
	}
	return v.active
}

func (v *engineDownMonitor) isDown(now time.Time) bool {
	state, _ := v.rank.Worker.State()
	switch {
	case v.fleet.RefusesConnections(v.rank), v.fleet.IsFrozen(v.rank):
		return true
	case v.fleet.Incarnation(v.rank) != v.incarnation: // it came back, without the KV
		return true
	case state != worker.Unhealthy:
		v.unhealthySince = time.Time{}
	case v.unhealthySince.IsZero():
		v.unhealthySince = now
	default:
		return now.Sub(v.unhealthySince) >= unhealthyLimit
	}
	return false
}

// finish ends the vigil; false: the engine went down, and the call was cut. A nil
// vigil, as all of a request that had none, answers true.
func (v *engineDownMonitor) finish() bool {
	if v == nil {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	return !v.lost
}

// reset ends the vigil of an attempt that is over, and what it found.
func (v *engineDownMonitor) reset() {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	v.lost = false
}

func (v *engineDownMonitor) stop() {
	v.active = false
	v.fleet, v.rank, v.call = nil, nil, nil
}

// inUse says whether the vigil is over this attempt's decode, or was until it cut it.
func (v *engineDownMonitor) inUse() bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.active || v.lost
}

// acceptAnswer lets decode's answer count: false, when the hand-over is lost and the
// call was cut for it.
func (q *request) acceptAnswer() bool {
	engineUp := q.downMonitor.finish()
	return q.transfer.Unguard() && engineUp
}
