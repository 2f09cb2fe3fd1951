// Package sessions tests the sessions of a whole router: how they are recognised, where they run, how
// they end, and how many are active while they take each other's KV.
package sessions

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/session"
	"sluice/router/worker"
)

// overview returns the router's sessions, once they are idle: a stream's end is counted after the
// client has its last byte.
func overview(t *testing.T, r *harness.Router) (o session.Overview) {
	t.Helper()
	testwait.Until(t, "no turn is in progress", func() bool {
		a := harness.Get(t, "http://"+r.Admin.Addr()+"/admin/v1/sessions", "Authorization", "Bearer "+r.Admin.Token())
		if err := json.Unmarshal(a.Body, &o); err != nil {
			t.Fatalf("%s: %v", a.Body, err)
		}
		for _, s := range o.Newest {
			if s.Running > 0 {
				return false
			}
		}
		return true
	})
	return o
}

func body(prompt string, stream bool) string {
	return fmt.Sprintf(`{"model":"sim","max_tokens":4,"stream":%v,"messages":[{"role":"user","content":%q}]}`, stream, prompt)
}

// Every header and member that names a session is recognised, streamed or not, and the metric names
// it. Nothing that a client sent is stored or shown.
func TestSessionsAreRecognised(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) { c.Sessions.UserMember = true }, harness.SimWorker(e, worker.Aggregated, "e"))
	url := r.URL + "/v1/chat/completions"
	n := 0
	for o := session.None + 1; o < session.NumOrigins; o++ {
		for _, stream := range []bool{false, true} {
			id := fmt.Sprintf("secret-of-%d", n/2)
			b, headers, path := body("Hello there", stream), []string{}, url
			switch {
			case o.IsHeader():
				headers = []string{o.String(), id}
			case o == session.PreviousResponse:
				path = r.URL + "/v1/responses"
				b = fmt.Sprintf(`{"model":"sim","input":"Hello","stream":%v,"previous_response_id":%q}`, stream, id)
			default:
				b = fmt.Sprintf(`{"%s":%q,%s`, o, id, b[1:])
			}
			if a := harness.Post(t, path, b, headers...); o != session.PreviousResponse {
				harness.WantStatus(t, a, 200)
			}
			n++
		}
		view := overview(t, r)
		if len(view.Newest) != n/2 || view.Newest[0].Turns != 2 {
			t.Fatalf("%s: after %d requests there are %d sessions, the newest is %+v", o, n, len(view.Newest), view.Newest[0])
		}
		if js, _ := json.Marshal(view); strings.Contains(string(js), "secret") {
			t.Errorf("the admin API shows an id: %s", js)
		}
		if page := string(harness.Get(t, r.URL+"/metrics").Body); !strings.Contains(page, fmt.Sprintf("sluice_session_requests_total{source=%q} 2", o.String())) {
			t.Errorf("%s: the metric does not count 2", o)
		}
	}
	if strings.Contains(r.Logs.String(), "secret-of") {
		t.Error("the log has an id")
	}
	harness.WantStatus(t, harness.Post(t, url, body("Hello", false)), 200)
	if got := overview(t, r); got.Sessions != n/2 {
		t.Error("a request without session made one")
	}
}

// A chain of responses is one session, though each turn names another response.
func TestChainOfResponsesIsOneSession(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "e"))
	previous, turns := "", 0
	for _, stream := range []bool{false, false, true, false} {
		b := fmt.Sprintf(`{"model":"sim","input":"Hello %d","stream":%v}`, turns, stream)
		if previous != "" {
			b = fmt.Sprintf(`{"previous_response_id":%q,%s`, previous, b[1:])
		}
		a := harness.Post(t, r.URL+"/v1/responses", b)
		if a.Status == 404 || a.Status == 400 {
			t.Skipf("the simulated engine stores no responses: %s", a.Body)
		}
		harness.WantStatus(t, a, 200)
		_, rest, _ := strings.Cut(string(a.Body), `"id":"resp`)
		id, _, ok := strings.Cut(rest, `"`)
		if !ok {
			t.Fatalf("no id in %s", a.Body)
		}
		previous = "resp" + id
		turns++
	}
	view := overview(t, r)
	if len(view.Newest) != 1 || view.Newest[0].Turns != 3 {
		t.Errorf("four responses: %+v", view.Newest)
	}
}

func finish(t *testing.T, r *harness.Router, path string, headers ...string) *harness.Answer {
	t.Helper()
	return harness.DoWithoutBody(t, "POST", r.URL+"/v1/sessions/"+path+"/finish", headers...)
}

// Another tenant cannot end a session, and cannot determine whether there is one.
func TestFinishWithinATenant(t *testing.T) {
	e := harness.StartSim(t, nil)
	a, b := apikey.New(), apikey.New()
	r := harness.StartRouter(t, harness.WithKeys(
		config.APIKey{Name: "team-a", SHA256: apikey.HashOf(a).String()}, config.APIKey{Name: "team-b", SHA256: apikey.HashOf(b).String()},
	), harness.SimWorker(e, worker.Aggregated, "e"))
	asA, asB := []string{"Authorization", "Bearer " + a}, []string{"Authorization", "Bearer " + b}
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body("Hello", true), append(asA, "Session-Id", "run/1")...), 200)
	if view := overview(t, r); len(view.Newest) != 1 || view.Newest[0].Tenant != "team-a" {
		t.Fatalf("%+v", view)
	}
	foreign, unknown := finish(t, r, "run%2F1", asB...), finish(t, r, "no-such-session", asB...)
	if foreign.Status != 200 || string(foreign.Body) != string(unknown.Body) || unknown.Status != 200 {
		t.Errorf("a foreign session: %d %s; an unknown one: %d %s", foreign.Status, foreign.Body, unknown.Status, unknown.Body)
	}
	for name := range foreign.Header {
		if name != "X-Request-Id" && name != "Date" && foreign.Header.Get(name) != unknown.Header.Get(name) {
			t.Errorf("%s is %q for a foreign session, %q for an unknown one", name, foreign.Header.Get(name), unknown.Header.Get(name))
		}
	}
	if overview(t, r).Sessions != 1 {
		t.Fatal("another tenant has ended the session")
	}
	own := finish(t, r, "run%2F1", asA...)
	if own.Status != 200 || string(own.Body) != string(unknown.Body) {
		t.Errorf("its own session: %d %s", own.Status, own.Body)
	}
	if view := overview(t, r); view.Sessions != 0 || view.Finished != 1 {
		t.Errorf("after its end: %+v", view)
	}
	if c := finish(t, r, "run%2F1"); c.Status != 401 {
		t.Errorf("without a key: %d", c.Status)
	}
	// The header on the last request.
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body("Hello", true), append(asA, "Session-Id", "run/2", "X-Sluice-Session-Final", "true")...), 200)
	if view := overview(t, r); view.Sessions != 0 || view.Finished != 2 {
		t.Errorf("after a last request: %+v", view)
	}
}

// A tenant that a trusted client names cannot end the session of another one, in any mode of admission.
func TestFinishWithinANamedTenant(t *testing.T) {
	for _, mode := range []string{"fair", "fifo", "off"} {
		e := harness.StartSim(t, nil)
		r := harness.StartRouter(t, func(c *config.Config) { c.Admission.Mode, c.Admission.Trusted = mode, []string{"any"} }, harness.SimWorker(e, worker.Aggregated, "e"))
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body("Hello", true), "Session-Id", "run", "X-Sluice-Tenant", "a"), 200)
		if view := overview(t, r); len(view.Newest) != 1 || view.Newest[0].Tenant != "a" {
			t.Errorf("mode %s: sessions %+v; want one of tenant a", mode, view.Newest)
		}
		for _, foreign := range [][]string{nil, {"X-Sluice-Tenant", "b"}, {"x-llm-d-inference-fairness-id", "b"}} {
			harness.WantStatus(t, finish(t, r, "run", foreign...), 200)
			if overview(t, r).Sessions != 1 {
				t.Fatalf("mode %s: a request with the headers %q has ended the session of tenant a", mode, foreign)
			}
		}
		harness.WantReason(t, finish(t, r, "run", "X-Sluice-Tenant", strings.Repeat("a", 200)), 400, "bad_header")
		harness.WantStatus(t, finish(t, r, "run", "x-llm-d-inference-fairness-id", "a"), 200)
		if view := overview(t, r); view.Sessions != 0 || view.Finished != 1 {
			t.Errorf("mode %s: after its tenant has ended it: %+v", mode, view)
		}
	}
}

// A tenant that continues the response of another one has a session of its own.
func TestChainOfResponsesWithinATenant(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) { c.Admission.Trusted = []string{"any"} }, harness.SimWorker(e, worker.Aggregated, "e"))
	previous := ""
	for i, tenant := range []string{"a", "a", "b"} {
		b := `{"model":"sim","input":"Hello"}`
		if previous != "" {
			b = fmt.Sprintf(`{"previous_response_id":%q,%s`, previous, b[1:])
		}
		a := harness.Post(t, r.URL+"/v1/responses", b, "X-Sluice-Tenant", tenant)
		harness.WantStatus(t, a, 200)
		var answer struct{ ID string }
		if err := json.Unmarshal(a.Body, &answer); err != nil || answer.ID == "" {
			t.Fatalf("no id in %s", a.Body)
		}
		previous = answer.ID
		if n := overview(t, r).Sessions; n != i { // the first response begins no session
			t.Errorf("after %d responses there are %d sessions; want %d", i+1, n, i)
		}
	}
}

func TestFinishRefusesWhatIsNoID(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "e"))
	for _, c := range []struct {
		path, says string
		status     int
	}{
		{strings.Repeat("a", session.MaxID), "", 200},
		{strings.Repeat("a", session.MaxID+1), "at most 256 bytes", 400},
		{strings.Repeat("%41", session.MaxID+1), "at most 256 bytes", 400},
		{"a%00b", "control character", 400},
		{"a%0d%0ab", "control character", 400},
		{"%C3%A9", "", 200},
		{"%ff%fe", "", 200},
		{"a/b", "unknown path", 404},
	} {
		a := finish(t, r, c.path)
		if a.Status != c.status {
			t.Errorf("%.20s: %d %s, want %d", c.path, a.Status, a.Body, c.status)
			continue
		}
		if c.status == 200 {
			continue
		}
		if message, _, param := a.ErrorOf(t); !strings.Contains(message, c.says) || c.status == 400 && (param != "session_id" || a.Header.Get("X-Sluice-Reason") != "bad_field") {
			t.Errorf("%.20s: %q, param %q, reason %q", c.path, message, param, a.Header.Get("X-Sluice-Reason"))
		}
	}
	if a := harness.DoWithoutBody(t, "GET", r.URL+"/v1/sessions/x/finish"); a.Status != 405 || a.Header.Get("Allow") != "POST" {
		t.Errorf("GET: %d, Allow %q", a.Status, a.Header.Get("Allow"))
	}
	for o := session.None + 1; o.IsHeader(); o++ {
		a := harness.Post(t, r.URL+"/v1/chat/completions", body("Hello", false), o.String(), strings.Repeat("x", session.MaxID+1))
		if message, _, _ := a.ErrorOf(t); a.Status != http.StatusBadRequest || a.Header.Get("X-Sluice-Reason") != "bad_header" || !strings.Contains(message, o.String()) {
			t.Errorf("a long %s: %d %s", o, a.Status, a.Body)
		}
	}
	if overview(t, r).Sessions != 0 {
		t.Error("a refused request made a session")
	}
}

// The approximate index forgets what only a finished session used, and the session's next life starts
// anywhere.
func TestFinishForgetsPredictions(t *testing.T) {
	var workers []config.Worker
	for _, id := range []string{"a", "b"} {
		w := harness.SimWorker(harness.StartSim(t, nil), worker.Aggregated, id)
		w.KVEvents = []string{"off"}
		workers = append(workers, w)
	}
	r := harness.StartRouter(t, nil, workers...)
	shared := strings.Repeat("All agents begin with these words. ", 120)
	long := func(id string) string {
		return body(shared+strings.Repeat("Only session "+id+" goes on. ", 200), false)
	}
	for _, id := range []string{"one", "two"} {
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", long(id), "X-Session-Affinity", id), 200)
	}
	before := r.Approx.Len()
	harness.WantStatus(t, finish(t, r, "one"), 200)
	after := r.Approx.Len()
	a := harness.Post(t, r.URL+"/v1/chat/completions", long("two"), "X-Session-Affinity", "two")
	cached := a.Header.Get("X-Sluice-Cached-Tokens")
	if before-after < before/10 || after < before/10 || cached == "0" {
		t.Errorf("of %d predicted blocks %d are left; %s tokens of the other session are predicted", before, after, cached)
	}
	harness.WantStatus(t, finish(t, r, "two"), 200)
	if left := r.Approx.Len(); left >= after {
		t.Errorf("%d predicted blocks are left after the last session", left)
	}
}
