package fleet

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// plainEngine is an OpenAI-compatible server with a few paths, each with its answer.
type plainEngine struct {
	*httptest.Server
	mu       sync.Mutex
	status   map[string]int // of a path; those that are not here are answered 404
	requests map[string]int
	models   string
}

func newPlainEngine(t *testing.T, status map[string]int) *plainEngine {
	e := &plainEngine{status: status, requests: map[string]int{}, models: `{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"me"}]}`}
	e.Server = httptest.NewServer(e)
	t.Cleanup(e.Close)
	return e
}

func (e *plainEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	status := e.status[r.URL.Path]
	e.requests[r.URL.Path]++
	e.mu.Unlock()
	switch {
	case status == 0:
		http.NotFound(w, r)
	case r.URL.Path == "/v1/models" && status == 200:
		fmt.Fprint(w, e.models)
	default:
		w.WriteHeader(status)
	}
}

func (e *plainEngine) set(path string, status int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.status[path] = status
}

func (e *plainEngine) count(path string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.requests[path]
}

// examined is what init and check say of a server.
func (e *plainEngine) examined(t *testing.T, path string) *EngineInfo {
	ep, err := upstream.NewEndpoint(e.URL, upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer ep.Close()
	return InspectHealth(context.Background(), ep, path, 2*time.Second)
}

// Engines are ready by the first path of health that they have, and the prober, init and
// check ask the same.
func TestHealthPaths(t *testing.T) {
	const models = "/v1/models"
	for _, c := range []struct {
		name   string
		status map[string]int // beside the models
		named  string         // by the configuration
		path   string         // that decides
		fault  string         // part of the reason why it is not ready
	}{
		{"vLLM", map[string]int{"/health": 200, "/ping": 200}, "", "/health", ""},
		{"no /health", map[string]int{"/ping": 200}, "", "/ping", ""},
		{"neither", nil, "", models, ""},
		{"method not allowed", map[string]int{"/health": 405, "/ping": 405}, "", models, ""},
		{"204", map[string]int{"/health": 204}, "", "/health", ""},
		{"unhealthy, and a /ping", map[string]int{"/health": 503, "/ping": 200}, "", "", "GET /health returned 503; want 200"},
		{"a key is wanted", map[string]int{"/health": 401}, "", "", "GET /health returned 401; want 200"},
		{"named", map[string]int{"/health": 503, "/healthz": 200}, "/healthz", "/healthz", ""},
		{"named with a query", map[string]int{"/healthz": 200}, "/healthz?deep=1", "/healthz?deep=1", ""},
		{"named and not there", map[string]int{"/health": 200}, "/healthz", "", "GET /healthz returned 404; want 200: set health.path, or health_path of the worker, to another path"},
		{"none", map[string]int{models: 404}, "", "", "none of the paths /health, /ping, /v1/models"},
	} {
		for _, how := range []string{"of all", "of the worker"} {
			t.Run(c.name+" "+how, func(t *testing.T) {
				status := map[string]int{models: 200}
				for path, s := range c.status {
					status[path] = s
				}
				e := newPlainEngine(t, status)
				a := e.examined(t, c.named)
				if c.fault == "" && (a.Err != nil || a.HealthPath != c.path) {
					t.Errorf("examined: healthy at %q, %v; want at %q", a.HealthPath, a.Err, c.path)
				}
				if c.fault != "" && status[models] == 200 && (a.Err == nil || !strings.Contains(a.Err.Error(), c.fault)) {
					t.Errorf("examined: %v; want %q", a.Err, c.fault)
				}
				opt := Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: 20 * time.Millisecond}
				spec := worker.Spec{ID: "w", URL: e.URL, Models: []string{"tiny"}}
				if how == "of all" {
					opt.HealthPath = c.named
				} else {
					spec.HealthPath = c.named
					if c.named != "" {
						opt.HealthPath = "/of-all"
					}
				}
				f, _ := newFleet(t, opt)
				mustAdd(t, f, spec)
				if c.fault != "" {
					testwait.Until(t, "the reason is known", func() bool { _, why := stateOf(f, "w"); return strings.Contains(why, c.fault) })
					if s, _ := stateOf(f, "w"); s != worker.Joining {
						t.Errorf("state %s", s)
					}
					return
				}
				waitRanks(t, f, "tiny", 1)
				path, _, _ := strings.Cut(c.path, "?")
				n := e.count(path)
				testwait.Until(t, "it is asked there again and again", func() bool { return e.count(path) > n+3 })
				if s, why := stateOf(f, "w"); s != worker.Ready || why != "" {
					t.Errorf("state %s, %q", s, why)
				}
			})
		}
	}
}

// Where the models stand for health, an engine whose models fail or that is gone leaves
// the pools as any other, and comes back. Paths it does not have are not asked each time.
func TestHealthByModels(t *testing.T) {
	e := newPlainEngine(t, map[string]int{"/v1/models": 200})
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.URL})
	waitRanks(t, f, "tiny", 1)
	n := e.count("/v1/models")
	testwait.Until(t, "it is probed, its kind being known", func() bool { return e.count("/v1/models") > n+5 })
	none := e.count("/health")
	n = e.count("/v1/models")
	testwait.Until(t, "it is probed", func() bool { return e.count("/v1/models") > n+10 })
	if e.count("/health") > none {
		t.Errorf("a path that it does not have was asked %d times more", e.count("/health")-none)
	}
	e.set("/v1/models", 500)
	waitRanks(t, f, "tiny", 0)
	if _, why := stateOf(f, "w"); !strings.Contains(why, "GET /v1/models returned 500") {
		t.Error(why)
	}
	e.set("/v1/models", 200)
	waitRanks(t, f, "tiny", 1)

	// Another engine at this address, which has more to say of its health.
	e.set("/v1/models", 500)
	waitRanks(t, f, "tiny", 0)
	e.set("/health", 200)
	e.set("/v1/models", 200)
	waitRanks(t, f, "tiny", 1)
	n = e.count("/health")
	testwait.Until(t, "/health is asked", func() bool { return e.count("/health") > n+3 })
}

// A list of models that is longer than a probe reads is an answer as any other.
func TestHealthByManyModels(t *testing.T) {
	e := newPlainEngine(t, map[string]int{"/v1/models": 200})
	e.models = `{"data":[{"id":"tiny"}` + strings.Repeat(`,{"id":"another-model-of-many"}`, 5000) + `]}`
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.URL})
	waitRanks(t, f, "tiny", 1)
	n := e.count("/v1/models")
	testwait.Until(t, "it is probed", func() bool { return e.count("/v1/models") > n+5 })
	if s, why := stateOf(f, "w"); s != worker.Ready {
		t.Errorf("state %s, %q", s, why)
	}
}

// Another path takes effect while the fleet runs.
func TestChangeOfHealthPath(t *testing.T) {
	e := newPlainEngine(t, map[string]int{"/v1/models": 200, "/healthz": 200})
	opt := Options{ProbeInterval: 20 * time.Millisecond, ProbeTimeout: 200 * time.Millisecond, ScrapeInterval: -1}
	f, _ := newFleet(t, opt)
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.URL})
	waitRanks(t, f, "tiny", 1)
	opt.HealthPath = "/healthz"
	f.Reload(opt.Settings())
	testwait.Until(t, "it is asked there", func() bool { return e.count("/healthz") > 2 })
	opt.HealthPath = "/none"
	f.Reload(opt.Settings())
	waitRanks(t, f, "tiny", 0)
	opt.HealthPath = ""
	f.Reload(opt.Settings())
	waitRanks(t, f, "tiny", 1)
}

// An engine without /metrics is asked for them ever more seldom, and its load is unknown.
func TestNoMetrics(t *testing.T) {
	e := newPlainEngine(t, map[string]int{"/v1/models": 200})
	f, _ := newFleet(t, Options{})
	mustAdd(t, f, worker.Spec{ID: "w", URL: e.URL})
	rank := waitRanks(t, f, "tiny", 1).Aggregated[0]
	testwait.Until(t, "it is asked for metrics", func() bool { return e.count("/metrics") > 3 })
	asked, n := e.count("/metrics"), e.count("/v1/models")
	testwait.Until(t, "it is probed", func() bool { return e.count("/v1/models") > n+50 })
	if more := e.count("/metrics") - asked; more > 15 {
		t.Errorf("asked for metrics %d times more within 50 intervals; want one in ten", more)
	}
	if rank.Running.Load() != -1 {
		t.Error("a load is known")
	}
}

func TestHealthPathsBySpec(t *testing.T) {
	if got := healthPaths("/x", true); !slices.Equal(got, []string{"/x"}) {
		t.Error(got)
	}
	if got := healthPaths("", true); got[0] != "/ready" || got[len(got)-1] != ModelsPath {
		t.Error(got)
	}
}
