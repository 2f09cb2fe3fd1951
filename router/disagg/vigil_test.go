package disagg

import (
	"testing"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// A vigil costs a request a few stores, and no memory after its first.
func TestVigilAllocatesNothing(t *testing.T) {
	q, rank, call := &request{run: run{r: &Runner{vigils: newVigils()}}}, &worker.Rank{Worker: worker.New(worker.Spec{ID: "p0"})}, new(upstream.Call)
	all := fleet.New(fleet.Options{})
	defer all.Close()
	q.r.now.Store(&settled{Options: Options{Fleet: all}})
	q.guardOver(rank, call)
	v := q.vigil
	if n := testing.AllocsPerRun(200, func() {
		q.guardOver(rank, call)
		if !v.settle() {
			t.Error("lost without a look")
		}
		v.forget()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkVigil(b *testing.B) {
	q, rank, call := &request{run: run{r: &Runner{vigils: newVigils()}}}, &worker.Rank{Worker: worker.New(worker.Spec{ID: "p0"})}, new(upstream.Call)
	all := fleet.New(fleet.Options{})
	defer all.Close()
	q.r.now.Store(&settled{Options: Options{Fleet: all}})
	b.ReportAllocs()
	for b.Loop() {
		q.guardOver(rank, call)
		q.vigil.settle()
		q.vigil.forget()
	}
}
