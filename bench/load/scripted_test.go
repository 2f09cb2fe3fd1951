package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sluice/bench/testwait"
)

// script is what a scripted engine does with one request, by its header X-Sluice-Tenant and its
// number among those of the tenant.
type script struct {
	wait   time.Duration // before the first token; forever if it is negative
	step   time.Duration // between two tokens
	tokens int
	prompt int
	cached int
	status int // a refusal, if not 0
}

// scripted is an engine on pipes, for tests in a bubble, where its delays are exact.
type scripted struct {
	plan  func(tenant string, n int, r *http.Request, body []byte) script
	mu    sync.Mutex
	count map[string]int
	pipes chan net.Conn
}

func (e *scripted) Accept() (net.Conn, error) {
	c, ok := <-e.pipes
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (e *scripted) Close() error   { return nil }
func (e *scripted) Addr() net.Addr { return &net.TCPAddr{} }

func (e *scripted) dial() (net.Conn, error) {
	client, server := net.Pipe()
	e.pipes <- server
	return client, nil
}

func (e *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	tenant := r.Header.Get("X-Sluice-Tenant")
	e.mu.Lock()
	n := e.count[tenant]
	e.count[tenant]++
	s := e.plan(tenant, n, r, body)
	e.mu.Unlock()
	if s.status != 0 {
		testwait.Pace(s.wait)
		w.Header().Set("Retry-After", "1")
		http.Error(w, fmt.Sprintf("busy, wait %d.5s", n), s.status)
		return
	}
	if s.wait < 0 {
		<-r.Context().Done()
		return
	}
	send := func(event string) {
		fmt.Fprintf(w, "data: %s\n\n", event)
		w.(http.Flusher).Flush()
	}
	for i := range s.tokens {
		if i == 0 {
			testwait.Pace(s.wait)
		} else {
			testwait.Pace(s.step)
		}
		send(fmt.Sprintf(`{"choices":[{"text":"w%d","token_ids":[%d]}]}`, i, 1000*n+i))
	}
	send(fmt.Sprintf(`{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`, s.prompt, s.tokens, s.cached))
	send("[DONE]")
}

// runScripted runs a load against a scripted engine, in the time of a bubble.
func runScripted(t *testing.T, o Options, plan func(tenant string, n int, r *http.Request, body []byte) script) (rep *Report, results []Result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		e := &scripted{plan: plan, count: map[string]int{}, pipes: make(chan net.Conn)}
		srv := &http.Server{Handler: e}
		served := make(chan struct{})
		go func() { srv.Serve(e); close(served) }()
		var mu sync.Mutex
		o.dial = e.dial
		o.OnResult = func(r Result) { mu.Lock(); results = append(results, r); mu.Unlock() }
		var err error
		if rep, err = Run(t.Context(), o, nil); err != nil {
			t.Fatal(err)
		}
		close(e.pipes) // Shutdown waits for Accept
		if err := srv.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		<-served
	})
	return rep, results
}

func completions(sources ...Source) Options {
	o := Default()
	o.Endpoint, o.TokenIDs, o.Sources, o.PromptTokens = "completions", true, sources, 20
	return o
}

// near compares latencies in milliseconds: histograms have three digits.
func near(got, want float64) bool { return math.Abs(got-want) <= 0.002*want+0.002 }

// quantile is the smallest value that at least the share q of the values does not exceed.
func quantile(values []float64, q float64) float64 {
	slices.Sort(values)
	return values[max(0, int(math.Ceil(q*float64(len(values))))-1)]
}

// TestReportIsWhatTheEngineDid: two tenants with targets, and an engine that is in time, late at
// the first token, slow at the others, refuses and hangs, by a script. The report must have each
// tenant's goodput, quantiles and tokens, which the test counts from the script.
func TestReportIsWhatTheEngineDid(t *testing.T) {
	sources := []Source{
		{Tenant: "a", Class: "high", Rate: 40, TTFT: 200 * time.Millisecond, TPOT: 20 * time.Millisecond},
		{Tenant: "b", Class: "low", Rate: 25, TTFT: 500 * time.Millisecond},
	}
	scripts := map[string][]script{
		"a": {
			{wait: 100 * time.Millisecond, step: 10 * time.Millisecond, tokens: 11, prompt: 300, cached: 256},
			{wait: 300 * time.Millisecond, step: 10 * time.Millisecond, tokens: 5, prompt: 100},               // late
			{wait: 150 * time.Millisecond, step: 30 * time.Millisecond, tokens: 5, prompt: 100, cached: 16},   // slow
			{wait: 200 * time.Millisecond, step: 20 * time.Millisecond, tokens: 21, prompt: 40, cached: 0},    // just in time
			{wait: 3 * time.Millisecond, status: 429},                                                         // refused
			{wait: 50 * time.Millisecond, step: 10 * time.Millisecond, tokens: 1, prompt: 7},                  // one token has no TPOT
			{wait: 199 * time.Millisecond, step: 20500 * time.Microsecond, tokens: 3, prompt: 16, cached: 16}, // a bit slow
		},
		"b": {
			{wait: 400 * time.Millisecond, step: 90 * time.Millisecond, tokens: 4, prompt: 64, cached: 32}, // no TPOT target
			{wait: 501 * time.Millisecond, step: 10 * time.Millisecond, tokens: 4, prompt: 64},             // late
			{wait: -1}, // hangs
			{wait: time.Millisecond, status: 503},
		},
	}
	const limit = 2 * time.Second
	type expected struct {
		Group
		ttft, tpot, refusal []float64
	}
	want := map[string]*expected{"a": {}, "b": {}}
	targets := map[string]Source{"a": sources[0], "b": sources[1]}
	millis := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	o := completions(sources...)
	o.Duration, o.Timeout = 10*time.Second, limit
	rep, _ := runScripted(t, o, func(tenant string, n int, r *http.Request, body []byte) script {
		if got := r.Header.Get("X-Sluice-Priority"); got != targets[tenant].Class {
			t.Errorf("tenant %s: X-Sluice-Priority %q, want %q", tenant, got, targets[tenant].Class)
		}
		if got, ms := r.Header.Get("x-llm-d-slo-ttft-ms"), strconv.FormatInt(targets[tenant].TTFT.Milliseconds(), 10); got != ms {
			t.Errorf("tenant %s: x-llm-d-slo-ttft-ms %q, want %s", tenant, got, ms)
		}
		s := scripts[tenant][n%len(scripts[tenant])]
		w := want[tenant]
		w.Requests++
		switch {
		case s.status != 0:
			w.Refused++
			w.refusal = append(w.refusal, millis(s.wait))
			return s
		case s.wait < 0:
			w.Unanswered++
			w.ttft = append(w.ttft, millis(limit))
			return s
		}
		w.OK++
		w.ttft = append(w.ttft, millis(s.wait))
		if s.tokens > 1 {
			w.tpot = append(w.tpot, millis(s.step))
		}
		if s.wait <= targets[tenant].TTFT && (targets[tenant].TPOT == 0 || s.tokens == 1 || s.step <= targets[tenant].TPOT) {
			w.Good++
		}
		w.PromptTokens += int64(s.prompt)
		w.CachedTokens += int64(s.cached)
		w.OutputTokens += int64(s.tokens)
		return s
	})
	var sum, squares float64
	for tenant, w := range want {
		got := rep.ByTenant[tenant]
		counts := func(g Group) string {
			return fmt.Sprintf("%d requests, %d ok, %d good, %d refused, %d unanswered, %d failed, %d dropped, %d prompt, %d cached, %d output", g.Requests, g.OK, g.Good, g.Refused, g.Unanswered, g.Failed, g.Dropped, g.PromptTokens, g.CachedTokens, g.OutputTokens)
		}
		if counts(got) != counts(w.Group) {
			t.Errorf("tenant %s:\n%s; the engine did\n%s", tenant, counts(got), counts(w.Group))
		}
		for _, c := range []struct {
			name string
			got  float64
			want float64
		}{
			{"TTFT p50", got.TTFT.P50, quantile(w.ttft, 0.5)}, {"TTFT p90", got.TTFT.P90, quantile(w.ttft, 0.9)},
			{"TTFT p99", got.TTFT.P99, quantile(w.ttft, 0.99)}, {"TTFT max", got.TTFT.Max, quantile(w.ttft, 1)},
			{"TPOT p50", got.TPOT.P50, quantile(w.tpot, 0.5)}, {"TPOT p99", got.TPOT.P99, quantile(w.tpot, 0.99)},
			{"refusal p50", got.Refusal.P50, quantile(w.refusal, 0.5)},
			{"goodput", got.Goodput, float64(w.Good) / rep.WindowSeconds},
		} {
			if !near(c.got, c.want) {
				t.Errorf("tenant %s: %s is %v; the engine did %v", tenant, c.name, c.got, c.want)
			}
		}
		computed := float64(w.PromptTokens - w.CachedTokens + w.OutputTokens)
		if got.ServedComputed != int64(computed) {
			t.Errorf("tenant %s: %d computed tokens, want %.0f", tenant, got.ServedComputed, computed)
		}
		sum, squares = sum+computed, squares+computed*computed
	}
	if jain := sum * sum / (2 * squares); !near(rep.Fairness, jain) {
		t.Errorf("fairness %v, want %v", rep.Fairness, jain)
	}
	if w := want["a"]; w.Requests < 390 || w.Requests > 401 || rep.ByClass["high"].Good != w.Good || rep.BySource["a"].OK != w.OK {
		t.Errorf("the engine got %d requests of a, which sends 40 a second for 10 s; by class %+v", w.Requests, rep.ByClass["high"])
	}
	if len(rep.Errors) != 3 {
		t.Errorf("errors %v; want one kind for each status, whatever its numbers, and the timeout", rep.Errors)
	}
	if all := rep.Overall; all.Good != want["a"].Good+want["b"].Good || all.Refused != rep.Overall.Refusal.Count {
		t.Errorf("overall %+v; want the sum of both tenants", all)
	}
}

// TestWindow: only requests that are due in the measured time count, a request that is unanswered
// at the end of the cool-down is cut off and counts, and the rates are of what ended in that time.
func TestWindow(t *testing.T) {
	o := completions(Source{Tenant: "a", Rate: 10, TTFT: time.Second})
	o.Warmup, o.Duration, o.Cooldown, o.Timeout = 2*time.Second, 3*time.Second, time.Second, time.Minute
	var inWindow int64
	began := time.Time{}
	rep, results := runScripted(t, o, func(_ string, n int, _ *http.Request, _ []byte) script {
		if n == 0 {
			began = time.Now()
		}
		if n%10 == 5 {
			return script{wait: -1}
		}
		// Ends 50 ms after its arrival.
		if end := time.Since(began) + 50*time.Millisecond; end >= 1900*time.Millisecond && end < 4900*time.Millisecond {
			inWindow++
		}
		return script{wait: 40 * time.Millisecond, step: 10 * time.Millisecond, tokens: 2, prompt: 10}
	})
	g := rep.Overall
	if g.Requests != 30 || g.Unanswered != 3 || g.Good != 27 || rep.Requests != 30 {
		t.Errorf("%d requests, %d unanswered, %d good; want 30, 3 and 27: 10 a second for 3 s of which one in ten hangs", g.Requests, g.Unanswered, g.Good)
	}
	if len(results) < 55 || len(results) > 60 {
		t.Errorf("%d requests were sent; want about 60, in 6 s", len(results))
	}
	if g.Served != inWindow || !near(g.OutputPerSec, float64(2*inWindow)/3) || rep.WindowSeconds != 3 {
		t.Errorf("%d served in %v s, %v output tokens a second; the engine ended %d in 3 s", g.Served, rep.WindowSeconds, g.OutputPerSec, inWindow)
	}
	if !near(rep.Seconds, 6) {
		t.Errorf("the run took %v s; want 6: the cut ends requests that hang", rep.Seconds)
	}
	// The requests that hang were due at 2.6, 3.6 and 4.6 s, and are cut off at 6 s.
	if !near(g.TTFT.P50, 40) || !near(g.TTFT.Max, 3400) {
		t.Errorf("TTFT p50 %v ms, max %v; want 40, and 3400: a request that is cut off counts with its wait", g.TTFT.P50, g.TTFT.Max)
	}
}

// TestDroppedRequestsCount: requests beyond the bound of outstanding ones are not sent, and are
// part of what was due.
func TestDroppedRequestsCount(t *testing.T) {
	o := completions(Source{Tenant: "a", Rate: 10}, Source{Tenant: "b", Rate: 10})
	o.Duration, o.MaxInFlight, o.Timeout = 4*time.Second, 8, 10*time.Second
	rep, _ := runScripted(t, o, func(string, int, *http.Request, []byte) script {
		return script{wait: 5 * time.Second, tokens: 1}
	})
	if g := rep.Overall; g.OK != 8 || g.Requests < 76 || g.Requests > 82 || g.Dropped != g.Requests-8 || rep.Dropped != g.Dropped {
		t.Errorf("%d due, %d ok, %d dropped (%d); want about 80, 8 and the rest", g.Requests, g.OK, g.Dropped, rep.Dropped)
	}
}

// TestSourcesAreIndependent: a source sends the same requests at the same times whatever other
// sources there are, and exponential intervals have their mean.
func TestSourcesAreIndependent(t *testing.T) {
	type arrival struct {
		at   time.Duration
		body string
	}
	arrivals := func(sources ...Source) (list []arrival) {
		o := completions(sources...)
		o.Poisson, o.Duration = true, 100*time.Second
		var began time.Time
		runScripted(t, o, func(tenant string, n int, _ *http.Request, body []byte) script {
			if tenant == "a" {
				if began.IsZero() {
					began = time.Now()
				}
				list = append(list, arrival{time.Since(began), string(body)})
			}
			return script{tokens: 1}
		})
		return list
	}
	a := Source{Tenant: "a", Rate: 5, Spread: 0.7, Priority: -2}
	alone, together := arrivals(a), arrivals(a, Source{Tenant: "b", Rate: 20})
	if !slices.Equal(alone, together) {
		t.Errorf("%d requests alone, %d with another source; some differ", len(alone), len(together))
	}
	if n := len(alone); n < 430 || n > 570 {
		t.Errorf("%d requests in 100 s at a mean of 5 a second", n)
	}
	short, lengths := 0, 0
	for i, r := range alone {
		if i > 0 && r.at-alone[i-1].at < 100*time.Millisecond {
			short++ // of exponential intervals with a mean of 200 ms, 39 % are
		}
		var body struct {
			Prompt   []uint32
			Priority int
		}
		if err := json.Unmarshal([]byte(r.body), &body); err != nil || body.Priority != -2 {
			t.Fatalf("priority %d, %v; want -2: %s", body.Priority, err, r.body)
		}
		lengths += len(body.Prompt)
	}
	if share := float64(short) / float64(len(alone)); share < 0.32 || share > 0.47 {
		t.Errorf("%.0f %% of the intervals are below 100 ms; want 39 %%", 100*share)
	}
	if mean := float64(lengths) / float64(len(alone)); mean < 17 || mean > 24 {
		t.Errorf("prompts have %.1f tokens on average; want about 20", mean)
	}
}

// TestAgents: each request of a session has the one before, its answer and a tool's result as its
// prompt, follows the answer after a pause, and repeats when it is refused.
func TestAgents(t *testing.T) {
	o := completions(Source{Name: "coder", Agents: 3, Turns: 4, MaxTurns: 9, PromptTokens: 40, OutputTokens: 3, Grow: 12, Spread: 0.5, Pause: 700 * time.Millisecond, Start: time.Second})
	o.Duration = time.Hour
	type state struct {
		prompt      []uint32
		answer      []uint32
		first, last time.Time // arrival of the first request, end of the last
		turns       int
		final       bool
		pauses      time.Duration
	}
	sessions := map[string]*state{}
	refusals := 0
	rep, _ := runScripted(t, o, func(_ string, n int, r *http.Request, body []byte) script {
		id := r.Header.Get("X-Sluice-Session")
		s := sessions[id]
		if s == nil {
			s = &state{first: time.Now()}
			sessions[id] = s
		}
		if n%7 == 3 {
			refusals++
			return script{status: 429}
		}
		var in struct {
			Prompt []uint32
			Max    int  `json:"max_tokens"`
			IDs    bool `json:"return_token_ids"`
		}
		if err := json.Unmarshal(body, &in); err != nil || !in.IDs {
			t.Errorf("body %.200s: %v; want one that asks for token ids", body, err)
		}
		before := append(slices.Clone(s.prompt), s.answer...)
		if len(in.Prompt) <= len(before) || !slices.Equal(in.Prompt[:len(before)], before) {
			t.Errorf("session %s, turn %d: the prompt of %d tokens does not begin with the %d of the conversation so far", id, s.turns, len(in.Prompt), len(before))
		}
		if s.final {
			t.Errorf("session %s: a request after its last", id)
		}
		s.final = r.Header.Get("X-Sluice-Session-Final") == "true"
		if s.turns > 0 {
			s.pauses += time.Since(s.last)
		}
		s.prompt, s.answer = in.Prompt, nil
		for i := range in.Max {
			s.answer = append(s.answer, uint32(1000*n+i))
		}
		out := script{wait: 30 * time.Millisecond, step: 10 * time.Millisecond, tokens: in.Max, prompt: len(in.Prompt), cached: len(before)}
		s.last = time.Now().Add(out.wait + time.Duration(in.Max-1)*out.step)
		s.turns++
		return out
	})
	if len(sessions) != 3 || rep.Sessions == nil || rep.Sessions.Finished != 3 || rep.Sessions.Unfinished != 0 {
		t.Fatalf("%d sessions, report %+v; want 3 finished", len(sessions), rep.Sessions)
	}
	if rep.Sessions.Retries != int64(refusals) || refusals == 0 || rep.Overall.Refused != 0 {
		t.Errorf("%d retries, %d refused for good; the engine refused %d", rep.Sessions.Retries, rep.Overall.Refused, refusals)
	}
	turns, longest, pauses := 0, 0.0, time.Duration(0)
	for id, s := range sessions {
		if !s.final {
			t.Errorf("session %s: the last request does not say that it is", id)
		}
		if s.turns < 4 || s.turns > 9 {
			t.Errorf("session %s has %d turns; want 4 to 9", id, s.turns)
		}
		turns += s.turns
		pauses += s.pauses
		longest = max(longest, float64(s.last.Sub(s.first))/1e6)
	}
	if rep.OK != int64(turns) || !near(rep.Sessions.Time.Max, longest) {
		t.Errorf("%d answers, the longest session %v ms; the engine had %d and %v", rep.OK, rep.Sessions.Time.Max, turns, longest)
	}
	if mean := pauses / time.Duration(turns-3); mean < 250*time.Millisecond || mean > 2500*time.Millisecond {
		t.Errorf("pauses of %s on average, with the waits after refusals; want about 700 ms", mean)
	}
}

// TestAgentsText: over the other endpoints the answer returns as text, or as the assistant's message.
func TestAgentsText(t *testing.T) {
	for endpoint, check := range map[string]func(body []byte, turn int) error{
		"chat": func(body []byte, turn int) error {
			var in struct {
				Messages []struct{ Role, Content string }
			}
			if err := json.Unmarshal(body, &in); err != nil || len(in.Messages) != 1+2*turn {
				return fmt.Errorf("%d messages, %w", len(in.Messages), err)
			}
			for i, m := range in.Messages {
				if role := []string{"user", "assistant"}[i%2]; m.Role != role || i%2 == 1 && m.Content != "w0w1" {
					return fmt.Errorf("message %d is %+v", i, m)
				}
			}
			return nil
		},
		"completions": func(body []byte, turn int) error {
			var in struct{ Prompt string }
			if err := json.Unmarshal(body, &in); err != nil || len(in.Prompt) == 0 {
				return fmt.Errorf("%.100s: %w", body, err)
			}
			return nil
		},
	} {
		t.Run(endpoint, func(t *testing.T) {
			o := completions(Source{Name: "coder", Agents: 1, Turns: 3, PromptTokens: 5, OutputTokens: 2, Grow: 3})
			o.Endpoint, o.TokenIDs, o.Duration = endpoint, false, time.Hour
			var last []byte
			rep, _ := runScripted(t, o, func(_ string, n int, _ *http.Request, body []byte) script {
				if err := check(body, n); err != nil {
					t.Errorf("turn %d: %v", n, err)
				}
				last = body
				return script{tokens: 2, prompt: 1}
			})
			if rep.Sessions.Finished != 1 || rep.OK != 3 {
				t.Errorf("report %+v", rep)
			}
			if endpoint == "completions" {
				var in struct{ Prompt string }
				json.Unmarshal(last, &in)
				if n := strings.Count(in.Prompt, "w0w1"); n != 2 {
					t.Errorf("the last prompt has %d answers; want 2: %q", n, in.Prompt)
				}
			}
		})
	}
}

func TestSourceErrors(t *testing.T) {
	for spec, want := range map[string]string{
		"rate=x":           `rate is "x"`,
		"rate=1,rate=2":    "rate appears twice",
		"speed=1":          `unknown key "speed"`,
		"ttft=1":           `ttft is "1": want 1ms to 1h`,
		"turns=5-2":        `turns is "5-2"`,
		"tenant=a b":       `tenant is "a b"`,
		"priority=1.5":     `priority is "1.5"`,
		"shared-prefix=-1": `shared-prefix is "-1"`,
	} {
		if _, err := parseSource(spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v; want one with %s", spec, err, want)
		}
	}
	for want, change := range map[string]func(*Options){
		"0 of rate, users and agents": func(o *Options) { o.Sources = []Source{{Name: "x"}} },
		"2 of rate, users and agents": func(o *Options) { o.Sources = []Source{{Name: "x", Rate: 1, Users: 1}} },
		"two --source are named":      func(o *Options) { o.Sources = []Source{{Tenant: "x", Rate: 1}, {Name: "x", Rate: 1}} },
		"a range is for agents":       func(o *Options) { o.Sources = []Source{{Rate: 1, Turns: 2, MaxTurns: 3}} },
		"have no effect":              func(o *Options) { o.Sources, o.Rate = []Source{{Rate: 1}}, 3 },
		"--warmup":                    func(o *Options) { o.Warmup = -1 },
		"--duration":                  func(o *Options) { o.Cooldown, o.Duration, o.Requests = 1, 0, 5 },
	} {
		o := Default()
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v; want one with %q", err, want)
		}
	}
	s, err := parseSource("name=n,rate=2.5,class=c,tenant=t,key=k,priority=-3,deadline=4s,ttft=1500ms,tpot=50ms,prompt=10,output=5,groups=2,shared-prefix=0.25,turns=2-3,spread=1,pause=2s,grow=9,start=1s")
	want := Source{Name: "n", Rate: 2.5, Class: "c", Tenant: "t", Key: "k", Priority: -3, Deadline: 4 * time.Second, TTFT: 1500 * time.Millisecond, TPOT: 50 * time.Millisecond,
		PromptTokens: 10, OutputTokens: 5, Groups: 2, SharedPrefix: 0.25, Turns: 2, MaxTurns: 3, Spread: 1, Pause: 2 * time.Second, Grow: 9, Start: time.Second}
	if err != nil || s != want {
		t.Errorf("parsed %+v, %v; want %+v", s, err, want)
	}
}
