package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// oneAtATime bounds the rank to one request, so that all others wait in the router.
func oneAtATime(c *config.Config) { c.Limits.RankRequests = 1 }

// hang makes an engine hold back all answers until release.
func hang(e *sim.Engine) (release func()) {
	return harness.DelayAnswers(sim.Fault{Path: "/v1/chat"}, e)
}

func waiting(r *harness.Router, class string) int {
	return int(r.Metric(`sluice_admission_waiting_requests{class="` + class + `"}`))
}

// wantEmpty checks that nothing waits and nothing is reserved.
func wantEmpty(t *testing.T, r *harness.Router, engines ...*sim.Engine) {
	t.Helper()
	harness.WantIdle(t, r, 30*time.Second, engines...)
	for _, line := range strings.Split(string(harness.Get(t, r.URL+"/metrics").Body), "\n") {
		if strings.HasPrefix(line, "sluice_admission_waiting") && !strings.HasSuffix(line, " 0") {
			t.Errorf("%s after everything has ended", line)
		}
	}
	for _, k := range r.AllRanks() {
		if a, b, c := k.Pending.Load(), k.PendingWork.Load(), k.Unseen.Load(); a != 0 || b != 0 || c != 0 {
			t.Errorf("rank %s: %d requests pending with %d ns of work, %d unseen; want none", k.ID, a, b, c)
		}
	}
}

// clients send requests without streaming, and record those that do not get a response of an engine.
type clients struct {
	mu      sync.Mutex
	refused []string
	wg      sync.WaitGroup
}

func (o *clients) send(t *testing.T, r *harness.Router, name string, headers ...string) {
	o.wg.Go(func() {
		a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.ChatOf("words of "+name), append(headers, "X-Request-Id", name)...)
		switch {
		case err != nil:
			t.Error(err)
		case a.Status != 200:
			o.mu.Lock()
			defer o.mu.Unlock()
			o.refused = append(o.refused, fmt.Sprintf("%s %d %s", name, a.Status, a.Header.Get("X-Sluice-Reason")))
		}
	})
}

// all returns the requests that were refused so far.
func (o *clients) all() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.refused
}

// wait waits for all responses and returns the requests in the order in which the engine received
// them, and those that were refused.
func (o *clients) wait(e *sim.Engine) (served, refused string) {
	o.wg.Wait()
	return fmt.Sprint(harness.Ids(harness.GenerateRequests(e))), fmt.Sprint(o.refused)
}

// TestClassesTenantsAndTargets: with one place, waiting requests start by class, then in turns by
// tenant, then by target.
func TestClassesTenantsAndTargets(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		oneAtATime(c)
		c.Admission.Trusted = []string{"any"}
		c.Admission.UnmetTarget = "late"
		c.Admission.MinShare, c.Admission.MaxWait = 0, 2*time.Minute
		c.Admission.Classes = []config.AdmissionClass{{Name: "interactive", Priorities: []string{"-9..-1"}}, {Name: "standard", Priorities: []string{"0"}}, {Name: "batch", Priorities: []string{"1..9"}}}
		c.Admission.DefaultClass = "standard"
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	release := hang(e)
	defer release()
	var o clients
	await := func(class string, n int) {
		testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r, class) == n })
	}
	o.send(t, r, "first")
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool {
		return e.Stats().Sum().Running+e.Stats().Sum().Waiting > 0 || len(harness.GenerateRequests(e)) > 0
	})
	o.send(t, r, "batch", "X-Sluice-Priority", "batch")
	await("batch", 1)
	o.send(t, r, "a1", "X-Sluice-Tenant", "a")
	await("standard", 1)
	o.send(t, r, "a2", "x-llm-d-inference-fairness-id", "a")
	await("standard", 2)
	o.send(t, r, "a3", "X-Sluice-Tenant", "a", "X-Sluice-Deadline-Ms", "50000")
	await("standard", 3)
	o.send(t, r, "b1", "X-Sluice-Tenant", "b")
	await("standard", 4)
	o.send(t, r, "number", "X-Sluice-Priority", "-5")
	await("interactive", 1)
	o.send(t, r, "objective", "x-llm-d-inference-objective", "interactive")
	await("interactive", 2)

	const waits, since = `sluice_admission_tenant_waiting_requests{tenant="%s"}`, `sluice_admission_tenant_oldest_wait_seconds{tenant="%s"}`
	for tenant, n := range map[string]float64{"a": 3, "b": 1, "none": 3} {
		if got := r.Metric(fmt.Sprintf(waits, tenant)); got != n {
			t.Errorf("%v requests of tenant %s are reported to wait; want %v", got, tenant, n)
		}
	}
	b := r.Metric(fmt.Sprintf(since, "b")) // first: a busy machine may take longer between the two than between the requests
	if a := r.Metric(fmt.Sprintf(since, "a")); a <= b || b <= 0 {
		t.Errorf("the first requests of a and b are reported to have waited %v s and %v s; want a's longer", a, b)
	}

	const classes, number = "want a class (interactive, standard, batch) or one of its priorities (interactive: -9..-1; standard: 0; batch: 1..9)", "as a decimal number"
	for _, bad := range [][3]string{
		{"X-Sluice-Priority", "urgent", classes}, {"X-Sluice-Priority", "10", classes}, {"X-Sluice-Priority", "99999999999999999999", classes},
		{"X-Sluice-Deadline-Ms", "soon", number}, {"X-Sluice-Deadline-Ms", "0x10p4", number}, {"X-Sluice-Deadline-Ms", "1_000", number}, {"X-Sluice-Deadline-Ms", "0", number},
		{"x-slo-ttft-ms", "-1", number}, {"x-llm-d-slo-tpot-ms", "1e3", number}, {"x-slo-tpot-ms", "5.", number}, {"x-llm-d-slo-ttft-ms", "inf", number},
		{"X-Sluice-Tenant", strings.Repeat("x", 200), "at most 128"},
	} {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), bad[0], bad[1])
		harness.WantReason(t, a, 400, "bad_header")
		if message, _, _ := a.ErrorOf(t); !strings.Contains(message, bad[0]) || !strings.Contains(message, bad[2]) {
			t.Errorf("%s: %s: the error is %q; want the header and %q", bad[0], bad[1], message, bad[2])
		}
	}
	release()
	got, refused := o.wait(e)
	// The tenants take turns. a3 starts first of its tenant's: its deadline is earlier than half of the
	// longest wait, by which requests without targets are ordered.
	if want := "[first number objective a3 b1 a1 a2 batch]"; got != want || refused != "[]" {
		t.Errorf("requests started in the order %s, refused %s; want %s and none", got, refused, want)
	}
	for _, rec := range harness.GenerateRequests(e) {
		for _, h := range rec.Headers {
			if n := strings.ToLower(h.Name); strings.HasPrefix(n, "x-llm-d-") || strings.HasPrefix(n, "x-slo") || strings.HasPrefix(n, "x-sluice-") && n != "x-sluice-via" {
				t.Errorf("the engine received the header %s", h.Name)
			}
		}
	}
	if n := r.Metric(fmt.Sprintf(waits, "a")); n != 0 {
		t.Errorf("%v requests of tenant a are reported to wait after all have ended", n)
	}
	rec := r.Outcome(t, "batch")
	if notes := fmt.Sprint(rec.Notes); !strings.Contains(notes, "admission: waited") || !strings.Contains(notes, "class batch") {
		t.Errorf("the explain record of a request that waited has the notes %s", notes)
	}
	wantEmpty(t, r, e)
}

// TestKeysSelectClasses: without a trusted address, a request may ask for the classes of its key only.
func TestKeysSelectClasses(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	log := filepath.Join(t.TempDir(), "access.log")
	goldKey, plainKey := apikey.New(), apikey.New()
	gold := config.APIKey{Name: "gold", SHA256: apikey.HashOf(goldKey).String(), Classes: []string{"standard", "interactive"}, Weight: 2}
	plain := config.APIKey{Name: "plain", SHA256: apikey.HashOf(plainKey).String()}
	r := harness.StartRouter(t, func(c *config.Config) {
		c.APIKeys = []config.APIKey{gold, plain}
		c.AccessLog.Output = "file:" + log
		c.Admission.Classes = []config.AdmissionClass{{Name: "interactive"}, {Name: "standard"}, {Name: "batch", Models: []string{"sim"}}}
		c.Admission.Classes[0].Priorities = []string{"-10..-1"}
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	for _, c := range []struct{ key, asks, class string }{
		{goldKey, "body", "interactive"}, {plainKey, "body", "batch"},
		{goldKey, "", "standard"}, {goldKey, "interactive", "interactive"}, {goldKey, "batch", "standard"}, {plainKey, "", "batch"}, {plainKey, "interactive", "batch"},
	} {
		headers := []string{"Authorization", "Bearer " + c.key, "X-Request-Id", c.key[len(c.key)-4:] + c.asks, "X-Sluice-Tenant", "other"}
		body := harness.Chat("")
		switch c.asks {
		case "":
		case "body":
			body = harness.Chat(`,"priority":-3`)
		default:
			headers = append(headers, "X-Sluice-Priority", c.asks)
		}
		if a := harness.Post(t, r.URL+"/v1/chat/completions", body, headers...); a.Status != 200 {
			t.Fatalf("%+v: status %d: %s", c, a.Status, a.Body)
		}
		var line map[string]any
		testwait.UntilWithin(t, 10*time.Second, "the access log has the request", func() bool {
			text, _ := os.ReadFile(log)
			for l := range strings.Lines(string(text)) {
				if json.Unmarshal([]byte(l), &line) == nil && line["request_id"] == headers[3] {
					return true
				}
			}
			return false
		})
		if line["class"] != c.class || line["tenant"] != nil {
			t.Errorf("%+v: class %v, tenant %v in the access log; want %s and none", c, line["class"], line["tenant"], c.class)
		}
	}
}

// TestDefaultTargets: the targets of a request are those that it states, else those of its model, else those of
// its class.
func TestDefaultTargets(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	for name, c := range map[string]struct {
		model   config.Model
		headers []string
		want    string
	}{
		"class":   {config.Model{}, nil, "target of the first token 40s, of the time per token 4s"},
		"model":   {config.Model{TTFT: 30 * time.Second, TPOT: 3 * time.Second}, nil, "target of the first token 30s, of the time per token 3s"},
		"both":    {config.Model{TPOT: 3 * time.Second}, nil, "target of the first token 40s, of the time per token 3s"},
		"request": {config.Model{TTFT: 30 * time.Second, TPOT: 3 * time.Second}, []string{"x-llm-d-slo-ttft-ms", "20000", "x-slo-tpot-ms", "2000"}, "target of the first token 20s, of the time per token 2s"},
	} {
		t.Run(name, func(t *testing.T) {
			r := harness.StartRouter(t, func(cfg *config.Config) {
				oneAtATime(cfg)
				cfg.Admission.Trusted = []string{"any"}
				cfg.Admission.Classes = []config.AdmissionClass{{Name: "default", TTFT: 40 * time.Second, TPOT: 4 * time.Second, Deadline: time.Minute}}
				cfg.Models = map[string]config.Model{"sim": c.model}
			}, harness.SimWorker(e, worker.Aggregated, "a"))
			rank := r.AllRanks()[0]
			rank.Requests.Add(1)
			id := "targets-" + name
			ended := make(chan *harness.Answer, 1)
			go func() {
				a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.Chat(`,"stream":true`), append(c.headers, "X-Request-Id", id)...)
				if err != nil {
					t.Error(err)
				}
				ended <- a
			}()
			testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r, "default") == 1 })
			rank.Requests.Add(-1)
			if a := <-ended; a == nil || a.Status != 200 {
				t.Fatalf("answered %+v", a)
			}
			if notes := fmt.Sprint(r.Outcome(t, id).Notes); !strings.Contains(notes, c.want) {
				t.Errorf("the explain record has the notes %s; want %q", notes, c.want)
			}
		})
	}
	for _, rec := range harness.GenerateRequests(e) {
		for _, h := range rec.Headers {
			if n := strings.ToLower(h.Name); strings.HasPrefix(n, "x-llm-d-") || strings.HasPrefix(n, "x-slo") {
				t.Errorf("the engine received the header %s", h.Name)
			}
		}
	}
	for name, deadlines := range map[string][2]time.Duration{"class": {300 * time.Millisecond, 0}, "model": {time.Hour, 300 * time.Millisecond}} {
		r := harness.StartRouter(t, func(cfg *config.Config) {
			oneAtATime(cfg)
			cfg.Admission.Classes = []config.AdmissionClass{{Name: "default", Deadline: deadlines[0]}}
			cfg.Models = map[string]config.Model{"sim": {Deadline: deadlines[1]}}
		}, harness.SimWorker(e, worker.Aggregated, "a"))
		rank := r.AllRanks()[0]
		rank.Requests.Add(1)
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		rank.Requests.Add(-1)
		if a.Status != 504 && a.Header.Get("X-Sluice-Reason") != "target_unmet" {
			t.Errorf("deadline of the %s: status %d, reason %s; want an end after 300ms", name, a.Status, a.Header.Get("X-Sluice-Reason"))
		}
	}
}

// TestFullQueue: the queue's bounds refuse with a reason and Retry-After; a higher class takes the
// place of a lower one; a wait ends after max_wait.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		oneAtATime(c)
		c.Admission.Trusted = []string{"any"}
		c.Admission.MaxRequests = 2
		c.Admission.Classes = []config.AdmissionClass{{Name: "high"}, {Name: "low"}}
		c.Admission.DefaultClass = "low"
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	release := hang(e)
	defer release()
	var o clients
	o.send(t, r, "first")
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
	o.send(t, r, "low1")
	testwait.UntilWithin(t, 20*time.Second, "one waits", func() bool { return waiting(r, "low") == 1 })
	o.send(t, r, "low2")
	testwait.UntilWithin(t, 20*time.Second, "two wait", func() bool { return waiting(r, "low") == 2 })
	began := time.Now()
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	harness.WantReason(t, a, 429, "admission_queue_full")
	if message, _, _ := a.ErrorOf(t); a.Header.Get("Retry-After") == "" || !strings.Contains(message, "at most 2 requests may wait (admission.max_requests)") {
		t.Errorf("a refusal with Retry-After %q and the message %q; want a time, and the bound that is reached", a.Header.Get("Retry-After"), message)
	}
	t.Logf("refused within %v", time.Since(began))
	o.send(t, r, "high", "X-Sluice-Priority", "high")
	testwait.UntilWithin(t, 20*time.Second, "the higher class has a place", func() bool { return waiting(r, "high") == 1 && waiting(r, "low") == 1 })
	release()
	if served, refused := o.wait(e); served != "[first high low1]" || refused != "[low2 429 admission_queue_full]" {
		t.Errorf("served %s, refused %s; want first, high and low1 served, and low2 refused", served, refused)
	}
	if notes := fmt.Sprint(r.Outcome(t, "low2").Notes); !strings.Contains(notes, "admission: refused") || !strings.Contains(notes, "(admission.max_requests)") {
		t.Errorf("the explain record of a displaced request has the notes %s", notes)
	}
	wantEmpty(t, r, e)
}

// TestWaitEnds: max_wait, a deadline and a disconnect end a wait.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		oneAtATime(c)
		c.Admission.Classes = []config.AdmissionClass{{Name: "brief", MaxWait: 300 * time.Millisecond}, {Name: "long"}}
		c.Admission.Trusted, c.Admission.DefaultClass = []string{"any"}, "long"
	}, harness.SimWorker(e, worker.Aggregated, "a"))
	release := hang(e)
	defer release()
	var o clients
	o.send(t, r, "first")
	testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
	harness.WantReason(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Priority", "brief"), 429, "admission_timeout")
	late := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Deadline-Ms", "300.5")
	harness.WantReason(t, late, 504, "deadline")
	if message, _, _ := late.ErrorOf(t); !strings.Contains(message, "within 301ms (X-Sluice-Deadline-Ms)") {
		t.Errorf("the error at the deadline is %q; want the header and its value", message)
	}

	var left []time.Duration
	for range 5 {
		c := harness.StartRequest(t, r, "leaves", harness.Chat(""))
		testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r, "long") == 1 })
		at := c.Disconnect()
		testwait.UntilWithin(t, 20*time.Second, "it has left the queue", func() bool { return waiting(r, "long") == 0 })
		left = append(left, time.Since(at))
	}
	if m := testwait.Median(left...); m > 100*time.Millisecond {
		t.Errorf("a client that disconnected left the queue after %v (%v); want at most 100ms", m, left)
	}
	release()
	o.wg.Wait()
	if n := len(harness.GenerateRequests(e)); n != 1 {
		t.Errorf("the engine received %d requests; want the first alone", n)
	}
	wantEmpty(t, r, e)
}

// TestSoakWithFullQueue: disconnects, lost workers and reloads while the queue is full. In the end all counters
// are zero, and every request has ended.
func TestSoakWithFullQueue(t *testing.T) {
	for name, roles := range map[string][]string{"whole": {"aggregated", "aggregated"}, "two legs": {"prefill", "decode", "decode"}} {
		t.Run(name, func(t *testing.T) { soakWithFullQueue(t, roles) })
	}
}

// soakWithFullQueue loses one worker of the roles after the other.
func soakWithFullQueue(t *testing.T, roles []string) {
	rounds := 3
	if os.Getenv("SLUICE_SOAK") != "" {
		rounds = 40
	}
	var engines []*sim.Engine
	workers := ""
	for i, role := range roles {
		e := harness.StartSim(t, func(o *sim.Options) {
			slowPrefill(o)
			o.Speed, o.Role = 4, role
		})
		engines = append(engines, e)
		workers += fmt.Sprintf("  - {id: w%d, url: %s, role: %s}\n", i, e.URL(), role)
	}
	path := filepath.Join(t.TempDir(), "sluice.yaml")
	write := func(i int) {
		harness.WriteFile(t, path, fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: off}\nworkers:\n%sadmission:\n  max_requests: %d\n  max_wait: 5s\n  trusted: [any]\n  classes:\n    - {name: high}\n    - {name: low, min_share: 0.%d}\n",
			workers, 60+i%3*20, 1+i%3))
	}
	write(0)
	r := harness.LaunchConfigured(t, path)
	r.AwaitReady(t)
	var sent, ended, disconnected atomic.Int64
	var mu sync.Mutex
	outcomes := map[string]int{}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for i := range 150 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithCancel(context.Background())
				if (i+n)%5 == 0 {
					time.AfterFunc(time.Duration(20+(i*37+n*11)%400)*time.Millisecond, cancel)
				}
				sent.Add(1)
				s, err := stream(ctx, r.URL, i*1000+n, "X-Sluice-Priority", []string{"high", "low"}[i%2], "X-Sluice-Tenant", fmt.Sprint("t", i%7))
				if err != nil {
					disconnected.Add(1)
				}
				cancel()
				ended.Add(1)
				mu.Lock()
				outcomes[fmt.Sprint(s.status, " ", s.reason)]++
				mu.Unlock()
				if s.status == 429 || s.status == http.StatusServiceUnavailable {
					testwait.Pace(50 * time.Millisecond)
				}
			}
		})
	}
	for i := range rounds {
		testwait.UntilWithin(t, 30*time.Second, "the queue is full", func() bool { return waiting(r, "high")+waiting(r, "low") > 30 })
		write(i + 1)
		if _, err := r.Reload(context.Background(), false); err != nil {
			t.Fatal(err)
		}
		if left, err := r.Reload(context.Background(), true); err != nil || len(left) > 0 {
			t.Errorf("not in effect after a reload: %v, %v", left, err)
		}
		lost, id := engines[i%len(engines)], fmt.Sprintf("w%d", i%len(engines))
		lost.Crash()
		testwait.UntilWithin(t, 30*time.Second, "the worker is lost", func() bool { return r.State(id) != worker.Ready })
		testwait.Holds(t, 300*time.Millisecond, "the worker is lost", func() bool { return r.State(id) != worker.Ready })
		lost.Restart()
		testwait.UntilWithin(t, 30*time.Second, "the worker is back", func() bool { return r.State(id) == worker.Ready })
	}
	close(stop)
	wg.Wait()
	t.Logf("%d requests, %d disconnected: %v", sent.Load(), disconnected.Load(), outcomes)
	if outcomes["200 "] == 0 || disconnected.Load() == 0 || ended.Load() != sent.Load() {
		t.Errorf("%d of %d requests ended, %d disconnected: %v", ended.Load(), sent.Load(), disconnected.Load(), outcomes)
	}
	wantEmpty(t, r, engines...)
}

// TestPrefillOnlyWaits: a prefill-only request waits in the queue for a rank that computes prompts, on
// prefill workers and on those that serve whole requests, and leaves it with its client.
func TestPrefillOnlyWaits(t *testing.T) {
	t.Parallel()
	for name, role := range map[string]worker.Role{"whole": worker.Aggregated, "prefill": worker.Prefill} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := harness.StartSim(t, nil)
			engines, workers := []*sim.Engine{e}, []config.Worker{harness.SimWorker(e, role, "a")}
			if role == worker.Prefill {
				d := harness.StartSim(t, nil)
				engines, workers = append(engines, d), append(workers, harness.SimWorker(d, worker.Decode, "d"))
			}
			r := harness.StartRouter(t, func(c *config.Config) {
				if oneAtATime(c); role == worker.Prefill {
					c.PD.Family = "nixl"
				}
			}, workers...)
			release := hang(e)
			defer release()
			var o clients
			o.send(t, r, "first", "X-Sluice-Prefill-Only", "true")
			testwait.UntilWithin(t, 20*time.Second, "the first is in the engine", func() bool { return len(harness.GenerateRequests(e)) > 0 })
			ctx, leave := context.WithCancel(context.Background())
			left := make(chan struct{})
			go func() {
				defer close(left)
				_, _ = harness.TryPost(ctx, r.URL+"/v1/chat/completions", harness.ChatOf("words"), "X-Sluice-Prefill-Only", "true")
			}()
			testwait.UntilWithin(t, 20*time.Second, "the second waits", func() bool { return waiting(r, "default") == 1 })
			leave()
			<-left
			testwait.UntilWithin(t, 20*time.Second, "it has left", func() bool { return waiting(r, "default") == 0 })
			o.send(t, r, "third", "X-Sluice-Prefill-Only", "true")
			testwait.UntilWithin(t, 20*time.Second, "the third waits", func() bool { return waiting(r, "default") == 1 })
			release()
			if served, refused := o.wait(e); served != "[first third]" || refused != "[]" {
				t.Errorf("the engine served %s, refused were %s; want the first and the third", served, refused)
			}
			wantEmpty(t, r, engines...)
		})
	}
}
