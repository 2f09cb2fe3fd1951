package liveness

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// freezeMethod is a pair of signals that freeze and resume an engine's process.
type freezeMethod struct {
	state        string
	freeze, thaw syscall.Signal
}

var freezeMethods = []freezeMethod{
	{"process", syscall.SIGSTOP, syscall.SIGCONT},
	{"core", syscall.SIGUSR1, syscall.SIGUSR2}, // sluice sim stops its engine core only
}

// launchSim starts a simulated engine in a process of its own.
func launchSim(t *testing.T, role worker.Role, id string, args ...string) (*harness.Process, config.Worker) {
	t.Helper()
	p := harness.Launch(t, nil, append([]string{"sim", "--role", role.String(), "--cost-step", "20ms"}, args...)...)
	t.Cleanup(func() { p.Cmd.Process.Signal(syscall.SIGCONT) })
	return p, config.Worker{ID: id, URL: "http://" + p.Addr, Role: role, KVEvents: []string{"auto"}}
}

// shortDetection makes a router detect frozen engines within 1.5 s.
func shortDetection(c *config.Config) {
	c.Health.FrozenProcess, c.Health.FrozenCore, c.Health.FrozenHost = 1500*time.Millisecond, 1500*time.Millisecond, 1500*time.Millisecond
	c.Health.Timeout, c.Health.MetricsInterval = 300*time.Millisecond, 100*time.Millisecond
	c.Schedule.Policy = "round_robin"
	c.Fleet.RetryBudgetMinPerSecond = 1000
}

// TestFrozenEngine: requests on an engine that freezes, in any way, complete on another engine:
// streams migrate and other requests run again. Once the engine resumes it returns to the pool,
// and no client receives its late output.
func TestFrozenEngine(t *testing.T) {
	t.Parallel()
	for _, how := range freezeMethods {
		for _, frozen := range []worker.Role{worker.Aggregated, worker.Prefill, worker.Decode} {
			for _, driver := range []string{"loop", "goroutine"} {
				if driver == "goroutine" && frozen != worker.Aggregated {
					continue // the other cases cover this one
				}
				t.Run(fmt.Sprint(how.state, "/", frozen, "/", driver), func(t *testing.T) {
					t.Parallel()
					testFrozenEngine(t, how, frozen, driver)
				})
			}
		}
	}
}

func testFrozenEngine(t *testing.T, how freezeMethod, frozen worker.Role, driver string) {
	var workers []config.Worker
	var args []string
	if frozen == worker.Prefill {
		args = []string{"--cost-prefill", "20ms"} // so that prefill takes a while
	}
	frozenID, w := launchSim(t, frozen, "sick", args...)
	workers = append(workers, w)
	_, w = launchSim(t, frozen, "well", args...)
	workers = append(workers, w)
	switch frozen {
	case worker.Prefill:
		_, w = launchSim(t, worker.Decode, "other")
		workers = append(workers, w)
	case worker.Decode:
		_, w = launchSim(t, worker.Prefill, "other")
		workers = append(workers, w)
	}
	r := harness.StartRouter(t, func(c *config.Config) {
		shortDetection(c)
		c.Relay.Driver = driver
	}, workers...)
	plain := harness.StartSim(t, nil)
	// Each engine must have served requests: the router allows minutes for a first one, which
	// may compile kernels.
	for i := range 4 {
		harness.StartPending(r.URL, fmt.Sprint("before-", i), false, 5).Wait(t, 10*time.Second)
	}

	const tokens = 80
	var clients []*harness.PendingRequest
	for i := range 8 {
		clients = append(clients, harness.StartPending(r.URL, fmt.Sprint("held-", i), i%2 == 0, tokens))
	}
	if frozen == worker.Prefill {
		// Prefill legs are short: stop the engine while some of them run.
		all := r.Fleet.View().Workers
		rank := all[slices.IndexFunc(all, func(w *worker.Worker) bool { return w.Spec.ID == "sick" })].Ranks[0]
		testwait.UntilWithin(t, 5*time.Second, "it computes prompts", func() bool { return rank.Requests.Load() > 0 })
	} else {
		for i := 0; i < len(clients); i += 2 {
			<-clients[i].First
		}
	}
	began := time.Now()
	frozenID.Cmd.Process.Signal(how.freeze)
	for i, c := range clients {
		a := c.Wait(t, 30*time.Second)
		stream := i%2 == 0
		want := harness.StartPending(plain.URL(), c.Id, stream, tokens).Wait(t, 10*time.Second)
		if a.Status != 200 || a.Text(t) != want.Text(t) {
			t.Errorf("%s: status %d, text %q, want %q", c.Id, a.Status, a.Text(t), want.Text(t))
		}
	}
	took := time.Since(began)
	cut := r.Metric(`sluice_engine_frozen_calls_total{state="` + how.state + `"}`)
	t.Logf("%s of %s: all answered %v after it froze, %v calls ended", how.state, frozen, took.Round(10*time.Millisecond), cut)
	if took > 10*time.Second {
		t.Errorf("the last answer came %v after it froze", took)
	}
	if n := r.Metric(`sluice_engine_frozen_total{state="` + how.state + `"}`); n != 1 || cut == 0 {
		t.Errorf("%v verdicts, %v calls ended", n, cut)
	}
	if n := r.Metric(`sluice_engine_frozen_ranks{state="` + how.state + `"}`); n != 1 {
		t.Errorf("%v ranks are frozen", n)
	}
	// The router sends nothing to the frozen engine.
	for i := range 4 {
		a := harness.StartPending(r.URL, fmt.Sprint("meanwhile-", i), i%2 == 0, 5).Wait(t, 5*time.Second)
		if a.Status != 200 || a.Header.Get("X-Sluice-Worker") == "sick" || a.Header.Get("X-Sluice-Prefill-Worker") == "sick" {
			t.Errorf("status %d by %s", a.Status, a.Header.Get("X-Sluice-Worker"))
		}
	}
	frozenID.Cmd.Process.Signal(how.thaw)
	testwait.UntilWithin(t, 10*time.Second, "it is let in again", func() bool {
		a := harness.StartPending(r.URL, "again", false, 5).Wait(t, 5*time.Second)
		return a.Header.Get("X-Sluice-Worker") == "sick" || a.Header.Get("X-Sluice-Prefill-Worker") == "sick"
	})
	if n := r.Metric(`sluice_engine_frozen_ranks{state="` + how.state + `"}`); n != 0 {
		t.Errorf("%v ranks are frozen", n)
	}
}

// TestFrozenEngineWakesUp: a client that still reads receives nothing of the output that an
// engine sends after the router declared it frozen.
func TestFrozenEngineWakesUp(t *testing.T) {
	t.Parallel()
	for _, how := range freezeMethods {
		t.Run(how.state, func(t *testing.T) {
			t.Parallel()
			frozenID, w := launchSim(t, worker.Aggregated, "sick")
			_, other := launchSim(t, worker.Aggregated, "well")
			r := harness.StartRouter(t, shortDetection, w, other)
			for i := range 2 {
				harness.StartPending(r.URL, fmt.Sprint("before-", i), false, 5).Wait(t, 10*time.Second)
			}
			both := []*harness.PendingRequest{harness.StartPending(r.URL, "woken-0", true, 250), harness.StartPending(r.URL, "woken-1", true, 250)} // one on each
			for _, c := range both {
				<-c.First
			}
			frozenID.Cmd.Process.Signal(how.freeze)
			testwait.UntilWithin(t, 10*time.Second, "it is found frozen", func() bool { return r.Metric(`sluice_engine_frozen_calls_total{state="`+how.state+`"}`) == 1 })
			frozenID.Cmd.Process.Signal(how.thaw)
			plain := harness.StartSim(t, nil)
			for _, c := range both {
				a, want := c.Wait(t, 20*time.Second), harness.StartPending(plain.URL(), c.Id, true, 250).Wait(t, 10*time.Second)
				if a.Status != 200 || a.Text(t) != want.Text(t) {
					t.Errorf("status %d, text %q, want %q", a.Status, a.Text(t), want.Text(t))
				}
			}
			testwait.UntilWithin(t, 5*time.Second, "the migration is counted", func() bool { return r.Metric(`sluice_migrations_total{outcome="done"}`) == 1 })
		})
	}
}

// TestBusyEngineIsNotFrozen: the router does not fail prompts whose prefill takes several times
// the detection bounds, in one step without visible progress or in many steps.
func TestBusyEngineIsNotFrozen(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		name string
		args []string
	}{
		{"one step", nil},
		{"many steps", []string{"--max-num-batched-tokens", "16"}},
	} {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			_, w := launchSim(t, worker.Aggregated, "busy", append(k.args, "--cost-prefill", "20ms")...)
			_, other := launchSim(t, worker.Aggregated, "other")
			r := harness.StartRouter(t, shortDetection, w, other)
			for i := range 6 { // so that the router learns the engine's rate
				harness.Post(t, r.URL+"/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":"%d %s","max_tokens":2}`, i, strings.Repeat("word ", 4*i)), "X-Sluice-Worker", "busy")
			}
			began := time.Now()
			a := harness.Post(t, r.URL+"/v1/completions", fmt.Sprintf(`{"model":"sim","prompt":"%s","max_tokens":4,"ignore_eos":true,"stream":true}`, strings.Repeat("long ", 250)), "X-Sluice-Worker", "busy")
			took := time.Since(began)
			t.Logf("%s: the answer came %v later", k.name, took.Round(10*time.Millisecond))
			if a.Status != 200 || !strings.HasSuffix(string(a.Body), "data: [DONE]\n\n") || strings.Contains(string(a.Body), `"error"`) || a.Header.Get("X-Sluice-Worker") != "busy" {
				t.Errorf("status %d by %s: %s", a.Status, a.Header.Get("X-Sluice-Worker"), a.Body)
			}
			if took < 3*time.Second {
				t.Errorf("it took %v, which is not long", took)
			}
			for _, state := range []string{"process", "core", "host"} {
				if n := r.Metric(`sluice_engine_frozen_total{state="` + state + `"}`); n != 0 {
					t.Errorf("%v verdicts of %s", n, state)
				}
			}
		})
	}
}

// TestFrozenOnlyEngineIsTriedAgain: a request on the only engine of a model waits when its core freezes, and is
// sent to it again as soon as it resumes.
func TestFrozenOnlyEngineIsTriedAgain(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, func(o *sim.Options) { o.Speed, o.Cost = 1, sim.Cost{Step: 20 * time.Millisecond} })
	r := harness.StartRouter(t, func(c *config.Config) {
		shortDetection(c)
		c.Timeouts.PoolWait = time.Minute
	}, harness.SimWorker(e, worker.Aggregated, "only"))
	for i := range 2 {
		harness.StartPending(r.URL, fmt.Sprint("before-", i), false, 5).Wait(t, 10*time.Second)
	}
	held := harness.StartPending(r.URL, "held", false, 60)
	testwait.Until(t, "the engine generates", func() bool { return e.Stats().Sum().GeneratedTokens > 15 })
	e.Freeze()
	testwait.Until(t, "its request waits for a worker", func() bool { return r.Metric("sluice_pool_waiters") == 1 })
	testwait.Holds(t, 300*time.Millisecond, "it waits", func() bool { return r.Metric("sluice_pool_waiters") == 1 })
	e.Thaw()
	a, want := held.Wait(t, 20*time.Second), harness.StartPending(harness.StartSim(t, nil).URL(), "held", false, 60).Wait(t, 10*time.Second)
	if a.Status != 200 || a.Text(t) != want.Text(t) {
		t.Errorf("status %d, text %q, want %q", a.Status, a.Text(t), want.Text(t))
	}
	if n := r.Metric(`sluice_engine_frozen_total{state="core"}`); n != 1 {
		t.Errorf("%v verdicts, want 1", n)
	}
	harness.WantIdle(t, r, 10*time.Second, e)
}
