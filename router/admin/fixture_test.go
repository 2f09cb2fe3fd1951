package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/obs"
	"sluice/router/recording"
	"sluice/router/requestlog"
	"sluice/router/requestlog/recent"
	"sluice/router/schedule"
	"sluice/router/worker"
)

const testToken = "correct-horse-battery-staple"

// fakeFleet is a fleet whose workers are not probed.
type fakeFleet struct {
	mu      sync.Mutex
	workers []*worker.Worker
	drained map[string]bool
}

func (c *fakeFleet) View() *fleet.View {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &fleet.View{Workers: c.workers}
}

func (c *fakeFleet) Drain(id string, on bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if id == "stuck" {
		return fmt.Errorf("fleet: cannot drain %q: it is gone", id)
	}
	c.drained[id] = on
	for _, w := range c.workers {
		if w.Spec.ID == id && on {
			w.SetState(worker.Draining, "asked for")
		}
	}
	return nil
}

// newFakeFleet returns two prefill workers, the first with two ranks, two decode workers and one
// unhealthy worker.
func newFakeFleet() *fakeFleet {
	c := &fakeFleet{drained: map[string]bool{}}
	for i, spec := range []worker.Spec{
		{ID: "p1", URL: "http://10.0.0.1:8000", Role: worker.Prefill, Ranks: []uint16{0, 1}},
		{ID: "p2", URL: "http://user:hunter2@10.0.0.2:8000", Role: worker.Prefill},
		{ID: "d1", URL: "http://10.0.0.3:8000", Role: worker.Decode},
		{ID: "d2", URL: "http://10.0.0.4:8000", Role: worker.Decode},
		{ID: "stuck", URL: "http://10.0.0.5:8000", Role: worker.Decode},
	} {
		spec.Models, spec.BlockSize = []string{"m"}, 16
		w := worker.New(spec)
		w.SetInfo(&worker.Info{Models: spec.Models, Engine: "vllm", Version: "0.33.0", BlockSize: 16, TotalBlocks: 2000})
		w.SetState(worker.Ready, "")
		for j, r := range w.Ranks {
			r.Slot = worker.Slot(2*i + j)
			r.Feed.Store(uint32(worker.FeedLive))
		}
		c.workers = append(c.workers, w)
	}
	c.workers[4].SetState(worker.Unhealthy, "probe failed: connection refused")
	return c
}

func (c *fakeFleet) ranks(role worker.Role) []*worker.Rank {
	var rs []*worker.Rank
	for _, w := range c.workers {
		if s, _ := w.State(); w.Spec.Role == role && s == worker.Ready {
			rs = append(rs, w.Ranks...)
		}
	}
	return rs
}

type fixture struct {
	*Server
	fleet        *fakeFleet
	scheduler    *schedule.Scheduler
	restartFails error
	reloadFails  error
	dry          bool // dry_run of the last reload
	metrics      *obs.Metrics
	timelines    *recent.Ring
	client       *Client
	http         *http.Client
}

// start runs a server on a free port and stops it at the end of the test.
func start(t testing.TB, change func(*Options)) *fixture {
	t.Helper()
	before := runtime.NumGoroutine()
	f := &fixture{fleet: newFakeFleet(), metrics: obs.NewMetrics(), timelines: recent.New(recent.Options{Size: 100, Slow: time.Second}),
		scheduler: schedule.New(schedule.Options{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1, Seed: 1})}
	opt := Options{Listen: "127.0.0.1:0", Token: testToken, RuntimeFile: filepath.Join(t.TempDir(), "rt.json"), Version: "test",
		Workers: f.fleet, Timelines: f.timelines, Scheduler: f.scheduler, Metrics: f.metrics, Recorder: recording.New(recording.Options{}),
		Health: func() (int, []byte) { return 200, []byte("{}") },
		Reload: func(_ context.Context, dry bool) ([]config.Change, error) {
			f.dry = dry
			return []config.Change{{Path: "timeouts.decode", Old: "10m", New: "1m", Effect: config.Applied}}, f.reloadFails
		},
		Restart: func(context.Context) (int, error) { return 4711, f.restartFails }}
	if change != nil {
		change(&opt)
	}
	s, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	f.Server = s
	f.http = &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{}}
	f.client = NewClient(Runtime{Address: s.Addr(), Token: testToken})
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	t.Cleanup(func() {
		f.http.CloseIdleConnections()
		f.client.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		testwait.Until(t, "the server's goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
	})
	return f
}

// call sends one request and returns the raw response.
func (f *fixture) call(t *testing.T, method, path string, change func(*http.Request)) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+f.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(req)
	}
	resp, err := f.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if c := resp.Header.Get("Content-Type"); c == "text/event-stream" || c == "application/octet-stream" {
		return resp.StatusCode, resp.Header, ""
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(body)
}

func bearer(token string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token) }
}

// serveOne simulates one prefill/decode request.
func (f *fixture) serveOne(id string) {
	e := requestlog.New(f.timelines).Begin(requestlog.Request{ID: id, Model: "m", Key: "team-a", Endpoint: "/v1/completions", Stream: true, Received: time.Now()})
	defer e.Finish(requestlog.Outcome{Status: 200, CachedTokens: 48, OutputTokens: 9, FirstToken: 30 * time.Millisecond, Total: 90 * time.Millisecond}, 500)
	p, _ := f.scheduler.Choose(&schedule.Query{Leg: schedule.PrefillLeg, Candidates: f.fleet.ranks(worker.Prefill), PromptTokens: 500, RequestID: id, Attempt: 1})
	f.scheduler.AddNote(id, "a note")
	d, _ := f.scheduler.Choose(&schedule.Query{Leg: schedule.DecodeLeg, Candidates: f.fleet.ranks(worker.Decode), PromptTokens: 500, RequestID: id, Attempt: 1})
	f.scheduler.EndRecord(id, schedule.Outcome{Status: 200, CachedTokens: 48, PromptTokens: 500, OutputTokens: 9, TTFT: 30 * time.Millisecond, Total: 90 * time.Millisecond})
	f.metrics.ResponseEnded("/v1/completions", 200, 90*time.Millisecond)
	f.metrics.FirstToken("/v1/completions", 30*time.Millisecond)
	f.metrics.Cached(d.Rank.ID, 500, 64, 48)
	p.Reservation.Release()
	d.Reservation.Release()
}

// examplePath replaces a route's wildcards by example values.
func examplePath(path string) string {
	return strings.NewReplacer("{$}", "", "{id}", "p1", "{profile}", "heap").Replace(path)
}
