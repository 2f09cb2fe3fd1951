package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/front"
	"sluice/router/admission"
	"sluice/router/apikey"
	"sluice/router/obs"
	"sluice/router/requestlog"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/worker"
)

// status fetches a status document.
func (f *fixture) status(t *testing.T, query string) (st Status) {
	t.Helper()
	code, _, body := f.call(t, "GET", "/admin/v1/status?"+query, bearer(testToken))
	if code != 200 {
		t.Fatalf("%s: %d %s", query, code, body)
	}
	if err := json.Unmarshal([]byte(body), &st); err != nil {
		t.Fatal(err)
	}
	return st
}

// TestStatusIsOneSnapshot: the legs in flight are those of the ranks in the same document, whatever
// parts it has, although the ranks change all the time.
func TestStatusIsOneSnapshot(t *testing.T) {
	f := start(t, nil)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for _, w := range f.fleet.workers {
				for _, r := range w.Ranks {
					r.Requests.Add(1)
				}
			}
		}
	}()
	defer func() { stop(); <-done }()
	for range 20 {
		st := f.status(t, "parts=workers")
		var want InFlight
		for _, w := range st.Workers {
			for _, r := range w.Ranks {
				switch w.Role {
				case "prefill":
					want.Prefill += r.Requests
				case "decode":
					want.Decode += r.Requests
				}
			}
		}
		if st.InFlight != want || want.Prefill == 0 {
			t.Fatalf("in flight %+v, but the ranks have %+v", st.InFlight, want)
		}
		if len(st.Workers) != 5 || st.Fleet != (Fleet{5, 4}) {
			t.Fatalf("%d workers, fleet %+v; want 5, of which 4 ready", len(st.Workers), st.Fleet)
		}
	}
	if st := f.status(t, ""); st.Workers != nil || st.Requests != nil || st.Models != nil || st.InFlight.Decode == 0 || st.Fleet.Ready != 4 {
		t.Errorf("without parts: %+v", st)
	}
}

func TestStatusRejectsBadParameters(t *testing.T) {
	f := start(t, nil)
	for query, want := range map[string]string{
		"parts=workers,wrokers": `"wrokers"`, "since=yesterday": `since="yesterday"`, "compared_since=-x": `compared_since="-x"`,
		"parts=requests&outcome=good": `outcome="good"`, "parts=requests&slow_ms=fast": `slow_ms="fast"`, "parts=requests&slow_ms=-1": `slow_ms="-1"`,
		"parts=requests&slow_ms=NaN": `slow_ms="NaN"`, "parts=requests&limit=501": `limit="501"`,
	} {
		if code, _, body := f.call(t, "GET", "/admin/v1/status?"+query, bearer(testToken)); code != 400 || !strings.Contains(strings.ReplaceAll(body, `\"`, `"`), want) {
			t.Errorf("%s: %d %s; want 400 and %s", query, code, body, want)
		}
	}
}

// TestRequestFilters: each filter selects exactly the requests that it names.
func TestRequestFilters(t *testing.T) {
	f := start(t, nil)
	l := requestlog.New(f.timelines)
	for _, c := range []struct {
		id, model, key string
		out            requestlog.Outcome
		ranks          [2]string
		change         func(*requestlog.Entry)
	}{
		{"good", "m", "a", requestlog.Outcome{Status: 200, FirstToken: 20 * time.Millisecond, Total: time.Second}, [2]string{"p1", "d1"}, nil},
		{"slow", "m", "b", requestlog.Outcome{Status: 200, FirstToken: 700 * time.Millisecond, Total: time.Second}, [2]string{"p2", "d1"}, func(e *requestlog.Entry) { e.SetClass("interactive", "t1") }},
		{"bad", "n", "b", requestlog.Outcome{Status: 502, Reason: "engine_down", Total: 600 * time.Millisecond}, [2]string{"p1", "d2"}, func(e *requestlog.Entry) { e.AddRetry(); e.SetClass("batch", "t1") }},
		{"gone", "n", "", requestlog.Outcome{Status: 499, Reason: "client_gone"}, [2]string{"p1", "d1"}, nil},
		{"refused", "x", "a", requestlog.Outcome{Status: 404, Reason: "unknown_model"}, [2]string{}, nil},
		{"moved", "m", "a", requestlog.Outcome{Status: 200}, [2]string{"p1", "d1"}, (*requestlog.Entry).AddMigration},
	} {
		e := l.Begin(requestlog.Request{ID: c.id, Model: c.model, Key: c.key, Received: time.Now()})
		for i, kind := range []string{"prefill", "decode"} {
			if c.ranks[i] != "" {
				e.EndLeg(e.StartLeg(kind, c.ranks[i], i, 0, time.Now()), "ok", time.Millisecond)
			}
		}
		if c.change != nil {
			c.change(e)
		}
		e.Finish(c.out, 0)
	}
	f.scheduler.Choose(&schedule.Query{Leg: schedule.PrefillLeg, Candidates: f.fleet.workers[1].Ranks, PromptTokens: 500, RequestID: "running", Attempt: 1})
	for query, want := range map[string]string{
		"": "running moved refused gone bad slow good", "model=m": "running moved slow good", "model=n": "gone bad", "model=none": "",
		"worker=p1": "moved gone bad good", "worker=d1/1": "moved gone slow good", "worker=d1/0": "", "worker=p2": "running slow",
		"key=a": "moved refused good", "class=batch": "bad", "tenant=t1": "bad slow", "class=batch&tenant=t2": "", "outcome=ok": "moved slow good", "outcome=failed": "bad", "outcome=rejected": "refused",
		"outcome=client_gone": "gone", "outcome=migrated": "moved", "outcome=retried": "bad", "outcome=in_flight": "running",
		"slow_ms=500": "bad slow", "slow_ms=650": "slow", "model=m&key=a&worker=d1": "moved good", "limit=2": "running moved",
	} {
		r := f.status(t, "parts=requests&"+query).Requests
		var got []string
		for _, q := range r.Requests {
			got = append(got, q.ID)
		}
		matched := len(got)
		if query == "limit=2" {
			matched = 7
		}
		if strings.Join(got, " ") != want || r.Searched != 7 || r.Matched != matched {
			t.Errorf("%q: %v, %d of %d; want %s", query, got, r.Matched, r.Searched, want)
		}
	}
}

// TestTimeline: the spans of a request have the times that the request log recorded, in the order of
// their starts, and the document about the request has them and its explain record.
func TestTimeline(t *testing.T) {
	f := start(t, nil)
	f.serveOne("x")
	received := time.Now()
	at := func(ms int) time.Time { return received.Add(time.Duration(ms) * time.Millisecond) }
	e := requestlog.New(f.timelines).Begin(requestlog.Request{ID: "y", Model: "m", Stream: true, Received: received, Bytes: 1234})
	p := e.StartLeg("prefill", "p1", 1, 32, at(10))
	e.EndLeg(p, "ok", 40*time.Millisecond)
	d := e.StartLeg("decode", "d1", 0, 16, at(55))
	e.EndLeg(d, "ok", 200*time.Millisecond)
	e.SetPlan("disaggregated", "nixl")
	e.Tokenize = requestlog.Span{Began: at(1), Took: 2 * time.Millisecond}
	e.Queue = requestlog.Span{Began: at(4), Took: 3 * time.Millisecond}
	e.SetClass("batch", "team-a")
	e.SetPosition(7)
	e.Choices = append(e.Choices, requestlog.Choice{Span: requestlog.Span{Began: at(8), Took: time.Millisecond}, Leg: "prefill", Worker: "p1", Rank: 1})
	e.Finish(requestlog.Outcome{Status: 200, CachedTokens: 30, OutputTokens: 7, FirstToken: 90 * time.Millisecond, Total: 255 * time.Millisecond,
		Transfer: requestlog.Transfer{State: "done", Bytes: 4096, Span: requestlog.Span{Took: 20 * time.Millisecond}}}, 500)

	st := f.status(t, "request=y")
	got := st.Request.Timeline
	if got == nil || st.Request.NoExplain == "" || st.Request.Explain != nil && string(st.Request.Explain) != "null" {
		t.Fatalf("got %+v", st.Request)
	}
	want := []TimelineSpan{
		{Name: "tokenize", StartMS: 1, TookMS: 2}, {Name: "queue", StartMS: 4, TookMS: 3, Class: "batch", Tenant: "team-a", Position: 7},
		{Name: "choose", Leg: "prefill", Rank: "p1/1", StartMS: 8, TookMS: 1},
		{Name: "prefill leg", Rank: "p1/1", StartMS: 10, TookMS: 40, Outcome: "ok"},
		{Name: "KV transfer", StartMS: 50, TookMS: 20, Outcome: "done", Bytes: 4096},
		{Name: "decode leg", Rank: "d1/0", StartMS: 55, TookMS: 200, Outcome: "ok"},
		{Name: "stream", StartMS: 90, TookMS: 165},
	}
	if !slices.Equal(got.Spans, want) {
		t.Errorf("spans\n%+v\nwant\n%+v", got.Spans, want)
	}
	if got.Prefill != "p1/1" || got.Decode != "d1/0" || got.Predicted != 32 || got.Reported != 30 || got.OutputTokens != 7 || got.TTFTMS != 90 || got.TotalMS != 255 ||
		got.RequestBytes != 1234 || got.Plan != "disaggregated" || got.Family != "nixl" || got.Outcome != "ok" || got.Class != "batch" || got.Tenant != "team-a" {
		t.Errorf("timeline %+v", got)
	}
	if p := f.status(t, "request=x").Request; p.Timeline == nil || !strings.Contains(string(p.Explain), `"request_id":"x"`) || p.NoExplain != "" {
		t.Errorf("request x: %+v", p)
	}
	if p := f.status(t, "request=none").Request; p.Timeline != nil || !strings.Contains(p.NoTimeline, `"none"`) || !strings.Contains(p.NoExplain, `"none"`) {
		t.Errorf("an unknown request: %+v", p)
	}
	for path, want := range map[string]int{"/admin/v1/timeline/y": 200, "/admin/v1/timeline?id=y": 200, "/admin/v1/timeline": 400, "/admin/v1/timeline/none": 404} {
		if code, _, body := f.call(t, "GET", path, bearer(testToken)); code != want || want == 200 && !strings.Contains(body, `"name":"stream"`) {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
}

// TestModelStatus: rates and quantiles are those of the last seconds, counts those since the start.
func TestModelStatus(t *testing.T) {
	m := obs.NewMetrics()
	old := schedule.Outcome{Status: 200, PromptTokens: 100, CachedTokens: 10, OutputTokens: 5, Total: time.Second}
	for range 50 {
		m.Model("m").Ended(old, 0, [16]byte{})
		m.Model("m").FirstToken(9*time.Second, [16]byte{})
	}
	s := newModelSampler(m)
	now := s.samples[0].at
	m.Model("m").FirstToken(40*time.Millisecond, [16]byte{})
	m.Model("m").Ended(schedule.Outcome{Status: 200, PromptTokens: 100, CachedTokens: 80, OutputTokens: 20, Total: 200 * time.Millisecond}, 0, [16]byte{})
	m.Model("m").Ended(schedule.Outcome{Status: 502, Reason: "engine_down"}, 0, [16]byte{})
	s.sample(now.Add(2 * time.Second))
	got := s.status(newFakeFleet().View())
	if len(got) != 1 {
		t.Fatalf("models %+v, want one", got)
	}
	g := got[0]
	if g.Model != "m" || g.RequestRate != 1 || g.ErrorRate != .5 || g.TokenRate != 10 || g.HitRate == nil || *g.HitRate != .8 ||
		g.Outcomes["ok"] != 51 || g.Outcomes["failed"] != 1 || g.Output != 270 || g.Members != (RoleCounts{2, 3, 0}) || g.Workers != (RoleCounts{2, 2, 0}) {
		t.Errorf("got %+v", g)
	}
	if g.TTFT.P50 == nil || *g.TTFT.P50 < 25 || *g.TTFT.P99 > 50 {
		t.Errorf("quantiles of the time to the first token %v, want within the bucket of 25 to 50 ms", g.TTFT)
	}
	for i := range 2 * modelWindow {
		s.sample(now.Add(time.Duration(3+i) * time.Second))
	}
	if g := s.status(newFakeFleet().View())[0]; g.RequestRate != 0 || g.TTFT.P50 != nil || g.Outcomes["ok"] != 51 || len(s.samples) != modelWindow {
		t.Errorf("after a pause: %+v, %d samples", g, len(s.samples))
	}
}

// TestWorkerDetail: the page of a worker has blocks by tier and legs by outcome of its own ranks.
func TestWorkerDetail(t *testing.T) {
	f := start(t, func(o *Options) {
		o.BlocksByTier = func(r *worker.Rank) map[string]int { return map[string]int{"device": 10 + int(r.ID.Rank), "host": 3} }
		o.Transfers = func() any { return map[string]any{"active": "zmq"} }
	})
	for _, w := range f.fleet.workers {
		for _, r := range w.Ranks {
			f.metrics.RankAdded(r)
		}
	}
	id := worker.ID{Worker: "p1", Rank: 1}
	for range 3 {
		f.metrics.LegStarted(schedule.PrefillLeg, id)
		f.metrics.LegEnded(schedule.PrefillLeg, id, "ok", 100*time.Millisecond)
	}
	f.metrics.LegStarted(schedule.PrefillLeg, id)
	f.metrics.LegEnded(schedule.PrefillLeg, id, "5xx", time.Second)
	w := f.status(t, "detail=p1").Worker
	if w == nil || w.ID != "p1" || len(w.Ranks) != 2 {
		t.Fatalf("got %+v", w)
	}
	legs := []obs.LegCount{{Leg: "prefill", Outcome: "5xx", Count: 1}, {Leg: "prefill", Outcome: "ok", Count: 3, Seconds: 0.3}}
	if r := w.Ranks[1]; r.ID != "p1/1" || fmt.Sprint(r.ByTier) != "map[device:11 host:3]" || !slices.Equal(r.Legs, legs) || r.URL != "http://10.0.0.1:8000" {
		t.Errorf("rank %+v", r)
	}
	if len(w.Ranks[0].Legs) != 0 || fmt.Sprint(w.Transfers) != "map[active:zmq]" {
		t.Errorf("worker %+v", w)
	}
	if st := f.status(t, "detail=nobody"); st.Worker != nil {
		t.Errorf("an unknown worker: %+v", st.Worker)
	}
	if w := f.status(t, "detail=p2").Worker; strings.Contains(w.Ranks[0].URL+w.URL, "hunter2") {
		t.Errorf("a password is shown: %+v", w)
	}
}

// TestKeyStatus: the usage and the limits of keys, and never their hashes.
func TestKeyStatus(t *testing.T) {
	ring, err := apikey.NewKeyring([]apikey.Spec{
		{Name: "team-a", Hash: apikey.HashOf("secret-a"), RequestsPerMinute: 2, Models: []string{"m"}},
		{Name: "team-b", Hash: apikey.HashOf("secret-b")},
	})
	if err != nil {
		t.Fatal(err)
	}
	f := start(t, func(o *Options) { o.Keyring = ring })
	for range 3 {
		ring.Authenticate([]byte("secret-a"), true)
	}
	st := f.status(t, "parts=keys")
	if len(st.Keys) != 2 || !st.Can.Keys {
		t.Fatalf("keys %+v", st.Keys)
	}
	a, b := st.Keys[0], st.Keys[1]
	if a.Name != "team-a" || a.Admitted != 2 || a.Limited != 1 || !slices.Equal(a.Models, []string{"m"}) || len(a.Limits) != 1 {
		t.Fatalf("key %+v", a)
	}
	if l := a.Limits[0]; l.What != "requests" || l.PerMinute != 2 || l.Remaining != 0 || l.ResetS <= 0 || l.ResetS > 60 {
		t.Errorf("limit %+v", l)
	}
	if b.Name != "team-b" || b.Admitted != 0 || b.Limits != nil {
		t.Errorf("key %+v", b)
	}
	if _, _, body := f.call(t, "GET", "/admin/v1/status?parts=keys", bearer(testToken)); strings.Contains(body, apikey.HashOf("secret-a").String()) {
		t.Error("a key's hash is shown")
	}
}

// TestQueues: what the admission queue reports is passed on unchanged, and so are the sessions.
func TestQueues(t *testing.T) {
	f := start(t, func(o *Options) {
		o.Queues = func() any { return map[string]any{"classes": []map[string]any{{"class": "batch", "requests": 3}}} }
		o.Sessions = func(limit int) session.Overview {
			return session.Overview{Sessions: 9, Finished: 1, Expired: 2, Evicted: 3, Models: []session.PoolView{{Model: "m", Waiting: 4}}, Newest: []session.View{{Key: "0a", Turns: limit}}}
		}
	})
	f.metrics.Enqueued("batch", "team-a")
	f.metrics.Dequeued("batch", "team-a", admission.Dispatched, time.Second, -1)
	f.metrics.AdmissionRefused("batch", "", front.TargetUnmet)
	_, _, body := f.call(t, "GET", "/admin/v1/status?parts=queues", bearer(testToken))
	for _, want := range []string{`"admission":{"classes":[{"class":"batch","requests":3}]}`, `"sessions":{"present":9,"finished":1,"expired":2,"evicted":3}`,
		`"session_limits":[{"model":"m","active":0,"waiting":4`, `"latest_sessions":[{"key":"0a","turns":50`, `"queues":true`,
		`"admission_outcomes":[{"class":"batch","outcome":"dispatched","requests":1},{"class":"batch","outcome":"refused, target_unmet","requests":1}]`,
		`"tenant_outcomes":[{"tenant":"none","outcome":"refused","requests":1},{"tenant":"team-a","outcome":"dispatched","requests":1}]`} {
		if !strings.Contains(body, want) {
			t.Errorf("%s is not in %s", want, body)
		}
	}
}

// TestConsoleRoutes: every file of the console is served without a token and with its type; what is
// not part of the page is not served.
func TestConsoleRoutes(t *testing.T) {
	f := start(t, nil)
	for path, contentType := range map[string]string{"/": "text/html", "/console.js": "text/javascript", "/uplot/uplot.js": "text/javascript", "/uplot/uplot.css": "text/css"} {
		if code, h, _ := f.call(t, "GET", path, nil); code != 200 || !strings.HasPrefix(h.Get("Content-Type"), contentType) {
			t.Errorf("%s: %d %v", path, code, h)
		}
	}
	if code, _, _ := f.call(t, "GET", "/uplot/LICENSE", nil); code != http.StatusUnauthorized {
		t.Errorf("the licence: %d", code)
	}
}
