package migration

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// preempting lets requests of the class high suspend streams of the classes below, on ranks that run one
// request at a time.
func preempting(c *config.Config) {
	c.Limits.RankRequests = 1
	c.Timeouts.StreamIdle = 10 * time.Second
	a := &c.Admission
	a.Preemption, a.MaxPreemptions, a.PreemptionInterval = true, 100, 0
	a.Trusted, a.DefaultClass = []string{"any"}, "low"
	a.Classes = []config.AdmissionClass{{Name: "high"}, {Name: "middle"}, {Name: "low"}}
}

var chatCase = harness.EndpointCase{Name: "chat", Path: "/v1/chat/completions", Body: `"messages":[{"role":"user","content":"go on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, Read: readOpenAIStream}

func classMetric(m *harness.Router, name, class string) int {
	return int(m.Metric(name + `{class="` + class + `"}`))
}

// slowStreams makes engines generate tokens of the requests whose ids begin so at a pace at which a test
// can act between them.
func slowStreams(id string, pace time.Duration, engines ...*sim.Engine) {
	for _, e := range engines {
		e.Fault(sim.Fault{Kind: sim.Slow, ID: id, Delay: pace})
	}
}

// sendAsync sends a request and returns its response later.
func sendAsync(t *testing.T, url, body string, headers ...string) <-chan *harness.Answer {
	t.Helper()
	got := make(chan *harness.Answer, 1)
	go func() {
		a, err := harness.TryPost(context.Background(), url, body, headers...)
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	return got
}

func receive(t *testing.T, got <-chan *harness.Answer, what string) *harness.Answer {
	t.Helper()
	select {
	case a := <-got:
		if a == nil {
			t.Fatal("no response: " + what)
		}
		return a
	case <-time.After(60 * time.Second):
		t.Fatal("no response within a minute: " + what)
	}
	return nil
}

func generated(engines ...*sim.Engine) (n int) {
	for _, e := range engines {
		n += int(e.Stats().Sum().GeneratedTokens)
	}
	return n
}

// TestPreemptedStreamsAreExact: on every endpoint, a stream that is suspended again and again equals an
// undisturbed one, and each request that suspends it is answered long before its end.
func TestPreemptedStreamsAreExact(t *testing.T) {
	t.Parallel()
	for _, f := range append([]harness.EndpointCase{chatCase}, endpointCases...) {
		if strings.Contains(f.Name, "to the end") {
			continue // the stream may end before it is suspended
		}
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, &f, 1, preempting)
			slowStreams("low", 4*time.Millisecond, m.Engines...)
			body := f.Request(60, true)
			want := f.Read(harness.Post(t, m.Reference.URL()+f.Path, body))
			got := sendAsync(t, m.URL+f.Path, body, "X-Request-Id", "low")
			rounds := 4
			if strings.Contains(f.Name, "before ids") {
				rounds = 1 // the engine that continues the stream reports no ids, and its text is not kept
			}
			for i := range rounds {
				more := generated(m.Engines...) + 1 + rand.IntN(8)
				testwait.UntilWithin(t, 10*time.Second, "the stream goes on", func() bool { return generated(m.Engines...) >= more })
				a := harness.Post(t, m.URL+f.Path, f.Request(4, false), "X-Request-Id", fmt.Sprint("high", i), "X-Sluice-Priority", "high")
				if a.Status != 200 {
					t.Fatalf("status %d: %s", a.Status, a.Body)
				}
				select {
				case <-got:
					t.Fatalf("the stream ended before request %d was answered", i)
				default:
				}
			}
			m.WantSameRecord(t, f.Name, &f, receive(t, got, "the suspended stream"), want)
			harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
			if n := classMetric(m.Router, "sluice_admission_preemptions_total", "low"); n != rounds {
				t.Errorf("%d suspensions are counted, want %d", n, rounds)
			}
			if n := int(m.Metric(`sluice_admission_suspensions_ended_total{class="low",outcome="resumed"}`)); n != rounds {
				t.Errorf("%d ends of suspensions are counted, want %d", n, rounds)
			}
			if notes := fmt.Sprint(m.Outcome(t, "low").Notes); strings.Count(notes, "suspended: d0/0 after ") != rounds {
				t.Errorf("the explain record of the stream has the notes %s", notes)
			}
			if notes := fmt.Sprint(m.Outcome(t, "high0").Notes); !strings.Contains(notes, "was requested") {
				t.Errorf("the explain record of the request has the notes %s", notes)
			}
		})
	}
}

// TestOtherStreamsAreNotPreempted: a request waits for streams that cannot move, for those of its own
// class or a higher one, and for those that have been suspended as often as they may be.
func TestOtherStreamsAreNotPreempted(t *testing.T) {
	t.Parallel()
	for name, k := range map[string]struct {
		extra, class, asks string
		mod                func(*config.Config)
		most               int
	}{
		"log-probabilities": {extra: `,"logprobs":true`, class: "low", asks: "high"},
		"tools":             {extra: `,"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]`, class: "low", asks: "high"},
		"its own class":     {class: "middle", asks: "middle"},
		"a higher class":    {class: "high", asks: "middle"},
		"off":               {class: "low", asks: "high", mod: func(c *config.Config) { c.Admission.Preemption = false }},
		"too often":         {class: "low", asks: "high", mod: func(c *config.Config) { c.Admission.MaxPreemptions = 1 }, most: 1},
		"too soon":          {class: "low", asks: "high", mod: func(c *config.Config) { c.Admission.PreemptionInterval = time.Hour }, most: 1},
		"queue full":        {class: "low", asks: "high", mod: func(c *config.Config) { c.Admission.MaxRequests = 1 }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mods := preempting
			if k.mod != nil {
				mods = harness.AllOf(preempting, k.mod)
			}
			m := harness.StartMigrationFleet(t, false, 1, mods)
			slowStreams("stream", 4*time.Millisecond, m.Engines...)
			body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":60` + k.extra + `}`
			undisturbed := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body)
			got := sendAsync(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "stream", "X-Sluice-Priority", k.class)
			for i := range k.most + 1 {
				more := generated(m.Engines...) + 4
				testwait.UntilWithin(t, 10*time.Second, "the stream goes on", func() bool { return generated(m.Engines...) >= more })
				if a := harness.Post(t, m.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", fmt.Sprint("asks", i), "X-Sluice-Priority", k.asks); a.Status != 200 {
					t.Fatalf("status %d: %s", a.Status, a.Body)
				}
			}
			a := receive(t, got, "the stream")
			if string(a.Body) == "" || harness.ReadStreamContent(a).Text != harness.ReadStreamContent(undisturbed).Text {
				t.Errorf("the stream has the text %q", harness.ReadStreamContent(a).Text)
			}
			if n := classMetric(m.Router, "sluice_admission_preemptions_total", k.class); n != k.most {
				t.Errorf("%d suspensions, want %d", n, k.most)
			}
			if n := len(harness.GenerateRequests(m.Engines[0])); n != 2+2*k.most {
				t.Errorf("the engine received %d requests, want %d", n, 2+2*k.most)
			}
			harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
		})
	}
}

// TestFewestStreamsArePreempted: of several ranks the one is chosen where one stream suffices, and of its
// streams one of the lowest class, although another began later.
func TestFewestStreamsArePreempted(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 1, func(c *config.Config) { preempting(c); c.Limits.RankRequests = 3 })
	slowStreams("stream", 4*time.Millisecond, m.Engines...)
	body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"go on"}],"ignore_eos":true,"max_tokens":150}`
	undisturbed := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body)
	var all []<-chan *harness.Answer
	for i, class := range []string{"low", "middle", "high"} {
		all = append(all, sendAsync(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "stream-"+class, "X-Sluice-Priority", class))
		testwait.UntilWithin(t, 10*time.Second, "it runs", func() bool { return m.Engines[0].Stats().Sum().Running == i+1 })
	}
	if a := harness.Post(t, m.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Priority", "high"); a.Status != 200 {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	for _, got := range all {
		harness.WantSameContent(t, receive(t, got, "a stream"), undisturbed)
	}
	for class, n := range map[string]int{"low": 1, "middle": 0, "high": 0} {
		if got := classMetric(m.Router, "sluice_admission_preemptions_total", class); got != n {
			t.Errorf("%d streams of class %s were suspended, want %d", got, class, n)
		}
	}
	harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
}

// suspended starts a stream and suspends it by a request whose response the engine withholds until
// release. It returns the lines of the stream.
func suspended(t *testing.T, m *harness.MigrationFleet, headers ...string) (lines *bufio.Scanner, disconnect func(), release func()) {
	t.Helper()
	release = harness.DelayAnswers(sim.Fault{ID: "high"}, m.Engines...)
	t.Cleanup(release)
	slowStreams("low", 4*time.Millisecond, m.Engines...)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, "POST", m.URL+"/v1/chat/completions", strings.NewReader(fmt.Sprintf(`{"model":"sim","stream":true,%s}`, fmt.Sprintf(chatCase.Body, 60))))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", "low")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	testwait.UntilWithin(t, 10*time.Second, "the stream is in progress", func() bool { return generated(m.Engines...) > 4 })
	sendAsync(t, m.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "high", "X-Sluice-Priority", "high")
	testwait.UntilWithin(t, 10*time.Second, "the stream is suspended", func() bool {
		return classMetric(m.Router, "sluice_admission_suspended_streams", "low") == 1 && classMetric(m.Router, "sluice_admission_waiting_requests", "high") == 0
	})
	if v := m.Runner.Admission().View(); v.Classes[2].Suspended != 1 || v.Classes[2].Requests != 1 {
		t.Errorf("the queue shows %+v", v.Classes)
	}
	return bufio.NewScanner(resp.Body), cancel, release
}

// TestSuspendedStreamIsKeptAlive: a suspended stream gets comments, and goes on as soon as its rank is free.
func TestSuspendedStreamIsKeptAlive(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 1, func(c *config.Config) { preempting(c); c.Relay.CommentInterval = 20 * time.Millisecond })
	lines, _, release := suspended(t, m)
	text, comments := "", 0
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), ":") {
			lines.Scan() // the empty line that ends it
			if comments++; comments == 3 {
				release()
				slowStreams("low", 4*time.Millisecond, m.Engines...)
			}
			continue
		}
		text += lines.Text() + "\n"
	}
	want := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", chatCase.Request(60, true))
	if comments < 3 {
		t.Errorf("%d comments", comments)
	}
	harness.WantSameContent(t, &harness.Answer{Status: 200, Body: []byte(text)}, want)
	harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
}

// TestSuspendedStreamEnds: a client that disconnects and a deadline end a suspension, and free everything.
func TestSuspendedStreamEnds(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"client_gone", "deadline"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, false, 1, preempting)
			var headers []string
			if how == "deadline" {
				headers = []string{"X-Sluice-Deadline-Ms", "1500"}
			}
			lines, disconnect, release := suspended(t, m, headers...)
			last := ""
			if how == "deadline" {
				for lines.Scan() {
					if strings.HasPrefix(lines.Text(), "data: {") {
						last = lines.Text()
					}
				}
				if !strings.Contains(last, "deadline has passed") {
					t.Errorf("the stream ended with %s", last)
				}
			} else {
				disconnect()
			}
			testwait.UntilWithin(t, 10*time.Second, "nothing waits", func() bool { return m.Runner.Admission().IsEmpty() })
			testwait.UntilWithin(t, 10*time.Second, "the end is counted", func() bool {
				return m.Metric(`sluice_admission_suspensions_ended_total{class="low",outcome="`+how+`"}`) == 1
			})
			release()
			harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
			if n := len(harness.GenerateRequests(m.Engines[0])); n != 2 {
				t.Errorf("the engine received %d requests, want 2", n)
			}
		})
	}
}

// TestLongSuspensionEnds: a stream that has been suspended for the longest wait of its class goes on as
// soon as its rank is below its limits, although requests of a higher class wait.
func TestLongSuspensionEnds(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 1, func(c *config.Config) {
		preempting(c)
		c.Admission.Classes[2].MaxWait = 300 * time.Millisecond
		c.Admission.Classes[2].MinShare, c.Admission.MinShare = 0, 0
	})
	lines, _, release := suspended(t, m)
	testwait.UntilWithin(t, 10*time.Second, "it has left the queue", func() bool { return m.Runner.Admission().IsEmpty() })
	release()
	var body strings.Builder
	for lines.Scan() {
		body.WriteString(lines.Text() + "\n")
	}
	harness.WantSameContent(t, &harness.Answer{Status: 200, Body: []byte(body.String())}, harness.Post(t, m.Reference.URL()+"/v1/chat/completions", chatCase.Request(60, true)))
	harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
}

// TestLongSuspensionEndsDuringBacklog: after max_wait a suspended stream goes on although requests of a higher
// class wait without end.
func TestLongSuspensionEndsDuringBacklog(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 1, func(c *config.Config) {
		preempting(c)
		c.Admission.MaxPreemptions = 1
		c.Admission.Classes[2].MaxWait = 300 * time.Millisecond
		c.Admission.Classes[2].MinShare, c.Admission.MinShare = 0, 0
	})
	lines, _, release := suspended(t, m)
	ctx, stop := context.WithCancel(context.Background())
	var backlog sync.WaitGroup
	var served atomic.Int64
	for i := range 8 {
		backlog.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				a, err := harness.TryPost(ctx, m.URL+"/v1/chat/completions", chatCase.Request(4, true), "X-Request-Id", fmt.Sprintf("backlog-%d-%d", i, n), "X-Sluice-Priority", "high")
				if err == nil && a.Status == 200 {
					served.Add(1)
				}
			}
		})
	}
	defer backlog.Wait()
	defer stop()
	testwait.UntilWithin(t, 10*time.Second, "requests wait", func() bool { return classMetric(m.Router, "sluice_admission_waiting_requests", "high") > 4 })
	release()
	slowStreams("backlog", 10*time.Millisecond, m.Engines...) // so that the place is seldom free
	read := make(chan string, 1)
	go func() {
		var body strings.Builder
		for lines.Scan() {
			body.WriteString(lines.Text() + "\n")
		}
		read <- body.String()
	}()
	select {
	case body := <-read:
		// max_wait is the time of 8 of them; looking for a free place now and then took some 100.
		if n := served.Load(); n > 40 {
			t.Errorf("%d requests of the backlog were served before the end of the stream; want at most 40", n)
		}
		stop()
		backlog.Wait()
		harness.WantSameContent(t, &harness.Answer{Status: 200, Body: []byte(body)}, harness.Post(t, m.Reference.URL()+"/v1/chat/completions", chatCase.Request(60, true)))
		harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
	case <-time.After(15 * time.Second):
		t.Error("the stream has not ended after 15s beside the backlog")
	}
}

// TestPreemptionDuringTrial: a rank whose breaker is half open and that runs its trial does not keep a request from
// suspending a stream elsewhere.
func TestPreemptionDuringTrial(t *testing.T) {
	t.Parallel()
	m := harness.StartMigrationFleet(t, false, 2, preempting)
	slowStreams("low", 4*time.Millisecond, m.Engines...)
	got := sendAsync(t, m.URL+"/v1/chat/completions", chatCase.Request(80, true), "X-Request-Id", "low")
	testwait.UntilWithin(t, 10*time.Second, "the stream is in progress", func() bool { return generated(m.Engines...) > 4 })
	for _, k := range m.AllRanks() {
		if k.Requests.Load() == 0 {
			k.Requests.Add(1)
			k.Breaker.Store(uint32(worker.BreakerHalfOpen))
			defer k.Requests.Add(-1)
			defer k.Breaker.Store(uint32(worker.BreakerClosed))
		}
	}
	harness.WantStatus(t, harness.Post(t, m.URL+"/v1/chat/completions", harness.Chat(""), "X-Sluice-Priority", "high"), 200)
	if n := classMetric(m.Router, "sluice_admission_preemptions_total", "low"); n != 1 {
		t.Errorf("%d suspensions, want 1", n)
	}
	harness.WantSameContent(t, receive(t, got, "the stream"), harness.Post(t, m.Reference.URL()+"/v1/chat/completions", chatCase.Request(80, true)))
}

// TestDecodeIsPreempted: in a pool with prefill workers, a request whose prompt could be computed suspends
// a stream on a full decode rank.
func TestDecodeIsPreempted(t *testing.T) {
	t.Parallel()
	for name, tokens := range map[string]int{"decode computes the rest": 1 << 20, "both legs": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, true, 1, func(c *config.Config) {
				preempting(c)
				c.Limits.RankRequests = 0
				for i := range c.Workers {
					if c.Workers[i].Role == worker.Decode {
						c.Workers[i].RankRequests = 1
					}
				}
				c.Migration.HandoverTokens = tokens
			})
			slowStreams("low", 4*time.Millisecond, m.Engines...)
			undisturbed := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", chatCase.Request(80, true))
			got := sendAsync(t, m.URL+"/v1/chat/completions", chatCase.Request(80, true), "X-Request-Id", "low")
			for i := range 4 {
				more := generated(m.Engines...) + 5
				testwait.UntilWithin(t, 10*time.Second, "the stream goes on", func() bool { return generated(m.Engines...) >= more })
				a := harness.Post(t, m.URL+"/v1/chat/completions", harness.ChatOf(fmt.Sprint("other words ", i)), "X-Sluice-Priority", "high")
				if a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") == "" {
					t.Fatalf("status %d, prefill on %q: %s", a.Status, a.Header.Get("X-Sluice-Prefill-Worker"), a.Body)
				}
			}
			harness.WantSameContent(t, receive(t, got, "the stream"), undisturbed)
			if n := classMetric(m.Router, "sluice_admission_preemptions_total", "low"); n != 4 {
				t.Errorf("%d suspensions, want 4", n)
			}
			harness.WantIdle(t, m.Router, 10*time.Second, append(m.Engines, m.Prefill)...)
		})
	}
}

// TestPreemptionsLeaveNoState: streams of three classes compete for few places, clients disconnect at
// random, and in the end nothing is left. Each stream that its client reads to the end is whole.
func TestPreemptionsLeaveNoState(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, func(c *config.Config) {
		preempting(c)
		c.Limits.RankRequests = 4
		c.Admission.PreemptionInterval = 20 * time.Millisecond
	})
	slowStreams("stream", time.Millisecond, m.Engines...)
	body := chatCase.Request(60, true)
	undisturbed := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body)
	was := runtime.NumGoroutine()
	var wg sync.WaitGroup
	var mu sync.Mutex
	whole := 0
	for i := range 24 {
		wg.Go(func() {
			for n := range harness.Trials(4) {
				ctx, cancel := context.WithCancel(context.Background())
				if (i+n)%4 == 0 {
					time.AfterFunc(time.Duration(5+(i*37+n*11)%150)*time.Millisecond, cancel)
				}
				a, err := harness.TryPost(ctx, m.URL+"/v1/chat/completions", body, "X-Request-Id", fmt.Sprintf("stream-%d-%d", i, n), "X-Sluice-Priority", []string{"high", "middle", "low", "low"}[(i+n)%4])
				if err == nil {
					mu.Lock()
					whole++
					harness.WantSameContent(t, a, undisturbed)
					mu.Unlock()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	harness.WantIdle(t, m.Router, 20*time.Second, m.Engines...)
	testwait.UntilWithin(t, 10*time.Second, "nothing waits", func() bool { return m.Runner.Admission().IsEmpty() })
	harness.DropIdle()
	testwait.UntilWithin(t, 10*time.Second, fmt.Sprintf("no more than %d goroutines and some", was), func() bool { return runtime.NumGoroutine() <= was+15 })
	suspensions := classMetric(m.Router, "sluice_admission_preemptions_total", "low") + classMetric(m.Router, "sluice_admission_preemptions_total", "middle")
	ends := 0
	for _, class := range []string{"middle", "low"} {
		for _, how := range []string{"resumed", "client_gone", "deadline", "failed"} {
			ends += int(m.Metric(`sluice_admission_suspensions_ended_total{class="` + class + `",outcome="` + how + `"}`))
		}
	}
	t.Logf("%d streams were read to the end, %d suspensions", whole, suspensions)
	if whole == 0 || suspensions == 0 || ends != suspensions {
		t.Errorf("%d whole streams, %d suspensions, %d ends of them", whole, suspensions, ends)
	}
}
