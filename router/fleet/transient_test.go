package fleet

import (
	"errors"
	"testing"
	"time"

	"sluice/router/worker"
)

func transientSpec(id, url string) worker.Spec {
	return worker.Spec{ID: id, URL: url, Role: worker.Prefill, Models: []string{"m"}, KVEvents: []string{"off"}}
}

// A transient worker is in no view and has its own breaker and connections. Its slot is used again
// only after its last request has ended.
func TestTransient(t *testing.T) {
	f := New(Options{BreakerThreshold: 2, BreakerTimeout: time.Hour})
	defer f.Close()
	w, err := f.AddTransient(transientSpec("10.0.0.1:8000", "http://10.0.0.1:8000"))
	if err != nil {
		t.Fatal(err)
	}
	r := w.Ranks[0]
	if v := f.View(); len(v.Workers) != 0 || len(v.Models) != 0 {
		t.Errorf("a transient worker is in the view: %v", v.Workers)
	}
	if s, _ := w.State(); s != worker.Ready {
		t.Errorf("it is %v", s)
	}
	ep := f.Endpoint(r)
	if ep == nil || ep != f.Endpoint(r) || ep.URL() != "http://10.0.0.1:8000" {
		t.Errorf("endpoint %v", ep)
	}
	for range 2 {
		f.ReportFailure(r, errors.New("refused"))
	}
	if b := worker.BreakerState(r.Breaker.Load()); b != worker.BreakerOpen {
		t.Errorf("after two failures its breaker is %v", b)
	}
	if s, _ := w.State(); s != worker.Ready || f.TransientWorkers() != 1 {
		t.Errorf("state %v, %d transient workers", s, f.TransientWorkers())
	}

	r.Requests.Add(1)
	f.RemoveTransient(w)
	f.RemoveTransient(w)
	if b := worker.BreakerState(r.Breaker.Load()); f.TransientWorkers() != 0 || b != worker.BreakerClosed {
		t.Errorf("%d transient workers after its removal, breaker %v", f.TransientWorkers(), b)
	}
	other, err := f.AddTransient(transientSpec("10.0.0.2:8000", "http://10.0.0.2:8000"))
	if err != nil {
		t.Fatal(err)
	}
	if other.Ranks[0].Slot == r.Slot {
		t.Error("the slot was used again while a request holds it")
	}
	f.ReportFailure(r, errors.New("refused")) // of a removed worker: ignored
	f.ReportStatus(r, 500)
	r.Requests.Add(-1)
	third, err := f.AddTransient(transientSpec("10.0.0.3:8000", "http://10.0.0.3:8000"))
	if err != nil {
		t.Fatal(err)
	}
	if third.Ranks[0].Slot != r.Slot {
		t.Errorf("slot %d; want %d, which is free again", third.Ranks[0].Slot, r.Slot)
	}
	if f.RemoveTransient(worker.New(worker.Spec{ID: "stranger"})); f.TransientWorkers() != 2 {
		t.Error("a stranger was dismissed")
	}
	if _, err := f.AddTransient(transientSpec("x", "ftp://x")); err == nil {
		t.Error("a URL that is none")
	}
	f.Close()
	if _, err := f.AddTransient(transientSpec("10.0.0.4:8000", "http://10.0.0.4:8000")); !errors.Is(err, errClosed) {
		t.Errorf("after Close: %v", err)
	}
}
