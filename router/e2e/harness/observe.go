package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/admin"
	"sluice/router/fleet"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Metric returns the value of one series of the router's /metrics, or 0 if it is absent. series
// is written as on the page, with labels: name{a="b"}.
func (r *Router) Metric(series string) float64 {
	var b bytes.Buffer
	r.Metrics.WritePrometheus(&b)
	for line := range strings.Lines(b.String()) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), series+" "); ok {
			f, err := strconv.ParseFloat(v, 64)
			if err != nil {
				panic(err)
			}
			return f
		}
	}
	return 0
}

// Fallbacks returns the number of fallbacks of a kind since the router started.
func (r *Router) Fallbacks(kind string) float64 {
	return r.Metric(`sluice_fallbacks_total{kind="` + kind + `"}`)
}

// Explain fetches a request's record from the admin listener.
func (r *Router) Explain(t *testing.T, id string) *schedule.Record {
	t.Helper()
	rt, err := admin.ReadRuntimeFile(r.Config.Admin.RuntimeFile)
	if err != nil {
		t.Fatal(err)
	}
	c := admin.NewClient(rt)
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	rec, _, err := c.Explain(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// Outcome waits until a request's record has an outcome, and returns the record.
func (r *Router) Outcome(t *testing.T, id string) *schedule.Record {
	t.Helper()
	var rec schedule.Record
	testwait.UntilWithin(t, 10*time.Second, "the record of "+id+" has its outcome", func() bool {
		body, ok := r.Scheduler.Explain(id)
		return ok && json.Unmarshal(body, &rec) == nil && rec.Outcome != nil
	})
	return &rec
}

// ReservedLoad describes the load that is still reserved on any rank; "" if there is none.
func (r *Router) ReservedLoad() string {
	var remaining []string
	for _, w := range r.Fleet.View().Workers {
		for _, k := range w.Ranks {
			if p, b, n := k.PrefillTokens.Load(), k.DecodeBlocks.Load(), k.Requests.Load(); p != 0 || b != 0 || n != 0 {
				remaining = append(remaining, fmt.Sprintf("%s: %d prefill tokens, %d blocks, %d requests", k.ID, p, b, n))
			}
		}
	}
	for _, leg := range []string{"prefill", "decode", "whole"} {
		if n := r.Metric(`sluice_legs_in_flight{leg="` + leg + `"}`); n != 0 {
			remaining = append(remaining, fmt.Sprintf("%v %s legs in flight", n, leg))
		}
	}
	return strings.Join(remaining, "; ")
}

// WantIdle waits until no request is in progress in the router and the engines, and no engine
// holds blocks for a lease.
func WantIdle(t *testing.T, r *Router, within time.Duration, engines ...*sim.Engine) {
	t.Helper()
	busy := ""
	defer func() {
		if t.Failed() && busy != "" {
			t.Logf("still there: %s", busy)
		}
	}()
	testwait.UntilWithin(t, within, "nothing is in flight", func() bool {
		busy = r.ReservedLoad()
		for i, e := range engines {
			if s := e.Stats().Sum(); e.Alive() && (s.Running != 0 || s.Waiting != 0 || s.Leases != 0 || s.BlocksLeased != 0) {
				busy += fmt.Sprintf(" engine %d: %d running, %d waiting, %d leases of %d blocks", i, s.Running, s.Waiting, s.Leases, s.BlocksLeased)
			}
		}
		return busy == ""
	})
	busy = ""
}

// GenerateRequests returns the requests to inference endpoints that the engine received, oldest
// first. The router's calls of /tokenize and its probes are not included.
func GenerateRequests(e *sim.Engine) []sim.Record {
	return slices.DeleteFunc(e.Requests(), func(r sim.Record) bool {
		return r.Method != "POST" || !strings.HasPrefix(r.Path, "/v1/") && !strings.HasPrefix(r.Path, "/inference/") && r.Path != "/generate"
	})
}

// Ids returns the X-Request-Id of each request, "" where there is none. The result is never nil.
func Ids(recs []sim.Record) []string {
	out := []string{}
	for _, r := range recs {
		out = append(out, r.Header("X-Request-Id"))
	}
	return out
}

// Member returns the text of one member of a JSON object.
func Member(t *testing.T, object []byte, name string) string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal(object, &m); err != nil {
		t.Fatalf("no JSON object: %v in %s", err, object)
	}
	return string(m[name])
}

// State returns the state of a worker as requests see it. The state of a worker changes a moment
// before the View that requests use; a worker that is no longer ready is Ready here until it has
// left that View.
func (r *Router) State(id string) worker.State {
	v := r.Fleet.View()
	for _, w := range v.Workers {
		if w.Spec.ID == id {
			s, _ := w.State()
			if s != worker.Ready && inPools(v, w) {
				return worker.Ready
			}
			return s
		}
	}
	return worker.Gone
}

// WantStatus ends the test if the status of a response is another one.
func WantStatus(t *testing.T, a *Answer, status int) {
	t.Helper()
	if a.Status != status {
		t.Fatalf("status %d, want %d: %s", a.Status, status, a.Body)
	}
}

// WantReason fails the test, but does not end it, if the status or the X-Sluice-Reason of a response
// is another one.
func WantReason(t *testing.T, a *Answer, status int, reason string) {
	t.Helper()
	if a.Status != status || a.Header.Get("X-Sluice-Reason") != reason {
		t.Errorf("status %d, reason %q; want %d, %q: %s", a.Status, a.Header.Get("X-Sluice-Reason"), status, reason, a.Body)
	}
}

// DropIdle closes the idle connections of the test's HTTP client.
func DropIdle() { http.DefaultTransport.(*http.Transport).CloseIdleConnections() }

// inPools reports whether a rank of the worker is in any pool of the View.
func inPools(v *fleet.View, w *worker.Worker) bool {
	for _, model := range v.Models {
		p, _ := v.Pool(model)
		for _, role := range [...]worker.Role{worker.Prefill, worker.Decode, worker.Aggregated} {
			if p != nil && slices.ContainsFunc(p.Ranks(role), func(r *worker.Rank) bool { return r.Worker == w }) {
				return true
			}
		}
	}
	return false
}
