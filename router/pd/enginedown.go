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

// engineDownMonitor watches the engine that has the KV of a decode leg from which nothing has
// come yet. When that engine goes down decode would wait for minutes without effect, so the
// monitor cancels it. A request keeps its monitor, so that a start allocates nothing. The
// sweeper checks it every peerCheckInterval (newDownMonitors).
type engineDownMonitor struct {
	mu             sync.Mutex // the request's goroutine and check take it, for a few stores
	active         bool
	lost           bool // check found the engine down and cancelled the call
	fleet          *fleet.Fleet
	rank           *worker.Rank
	call           *upstream.Call
	unhealthySince time.Time // since when checks have found it unhealthy
	incarnation    uint32    // Fleet.Incarnation of rank when its prefill leg began
}

// unhealthyLimit is how long an engine that still listens must be unhealthy to count as down.
// An engine that computes a long prompt may leave probes unanswered.
const unhealthyLimit = 5 * time.Second

// newDownMonitors makes the sweeper that checks all monitors of a Runner.
func newDownMonitors() *sweeper.Sweeper[engineDownMonitor] {
	return sweeper.New(peerCheckInterval, (*engineDownMonitor).check)
}

// monitorPrefill starts the monitor of prefill's engine for call.
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

// start watches rank for call until finish or reset. incarnation is Fleet.Incarnation of rank
// when its engine got the prefill leg.
func (v *engineDownMonitor) start(f *fleet.Fleet, rank *worker.Rank, incarnation uint32, call *upstream.Call) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.active, v.lost, v.unhealthySince = true, false, time.Time{}
	v.fleet, v.rank, v.incarnation, v.call = f, rank, incarnation, call
}

// check cancels the call when the engine is down. It reports whether the monitor goes on.
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
	case v.fleet.Incarnation(v.rank) != v.incarnation: // it has restarted without the KV
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

// finish stops the monitor. It returns false when the engine went down and the call was
// cancelled. It returns true on nil.
func (v *engineDownMonitor) finish() bool {
	if v == nil {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	return !v.lost
}

// reset stops the monitor and clears its result, for the next attempt. It works on nil.
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

// inUse reports whether the monitor watches this attempt's decode or has cancelled it.
func (v *engineDownMonitor) inUse() bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.active || v.lost
}

// acceptAnswer ends the watches over the hand-over. It returns false when the hand-over is
// lost and the call was cancelled for that.
func (q *request) acceptAnswer() bool {
	engineUp := q.downMonitor.finish()
	return q.transfer.Unguard() && engineUp
}
