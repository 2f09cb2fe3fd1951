package faults

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// stallEngine stalls the requests on e that f matches until the test ends.
func stallEngine(t *testing.T, e *sim.Engine, f sim.Fault) {
	t.Helper()
	until := make(chan struct{})
	t.Cleanup(func() { close(until) })
	f.Kind, f.Until = sim.Stall, until
	e.Fault(f)
}

// TestRetryUsesCurrentFleet: if the only worker of a request dies, the router retries on a worker
// that became ready after the request had arrived.
func TestRetryUsesCurrentFleet(t *testing.T) {
	t.Parallel()
	for _, more := range []string{"", `,"stream":true`} {
		for _, phase := range []string{"", "body"} { // before and after the response head
			t.Run(more+" "+phase, func(t *testing.T) {
				t.Parallel()
				plain, a, b := harness.StartSim(t, nil), harness.StartSim(t, nil), harness.StartSim(t, nil)
				r := harness.StartRouter(t, func(c *config.Config) { c.Migration.MaxAttempts = 0 }, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
				b.Crash()
				r.AwaitState(t, "b", worker.Unhealthy)
				stallEngine(t, a, sim.Fault{Phase: phase})
				want := harness.Post(t, plain.URL()+"/v1/chat/completions", harness.Chat(more))
				got := harness.PostAsync(t, r.URL+"/v1/chat/completions", harness.Chat(more))
				testwait.UntilWithin(t, 10*time.Second, "the request is on a", func() bool { return len(harness.GenerateRequests(a)) == 1 })
				if err := b.Restart(); err != nil {
					t.Fatal(err)
				}
				r.AwaitState(t, "b", worker.Ready)
				a.Crash()
				if got := <-got; got.Status != 200 || got.Header.Get("X-Sluice-Worker") != "b" || got.Text(t) != want.Text(t) {
					t.Errorf("status %d on %q: %s", got.Status, got.Header.Get("X-Sluice-Worker"), got.Body)
				}
				harness.WantIdle(t, r, 10*time.Second, b)
			})
		}
	}
}

// TestRetryWaitsForARestart: the only engine dies during a request and returns within
// timeouts.pool_wait.
func TestRetryWaitsForARestart(t *testing.T) {
	for _, more := range []string{"", `,"stream":true`} {
		for _, leg := range []string{"whole", "decode", "prefill"} {
			t.Run(leg+more, func(t *testing.T) {
				t.Parallel()
				plain, e := harness.StartSim(t, nil), harness.StartSim(t, func(o *sim.Options) {
					if o.Role = leg; leg == "whole" {
						o.Role = ""
					}
				})
				workers := []config.Worker{harness.SimWorker(e, worker.Aggregated, "e")}
				if leg != "whole" {
					other := map[string]string{"decode": "prefill", "prefill": "decode"}[leg]
					roles := map[string]worker.Role{"decode": worker.Decode, "prefill": worker.Prefill}
					workers = []config.Worker{harness.SimWorker(e, roles[leg], "e"), harness.SimWorker(harness.StartSim(t, harness.SimRole(other)), roles[other], "o")}
				}
				r := harness.StartRouter(t, func(c *config.Config) { c.PD.DecodeOnlyFallback, c.Timeouts.PoolWait = false, 20*time.Second }, workers...)
				stallEngine(t, e, sim.Fault{})
				want := harness.Post(t, plain.URL()+"/v1/chat/completions", harness.Chat(more))
				got := harness.PostAsync(t, r.URL+"/v1/chat/completions", harness.Chat(more))
				testwait.UntilWithin(t, 10*time.Second, "the request is on e", func() bool { return len(harness.GenerateRequests(e)) == 1 })
				e.Crash()
				e.ClearFaults()
				r.AwaitState(t, "e", worker.Unhealthy)
				if err := e.Restart(); err != nil {
					t.Fatal(err)
				}
				a := <-got
				if a.Status != 200 || a.Text(t) != want.Text(t) {
					t.Errorf("status %d: %s", a.Status, a.Body)
				}
				if a.Header.Get("X-Sluice-Queue-Time") == "" {
					t.Error("no X-Sluice-Queue-Time")
				}
				harness.WantIdle(t, r, 10*time.Second, e)
			})
		}
	}
}

// TestRestartsLoseNoRequest: the only prefill worker, or the only decode worker, restarts
// repeatedly under load, with the default settings, and with pd.decode_only_fallback off, so that
// requests must wait for prefill. Every request succeeds.
func TestRestartsLoseNoRequest(t *testing.T) {
	t.Parallel()
	for _, family := range []string{"nixl", "sglang"} {
		for _, restarts := range []string{"prefill", "prefill, no fallback", "decode"} {
			t.Run(family+" "+restarts, func(t *testing.T) {
				fam := harness.MatrixFamilyNamed(t, family)
				p, pw := harness.SidecarEngine(t, fam, worker.Prefill)
				d, dw := harness.SidecarEngine(t, fam, worker.Decode)
				r := harness.StartRouter(t, func(c *config.Config) {
					c.PD.Family, c.Health = family, config.Default().Health // the harness probes more often
					c.PD.DecodeOnlyFallback = restarts != "prefill, no fallback"
				}, pw, dw)
				e := p
				if restarts == "decode" {
					e = d
				}
				ctx, stop := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				var mu sync.Mutex
				answered, bad, byClient := 0, []string{}, [8]int{}
				for i := range byClient {
					wg.Go(func() {
						for n := 0; ctx.Err() == nil; n++ {
							a, err := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", harness.Chat(fmt.Sprintf(`,"seed":%d,"stream":%v`, n, i%2 == 0 && restarts != "decode")))
							mu.Lock()
							byClient[i]++
							switch answered++; {
							case err != nil:
								bad = append(bad, err.Error())
							case a.Status != 200 || strings.Contains(string(a.Body), `"error"`):
								bad = append(bad, fmt.Sprintf("%d %v %s", a.Status, a.Header, a.Body))
							}
							mu.Unlock()
						}
					})
				}
				down := []time.Duration{0, 500 * time.Millisecond, 2400 * time.Millisecond}
				if os.Getenv("SLUICE_SOAK") != "" {
					down = append(down, 500*time.Millisecond, time.Second, 1200*time.Millisecond, 1800*time.Millisecond)
				}
				for _, d := range down {
					// The router retries a request once after a broken connection, so no request may
					// span two restarts: each client starts a new request in between.
					mu.Lock()
					before := byClient
					mu.Unlock()
					testwait.UntilWithin(t, 20*time.Second, "requests are answered", func() bool {
						mu.Lock()
						defer mu.Unlock()
						for i := range byClient {
							if byClient[i] < before[i]+2 {
								return false
							}
						}
						return true
					})
					e.Crash()
					testwait.Pace(d) // the start time of the engine
					if err := e.Restart(); err != nil {
						t.Fatal(err)
					}
				}
				stop()
				wg.Wait()
				t.Logf("%d of %d requests failed over %d restarts", len(bad), answered, len(down))
				if len(bad) > 0 {
					t.Errorf("the first: %.600s", bad[0])
				}
				harness.WantIdle(t, r, 20*time.Second) // prefill holds the blocks of a dead decode until the lease ends
			})
		}
	}
}

// TestRefusalCountsAttempts: an error contains the number of attempts made.
func TestRefusalCountsAttempts(t *testing.T) {
	for _, n := range []int{1, 2} {
		var workers []config.Worker
		for i := range n {
			workers = append(workers, harness.StartScripted(t, harness.ReplyHandler(500, `{"error":{"message":"boom"}}`)).Worker(worker.Prefill, fmt.Sprint("p", i)))
		}
		d := harness.StartSim(t, harness.SimRole("decode"))
		r := harness.StartRouter(t, func(c *config.Config) { c.PD.DecodeOnlyFallback, c.PD.MaxAttempts = false, 8 }, append(workers, harness.SimWorker(d, worker.Decode, "d0"))...)
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		harness.WantReason(t, a, 502, "upstream_failed")
		if msg, _, _ := a.ErrorOf(t); !strings.Contains(msg, map[int]string{1: "1 try", 2: "2 tries"}[n]) {
			t.Errorf("%d prefill workers: %s", n, msg)
		}
	}
}

// TestEngineRestartBetweenProbes: an engine restarts without the fleet noticing, because one
// request causes fewer failures than the fleet needs.
func TestEngineRestartBetweenProbes(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) { c.Health.UnhealthyThreshold, c.Health.Interval = 1000, time.Minute }, harness.SimWorker(e, worker.Aggregated, "e"))
	e.Crash()
	got := harness.PostAsync(t, r.URL+"/v1/chat/completions", harness.Chat(""))
	testwait.UntilWithin(t, 10*time.Second, "a try has failed", func() bool {
		return r.Metric(`sluice_legs_total{leg="whole",outcome="upstream_failed"}`) > 0
	})
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	harness.WantStatus(t, <-got, 200)
	// If the engine does not return, the wait ends after timeouts.pool_wait.
	r2 := harness.StartRouter(t, func(c *config.Config) {
		c.Health.UnhealthyThreshold, c.Health.Interval, c.Timeouts.PoolWait = 1000, time.Minute, 300*time.Millisecond
	}, harness.SimWorker(e, worker.Aggregated, "e"))
	e.Crash()
	began := time.Now()
	harness.WantReason(t, harness.Post(t, r2.URL+"/v1/chat/completions", harness.Chat("")), 502, "upstream_failed")
	if took := time.Since(began); took < 250*time.Millisecond || took > 5*time.Second {
		t.Errorf("refused after %v", took)
	}
}

// TestErrorAnswersAreNotRetriedLater: the router does not wait for a worker that answers with
// errors; the client receives the error.
func TestErrorAnswersAreNotRetriedLater(t *testing.T) {
	bad := harness.StartScripted(t, harness.ReplyHandler(503, `{"error":{"message":"full"}}`))
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.PoolWait = time.Minute }, bad.Worker(worker.Aggregated, "bad"))
	began := time.Now()
	harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 503)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
}

// TestMigrationWaitsForAWorker: a stream whose engine dies resumes on a worker that becomes ready
// a moment later.
func TestMigrationWaitsForAWorker(t *testing.T) {
	m := harness.StartMigrationFleet(t, false, 2, func(c *config.Config) { c.Timeouts.PoolWait, c.Health.UnhealthyThreshold = 20*time.Second, 2 })
	m.Engines[1].Crash()
	m.AwaitState(t, "d1", worker.Unhealthy)
	stallEngine(t, m.Engines[0], sim.Fault{After: 5})
	body := harness.Chat(`,"stream":true`)
	want := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body)
	began, once := make(chan struct{}), sync.Once{}
	got := make(chan *harness.Answer, 1)
	go func() {
		a, err := readAfter(m.URL+"/v1/chat/completions", body, func(read []byte) {
			if bytes.Count(read, []byte("content")) == 5 {
				once.Do(func() { close(began) })
			}
		})
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	<-began
	m.Engines[0].Crash()
	m.AwaitState(t, "d0", worker.Unhealthy)
	if err := m.Engines[1].Restart(); err != nil {
		t.Fatal(err)
	}
	harness.WantSameContent(t, <-got, want)
}

// TestMigrationToALateWorker: a stream began while the only other worker had never answered. Its
// engine dies when that worker has become ready, and the stream continues there.
func TestMigrationToALateWorker(t *testing.T) {
	first, late, reference := harness.StartSim(t, nil), harness.StartSim(t, nil), harness.StartSim(t, nil)
	lateWorker := harness.SimWorker(late, worker.Aggregated, "late")
	late.Crash()
	r := harness.LaunchRouter(t, func(c *config.Config) { c.Health.UnhealthyThreshold = 2 }, harness.SimWorker(first, worker.Aggregated, "first"), lateWorker)
	testwait.Until(t, "the first worker is ready", func() bool { return r.State("first") == worker.Ready })
	stallEngine(t, first, sim.Fault{After: 5})
	body := harness.Chat(`,"stream":true`)
	want := harness.Post(t, reference.URL()+"/v1/chat/completions", body)
	began, once := make(chan struct{}), sync.Once{}
	got := make(chan *harness.Answer, 1)
	go func() {
		a, err := readAfter(r.URL+"/v1/chat/completions", body, func(read []byte) {
			if bytes.Count(read, []byte("content")) == 5 {
				once.Do(func() { close(began) })
			}
		})
		if err != nil {
			t.Error(err)
		}
		got <- a
	}()
	<-began
	if err := late.Restart(); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the late worker is ready", func() bool { return r.State("late") == worker.Ready })
	first.Crash()
	harness.WantSameContent(t, <-got, want)
}

// readAfter posts a body and reads the response event by event. It calls seen after each event
// with all bytes so far.
func readAfter(url, body string, seen func([]byte)) (*harness.Answer, error) {
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		return &harness.Answer{}, err
	}
	defer resp.Body.Close()
	a := &harness.Answer{Status: resp.StatusCode, Header: resp.Header}
	for br := bufio.NewReader(resp.Body); ; {
		line, err := br.ReadBytes('\n')
		a.Body = append(a.Body, line...)
		if err == io.EOF {
			return a, nil
		} else if err != nil {
			return a, err
		} else if len(line) == 1 {
			seen(a.Body)
		}
	}
}

// TestClientAbortsDuringRetryWait: the wait of a request for a worker ends if its client leaves.
func TestClientAbortsDuringRetryWait(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) { c.Timeouts.PoolWait = time.Minute }, harness.SimWorker(e, worker.Aggregated, "e"))
	stallEngine(t, e, sim.Fault{})
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); harness.TryPost(ctx, r.URL+"/v1/chat/completions", harness.Chat("")) }()
	testwait.UntilWithin(t, 10*time.Second, "the request is on e", func() bool { return len(harness.GenerateRequests(e)) == 1 })
	e.Crash()
	testwait.UntilWithin(t, 10*time.Second, "it waits", func() bool { return r.Metric("sluice_pool_waiters") == 1 })
	leave()
	<-done
	testwait.UntilWithin(t, 10*time.Second, "it waits no more", func() bool { return r.Metric("sluice_pool_waiters") == 0 })
	harness.WantIdle(t, r, 10*time.Second)
}
