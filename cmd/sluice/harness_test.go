package main

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
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/worker"
)

// startSim starts a simulated engine that waits for nothing but what mod says.
func startSim(t *testing.T, mod func(*sim.Options)) *sim.Engine {
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

// suspendEngines has engines take nothing in until release: neither the requests that f is for
// nor the questions by which the router tells an engine that stands still from one that
// holds up one request.
func suspendEngines(f sim.Fault, engines ...*sim.Engine) (release func()) {
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

// delayAnswers has engines finish what f matches and not answer it until release, unlike
// standstill with all else as it was.
func delayAnswers(f sim.Fault, engines ...*sim.Engine) (release func()) {
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

func simRole(r string) func(*sim.Options) { return func(o *sim.Options) { o.Role = r } }

// testRouter is a whole router in this process, on free ports.
type testRouter struct {
	*app.Router
	app.Components
	URL  string
	stop context.CancelFunc
	done chan error
	logs *syncBuffer
}

// startRouter starts a router over workers and waits until all of them are ready. mod may
// change the configuration first.
func startRouter(t *testing.T, mod func(*config.Config), workers ...config.Worker) *testRouter {
	t.Helper()
	r := launchRouter(t, mod, workers...)
	r.awaitReady(t)
	return r
}

// awaitReady waits until the router and all its workers are ready.
func (r *testRouter) awaitReady(t *testing.T) {
	t.Helper()
	eventually(t, 30*time.Second, "the router is ready", func() bool {
		status, _ := r.Pages.Ready(true)
		return status == 200 && allReady(r) && allInPools(r)
	})
}

func allReady(r *testRouter) bool {
	for _, w := range r.Fleet.View().Workers {
		if s, _ := w.State(); s != worker.Ready {
			return false
		}
	}
	return true
}

// AllRanks returns the ranks of all workers.
func (r *testRouter) AllRanks() (all []*worker.Rank) {
	for _, w := range r.Fleet.View().Workers {
		all = append(all, w.Ranks...)
	}
	return all
}

// allInPools says whether requests may go to all ranks: a worker is ready with the first
// of its ranks' servers, and a moment before it is in the pools.
func allInPools(r *testRouter) bool {
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

// launchRouter is startRouter without the wait.
func launchRouter(t testing.TB, mod func(*config.Config), workers ...config.Worker) *testRouter {
	t.Helper()
	return launchOptions(t, app.Options{}, mod, workers...)
}

// launchOptions is launchRouter with options beside the configuration and the log.
func launchOptions(t testing.TB, opt app.Options, mod func(*config.Config), workers ...config.Worker) *testRouter {
	t.Helper()
	cfg := config.Default()
	cfg.Listen = "127.0.0.1:0"
	cfg.Admin.Listen = "127.0.0.1:0"
	cfg.Admin.Token = "test-token-0123456789"
	cfg.Admin.RuntimeFile = t.TempDir() + "/runtime.json"
	cfg.Health.Interval = 50 * time.Millisecond
	cfg.Steering.Pins = []string{"127.0.0.0/8"}
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

// launchConfigured runs a router on a file, as --config does.
func launchConfigured(t testing.TB, path string) *testRouter {
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

// runRouter runs a router whose log the test shows if it fails.
func runRouter(t testing.TB, opt app.Options) *testRouter {
	t.Helper()
	logs := new(syncBuffer)
	opt.Log = slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r, err := app.New(opt)
	if err != nil {
		t.Fatal(err)
	}
	return runTest(t, "router", r, logs)
}

// runTest runs an assembled router until the test ends, and shows its log if that failed.
func runTest(t testing.TB, what string, r *app.Router, logs *syncBuffer) *testRouter {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	tr := &testRouter{Router: r, Components: r.Components(), URL: "http://" + r.Addr(), stop: stop, done: make(chan error, 1), logs: logs}
	go func() { tr.done <- r.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		select {
		case err := <-tr.done:
			if err != nil {
				t.Errorf("the %s ended with %v", what, err)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("the %s did not end within 20 s", what)
		}
		if t.Failed() {
			t.Logf("the %s's log:\n%s", what, logs.tail(8000))
		}
	})
	return tr
}

func simWorker(e *sim.Engine, r worker.Role, id string) config.Worker {
	return config.Worker{ID: id, URL: e.URL(), Role: r, KVEvents: []string{"auto"}}
}

// eventually polls until ok, or fails the test after within.
func eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); ; {
		if ok() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", within, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// answer is a response read whole.
type answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// text is the completion's text, streamed or not.
func (a *answer) text(t *testing.T) string {
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

// errorOf reads an error body of OpenAI's shape.
func (a *answer) errorOf(t *testing.T) (message, typ, param string) {
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

// post sends a JSON body and reads the whole answer.
func post(t *testing.T, url, body string, headers ...string) *answer {
	t.Helper()
	a, err := tryPost(context.Background(), url, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func tryPost(ctx context.Context, url, body string, headers ...string) (*answer, error) {
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
	return &answer{Status: resp.StatusCode, Header: resp.Header, Body: b}, err
}

func get(t *testing.T, url string, headers ...string) *answer {
	t.Helper()
	return doWithoutBody(t, "GET", url, headers...)
}

// doWithoutBody makes a request without a body and reads the whole answer.
func doWithoutBody(t *testing.T, method, url string, headers ...string) *answer {
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
	return &answer{Status: resp.StatusCode, Header: resp.Header, Body: b}
}
