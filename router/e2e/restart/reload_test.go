package restart

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// TestReloadReachesEngineAPI: the framed socket uses the limits that a reload has changed.
func TestReloadReachesEngineAPI(t *testing.T) {
	one := harness.StartSim(t, nil)
	socket := filepath.Join(t.TempDir(), "engine.sock")
	config := func(depth int) string {
		return fmt.Sprintf("engine_api: {unix_socket: %q}\nlimits: {max_depth: %d}\n", socket, depth)
	}
	g := harness.StartReloadRouter(t, config(16), one.URL())
	c := harness.DialRetry(t, "unix://"+socket)
	var schema any = 1
	for range 20 {
		schema = map[string]any{"a": schema}
	}
	generate := func() *harness.EngineAPIAnswer {
		return harness.GenerateEngineAPI(t, c, &client.Request{Extra: map[string]any{
			"model": "sim", "token_ids": []int{1, 2, 3}, "stop_conditions": map[string]any{"max_tokens": 2},
			"sampling_options": map[string]any{"guided_decoding": map[string]any{"json": schema}},
		}})
	}
	if a := generate(); a.Failure == nil || a.Failure.Code != 400 {
		t.Fatalf("nested too deeply: %+v, %v", a.Failure, a.Err)
	}
	if status, _, message := g.ReloadWith(config(32)); status != 200 {
		t.Fatalf("%d %s", status, message)
	}
	if a := generate(); a.Failure != nil || a.Err != nil {
		t.Errorf("limits.max_depth is not in effect: %+v, %v", a.Failure, a.Err)
	}
}

// TestReload: every reloaded field is in effect in its part of the router once the reload returns.
func TestReload(t *testing.T) {
	one, two := harness.StartSim(t, nil), harness.StartSim(t, nil)
	g := harness.StartReloadRouter(t, "", one.URL())
	request := func(fields ...string) *harness.Answer {
		return harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat(""), fields...)
	}
	harness.WantStatus(t, request(), 200)
	status, changes, message := g.ReloadWith(fmt.Sprintf(`  - {id: new, url: %q}
cors: {origins: [https://app.example]}
limits: {max_body: 1KiB, max_head: 32KiB}
schedule: {policy: round_robin}
steering: {pinning: "off"}
timeouts: {head: 3s, pool_wait: 1ms}
`, two.URL()))
	if status != 200 {
		t.Fatalf("%d %s", status, message)
	}
	effect := map[string]config.Effect{}
	for _, c := range changes {
		effect[c.Path] = c.Effect
	}
	if want := map[string]config.Effect{`workers["new"]`: config.Applied, "cors.origins": config.Applied, "limits.max_body": config.Applied, "schedule.policy": config.Applied,
		"steering.pinning": config.Applied, "limits.max_head": config.Restart, "timeouts.head": config.Applied, "timeouts.pool_wait": config.Applied}; !reflect.DeepEqual(effect, want) {
		t.Errorf("%v, want %v", effect, want)
	}
	a := request("Origin", "https://app.example")
	if a.Header.Get("Access-Control-Allow-Origin") != "https://app.example" {
		t.Error("cors.origins is not in effect")
	}
	if a := harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat(`,"user":"`+strings.Repeat("x", 2000)+`"`)); a.Status != 413 {
		t.Errorf("limits.max_body is not in effect: %d", a.Status)
	}
	if g.Scheduler.Policy() != "round_robin" {
		t.Errorf("schedule.policy is %s", g.Scheduler.Policy())
	}
	if a := request("X-Sluice-Worker", "w0"); a.Status != 400 {
		t.Errorf("steering.pinning is not in effect: %d", a.Status)
	}
	testwait.UntilWithin(t, 20*time.Second, "the new worker", func() bool { return g.State("new") == worker.Ready })
	req, _ := http.NewRequest("GET", "http://"+g.Admin.Addr()+"/admin/v1/config", nil)
	req.Header.Set("Authorization", "Bearer test-token-0123456789")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var shown struct {
		Limits struct {
			MaxBody int64 `json:"max_body"`
			MaxHead int64 `json:"max_head"`
		}
	}
	_ = json.NewDecoder(resp.Body).Decode(&shown)
	if shown.Limits.MaxBody != 1<<10 || shown.Limits.MaxHead != 16<<10 {
		t.Errorf("/admin/v1/config shows %+v, want what is in effect", shown)
	}

	// Reload the same file again: only the fields that need a restart differ.
	harness.WriteFile(t, g.Path, strings.Replace(g.Base, "workers:", "workers:", 1))
	_, changes, _ = g.ReloadWith("")
	for _, c := range changes {
		if c.Path == "limits.max_head" {
			t.Errorf("%+v, though the file has it as it is in effect", c)
		}
	}
	if a := harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat(`,"user":"`+strings.Repeat("x", 2000)+`"`)); a.Status != 200 {
		t.Errorf("back to the default: %d %s", a.Status, a.Body)
	}
}

// TestReloadDuringRequest: a request keeps the configuration that it began with. In the past a
// second attempt used the timeouts of the new configuration.
func TestReloadDuringRequest(t *testing.T) {
	t.Parallel()
	const decodeTime = 1500 * time.Millisecond
	calls, reloaded := new(atomic.Int32), make(chan struct{})
	handle := func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if calls.Add(1) == 1 {
			<-reloaded
			harness.ReplyJSON(w, 500, `{"error":{"message":"no"}}`)
			return
		}
		testwait.Pace(decodeTime)
		harness.ReplyJSON(w, 200, harness.WholeAnswer)
	}
	one, two := harness.StartScripted(t, handle), harness.StartScripted(t, handle)
	g := harness.StartReloadRouter(t, "timeouts: {decode: 30s}\n", one.URL, two.URL)
	done := make(chan *harness.Answer, 1)
	go func() {
		a, err := harness.TryPost(context.Background(), g.URL+"/v1/chat/completions", harness.Chat(""))
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	testwait.UntilWithin(t, 10*time.Second, "the request is at an engine", func() bool { return calls.Load() == 1 })
	if status, _, message := g.ReloadWith("timeouts: {decode: 1s}\n"); status != 200 {
		t.Fatalf("%d %s", status, message)
	}
	close(reloaded)
	if a := <-done; a == nil || a.Status != 200 || calls.Load() != 2 {
		t.Fatalf("%d calls, answer %+v; want the second try to have the timeout of 30 s", calls.Load(), a)
	}
	if a := harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat("")); a.Status != 504 {
		t.Errorf("a new request: %d %s; want 504, by the new timeout", a.Status, a.Body)
	}
}

// TestReloadOfRatesAndTokens reloads the scheduler's rates and the tokenizer mode during requests.
func TestReloadOfRatesAndTokens(t *testing.T) {
	e := harness.StartSim(t, nil)
	g := harness.StartReloadRouter(t, "", e.URL())
	ask := func() {
		t.Helper()
		harness.WantStatus(t, harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat("")), 200)
	}
	request := func(more string, n int) {
		t.Helper()
		status, changes, message := g.ReloadWith(more)
		if status != 200 || len(changes) != n {
			t.Fatalf("%d %v %s", status, changes, message)
		}
		for _, c := range changes {
			if c.Effect != config.Applied || c.Reason != "" {
				t.Errorf("%+v", c)
			}
		}
	}
	ask()
	rank := g.Fleet.View().Workers[0].Ranks[0]
	before := g.Scheduler.RatesOf(rank)
	request("schedule: {prefill_ms: 7, transfer_ms: 3, block_ms: 2}\n", 3)
	if got := g.Scheduler.RatesOf(rank); got.Prefill != 7 || got.Transfer != 3 || got.Block != 2 {
		t.Errorf("%+v", got)
	}
	ask()
	request("", 3)
	if got := g.Scheduler.RatesOf(rank); got.Transfer != before.Transfer || got.Prefill == 7 {
		t.Errorf("learned again: %+v, before %+v", got, before)
	}
	text := g.Tokenizer.Stats().FromText
	request("tokens: {mode: text, timeout: 100ms, cache_bytes: 0, max_engine_bytes: 1KiB}\n", 4)
	ask()
	if s := g.Tokenizer.Stats(); s.FromText != text+1 || s.CacheBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// TestReloadOfPredictionTTL: a new index.approx_ttl also applies to existing predictions.
func TestReloadOfPredictionTTL(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	const text = "tokens: {mode: text}\n" // with which no engine's events match the hashes
	g := harness.StartReloadRouter(t, text+"index: {approx_ttl: 1h}\n", e.URL())
	harness.WantStatus(t, harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat("")), 200)
	if g.Approx.Len() == 0 {
		t.Fatal("nothing is believed of a prompt without tokens")
	}
	status, changes, message := g.ReloadWith(text + "index: {approx_ttl: 1s}\n")
	if status != 200 || len(changes) != 1 || changes[0].Path != "index.approx_ttl" || changes[0].Effect != config.Applied {
		t.Fatalf("%d %+v %s", status, changes, message)
	}
	testwait.UntilWithin(t, 60*time.Second, "what was believed for an hour is past its time", func() bool {
		var o kvindex.Overlap
		// A look-up expires entries only in the shard of its prompt. Random hashes, as in
		// production: 1000 consecutive ones miss shards under 4 % of the index's random factors.
		for range 1000 {
			g.Approx.Find([]blockhash.Seq{blockhash.Seq(rand.Uint64())}, &o)
		}
		return g.Approx.Len() == 0
	})
}

// TestReloadOfEngineConnections: new bounds of engine connections apply to open connections too.
func TestReloadOfEngineConnections(t *testing.T) {
	e := harness.StartSim(t, nil)
	settle := "timeouts: {engine_idle: 1h, engine_age: 0s}\n"
	g := harness.StartReloadRouter(t, settle, e.URL())
	stats := func() upstream.Stats { return g.Fleet.Endpoint(g.Fleet.View().Workers[0].Ranks[0]).Stats() }
	ask := func() int { return harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat("")).Status }
	request := func(more string, paths ...string) {
		t.Helper()
		status, changes, message := g.ReloadWith(more)
		if status != 200 || len(changes) != len(paths) {
			t.Fatalf("%d %v %s", status, changes, message)
		}
		for i, c := range changes {
			if c.Path != paths[i] || c.Effect != config.Applied {
				t.Errorf("%+v, want %s applied", c, paths[i])
			}
		}
	}
	idle := func(n int) {
		t.Helper()
		testwait.UntilWithin(t, 30*time.Second, fmt.Sprintf("%d idle connections", n), func() bool { return stats().Idle == n && stats().Open == n })
	}
	if ask() != 200 {
		t.Fatal("before")
	}
	idle(1)
	request("timeouts: {engine_idle: 1ms, engine_age: 0s}\n", "timeouts.engine_idle")
	idle(0)
	request(settle, "timeouts.engine_idle")
	ask()
	idle(1)
	request("timeouts: {engine_idle: 1h, engine_age: 1ms}\n", "timeouts.engine_age")
	testwait.UntilWithin(t, 30*time.Second, "connections end for their age", func() bool { return ask() == 200 && stats().Aged >= 3 })
	request(settle, "timeouts.engine_age")

	// Two connections are in use, by requests that the engine stalls.
	e.Fault(sim.Fault{Kind: sim.Stall, N: 2})
	ctx, release := context.WithCancel(t.Context())
	var pooled sync.WaitGroup
	for range 2 {
		pooled.Go(func() {
			req, _ := http.NewRequestWithContext(ctx, "POST", g.URL+"/v1/chat/completions", strings.NewReader(harness.Chat("")))
			req.Header.Set("Content-Type", "application/json")
			if resp, err := http.DefaultClient.Do(req); err == nil {
				resp.Body.Close()
			}
		})
	}
	testwait.UntilWithin(t, 30*time.Second, "two are in flight", func() bool { return stats().Open-stats().Idle == 2 })
	request(settle+"limits: {engine_conns: 2}\n", "limits.engine_conns")
	testwait.UntilWithin(t, 30*time.Second, "a third is one too many", func() bool { return ask() >= 500 })
	request(settle, "limits.engine_conns")
	if status := ask(); status != 200 {
		t.Errorf("within the limit again: %d", status)
	}
	release()
	pooled.Wait()
	request("timeouts: {engine_idle: 1h, engine_age: 0s, connect: 3s}\n", "timeouts.connect")
	if b := g.Fleet.Endpoint(g.Fleet.View().Workers[0].Ranks[0]).Reloadable(); b.ConnectTimeout != 3*time.Second {
		t.Errorf("%+v", b)
	}
}

// TestReloadOfABadFile: an invalid file changes nothing, and the error names the line and column.
func TestReloadOfABadFile(t *testing.T) {
	e := harness.StartSim(t, nil)
	g := harness.StartReloadRouter(t, "cors: {origins: [https://one.example]}\n", e.URL())
	before := g.LiveConfig()
	lines := strings.Count(g.Base, "\n")
	for more, place := range map[string]string{
		"cors: {origins: [https://two.example]}\nlimits: {max_body: -1}\n": fmt.Sprintf("sluice.yaml:%d:20: limits.max_body", lines+2),
		"cors: {origins: [https://two.example]}\nnonsense: 1\n":            fmt.Sprintf("sluice.yaml:%d:1: nonsense", lines+2),
		"cors: {origins: [\n": fmt.Sprintf("sluice.yaml:%d:", lines+1),
	} {
		status, _, message := g.ReloadWith(more)
		if status != 422 || !strings.Contains(message, place) {
			t.Errorf("%q: %d %q, want %s", more, status, message, place)
		}
		if g.LiveConfig() != before {
			t.Errorf("%q changed something", more)
		}
	}
	if a := harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat(""), "Origin", "https://one.example"); a.Status != 200 || a.Header.Get("Access-Control-Allow-Origin") == "" {
		t.Errorf("%d %v", a.Status, a.Header)
	}
	if err := os.WriteFile(g.Path, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Reload(t.Context(), false); err == nil || !strings.Contains(err.Error(), "sluice.yaml:1:1: the file is empty") || g.LiveConfig() != before {
		t.Errorf("emptied: %v", err)
	}
	os.Remove(g.Path)
	if _, err := g.Reload(t.Context(), false); err == nil || !strings.Contains(err.Error(), g.Path) {
		t.Errorf("without its file: %v", err)
	}
}

// TestThousandReloads is point 12 of RELIABILITY.md: reloads under load, a third of them invalid,
// some of them concurrent.
func TestThousandReloads(t *testing.T) {
	e := harness.StartSim(t, nil)
	g := harness.StartReloadRouter(t, "", e.URL())
	n := 1000
	if testing.Short() {
		n = 100
	}
	harness.WantStatus(t, harness.Post(t, g.URL+"/v1/chat/completions", harness.Chat("")), 200)
	var failed, served atomic.Int64
	stop := make(chan struct{})
	var load sync.WaitGroup
	for range 2 {
		load.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				resp, err := http.Post(g.URL+"/v1/chat/completions", "application/json", strings.NewReader(harness.Chat("")))
				if err != nil {
					failed.Add(1)
					continue
				}
				resp.Body.Close()
				if resp.StatusCode != 200 {
					failed.Add(1)
				}
				served.Add(1)
				testwait.Pace(2 * time.Millisecond)
			}
		})
	}
	names, latest := map[string]bool{}, []string(nil) // all series seen; those that the last count saw first
	count := func() (goroutines, series int) {
		var page bytes.Buffer
		g.Metrics.WritePrometheus(&page)
		latest = nil
		for line := range strings.Lines(page.String()) {
			name, _, _ := strings.Cut(line, "{")
			// Series of learned rates appear once the router has learned them, those of waits with the first wait: on a
			// busy machine an engine may have more work than it should for a moment.
			if strings.HasPrefix(name, "sluice_") && !strings.HasPrefix(name, "sluice_admission_") && !(strings.HasPrefix(name, "sluice_rank_") && strings.HasSuffix(name, "_seconds")) {
				series++
				if id, _, _ := strings.Cut(line, " "); !names[id] {
					names[id] = true
					latest = append(latest, id)
				}
			}
		}
		return runtime.NumGoroutine(), series
	}
	round := func(i int) string {
		switch i % 3 {
		case 0:
			return fmt.Sprintf("schedule: {queue_weight: %d}\ntimeouts: {write: %ds}\n", i%7, 20+i%7)
		case 1:
			return fmt.Sprintf("log: {level: warn}\ncors: {origins: [https://a%d.example]}\nmigration: {max_attempts: %d}\n", i%5, 2+i%3)
		}
		return "limits: {max_body: nonsense}\n"
	}
	do := func(from, to int) (bad int64) {
		var wrong atomic.Int64
		for i := from; i < to; i++ {
			harness.WriteFile(t, g.Path, g.Base+round(i))
			var both sync.WaitGroup
			for range 1 + rand.IntN(2) { // sometimes two at once
				both.Go(func() {
					_, err := g.Reload(t.Context(), false)
					if (err != nil) != (i%3 == 2) {
						t.Errorf("reload %d: %v", i, err)
					}
					if err != nil {
						wrong.Add(1)
						if !strings.Contains(err.Error(), fmt.Sprintf("sluice.yaml:%d:20: limits.max_body", strings.Count(g.Base, "\n")+1)) {
							t.Errorf("reload %d: %v", i, err)
						}
					}
				})
			}
			both.Wait()
		}
		return wrong.Load()
	}
	do(0, n/10) // so that everything that is created once exists
	goroutines, series := count()
	began := time.Now()
	bad := do(n/10, n)
	took := time.Since(began)
	close(stop)
	load.Wait()
	harness.DropIdle()
	var g2, s2 int
	testwait.UntilWithin(t, 30*time.Second, "goroutines as before", func() bool {
		g2 = runtime.NumGoroutine()
		return g2 <= goroutines
	})
	_, s2 = count()
	if s2 > series+5 { // a few appear late, independent of reloads: engine reports
		t.Errorf("%d series, %d before; new: %q", s2, series, latest)
	}
	if failed.Load() > 0 {
		t.Errorf("%d of %d requests failed", failed.Load(), served.Load())
	}
	harness.LogFigure(t, 12, "%d reloads, %d of them refused with line and column, under %d requests, none failed; goroutines %d -> %d, series %d -> %d, %.1f ms a reload", n, bad, served.Load(), goroutines, g2, series, s2, took.Seconds()*1000/float64(n-n/10))
}
