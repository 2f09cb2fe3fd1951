package abort

import (
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/sweeper"
	"sluice/router/worker"
)

// DownMonitor watches the engine that has the KV of a decode leg from which nothing has
// arrived yet. If that engine goes down, decode would wait for minutes without effect, so the monitor
// cancels its call. A request keeps its monitor for reuse, so a start allocates nothing. The
// sweeper of NewDownMonitors checks all monitors every downCheckInterval.
type DownMonitor struct {
	mu             sync.Mutex // Held by the request's goroutine or check, only for a few stores
	active         bool
	lost           bool // check found the engine down and cancelled the call
	fleet          *fleet.Fleet
	rank           *worker.Rank
	call           *upstream.Call
	unhealthySince time.Time // Start of the period in which every check found it unhealthy
	incarnation    uint32    // Fleet.Incarnation of rank at the start of its prefill leg
}

// unhealthyLimit is how long an engine that still accepts connections must be unhealthy to count as
// down. An engine that computes a long prompt may not answer probes.
const unhealthyLimit = 5 * time.Second

// downCheckInterval is the interval of the checks.
const downCheckInterval = 200 * time.Millisecond

// NewDownMonitors returns the sweeper that checks all monitors of a Runner.
func NewDownMonitors() *sweeper.Sweeper[DownMonitor] {
	return sweeper.New(downCheckInterval, (*DownMonitor).check)
}

// Start watches rank on behalf of call until finish or reset. incarnation is Fleet.Incarnation of
// rank when its engine received the prefill leg.
func (v *DownMonitor) Start(f *fleet.Fleet, rank *worker.Rank, incarnation uint32, call *upstream.Call) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.active, v.lost, v.unhealthySince = true, false, time.Time{}
	v.fleet, v.rank, v.incarnation, v.call = f, rank, incarnation, call
}

// check cancels the call if the engine is down. It reports whether the monitor is still active.
func (v *DownMonitor) check(now time.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.active && v.isDown(now) {
		v.lost = true
		v.call.Cancel()
		v.stop()
	}
	return v.active
}

func (v *DownMonitor) isDown(now time.Time) bool {
	state, _ := v.rank.Worker.State()
	switch {
	case v.fleet.RefusesConnections(v.rank), v.fleet.IsFrozen(v.rank):
		return true
	case v.fleet.Incarnation(v.rank) != v.incarnation: // the engine has restarted and lost the KV
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

// Finish stops the monitor. It returns false if the engine went down and the monitor has cancelled
// the call. Finish works on nil and then returns true.
func (v *DownMonitor) Finish() bool {
	if v == nil {
		return true
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	return !v.lost
}

// Reset stops the monitor and clears its result for the next attempt. It works on nil.
func (v *DownMonitor) Reset() {
	if v == nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.stop()
	v.lost = false
}

func (v *DownMonitor) stop() {
	v.active = false
	v.fleet, v.rank, v.call = nil, nil, nil
}

// InUse reports whether the monitor is active in this attempt or has cancelled its decode.
func (v *DownMonitor) InUse() bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.active || v.lost
}
