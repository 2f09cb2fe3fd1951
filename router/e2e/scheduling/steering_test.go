package scheduling

import (
	"fmt"
	"strings"
	"testing"

	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

func TestSteeringHeaders(t *testing.T) {
	var workers []config.Worker
	for i, id := range []string{"a", "b", "c"} {
		w := harness.SimWorker(harness.StartSim(t, nil), worker.Aggregated, id)
		w.Labels = [][]string{{"h100", "eu"}, {"h100", "us"}, {"a10", "eu"}}[i]
		workers = append(workers, w)
	}
	r := harness.StartRouter(t, nil, workers...)
	url := r.URL + "/v1/chat/completions"
	n := 0
	worker := func(headers ...string) map[string]int {
		t.Helper()
		where := map[string]int{}
		for range 12 {
			n++
			a := harness.Post(t, url, harness.ChatOf(fmt.Sprint(n, " ", harness.Prompt)), headers...)
			harness.WantStatus(t, a, 200)
			where[a.Header.Get("X-Sluice-Worker")]++
		}
		return where
	}
	only := func(where map[string]int, ids ...string) {
		t.Helper()
		sum := 0
		for _, id := range ids {
			sum += where[id]
		}
		if sum != 12 {
			t.Errorf("went %v, want only %v", where, ids)
		}
	}
	only(worker("X-Sluice-Worker", "b"), "b")
	only(worker("X-Sluice-Worker", "c/0"), "c")
	only(worker("X-Sluice-Allowed-Workers", "a, c"), "a", "c")
	only(worker("X-Sluice-Require-Labels", "h100,eu"), "a")
	only(worker("X-Sluice-Require-Labels", "eu", "X-Sluice-Allowed-Workers", "b,c"), "c")
	// A list may be split over several header lines.
	only(worker("X-Sluice-Allowed-Workers", "a", "X-Sluice-Allowed-Workers", "c"), "a", "c")
	only(worker("X-Sluice-Require-Labels", "h100", "X-Sluice-Require-Labels", "us"), "b")
	for _, session := range []string{"one", "two", "three", "four"} {
		if where := worker("X-Sluice-Session", session); len(where) != 1 {
			t.Errorf("session %s went %v", session, where)
		}
		if where := worker("X-Session-ID", session); len(where) != 1 {
			t.Errorf("session %s went %v", session, where)
		}
	}
	for _, c := range []struct {
		headers []string
		want    []string
	}{
		{[]string{"X-Sluice-Worker", "d"}, []string{"X-Sluice-Worker", `"d"`, "a, b, c"}},
		{[]string{"X-Sluice-Worker", "a/7"}, []string{`"a/7"`, "a, b, c"}},
		{[]string{"X-Sluice-Worker", ","}, []string{"names no worker", "a, b, c"}},
		{[]string{"X-Sluice-Worker", "http://10.0.0.1:80"}, []string{`"http://10.0.0.1:80"`, "a, b, c"}},
		{[]string{"X-Sluice-Allowed-Workers", "a,x"}, []string{"X-Sluice-Allowed-Workers", `"x"`, "a, b, c"}},
		{[]string{"X-Sluice-Require-Labels", "b200"}, []string{"X-Sluice-Require-Labels", `"b200"`, "a10, eu, h100, us"}},
		{[]string{"X-Sluice-Require-Labels", "a10,us"}, []string{"X-Sluice-Require-Labels", "no ready aggregated worker", "a, b, c"}},
		{[]string{"X-Sluice-Require-Labels", ","}, []string{"X-Sluice-Require-Labels", "names no label", "a10, eu, h100, us"}},
		{[]string{"X-Sluice-Require-Labels", "a10", "X-Sluice-Require-Labels", "b200"}, []string{`"a10,b200"`, `"b200"`}},
		{[]string{"X-Sluice-Worker", "a", "X-Sluice-Allowed-Workers", "b"}, []string{"X-Sluice-Worker", `"a" cannot be used`}},
		{[]string{"X-Sluice-Session", strings.Repeat("s", 300)}, []string{"X-Sluice-Session", "300 bytes"}},
		{[]string{"X-Session-ID", strings.Repeat("s", 300)}, []string{"X-Session-Id", "300 bytes"}},
	} {
		a := harness.Post(t, url, harness.ChatOf("x"), c.headers...)
		harness.WantStatus(t, a, 400)
		msg, _, _ := a.ErrorOf(t)
		for _, w := range c.want {
			if !strings.Contains(msg, w) {
				t.Errorf("%v: %q does not say %q", c.headers, msg, w)
			}
		}
		if got := a.Header.Get("X-Sluice-Reason"); got != "bad_header" {
			t.Errorf("%v: reason %q", c.headers, got)
		}
	}
}

func TestPinsNeedPermission(t *testing.T) {
	e := harness.StartSim(t, nil)
	// By default a client on the same machine may not either: it may be a proxy for any client.
	for _, pins := range [][]string{{"10.0.0.0/8"}, config.Default().Steering.Pinning} {
		r := harness.StartRouter(t, func(c *config.Config) { c.Steering.Pinning = pins }, harness.SimWorker(e, worker.Aggregated, "a"))
		for _, h := range []string{"X-Sluice-Worker", "X-Sluice-Allowed-Workers"} {
			a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("x"), h, "a")
			harness.WantStatus(t, a, 400)
			if msg, _, _ := a.ErrorOf(t); !strings.Contains(msg, "steering.pinning") {
				t.Errorf("%s: %q", h, msg)
			}
		}
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("x"), "X-Sluice-Session", "s"), 200)
	}
}

// TestPinOfOneLeg: with two legs a pin applies to the leg that its worker can run.
func TestPinOfOneLeg(t *testing.T) {
	var workers []config.Worker
	for _, id := range []string{"p0", "p1", "d0", "d1"} {
		ro := worker.Prefill
		if id[0] == 'd' {
			ro = worker.Decode
		}
		workers = append(workers, harness.SimWorker(harness.StartSim(t, harness.SimRole(ro.String())), ro, id))
	}
	r := harness.StartRouter(t, nil, workers...)
	decodes := map[string]int{}
	for i := range 16 {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(fmt.Sprint(i, harness.Prompt)), "X-Sluice-Worker", "p1")
		harness.WantStatus(t, a, 200)
		if got := a.Header.Get("X-Sluice-Prefill-Worker"); got != "p1" {
			t.Fatalf("prefill on %q", got)
		}
		decodes[a.Header.Get("X-Sluice-Worker")]++
	}
	if len(decodes) != 2 {
		t.Errorf("decode went %v: the pin is of the other leg", decodes)
	}
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("both"), "X-Sluice-Worker", "p0,d1")
	harness.WantStatus(t, a, 200)
	if p, d := a.Header.Get("X-Sluice-Prefill-Worker"), a.Header.Get("X-Sluice-Worker"); p != "p0" || d != "d1" {
		t.Errorf("went to %s and %s", p, d)
	}
}
