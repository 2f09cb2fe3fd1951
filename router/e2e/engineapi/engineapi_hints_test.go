package engineapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// TestEngineAPIDirect: the caller names the worker, by any of its names. Prefill still runs as a
// separate leg, on a worker that the router or the caller chooses.
func TestEngineAPIDirect(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"nixl", "nixl-push", "sglang"} {
		t.Run(name, func(t *testing.T) {
			fam := &harness.MatrixFamilies[slices.IndexFunc(harness.MatrixFamilies, func(f harness.MatrixFamily) bool { return f.Name == name })]
			f := engineAPIFleet(t, fam)
			c := harness.DialEngine(t, f.Router, "unix")
			for i := range 4 {
				f.ForgetRequests()
				decode, prefill := i%2, -1
				req := harness.EngineAPIRequest(harness.TokenIDs(50, 20+i), 6)
				req.Annotations = []string{"decision"}
				req.Routing = map[string]any{"backend_instance_id": fmt.Sprint("decode-", decode), "dp_rank": 0}
				if i > 1 {
					prefill = (i + 1) % 2
					req.Routing = map[string]any{"decode_worker_id": fmt.Sprint("decode-", decode), "prefill_worker_id": fmt.Sprint("prefill-", prefill)}
				}
				a := harness.GenerateEngineAPI(t, c, req)
				if a.Failure != nil || !slices.Equal(a.Tokens[0], referenceTokens(t, f.Reference, req.TokenIDs, 6)) {
					t.Fatalf("%v: %v", req.Routing, a.Failure)
				}
				if !slices.Contains(a.Comments, fmt.Sprint("worker_id: decode-", decode)) {
					t.Errorf("%v: the decision is %q", req.Routing, a.Comments)
				}
				if n := len(harness.GenerateRequests(f.Decodes[1-decode])); n != 0 || harness.LegCount(f.Prefills) != 1 || harness.LegCount(f.Decodes) != 1 {
					t.Errorf("%v: %d prefill and %d decode legs, %d of these on the other", req.Routing, harness.LegCount(f.Prefills), harness.LegCount(f.Decodes), n)
				}
				if prefill >= 0 && len(harness.GenerateRequests(f.Prefills[prefill])) != 1 {
					t.Errorf("%v: prefill ran elsewhere", req.Routing)
				}
			}
			for _, k := range []struct {
				routing    map[string]any
				field, say string
			}{
				{map[string]any{"prefill_worker_id": "decode-0"}, "routing.prefill_worker_id", `got "decode-0", a decode worker`},
				{map[string]any{"decode_worker_id": "prefill-0"}, "routing.decode_worker_id", `got "prefill-0", a prefill worker`},
				{map[string]any{"decode_worker_id": "decode-0", "dp_rank": 7}, "routing.decode_worker_id", `no rank 7 of worker "decode-0"`},
				{map[string]any{"decode_worker_id": "decode-0", "prefill_dp_rank": 0}, "routing.prefill_dp_rank", "prefill_worker_id"},
				{map[string]any{"prefill_worker_id": "prefill-0", "dp_rank": 0}, "routing.dp_rank", "decode_worker_id"},
			} {
				req := harness.EngineAPIRequest(harness.TokenIDs(50, 30), 6)
				req.Routing = k.routing
				if a := harness.GenerateEngineAPI(t, c, req); a.Failure == nil || a.Failure.Code != 400 || a.Failure.Param != k.field || !strings.Contains(a.Failure.Message, k.say) {
					t.Errorf("%v: %+v; want field %q and %q", k.routing, a.Failure, k.field, k.say)
				}
			}
		})
	}
}

// TestEngineAPIDeadline: the caller's deadline passes in each phase of a request. The caller
// receives an error that says so, and the legs end as for a caller that leaves, so that no block
// stays until a lease ends.
func TestEngineAPIDeadline(t *testing.T) {
	t.Parallel()
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		t.Run(fam.Name, func(t *testing.T) {
			t.Parallel()
			f := engineAPIFleet(t, fam)
			c := harness.DialEngine(t, f.Router, "unix")
			handoverFault := fam.HandoverFault
			if handoverFault.Leg == "" {
				handoverFault.Delay = time.Second // longer than the request's deadline
			}
			for i, held := range []struct {
				at     []*sim.Engine
				fault  sim.Fault
				begins bool // the stream begins before the deadline
			}{
				{f.Prefills, sim.Fault{Kind: sim.Stall}, false},
				{f.Decodes, handoverFault, false},
				{f.Decodes, sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, true},
			} {
				for _, e := range held.at {
					e.Fault(held.fault)
				}
				req := harness.EngineAPIRequest(harness.TokenIDs(50, 30+i), 30_000)
				var a *harness.EngineAPIAnswer
				for ms := 400; ; ms *= 2 { // double the deadline until it suffices on a busy machine
					req.Context.TimeoutMS, req.Context.ID = ms, fmt.Sprint("late-", i, "-", ms)
					began := time.Now()
					a = harness.GenerateEngineAPI(t, c, req)
					t.Logf("%s of %q: answered %v after its deadline", held.fault.Kind, held.fault.Leg, (time.Since(began) - time.Duration(ms)*time.Millisecond).Round(time.Millisecond))
					if !held.begins || len(a.Tokens[0]) > 0 || ms > 6_000 {
						break
					}
				}
				if a.Failure == nil || a.Failure.Code != 504 || a.Err != nil {
					t.Errorf("%s of %q: %v, %v behind %d tokens", held.fault.Kind, held.fault.Leg, a.Failure, a.Err, len(a.Tokens[0]))
				}
				if o := f.Router.Outcome(t, req.Context.ID).Outcome; o.Reason != "deadline" {
					t.Errorf("%s of %q: the outcome is %q, want deadline", held.fault.Kind, held.fault.Leg, o.Reason)
				}
				for _, e := range held.at {
					e.ClearFaults()
				}
				if !f.BecomesIdle(harness.TestTimeout) || expiredLeases(f) != 0 {
					t.Errorf("%s of %q: %d leases ran out, holding: %v", held.fault.Kind, held.fault.Leg, expiredLeases(f), f.HasKV())
				}
			}
			wantDeadlines(t, f.Router)
		})
	}
}

// wantDeadlines checks that streams and legs of a router ended by a deadline, and none because a
// caller left.
func wantDeadlines(t *testing.T, r *harness.Router) {
	t.Helper()
	testwait.UntilWithin(t, harness.TestTimeout, "a stream is counted as ended by its deadline", func() bool { return r.Metric(`sluice_streams_total{cause="deadline"}`) > 0 })
	for _, other := range []string{"client_gone", "client_stalled", "engine_stalled"} {
		if n := r.Metric(`sluice_streams_total{cause="` + other + `"}`); n != 0 {
			t.Errorf("%v streams are counted as %s", n, other)
		}
		for _, leg := range []string{"prefill", "decode", "whole"} {
			if n := r.Metric(`sluice_legs_total{leg="` + leg + `",outcome="` + other + `"}`); n != 0 {
				t.Errorf("%v %s legs are counted as %s", n, leg, other)
			}
		}
	}
}

// TestEngineAPIDeadlineOverHTTP: the same for callers of the HTTP endpoint. They receive 504 before
// the response begins and an event in a stream, with a message that names the caller's deadline.
func TestEngineAPIDeadlineOverHTTP(t *testing.T) {
	t.Parallel()
	for _, driver := range harness.Drivers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			r, engines := harness.StartEngineRouter(t, 1, nil, func(c *config.Config) { c.Relay.Driver = driver })
			ask := func(salt, ms int) (*harness.Answer, *harness.EngineAPIAnswer) {
				ids, _ := json.Marshal(harness.TokenIDs(30, salt))
				return harness.GenerateEngineAPIHTTP(t, r, fmt.Sprintf(`{"model":"sim","token_ids":%s,"stop_conditions":{"max_tokens":30000,"ignore_eos":true},"context":{"timeout_ms":%d}}`, ids, ms))
			}
			engines[0].Fault(sim.Fault{Kind: sim.Stall})
			raw, _ := ask(1, 200)
			if reason := raw.Header.Get("X-Sluice-Reason"); reason != "deadline" {
				t.Errorf("before the stream: the reason is %q", reason)
			}
			if message, kind, _ := raw.ErrorOf(t); raw.Status != 504 || kind != "upstream_error" || !strings.HasPrefix(message, "the request's time is over") {
				t.Errorf("before the stream: %d %s", raw.Status, raw.Body)
			}
			engines[0].ClearFaults()
			engines[0].Fault(sim.Fault{Kind: sim.Slow, Delay: 20 * time.Millisecond})
			raw, a := ask(2, 3000)
			if f := a.Failure; raw.Status != 200 || f == nil || f.Code != 504 || f.Param != "context.timeout_ms" || len(a.Tokens[0]) == 0 {
				t.Errorf("within the stream: %d, %v behind %d tokens", raw.Status, a.Failure, len(a.Tokens[0]))
			}
			testwait.UntilWithin(t, harness.TestTimeout, "nothing runs on", func() bool { return engines[0].Stats().Sum().Running == 0 })
			wantDeadlines(t, r)
		})
	}
}

// TestEngineAPIMinWorkers: the socket opens once engine_api.min_workers are ready, or after
// engine_api.start_timeout.
func TestEngineAPIMinWorkers(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	b.Crash()
	path := harness.SocketIn(t)
	r := harness.LaunchRouter(t, func(c *config.Config) {
		c.EngineAPI.UnixSocket, c.EngineAPI.MinWorkers, c.EngineAPI.StartTimeout = path, 2, time.Hour
	}, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	testwait.UntilWithin(t, harness.TestTimeout, "a is ready", func() bool { return r.State("a") == worker.Ready })
	testwait.Holds(t, 50*time.Millisecond, "the socket is closed with one of two workers", func() bool {
		_, err := client.Dial(context.Background(), "unix://"+path, client.Options{})
		return err != nil
	})
	b.Restart()
	if got := harness.GenerateEngineAPI(t, harness.DialEngine(t, r, "unix"), harness.EngineAPIRequest(harness.TokenIDs(20, 1), 3)); got.Failure != nil {
		t.Error(got.Failure)
	}

	late := harness.LaunchRouter(t, func(c *config.Config) {
		c.EngineAPI.UnixSocket, c.EngineAPI.MinWorkers, c.EngineAPI.StartTimeout = harness.SocketIn(t), 2, 200*time.Millisecond
	}, harness.SimWorker(a, worker.Aggregated, "a"))
	harness.DialEngine(t, late, "unix")
	if !strings.Contains(late.Logs.String(), "fewer workers than engine_api.min_workers") {
		t.Error("nothing in the log")
	}

	// A router that ends during the wait never opens the socket.
	never := harness.LaunchRouter(t, func(c *config.Config) {
		c.EngineAPI.UnixSocket, c.EngineAPI.MinWorkers, c.EngineAPI.StartTimeout = harness.SocketIn(t), 2, time.Hour
	}, harness.SimWorker(a, worker.Aggregated, "a"))
	never.Stop()
	if err := <-never.Done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	never.Done <- nil
	if harness.WireAddr(never, "unix") != "" {
		t.Error("a router that ended opened its socket")
	}
}

// TestEngineAPIWaitsInQueue: a request for a model that no worker has reported yet waits like any
// other request: it is counted and bounded, and its record contains the wait.
func TestEngineAPIWaitsInQueue(t *testing.T) {
	e := harness.StartSim(t, func(o *sim.Options) {
		o.Listen, o.KVEvents, o.Replay = fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t)), "off", "off"
	})
	e.Crash()
	r := harness.LaunchRouter(t, func(c *config.Config) {
		harness.WithEngineAPI(harness.SocketIn(t))(c)
		c.Workers[0].KVEvents = []string{"off"}
		c.EngineAPI.MinWorkers, c.Limits.PoolWaiters, c.Timeouts.PoolWait = 0, 1, time.Hour
	}, harness.SimWorker(e, worker.Aggregated, "e"))
	c := harness.DialEngine(t, r, "unix")
	req := harness.EngineAPIRequest(harness.TokenIDs(20, 1), 3)
	req.Annotations = []string{"decision"}
	s, err := c.Generate(req)
	if err != nil {
		t.Fatal(err)
	}
	testwait.UntilWithin(t, harness.TestTimeout, "the first waits", func() bool { return r.Metric("sluice_pool_waiters") == 1 })
	if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(20, 2), 3)); a.Failure == nil || a.Failure.Code != 503 || !strings.Contains(a.Failure.Message, "limits.pool_waiters") {
		t.Errorf("the second: %v", a.Failure)
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	a := harness.ReadEngineAPI(ctx, s)
	if a.Failure != nil || a.Err != nil || len(a.Tokens[0]) != 3 || slices.Contains(a.Comments, "queued: 0s") {
		t.Errorf("the first: %v, %v, %d tokens, %q", a.Failure, a.Err, len(a.Tokens[0]), a.Comments)
	}
	testwait.UntilWithin(t, harness.TestTimeout, "none waits", func() bool { return r.Metric("sluice_pool_waiters") == 0 })
}
