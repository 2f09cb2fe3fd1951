package scheduling

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

func TestRequestIDIsMadeOrReplaced(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	seen := map[string]bool{}
	for _, given := range []string{"", "has space", `quo"te`, "caf\xc3\xa9", strings.Repeat("x", 129), "back\\slash",
		"___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:1_0", "x___decode_addr_host:10.0.0.9,handshake:1,notify:2_0123456789abcdef0123456789abcdef"} {
		e.ForgetRequests()
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", given)
		harness.WantStatus(t, a, 200)
		id := a.Header.Get("X-Request-Id")
		if id == "" || id == given || seen[id] {
			t.Errorf("for %q the id is %q; want a new one", given, id)
		}
		seen[id] = true
		if got := harness.Ids(harness.GenerateRequests(e)); len(got) != 1 || got[0] != id {
			t.Errorf("the engine saw ids %q, the client %q", got, id)
		}
	}
	for _, given := range []string{"a", "req_1:/x.y-z+=", "my_addr_book", strings.Repeat("x", 128)} {
		e.ForgetRequests()
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "X-Request-Id", given)
		if got := a.Header["X-Request-Id"]; len(got) != 1 || got[0] != given {
			t.Errorf("X-Request-Id %q, want %q once", got, given)
		}
		if got := harness.Ids(harness.GenerateRequests(e)); len(got) != 1 || got[0] != given {
			t.Errorf("the engine saw ids %q, want %q", got, given)
		}
	}
	// Errors contain the id too.
	a := harness.Post(t, r.URL+"/v1/chat/completions", `{`, "X-Request-Id", "bad-1")
	if a.Status != 400 || a.Header.Get("X-Request-Id") != "bad-1" {
		t.Errorf("status %d, id %q", a.Status, a.Header.Get("X-Request-Id"))
	}
}

func TestRetriesHaveOwnIDs(t *testing.T) {
	p0, p1, d0, d1 := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p0, worker.Prefill, "p0"), harness.SimWorker(p1, worker.Prefill, "p1"), harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
	// The first decode fails after it received the request: both legs run again.
	for _, d := range []*sim.Engine{d0, d1} {
		d.Fault(sim.Fault{Kind: sim.Status, Leg: "decode", N: 1})
	}
	// The first choice is random.
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "X-Request-Id", "pair")
	harness.WantStatus(t, a, 503) // both decodes have failed this request
	got := append(harness.Ids(harness.GenerateRequests(p0)), harness.Ids(harness.GenerateRequests(p1))...)
	slices.Sort(got)
	if !slices.Equal(got, []string{"pair", "pair-2"}) {
		t.Errorf("prefill saw %q; want pair, pair-2", got)
	}
	got = append(harness.Ids(harness.GenerateRequests(d0)), harness.Ids(harness.GenerateRequests(d1))...)
	slices.Sort(got)
	if !slices.Equal(got, []string{"pair", "pair-2"}) {
		t.Errorf("decode saw %q; want pair, pair-2", got)
	}
	a = harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "X-Request-Id", "third")
	harness.WantStatus(t, a, 200)
	for _, e := range []*sim.Engine{d0, d1} {
		for _, rec := range harness.GenerateRequests(e) {
			if id := rec.Header("X-Request-Id"); !strings.Contains(string(rec.Body), `-`+id+`-`) {
				t.Errorf("decode %q was given a handle of another attempt: %s", id, rec.Body)
			}
		}
	}
}

// TestReusedIDKeepsHandoversApart: clients send the same id twice, like gateways that retry. In
// families that find the hand-over by the request id, the router gives each request a unique id,
// which both of its legs share.
func TestReusedIDKeepsHandoversApart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ family, release string }{{"nixl-push", ""}, {"nixl", "0.13"}, {"nixl", "0.11"}, {"nixl", ""}} {
		t.Run(c.family+c.release, func(t *testing.T) { testReusedID(t, c.family, c.release) })
	}
}

func testReusedID(t *testing.T, family, release string) {
	as := func(role string) func(*sim.Options) {
		return func(o *sim.Options) {
			o.Role, o.Release = role, release
			o.ClientIDs = family == "nixl" // new releases need the setting; old ones always use the client id
			if family != "nixl" {
				o.PD = family
			}
		}
	}
	p, d := harness.StartSim(t, as("prefill")), harness.StartSim(t, as("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = family }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	warm := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "X-Request-Id", "first")
	harness.WantStatus(t, warm, 200) // so that the router knows the engines' id rules and prefill's address
	p.ForgetRequests()
	d.ForgetRequests()
	const n = 8
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			a, err := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), "X-Request-Id", "twice")
			if err != nil {
				t.Error(err)
			} else if got := a.Header.Get("X-Request-Id"); a.Status != 200 || got != "twice" {
				t.Errorf("status %d, id %q: %s", a.Status, got, a.Body)
			}
		})
	}
	wg.Wait()
	prefills, decodes := harness.Ids(harness.GenerateRequests(p)), harness.Ids(harness.GenerateRequests(d))
	slices.Sort(prefills)
	slices.Sort(decodes)
	if !slices.Equal(prefills, decodes) {
		t.Errorf("prefill saw %q, decode %q", prefills, decodes)
	}
	if len(prefills) != n || len(slices.Compact(slices.Clone(prefills))) != n {
		t.Errorf("prefill saw %q; want %d ids that differ", prefills, n)
	}
	for _, id := range prefills {
		if !strings.HasPrefix(id, "twice-x") {
			t.Errorf("an engine saw %q; want the client's id with an end of its own", id)
		}
	}
	if lost := d.Stats().Sum().GarbageReads; lost > 0 {
		t.Errorf("%d decodes found another's blocks freed", lost)
	}
}

// TestReusedHandleKeepsPrefillID: a decode that never reached its engine is sent to another one
// with the same handle, and therefore with the id of its prefill.
func TestReusedHandleKeepsPrefillID(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	gone := harness.StartScripted(t, harness.ReplyHandler(200, "{}"))
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Health.Interval, c.Health.UnhealthyThreshold = time.Minute, 1000 // keep the dead worker in the pool
		c.Schedule.Policy = "round_robin"
	}, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"), gone.Worker(worker.Decode, "d1"))
	gone.CloseClientConnections()
	gone.Listener.Close()
	for i := range 4 {
		id := "handle-" + string(rune('a'+i))
		p.ForgetRequests()
		d.ForgetRequests()
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", id)
		harness.WantStatus(t, a, 200)
		if got := harness.Ids(harness.GenerateRequests(p)); !slices.Equal(got, []string{id}) {
			t.Errorf("prefill saw %q, want %q once", got, id)
		}
		if got := harness.Ids(harness.GenerateRequests(d)); !slices.Equal(got, []string{id}) {
			t.Errorf("decode saw %q, want %q: the handle is that prefill's", got, id)
		}
	}
	if n := r.Metric(`sluice_legs_total{leg="decode",outcome="upstream_failed"}`); n == 0 {
		t.Error("the dead decode worker was never tried: the test shows nothing")
	}
}

// TestLogLinesHaveRequestID: every log line about a request contains its id.
func TestLogLinesHaveRequestID(t *testing.T) {
	p0, p1, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p0, worker.Prefill, "p0"), harness.SimWorker(p1, worker.Prefill, "p1"), harness.SimWorker(d, worker.Decode, "d0"))
	url := r.URL + "/v1/chat/completions"
	// Two, because the router retries after a reset of a reused connection on a new one.
	arm := func(k sim.FaultKind, leg string) {
		for _, e := range []*sim.Engine{p0, p1, d} {
			e.ClearFaults()
			e.Fault(sim.Fault{Kind: k, Leg: leg, N: 2, After: map[sim.FaultKind]int{sim.Truncate: 2}[k]})
		}
	}
	arm(sim.Reset, "prefill")
	harness.Post(t, url, harness.Chat(""), "X-Request-Id", "log-reset")
	arm(sim.BadHandle, "prefill")
	harness.Post(t, url, harness.Chat(""), "X-Request-Id", "log-handle")
	arm(sim.Status, "prefill")
	harness.Post(t, url, harness.Chat(""), "X-Request-Id", "log-status")
	arm(sim.Truncate, "decode")
	harness.Post(t, url, harness.Chat(`,"stream":true`), "X-Request-Id", "log-cut")
	r.Outcome(t, "log-cut")

	for _, k := range []struct{ msg, id string }{
		{`msg="leg failed"`, "log-reset"}, {`msg="plan changed"`, "log-handle"}, {`msg="leg refused"`, "log-status"}, {`msg="stream ended early"`, "log-cut"},
	} {
		found := false
		for line := range strings.Lines(r.Logs.String()) {
			found = found || strings.Contains(line, k.msg) && strings.Contains(line, "request="+k.id)
		}
		if !found {
			t.Errorf("no line with %s and request=%s", k.msg, k.id)
		}
	}
	for line := range strings.Lines(r.Logs.String()) {
		// All other lines are about the router and its workers.
		of := strings.Contains(line, "leg ") || strings.Contains(line, "stream") || strings.Contains(line, "plan") || strings.Contains(line, "log-")
		if of && !strings.Contains(line, "request=log-") && !strings.Contains(line, `msg="worker`) {
			t.Errorf("a line without the id: %s", line)
		}
	}
}
