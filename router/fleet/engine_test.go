package fleet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/worker"
)

// testEngine is a real HTTP server on loopback that answers as an engine does,
// and can die, hang, talk garbage and come back on its address.
type testEngine struct {
	t    *testing.T
	addr string

	hang        atomic.Bool
	onHang      atomic.Pointer[func()] // called for each request that hangs; nil: nothing
	unhealthy   atomic.Bool            // /health is 503
	garbage     atomic.Pointer[string] // body of every answer
	models      atomic.Pointer[string] // of /v1/models
	metrics     atomic.Pointer[string]
	events      atomic.Pointer[string]
	info        atomic.Pointer[string] // of /server_info
	sglang      atomic.Bool            // no /health worth the name, no /version
	slow        atomic.Int64           // nanoseconds that /health takes
	inflight    atomic.Int32
	maxInflight atomic.Int32 // probes of health at once
	calls       sync.Map     // path -> *atomic.Int64

	mu  sync.Mutex
	srv *http.Server
	up  chan struct{} // closed when the server has ended
	end context.CancelFunc
}

func newEngine(t *testing.T) *testEngine {
	t.Helper()
	e := &testEngine{t: t, addr: "127.0.0.1:0"}
	e.setModels(&e.models, `{"object":"list","data":[{"id":"tiny","object":"model","owned_by":"vllm","max_model_len":4096,"parent":null},{"id":"tiny-lora","owned_by":"vllm","parent":"tiny"}]}`)
	e.setIncarnation(1000)
	e.start()
	t.Cleanup(e.kill)
	return e
}

func (e *testEngine) setModels(to *atomic.Pointer[string], s string) { to.Store(&s) }

func (e *testEngine) setIncarnation(started float64) {
	e.setModels(&e.metrics, fmt.Sprintf(`# HELP process_start_time_seconds Start time.
process_start_time_seconds %g
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="a}\"b,engine=\"9"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",num_gpu_blocks="400"} 1.0
`, started))
}

func (e *testEngine) url() string { return "http://" + e.addr }

func (e *testEngine) start() {
	e.t.Helper()
	var l net.Listener
	testwait.Until(e.t, "listen on "+e.addr, func() bool {
		var err error
		l, err = net.Listen("tcp", e.addr)
		return err == nil
	})
	e.mu.Lock()
	defer e.mu.Unlock()
	e.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	srv, up := &http.Server{Handler: e, BaseContext: func(net.Listener) context.Context { return ctx }}, make(chan struct{})
	e.srv, e.end, e.up = srv, cancel, up
	go func() { defer close(up); _ = srv.Serve(l) }()
}

// kill ends the server and its connections, as the end of a process does.
func (e *testEngine) kill() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.srv == nil {
		return
	}
	e.end()
	_ = e.srv.Close()
	<-e.up
	e.srv = nil
}

func (e *testEngine) count(path string) int64 {
	n, _ := e.calls.LoadOrStore(path, new(atomic.Int64))
	return n.(*atomic.Int64).Load()
}

func (e *testEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n, _ := e.calls.LoadOrStore(r.URL.Path, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	if r.URL.Path == "/health" {
		now := e.inflight.Add(1)
		defer e.inflight.Add(-1)
		if now > e.maxInflight.Load() {
			e.maxInflight.Store(now)
		}
	}
	if e.hang.Load() || e.sglang.Load() && r.URL.Path == "/health" {
		if f := e.onHang.Load(); f != nil {
			(*f)()
		}
		<-r.Context().Done()
		return
	}
	if r.URL.Path == "/health" {
		select {
		case <-time.After(time.Duration(e.slow.Load())):
		case <-r.Context().Done():
			return
		}
	}
	if g := e.garbage.Load(); g != nil {
		fmt.Fprint(w, *g)
		return
	}
	reply := func(p *atomic.Pointer[string]) {
		if s := p.Load(); s != nil {
			fmt.Fprint(w, *s)
			return
		}
		http.NotFound(w, r)
	}
	switch r.URL.Path {
	case "/health":
		if e.unhealthy.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	case "/ping":
	case "/v1/models":
		reply(&e.models)
	case "/version":
		if e.sglang.Load() {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, `{"version":"0.33.0"}`)
	case "/metrics":
		reply(&e.metrics)
	case "/kv_event_sources":
		reply(&e.events)
	case "/server_info":
		reply(&e.info)
	case "/v1/completions":
		fmt.Fprint(w, `{}`)
	default:
		http.NotFound(w, r)
	}
}

// listener records the callbacks of a fleet.
type listener struct {
	mu  sync.Mutex
	log []string
}

func (l *listener) add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log = append(l.log, s)
}

func (l *listener) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.log, " ")
}

// newFleet is a fleet with fast probes whose goroutines are seen to end.
func newFleet(t *testing.T, opt Options) (*Fleet, *listener) {
	t.Helper()
	before := runtime.NumGoroutine()
	l := &listener{}
	if opt.ProbeInterval == 0 {
		opt.ProbeInterval, opt.ProbeTimeout, opt.ScrapeInterval = 20*time.Millisecond, 200*time.Millisecond, 20*time.Millisecond
	}
	if opt.OnJoin == nil {
		opt.OnJoin = func(w *worker.Worker) { l.add("join:" + w.Spec.ID) }
	}
	if opt.OnLeave == nil {
		opt.OnLeave = func(w *worker.Worker) { l.add("leave:" + w.Spec.ID) }
	}
	opt.OnState = func(w *worker.Worker, from, to worker.State, _ string) { l.add(from.String() + ">" + to.String()) }
	f := New(opt)
	t.Cleanup(func() {
		f.Close()
		// The engines' own connections end a little later; a leak stays.
		testwait.Until(t, "goroutines of the fleet end", func() bool { return runtime.NumGoroutine() <= before+4 })
	})
	return f, l
}

func mustAdd(t *testing.T, f *Fleet, spec worker.Spec) {
	t.Helper()
	if err := f.Add(spec); err != nil {
		t.Fatal(err)
	}
}

// waitRanks waits for a pool with n ranks in any role.
func waitRanks(t *testing.T, f *Fleet, model string, n int) *Pool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	v, ok := f.Wait(ctx, func(v *View) bool {
		p, _ := v.Pool(model)
		return p != nil && len(p.Aggregated)+len(p.Prefill)+len(p.Decode) == n
	})
	if !ok {
		for _, w := range v.Workers {
			s, why := w.State()
			t.Logf("%s: %s %s", w.Spec.ID, s, why)
		}
		t.Fatalf("model %q never had %d ranks", model, n)
	}
	p, _ := v.Pool(model)
	return p
}

func stateOf(f *Fleet, id string) (worker.State, string) {
	for _, w := range f.View().Workers {
		if w.Spec.ID == id {
			return w.State()
		}
	}
	return worker.Gone, ""
}

var errReset = errors.New("connection reset by peer")
