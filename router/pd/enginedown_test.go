package pd

import (
	"testing"

	"sluice/router/fleet"
	"sluice/router/pd/abort"
	"sluice/router/worker"
)

// TestEngineDownMonitorAllocatesNothing checks that starting and stopping a request's monitor
// allocates nothing after the first time.
func TestEngineDownMonitorAllocatesNothing(t *testing.T) {
	q, rank := &request{runState: runState{r: &Runner{downMonitors: abort.NewDownMonitors()}, settings: new(settings)}}, &worker.Rank{Worker: worker.New(worker.Spec{ID: "p0"})}
	q.decodeLeg.newCall()
	all := fleet.New(fleet.Options{})
	defer all.Close()
	q.settings.Fleet = all
	q.monitorPrefill(rank)
	v := q.decodeLeg.monitor
	if n := testing.AllocsPerRun(200, func() {
		q.monitorPrefill(rank)
		if !v.Finish() {
			t.Error("lost without a look")
		}
		v.Reset()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkEngineDownMonitor(b *testing.B) {
	q, rank := &request{runState: runState{r: &Runner{downMonitors: abort.NewDownMonitors()}, settings: new(settings)}}, &worker.Rank{Worker: worker.New(worker.Spec{ID: "p0"})}
	q.decodeLeg.newCall()
	all := fleet.New(fleet.Options{})
	defer all.Close()
	q.settings.Fleet = all
	b.ReportAllocs()
	for b.Loop() {
		q.monitorPrefill(rank)
		q.decodeLeg.monitor.Finish()
		q.decodeLeg.monitor.Reset()
	}
}
