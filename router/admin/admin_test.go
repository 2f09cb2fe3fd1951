package admin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/obs"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// TestRoutesNeedToken checks that every route except the console's files requires the token. The
// cases come from the route table, so a new route cannot be forgotten.
func TestRoutesNeedToken(t *testing.T) {
	f := start(t, func(o *Options) {
		o.Config = func() any { return map[string]any{} }
		o.Compared = &Compared{Name: "other", Metrics: obs.NewMetrics()}
	})
	f.serveOne("p1")
	open := map[string]bool{"/{$}": true, "/console.css": true, "/uplot/uplot.js": true, "/uplot/uplot.css": true}
	for _, module := range []string{"actions", "api", "chart", "console", "dom", "flow", "keys", "models", "overview", "queues", "request", "requests", "route", "table", "transfers", "workers"} {
		open["/"+module+".js"] = true
	}
	wrong := map[string]func(*http.Request){
		"no token":      nil,
		"wrong token":   bearer("wrong-wrong-wrong-wrong"),
		"empty token":   bearer(""),
		"prefix":        bearer(testToken[:len(testToken)-1]),
		"longer":        bearer(testToken + "x"),
		"basic":         func(r *http.Request) { r.SetBasicAuth("admin", testToken) },
		"in the query":  func(r *http.Request) { r.URL.RawQuery = "token=" + testToken },
		"in a cookie":   func(r *http.Request) { r.AddCookie(&http.Cookie{Name: "token", Value: testToken}) },
		"two, one good": func(r *http.Request) { r.Header["Authorization"] = []string{"Bearer no", "Bearer " + testToken} },
	}
	closed, tries := 0, 0
	for _, r := range Routes {
		if r.public != open[r.Path] {
			t.Errorf("%s %s: open is %v", r.Method, r.Path, r.public)
		}
		path := examplePath(r.Path)
		if r.Path == "/admin/v1/explain" || r.Path == "/admin/v1/timeline" {
			path += "?id=p1"
		}
		if r.public {
			if code, _, body := f.call(t, r.Method, path, nil); code != 200 || strings.Contains(body, "10.0.0.") || strings.Contains(body, testToken) {
				t.Errorf("%s: %d, or it carries data", path, code)
			}
			continue
		}
		for name, change := range wrong {
			if name == "in the query" && strings.Contains(path, "?") {
				continue
			}
			code, h, body := f.call(t, r.Method, path, change)
			tries++
			if code != http.StatusUnauthorized || h.Get("WWW-Authenticate") == "" || strings.Contains(body, "10.0.0.") {
				t.Errorf("%s %s with %s: %d %s", r.Method, path, name, code, body)
			}
		}
		closed++
		if code, _, body := f.call(t, r.Method, path, bearer(testToken)); code != 200 {
			t.Errorf("%s %s with the token: %d %s", r.Method, path, code, body)
		}
	}
	t.Logf("reliability 13: %d routes of %d ask for the token; %d tries without it, or with another, were refused", closed, len(Routes), tries)
	for _, path := range []string{"/admin", "/debug/vars", "/nothing", "/console/console.html"} {
		if code, _, _ := f.call(t, "GET", path, nil); code != http.StatusUnauthorized {
			t.Errorf("%s without a token: %d", path, code)
		}
		if code, _, body := f.call(t, "GET", path, bearer(testToken)); code != http.StatusNotFound || !strings.Contains(body, "/admin/v1/workers") {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, _, _ := f.call(t, "POST", "/admin/v1/workers", bearer(testToken)); code != http.StatusNotFound && code != http.StatusMethodNotAllowed {
		t.Errorf("a wrong method: %d", code)
	}
}

func TestForeignHostsAndOriginsAreRefused(t *testing.T) {
	f := start(t, nil)
	port := f.Addr()[strings.LastIndex(f.Addr(), ":"):]
	for _, c := range []struct {
		host, origin, site string
		want               int
	}{
		{"localhost" + port, "", "", 200},
		{"[::1]" + port, "", "", 200},
		{"127.0.0.1", "", "", 200},
		{"127.9.9.9:1", "", "none", 200}, // a tunnel changes the port
		{"evil.example" + port, "", "", 403},
		{"127.0.0.1.evil.example", "", "", 403},
		{"localhost.evil.example", "", "", 403},
		{"10.0.0.1" + port, "", "", 403},
		{"localhost" + port, "http://localhost" + port, "same-origin", 200},
		{"localhost" + port, "http://evil.example", "", 403},
		{"localhost" + port, "null", "", 403},
		{"localhost" + port, "http://localhost:1", "", 403},
		{"localhost" + port, "https://localhost" + port, "", 403},
		{"localhost" + port, "", "cross-site", 403},
		{"localhost" + port, "", "same-site", 403},
	} {
		code, _, body := f.call(t, "GET", "/admin/v1/workers", func(r *http.Request) {
			bearer(testToken)(r)
			r.Host = c.host
			if c.origin != "" {
				r.Header.Set("Origin", c.origin)
			}
			if c.site != "" {
				r.Header.Set("Sec-Fetch-Site", c.site)
			}
		})
		if code != c.want {
			t.Errorf("%+v: %d %s", c, code, body)
		}
	}
	// The console's page checks the Host header too: a page on a rebound name must not load the
	// script.
	if code, _, _ := f.call(t, "GET", "/", func(r *http.Request) { r.Host = "evil.example" }); code != 403 {
		t.Errorf("the page for a foreign host: %d", code)
	}
}

func TestPage(t *testing.T) {
	f := start(t, nil)
	code, h, body := f.call(t, "GET", "/", nil)
	if code != 200 || !strings.HasPrefix(h.Get("Content-Type"), "text/html") || !strings.Contains(body, "<title>") {
		t.Errorf("%d %v", code, h)
	}
	csp := h.Get("Content-Security-Policy")
	if !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
		t.Errorf("policy %q", csp)
	}
	for _, r := range Routes {
		if !r.public {
			continue
		}
		_, _, body := f.call(t, "GET", examplePath(r.Path), nil)
		for _, bad := range []string{"http://", "https://", "//cdn", "@import", "innerHTML", "eval("} {
			b := strings.ReplaceAll(body, "http://www.w3.org/", "")
			b = strings.ReplaceAll(b, "/*! https://github.com/leeoniya/uPlot", "") // names uPlot's source
			if strings.Contains(b, bad) {
				t.Errorf("%s has %q: nothing may come from elsewhere, nor text become markup", r.Path, bad)
			}
		}
	}
}

func TestWorkers(t *testing.T) {
	f := start(t, nil)
	d1 := f.fleet.workers[2].Ranks[0]
	d1.SetKVUsage(0.5)
	d1.CachedBlocks.Store(77)
	d1.Waiting.Store(2)
	ws, err := f.client.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(ws) != 5 || len(ws[0].Ranks) != 2 || ws[0].Ranks[1].ID != "p1/1" {
		t.Fatalf("got %+v", ws)
	}
	if r := ws[2].Ranks[0]; r.KVUsage != 0.5 || r.CachedBlocks != 77 || r.HeldBlocks != 77 || r.Waiting != 2 || r.Running != -1 || r.Feed != "live" || r.TotalBlocks != 2000 {
		t.Errorf("rank %+v", r)
	}
	if ws[4].State != "unhealthy" || !strings.Contains(ws[4].Reason, "connection refused") {
		t.Errorf("worker %+v", ws[4])
	}
	if strings.Contains(ws[1].URL, "hunter2") || !strings.Contains(ws[1].URL, "@10.0.0.2:8000") {
		t.Errorf("a password is shown: %s", ws[1].URL)
	}
}

func TestDrain(t *testing.T) {
	f := start(t, nil)
	w, err := f.client.Drain(t.Context(), "p1", true)
	if err != nil || w.State != "draining" || !f.fleet.drained["p1"] {
		t.Errorf("%+v, %v", w, err)
	}
	if _, err := f.client.Drain(t.Context(), "p1", false); err != nil || f.fleet.drained["p1"] {
		t.Errorf("taken back: %v, %v", f.fleet.drained, err)
	}
	var e *Error
	if _, err := f.client.Drain(t.Context(), "a/b", true); !errors.As(err, &e) || e.Status != 404 || !strings.Contains(e.Message, `"a/b"`) {
		t.Errorf("unknown worker: %v", err)
	}
	if _, err := f.client.Drain(t.Context(), "stuck", true); !errors.As(err, &e) || e.Status != 409 {
		t.Errorf("stuck: %v", err)
	}
	if code, _, body := f.call(t, "POST", "/admin/v1/workers/p1/drain?on=maybe", bearer(testToken)); code != 400 || !strings.Contains(body, "true or false") {
		t.Errorf("%d %s", code, body)
	}
}

func TestExplainAndRequests(t *testing.T) {
	f := start(t, nil)
	f.serveOne("plain")
	f.serveOne("with/slash?and#more")
	for _, id := range []string{"plain", "with/slash?and#more"} {
		rec, _, err := f.client.Explain(t.Context(), id)
		if err != nil || rec.RequestID != id || len(rec.Decisions) != 2 || rec.Outcome.Status != 200 || len(rec.Notes) != 1 {
			t.Errorf("%s: %+v, %v", id, rec, err)
		}
	}
	if code, _, _ := f.call(t, "GET", "/admin/v1/explain/plain", bearer(testToken)); code != 200 {
		t.Errorf("by path: %d", code)
	}
	var e *Error
	if _, _, err := f.client.Explain(t.Context(), "other"); !errors.As(err, &e) || e.Status != 404 || !strings.Contains(e.Message, "not among the last 10000") {
		t.Errorf("unknown: %v", err)
	}
	if code, _, _ := f.call(t, "GET", "/admin/v1/explain", bearer(testToken)); code != 400 {
		t.Errorf("without an id: %d", code)
	}
	reqs, err := f.client.Requests(t.Context(), 10)
	if err != nil || len(reqs) != 2 {
		t.Fatalf("%v, %v", reqs, err)
	}
	if q := reqs[1]; q.ID != "plain" || !strings.HasPrefix(q.Prefill, "p") || !strings.HasPrefix(q.Decode, "d") || !q.Done || q.TTFTMS != 30 || q.Reported != 48 || q.Notes != 1 {
		t.Errorf("request %+v", q)
	}
	for _, bad := range []string{"0", "-1", "501", "many"} {
		if code, _, body := f.call(t, "GET", "/admin/v1/requests?limit="+bad, bearer(testToken)); code != 400 || !strings.Contains(body, "from 1 to 500") {
			t.Errorf("limit %s: %d %s", bad, code, body)
		}
	}
}

func TestStats(t *testing.T) {
	compared := obs.NewMetrics()
	f := start(t, func(o *Options) { o.Compared = &Compared{Name: "round robin", Metrics: compared} })
	for i := range 50 {
		f.serveOne(fmt.Sprint(i))
	}
	compared.FirstToken("/v1/completions", 200*time.Millisecond)
	var st *Stats
	testwait.Until(t, "a sample with the requests", func() bool {
		var err error
		if st, err = f.client.Stats(t.Context(), time.Time{}); err != nil {
			t.Fatal(err)
		}
		return st.Now.TTFTP50 != nil
	})
	if st.Now.RequestRate <= 0 || *st.Now.TTFTP50 < 26 || *st.Now.TTFTP50 > 34 || *st.Now.Predicted != 0.128 || *st.Now.Actual != 0.096 {
		t.Errorf("now %+v, p50 %v", st.Now, *st.Now.TTFTP50)
	}
	if st.Name != "kv" || st.Total.Responses != 50 || *st.HitRate != 0.096 || len(st.History) < 2 || st.Version != "test" {
		t.Errorf("stats %+v", st)
	}
	later, err := f.client.Stats(t.Context(), time.UnixMilli(st.Now.At))
	if err != nil || len(later.History) > 0 && later.History[0].At <= st.Now.At {
		t.Errorf("since: %+v, %v", later, err)
	}
	var other Stats
	testwait.Until(t, "the compared router's sample", func() bool {
		other = Stats{}
		if err := f.client.get(t.Context(), "/admin/v1/compare", &other); err != nil {
			t.Fatal(err)
		}
		return other.TTFT.P50 != nil
	})
	if other.Name != "round robin" || *other.TTFT.P50 < 175 || *other.TTFT.P50 > 225 {
		t.Errorf("compared %+v", other)
	}
	if code, _, _ := f.call(t, "GET", "/admin/v1/stats?since=yesterday", bearer(testToken)); code != 400 {
		t.Errorf("a bad since: %d", code)
	}
}

func TestNoComparedRouter(t *testing.T) {
	f := start(t, nil)
	if code, _, _ := f.call(t, "GET", "/admin/v1/compare", bearer(testToken)); code != 404 {
		t.Errorf("%d", code)
	}
}

func TestSamplerDropsOldSamples(t *testing.T) {
	m := obs.NewMetrics()
	s := newSampler(m)
	at := time.Now()
	m.FirstToken("/v1/completions", time.Second)
	for range maxSamples + 100 {
		at = at.Add(sampleInterval)
		s.sample(at)
	}
	h, now, _ := s.since(0)
	if len(h) != maxSamples || now.TTFTP50 != nil || h[len(h)-1].At != now.At || now.At != at.UnixMilli() {
		t.Errorf("%d samples, newest %+v", len(h), now)
	}
	for i := 1; i < len(h); i++ {
		if h[i].At <= h[i-1].At {
			t.Fatal("samples are out of order")
		}
	}
}

func TestConfigIsMasked(t *testing.T) {
	type admin struct {
		Listen string `yaml:"listen"`
		Token  string `yaml:"token"`
	}
	f := start(t, func(o *Options) {
		o.Config = func() any {
			return struct {
				Admin   admin             `yaml:"admin"`
				Wait    time.Duration     `yaml:"pool_wait"`
				Tokens  map[string]string `yaml:"tokens"`
				Workers []map[string]any  `yaml:"workers"`
			}{admin{"127.0.0.1:1", "s3cret-s3cret-s3cret"}, 5 * time.Second, map[string]string{"mode": "auto"},
				[]map[string]any{{"url": "http://u:s3cret@h:1/x", "api_key": "s3cret", "id": "w", "require_api_keys": "all",
					"kv_events": []string{"http://s3cret@h:2", "https://u:s3@cret@h/y?key=s3cret", "https://h:3?s3cret@x", "tcp://h:4"},
					"api_keys":  []map[string]any{{"name": "team-a", "sha256": "s3cret"}},
					"options":   map[string][]string{"password": {"s3cret", "s3cret2"}}}}}
		}
	})
	code, _, body := f.call(t, "GET", "/admin/v1/config", bearer(testToken))
	if code != 200 || strings.Contains(body, "s3cret") {
		t.Fatalf("%d %s", code, body)
	}
	for _, want := range []string{`"token":"[masked]"`, `"api_key":"[masked]"`, `"mode":"auto"`, `"http://u:[masked]@h:1/x"`, `"pool_wait":"5s"`,
		`"name":"team-a"`, `"sha256":"[masked]"`, `"require_api_keys":"all"`, `"http://[masked]@h:2"`, `"https://u:[masked]@h/y?[masked]"`, `"https://h:3?[masked]"`, `"tcp://h:4"`} {
		if !strings.Contains(body, want) {
			t.Errorf("no %s in %s", want, body)
		}
	}
}

func TestMetricsRoute(t *testing.T) {
	f := start(t, nil)
	f.metrics.Accepted()
	if code, h, body := f.call(t, "GET", "/metrics", bearer(testToken)); code != 200 || !strings.Contains(body, "sluice_requests_accepted_total 1") || !strings.HasPrefix(h.Get("Content-Type"), "text/plain") {
		t.Errorf("%d %v", code, h)
	}
	openMetrics := func(r *http.Request) {
		bearer(testToken)(r)
		r.Header.Set("Accept", "application/openmetrics-text")
	}
	if code, h, body := f.call(t, "GET", "/metrics", openMetrics); code != 200 || !strings.HasSuffix(body, "# EOF\n") || !strings.HasPrefix(h.Get("Content-Type"), "application/openmetrics-text") {
		t.Errorf("as OpenMetrics: %d %v", code, h)
	}
}

// listen opens the event stream and returns its events until ctx ends.
func (f *fixture) listen(t *testing.T, ctx context.Context) <-chan Event {
	t.Helper()
	req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+f.Addr()+"/admin/v1/events", nil)
	bearer(testToken)(req)
	resp, err := (&http.Client{Transport: f.http.Transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 200 {
		resp.Body.Close()
		t.Fatalf("the event stream answers %d", resp.StatusCode)
	}
	ch := make(chan Event, 100)
	go func() {
		defer close(ch)
		defer resp.Body.Close()
		sc := bufio.NewScanner(resp.Body)
		for sc.Scan() {
			if data, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
				var e Event
				if json.Unmarshal([]byte(data), &e) == nil && e.Type != "" {
					select {
					case ch <- e:
					case <-ctx.Done():
						return
					}
				}
			}
		}
	}()
	return ch
}

func TestEvents(t *testing.T) {
	f := start(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	ch := f.listen(t, ctx)
	f.serveOne("r1")
	f.WorkerChanged(f.fleet.workers[2], worker.Ready, worker.Unhealthy, "two probes failed")
	var got []string
	for e := range ch {
		got = append(got, strings.TrimSpace(e.Type+" "+e.ID+e.Worker+" "+e.Leg+e.To))
		if e.Type == "chosen" && (e.Rank == "" || e.Prompt != 500) || e.Type == "ended" && (e.Status != 200 || e.TTFTMS != 30) {
			t.Errorf("event %+v", e)
		}
		if e.Type == "state" {
			break
		}
	}
	cancel()
	for range ch {
	}
	if want := "[chosen r1 prefill chosen r1 decode ended r1 state d1 unhealthy]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
	testwait.Until(t, "the subscriber to be gone", func() bool {
		f.hub.mu.Lock()
		defer f.hub.mu.Unlock()
		return len(f.hub.subs) == 0
	})
}

// TestHitEvents checks that a hit event has both the predicted and the reported blocks.
func TestHitEvents(t *testing.T) {
	f := start(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ch := f.listen(t, ctx)
	rank := f.fleet.workers[0].Ranks[0]
	rank.EventBlockSize.Store(16)
	c, _ := f.scheduler.Choose(&schedule.Query{Leg: schedule.PrefillLeg, Candidates: []*worker.Rank{rank}, PromptTokens: 500, RequestID: "h1", Attempt: 1})
	c.Reservation.Report("h1", 320, 1)
	c.Reservation.Release()
	for _, want := range []string{"chosen", "hit"} {
		e, ok := <-ch
		if !ok || e.Type != want || e.ID != "h1" || e.Blocks == nil || *e.Blocks != 31 || e.Overlap == nil || *e.Overlap != 0 {
			t.Fatalf("want %s, got %+v", want, e)
		}
		if want == "hit" && (e.Reported == nil || *e.Reported != 20 || e.Worker != rank.ID.Worker || e.DPRank == nil || *e.DPRank != 0) {
			t.Errorf("hit %+v", e)
		}
	}
}

// TestEventStreamOutlivesTheReadDeadline checks that the deadline for reading a request does not
// end its event stream.
func TestEventStreamOutlivesTheReadDeadline(t *testing.T) {
	was := headTimeout
	headTimeout = 200 * time.Millisecond
	defer func() { headTimeout = was }()
	f := start(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ch := f.listen(t, ctx)
	began := time.Now()
	testwait.Until(t, "the deadline to pass", func() bool { return time.Since(began) > 3*headTimeout })
	f.WorkerChanged(f.fleet.workers[0], worker.Ready, worker.Draining, "x")
	if e, ok := <-ch; !ok || e.Type != "state" {
		t.Errorf("the stream has ended: %+v", e)
	}
	cancel()
	for range ch {
	}
}

func TestEventSubscribersAreBounded(t *testing.T) {
	f := start(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var chs []<-chan Event
	for range maxSubscribers {
		chs = append(chs, f.listen(t, ctx))
	}
	if code, _, _ := f.call(t, "GET", "/admin/v1/events", bearer(testToken)); code != 503 {
		t.Errorf("one more listener: %d", code)
	}
	cancel()
	for _, ch := range chs {
		for range ch {
		}
	}
}

// TestSlowSubscriberIsDropped checks that neither the hub nor the requests wait for a subscriber
// that does not read.
func TestSlowSubscriberIsDropped(t *testing.T) {
	f := start(t, nil)
	sub, ok := f.hub.subscribe()
	if !ok {
		t.Fatal("not subscribed")
	}
	testwait.Until(t, "the subscriber to be dropped", func() bool {
		f.WorkerChanged(f.fleet.workers[0], worker.Ready, worker.Draining, "x")
		f.hub.mu.Lock()
		defer f.hub.mu.Unlock()
		return len(f.hub.subs) == 0
	})
	got := 0
	for range sub.lines {
		got++
	}
	if got > subscriberSize {
		t.Errorf("%d lines were queued", got)
	}
}

func TestCloseEndsSubscribers(t *testing.T) {
	f := start(t, nil)
	ch := f.listen(t, t.Context())
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	began := time.Now()
	if err := f.Close(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
	for range ch {
	}
	if took := time.Since(began); took > 8*time.Second {
		t.Errorf("close took %v", took)
	}
}

func TestOptionsThatAreRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Options)
		want   string
	}{
		{"not loopback", func(o *Options) { o.Listen = "0.0.0.0:0" }, "loopback"},
		{"no host", func(o *Options) { o.Listen = ":0" }, "loopback"},
		{"no port", func(o *Options) { o.Listen = "127.0.0.1" }, "HOST:PORT"},
		{"short token", func(o *Options) { o.Token = "short" }, "at least 16"},
		{"token with a line end", func(o *Options) { o.Token = "0123456789abcdef\n" }, "visible ASCII"},
		{"nothing to show", func(o *Options) { o.Workers = nil }, "Workers"},
		{"no place", func(o *Options) { o.RuntimeFile = "/proc/nothing/here.json" }, "runtime file"},
	} {
		f := newFakeFleet()
		opt := Options{Listen: "127.0.0.1:0", Token: testToken, RuntimeFile: "off", Workers: f, Scheduler: start(t, nil).scheduler, Metrics: obs.NewMetrics()}
		c.change(&opt)
		if s, err := New(opt); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
			if s != nil {
				s.Close(t.Context())
			}
		}
	}
	f := start(t, nil)
	opt := Options{Listen: f.Addr(), Token: testToken, RuntimeFile: "off", Workers: f.fleet, Scheduler: f.scheduler, Metrics: f.metrics}
	if _, err := New(opt); err == nil || !strings.Contains(err.Error(), "--admin") {
		t.Errorf("a port in use: %v", err)
	}
}

func TestTokenFromEnvironmentOrRandom(t *testing.T) {
	t.Setenv("SLUICE_ADMIN_TOKEN", "from-the-environment")
	if tok, err := chooseToken(""); err != nil || tok != "from-the-environment" {
		t.Errorf("%q, %v", tok, err)
	}
	t.Setenv("SLUICE_ADMIN_TOKEN", "")
	a, _ := chooseToken("")
	b, _ := chooseToken("")
	if len(a) < 32 || a == b {
		t.Errorf("%q and %q", a, b)
	}
}

func TestRuntimeFile(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	if _, err := Find(""); !errors.Is(err, ErrNoRouter) {
		t.Errorf("with nothing running: %v", err)
	}
	f := start(t, func(o *Options) { o.RuntimeFile = "" })
	st, err := os.Stat(f.RuntimeFile())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", st, err)
	}
	if d, _ := os.Stat(filepath.Dir(f.RuntimeFile())); d.Mode().Perm() != 0o700 {
		t.Errorf("folder mode %v", d.Mode())
	}
	port := f.Addr()[strings.LastIndex(f.Addr(), ":"):]
	for _, addr := range []string{"", f.Addr(), port, "localhost" + port} {
		rt, err := Find(addr)
		if err != nil || rt.Address != f.Addr() || rt.Token != testToken || rt.PID != os.Getpid() {
			t.Errorf("find %q: %+v, %v", addr, rt, err)
		}
		c := NewClient(rt)
		if _, err := c.Workers(t.Context()); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	if _, err := Find("127.0.0.1:1"); !errors.Is(err, ErrNoRouter) {
		t.Errorf("another address: %v", err)
	}
	// Find ignores and removes the file of a router that died.
	dead := DefaultRuntimeFile("127.0.0.1:2")
	if err := WriteRuntimeFile(dead, Runtime{Address: "127.0.0.1:2", Token: "x", PID: 1 << 30}); err != nil {
		t.Fatal(err)
	}
	if rt, err := Find(""); err != nil || rt.Address != f.Addr() {
		t.Errorf("beside a dead one: %+v, %v", rt, err)
	}
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the dead one's file is still there: %v", err)
	}
	g := start(t, func(o *Options) { o.RuntimeFile = "" })
	if _, err := Find(""); err == nil || !strings.Contains(err.Error(), g.Addr()) || !strings.Contains(err.Error(), "--admin") {
		t.Errorf("two routers: %v", err)
	}
	g.Close(t.Context())
	if _, err := os.Stat(g.RuntimeFile()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file outlives its router: %v", err)
	}
}

// TestRuntimeFolderNotWritable: without a place for the default runtime file the server warns and serves.
func TestRuntimeFolderNotWritable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", file) // no folder can be made in a file, not even by root
	var log bytes.Buffer
	f := start(t, func(o *Options) {
		o.RuntimeFile, o.Log = "", slog.New(slog.NewTextHandler(&log, nil))
	})
	if f.RuntimeFile() != "" || !strings.Contains(log.String(), "cannot write the runtime file") {
		t.Errorf("runtime file %q, log %q; want none and a warning", f.RuntimeFile(), log.String())
	}
	if status, _, body := f.call(t, "GET", "/admin/v1/status", bearer(testToken)); status != 200 {
		t.Errorf("status %d %s; want 200", status, body)
	}
}

func TestRuntimeFileReadableByOthersIsRefused(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	path := DefaultRuntimeFile("127.0.0.1:3")
	rt := Runtime{Address: "127.0.0.1:3", Token: "x", PID: os.Getpid()}
	if err := WriteRuntimeFile(path, rt); err != nil {
		t.Fatal(err)
	}
	os.Chmod(path, 0o644)
	if _, err := ReadRuntimeFile(path); err == nil || !strings.Contains(err.Error(), "cannot trust") {
		t.Errorf("a file open to others: %v", err)
	}
	os.Chmod(filepath.Dir(path), 0o777)
	if err := WriteRuntimeFile(path, rt); err == nil || !strings.Contains(err.Error(), "cannot trust") {
		t.Errorf("a folder open to others: %v", err)
	}
	os.Chmod(filepath.Dir(path), 0o700)
	os.WriteFile(path, []byte("{"), 0o600)
	os.Chmod(path, 0o600)
	if _, err := ReadRuntimeFile(path); err == nil {
		t.Error("half a file was read")
	}
}

func TestClientWithoutRouter(t *testing.T) {
	c := NewClient(Runtime{Address: "127.0.0.1:1", Token: "x"})
	defer c.Close()
	if _, err := c.Workers(t.Context()); err == nil || !strings.Contains(err.Error(), "cannot reach the router") {
		t.Errorf("%v", err)
	}
}

func TestRoutesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/admin.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Routes {
		if !r.public && !strings.Contains(string(doc), "`"+r.Method+" "+r.Path+"`") {
			t.Errorf("docs/admin.md says nothing of %s %s", r.Method, r.Path)
		}
	}
}

// TestRenamedPaths checks that former paths redirect with their query and require the token.
func TestRenamedPaths(t *testing.T) {
	f := start(t, nil)
	for old, present := range renamedPaths {
		for _, token := range []string{"", testToken} {
			req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+f.Server.Addr()+old+"?since=5", nil)
			if err != nil {
				t.Fatal(err)
			}
			want, location := http.StatusUnauthorized, ""
			if token != "" {
				req.Header.Set("Authorization", "Bearer "+token)
				want, location = http.StatusPermanentRedirect, present+"?since=5"
			}
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != want || resp.Header.Get("Location") != location {
				t.Errorf("%s: %d to %q; want %d to %q", old, resp.StatusCode, resp.Header.Get("Location"), want, location)
			}
		}
	}
}
