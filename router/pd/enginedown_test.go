package pd

import (
	"testing"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/pd/abort"
	"sluice/router/worker"
)

// TestEngineDownMonitorAllocatesNothing checks that starting and stopping a request's monitor
// allocates nothing after the first time.
func TestEngineDownMonitorAllocatesNothing(t *testing.T) {
	q, rank, call := &request{runState: runState{r: &Runner{downMonitors: abort.NewDownMonitors()}, settings: new(settings)}}, &worker.Rank{Worker: worker.New(worker.Spec{ID: "p0"})}, new(upstream.Call)
	all := fleet.New(fleet.Options{})
	defer all.Close()
	q.settings.Fleet = all
	q.monitorPrefill(rank, call)
	v := q.downMonitor
	if n := testing.AllocsPerRun(200, func() {
		q.monitorPrefill(rank, call)
		if !v.Finish() {
			t.Error("lost without a look")
		}
		v.Reset()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkEngineDownMonitor(b *testing.B) {
	q, rank, call := &request{runState: runState{r: &Runner{downMonitors: abort.NewDownMonitors()}, settings: new(settings)}}, &worker.Rank{Worker: worker.New(worker.Spec{ID: "p0"})}, new(upstream.Call)
	all := fleet.New(fleet.Options{})
	defer all.Close()
	q.settings.Fleet = all
	b.ReportAllocs()
	for b.Loop() {
		q.monitorPrefill(rank, call)
		q.downMonitor.Finish()
		q.downMonitor.Reset()
	}
}
