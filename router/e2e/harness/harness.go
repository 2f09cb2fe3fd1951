package harness

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/worker"
)

// StartSim starts a simulated engine without simulated delays. mod may change its options.
func StartSim(t *testing.T, mod func(*sim.Options)) *sim.Engine {
	t.Helper()
	o := sim.Options{Speed: -1, Blocks: 4096}
	if mod != nil {
		mod(&o)
	}
	e, err := sim.Start(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// SuspendEngines makes engines answer neither the requests that f matches nor /health until
// release. If they answered /health, the router could see that the engine runs and that only
// the one request is stalled.
func SuspendEngines(f sim.Fault, engines ...*sim.Engine) (release func()) {
	until := make(chan struct{})
	f.Kind, f.Until = sim.Stall, until
	for _, e := range engines {
		e.Fault(f)
		e.Fault(sim.Fault{Kind: sim.Stall, Path: "/health", Until: until})
	}
	return sync.OnceFunc(func() {
		for _, e := range engines {
			e.ClearFaults()
		}
		close(until)
	})
}

// DelayAnswers makes engines finish the requests that f matches but withhold the responses until
// release. Unlike with SuspendEngines, the engines serve everything else.
func DelayAnswers(f sim.Fault, engines ...*sim.Engine) (release func()) {
	until := make(chan struct{})
	f.Kind, f.Phase, f.Until = sim.Stall, "answer", until
	for _, e := range engines {
		e.Fault(f)
	}
	return sync.OnceFunc(func() {
		for _, e := range engines {
			e.ClearFaults()
		}
		close(until)
	})
}

// SimRole returns options for a simulated engine with a role: prefill or decode.
func SimRole(r string) func(*sim.Options) { return func(o *sim.Options) { o.Role = r } }

// Router is a whole router in the test process, on free ports.
type Router struct {
	*app.Router
	app.Components
	URL  string
	Stop context.CancelFunc
	Done chan error
	Logs *SyncBuffer
}

// StartRouter starts a router over workers and waits until all of them are ready. mod may
// change the configuration first.
func StartRouter(t *testing.T, mod func(*config.Config), workers ...config.Worker) *Router {
	t.Helper()
	r := LaunchRouter(t, mod, workers...)
	r.AwaitReady(t)
	return r
}

// AwaitReady waits until the router and all its workers are ready.
func (r *Router) AwaitReady(t *testing.T) {
	t.Helper()
	testwait.UntilWithin(t, 30*time.Second, "the router is ready", func() bool {
		status, _ := r.Pages.Ready(true)
		return status == 200 && AllReady(r) && AllInPools(r)
	})
}

// AllReady reports whether every worker is Ready, as the fleet sees it. Requests may see it a moment
// later: see AllInPools.
func AllReady(r *Router) bool {
	for _, w := range r.Fleet.View().Workers {
		if s, _ := w.State(); s != worker.Ready {
			return false
		}
	}
	return true
}

// AllRanks returns the ranks of all workers.
func (r *Router) AllRanks() (all []*worker.Rank) {
	for _, w := range r.Fleet.View().Workers {
		all = append(all, w.Ranks...)
	}
	return all
}

// AllInPools reports whether every rank is in a pool and can receive requests. A worker becomes
// ready with the first of its ranks' servers, and a moment before it is in the pools.
func AllInPools(r *Router) bool {
	v := r.Fleet.View()
	received := make(map[*worker.Rank]bool)
	for _, model := range v.Models {
		p, _ := v.Pool(model)
		for _, role := range []worker.Role{worker.Prefill, worker.Decode, worker.Aggregated} {
			for _, rank := range p.Ranks(role) {
				received[rank] = true
			}
		}
	}
	for _, w := range v.Workers {
		if len(w.Info().Models) > 0 && slices.ContainsFunc(w.Ranks, func(r *worker.Rank) bool { return !received[r] }) {
			return false
		}
	}
	return true
}

// LaunchRouter is StartRouter without the wait.
func LaunchRouter(t testing.TB, mod func(*config.Config), workers ...config.Worker) *Router {
	t.Helper()
	return LaunchOptions(t, app.Options{}, mod, workers...)
}

// LaunchOptions is LaunchRouter with further options; it sets the configuration and the log.
func LaunchOptions(t testing.TB, opt app.Options, mod func(*config.Config), workers ...config.Worker) *Router {
	t.Helper()
	cfg := config.Default()
	cfg.Listen = "127.0.0.1:0"
	cfg.Admin.Listen = "127.0.0.1:0"
	cfg.Admin.Token = "test-token-0123456789"
	cfg.Admin.RuntimeFile = t.TempDir() + "/runtime.json"
	cfg.Health.Interval = 50 * time.Millisecond
	cfg.Steering.Pinning = []string{"127.0.0.0/8"}
	cfg.Workers = workers
	if mod != nil {
		mod(cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	opt.Config = cfg
	return runRouter(t, opt)
}

// LaunchConfigured runs a router with a configuration file, as serve --config does.
func LaunchConfigured(t testing.TB, path string) *Router {
	t.Helper()
	fs := flag.NewFlagSet("serve", flag.ContinueOnError)
	flags := config.RegisterFlags(fs)
	if err := fs.Parse([]string{"--config", path}); err != nil {
		t.Fatal(err)
	}
	cfg, err := flags.Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	return runRouter(t, app.Options{Config: cfg})
}

// runRouter runs a router until the test ends. If the test fails, it prints the router's log.
func runRouter(t testing.TB, opt app.Options) *Router {
	t.Helper()
	logs := new(SyncBuffer)
	opt.Log = slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r, err := app.New(opt)
	if err != nil {
		t.Fatal(err)
	}
	return runTest(t, "router", r, logs)
}

// runTest runs an assembled router until the test ends. If the test fails, it prints the
// router's log.
func runTest(t testing.TB, what string, r *app.Router, logs *SyncBuffer) *Router {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	tr := &Router{Router: r, Components: r.Components(), URL: "http://" + r.Addr(), Stop: stop, Done: make(chan error, 1), Logs: logs}
	go func() { tr.Done <- r.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		select {
		case err := <-tr.Done:
			if err != nil {
				t.Errorf("the %s ended with %v", what, err)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("the %s did not end within 20 s", what)
		}
		if t.Failed() {
			t.Logf("the %s's log:\n%s", what, logs.Tail(8000))
		}
	})
	return tr
}

// SimWorker returns the configuration of a simulated engine as a worker that reports its own KV event
// endpoints (kv_events: auto).
func SimWorker(e *sim.Engine, r worker.Role, id string) config.Worker {
	return config.Worker{ID: id, URL: e.URL(), Role: r, KVEvents: []string{"auto"}}
}

// Answer is a complete HTTP response.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Text returns the text of a completion, streamed or not.
func (a *Answer) Text(t *testing.T) string {
	t.Helper()
	if strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
		var out strings.Builder
		sc := bufio.NewScanner(bytes.NewReader(a.Body))
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			data, ok := strings.CutPrefix(sc.Text(), "data: ")
			if !ok || data == "[DONE]" {
				continue
			}
			out.WriteString(choiceText(t, []byte(data)))
		}
		return out.String()
	}
	return choiceText(t, a.Body)
}

func choiceText(t *testing.T, js []byte) string {
	t.Helper()
	var v struct {
		Choices []struct {
			Text    string `json:"text"`
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(js, &v); err != nil {
		t.Fatalf("no JSON: %v in %s", err, js)
	}
	var s string
	for _, c := range v.Choices {
		s += c.Text + c.Message.Content + c.Delta.Content
	}
	return s
}

// ErrorOf returns the members of an error body in OpenAI's format.
func (a *Answer) ErrorOf(t *testing.T) (message, typ, param string) {
	t.Helper()
	var v struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
		} `json:"error"`
	}
	if err := json.Unmarshal(a.Body, &v); err != nil || v.Error.Message == "" {
		t.Fatalf("status %d: no error object: %v in %s", a.Status, err, a.Body)
	}
	if v.Error.Param != nil {
		param = *v.Error.Param
	}
	return v.Error.Message, v.Error.Type, param
}

// Post sends a JSON body and reads the whole response.
func Post(t *testing.T, url, body string, headers ...string) *Answer {
	t.Helper()
	a, err := TryPost(context.Background(), url, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TryPost sends a JSON body and reads the whole response. headers are names and values in turn; they
// may replace the Content-Type. If the body ends early, the answer has what was received, beside the
// error; if the request fails before the response, the answer is nil.
func TryPost(ctx context.Context, url, body string, headers ...string) (*Answer, error) {
	req, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	if req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return &Answer{Status: resp.StatusCode, Header: resp.Header, Body: b}, err
}

// Get sends a GET request and reads the whole response. headers are names and values in turn.
func Get(t *testing.T, url string, headers ...string) *Answer {
	t.Helper()
	return DoWithoutBody(t, "GET", url, headers...)
}

// DoWithoutBody sends a request without a body and reads the whole response.
func DoWithoutBody(t *testing.T, method, url string, headers ...string) *Answer {
	t.Helper()
	req, err := http.NewRequest(method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return &Answer{Status: resp.StatusCode, Header: resp.Header, Body: b}
}
