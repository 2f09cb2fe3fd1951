package main

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
	"sluice/router/config"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// TestEngineAPIDirect: the caller names the worker, by any of its names; prefill runs apart
// all the same, on one that the router or the caller chooses.
func TestEngineAPIDirect(t *testing.T) {
	for _, name := range []string{"nixl", "nixl-push", "sglang"} {
		t.Run(name, func(t *testing.T) {
			fam := &matrixFamilies[slices.IndexFunc(matrixFamilies, func(f matrixFamily) bool { return f.name == name })]
			f := engineAPIFleet(t, fam)
			c := dialEngine(t, f.router, "unix")
			for i := range 4 {
				f.forgetRequests()
				decode, prefill := i%2, -1
				req := engineAPIRequest(tokenIDs(50, 20+i), 6)
				req.Annotations = []string{"decision"}
				req.Routing = map[string]any{"backend_instance_id": fmt.Sprint("decode-", decode), "dp_rank": 0}
				if i > 1 {
					prefill = (i + 1) % 2
					req.Routing = map[string]any{"decode_worker_id": fmt.Sprint("decode-", decode), "prefill_worker_id": fmt.Sprint("prefill-", prefill)}
				}
				a := generateEngineAPI(t, c, req)
				if a.failure != nil || !slices.Equal(a.tokens[0], referenceTokens(t, f.reference, req.TokenIDs, 6)) {
					t.Fatalf("%v: %v", req.Routing, a.failure)
				}
				if !slices.Contains(a.comments, fmt.Sprint("worker_id: decode-", decode)) {
					t.Errorf("%v: the decision is %q", req.Routing, a.comments)
				}
				if n := len(generateRequests(f.decodes[1-decode])); n != 0 || legCount(f.prefills) != 1 || legCount(f.decodes) != 1 {
					t.Errorf("%v: %d prefill and %d decode legs, %d of these on the other", req.Routing, legCount(f.prefills), legCount(f.decodes), n)
				}
				if prefill >= 0 && len(generateRequests(f.prefills[prefill])) != 1 {
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
				req := engineAPIRequest(tokenIDs(50, 30), 6)
				req.Routing = k.routing
				if a := generateEngineAPI(t, c, req); a.failure == nil || a.failure.Code != 400 || a.failure.Param != k.field || !strings.Contains(a.failure.Message, k.say) {
					t.Errorf("%v: %+v; want field %q and %q", k.routing, a.failure, k.field, k.say)
				}
			}
		})
	}
}

// TestEngineAPIDeadline: the time that a caller gives is over in whatever phase: it is told
// so, and the legs end as for one who leaves, so that no block waits for a lease's end.
func TestEngineAPIDeadline(t *testing.T) {
	for i := range matrixFamilies {
		fam := &matrixFamilies[i]
		t.Run(fam.name, func(t *testing.T) {
			t.Parallel()
			f := engineAPIFleet(t, fam)
			c := dialEngine(t, f.router, "unix")
			handoverFault := fam.handoverFault
			if handoverFault.Leg == "" {
				handoverFault.Delay = time.Second // longer than the request has
			}
			for i, held := range []struct {
				at     []*sim.Engine
				fault  sim.Fault
				begins bool // the stream does within its time
			}{
				{f.prefills, sim.Fault{Kind: sim.Stall}, false},
				{f.decodes, handoverFault, false},
				{f.decodes, sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond}, true},
			} {
				for _, e := range held.at {
					e.Fault(held.fault)
				}
				req := engineAPIRequest(tokenIDs(50, 30+i), 30_000)
				var a *engineAPIAnswer
				for ms := 400; ; ms *= 2 { // as long as a busy machine needs
					req.Context.TimeoutMS, req.Context.ID = ms, fmt.Sprint("late-", i, "-", ms)
					began := time.Now()
					a = generateEngineAPI(t, c, req)
					t.Logf("%s of %q: told %v behind its time", held.fault.Kind, held.fault.Leg, (time.Since(began) - time.Duration(ms)*time.Millisecond).Round(time.Millisecond))
					if !held.begins || len(a.tokens[0]) > 0 || ms > 6_000 {
						break
					}
				}
				if a.failure == nil || a.failure.Code != 504 || a.err != nil {
					t.Errorf("%s of %q: %v, %v behind %d tokens", held.fault.Kind, held.fault.Leg, a.failure, a.err, len(a.tokens[0]))
				}
				if o := f.router.outcome(t, req.Context.ID).Outcome; o.Reason != "deadline" {
					t.Errorf("%s of %q: the outcome is %q, want deadline", held.fault.Kind, held.fault.Leg, o.Reason)
				}
				for _, e := range held.at {
					e.ClearFaults()
				}
				if !f.becomesIdle(testTimeout) || expiredLeases(f) != 0 {
					t.Errorf("%s of %q: %d leases ran out, holding: %v", held.fault.Kind, held.fault.Leg, expiredLeases(f), f.hasKV())
				}
			}
			wantDeadlines(t, f.router)
		})
	}
}

// wantDeadlines: a stream and a leg of a router ended with their callers' time, and none
// because a caller left.
func wantDeadlines(t *testing.T, r *testRouter) {
	t.Helper()
	eventually(t, testTimeout, "a stream is counted as ended by its deadline", func() bool { return r.metric(`sluice_streams_total{cause="deadline"}`) > 0 })
	for _, other := range []string{"client_gone", "client_stalled", "engine_stalled"} {
		if n := r.metric(`sluice_streams_total{cause="` + other + `"}`); n != 0 {
			t.Errorf("%v streams are counted as %s", n, other)
		}
		for _, leg := range []string{"prefill", "decode", "whole"} {
			if n := r.metric(`sluice_legs_total{leg="` + leg + `",outcome="` + other + `"}`); n != 0 {
				t.Errorf("%v %s legs are counted as %s", n, leg, other)
			}
		}
	}
}

// TestEngineAPIDeadlineOverHTTP: so it is of the HTTP twin's callers: 504 where nothing was
// answered, an event where the stream has begun, in words that say whose time it was.
func TestEngineAPIDeadlineOverHTTP(t *testing.T) {
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			r, engines := startEngineRouter(t, 1, nil, func(c *config.Config) { c.Relay.Driver = driver })
			ask := func(salt, ms int) (*answer, *engineAPIAnswer) {
				ids, _ := json.Marshal(tokenIDs(30, salt))
				return generateEngineAPIHTTP(t, r, fmt.Sprintf(`{"model":"sim","token_ids":%s,"stop_conditions":{"max_tokens":30000,"ignore_eos":true},"context":{"timeout_ms":%d}}`, ids, ms))
			}
			engines[0].Fault(sim.Fault{Kind: sim.Stall})
			raw, _ := ask(1, 200)
			if reason := raw.Header.Get("X-Sluice-Reason"); reason != "deadline" {
				t.Errorf("before the stream: the reason is %q", reason)
			}
			if message, kind, _ := raw.errorOf(t); raw.Status != 504 || kind != "upstream_error" || !strings.HasPrefix(message, "the request's time is over") {
				t.Errorf("before the stream: %d %s", raw.Status, raw.Body)
			}
			engines[0].ClearFaults()
			engines[0].Fault(sim.Fault{Kind: sim.Slow, Delay: 20 * time.Millisecond})
			raw, a := ask(2, 3000)
			if f := a.failure; raw.Status != 200 || f == nil || f.Code != 504 || f.Param != "context.timeout_ms" || len(a.tokens[0]) == 0 {
				t.Errorf("within the stream: %d, %v behind %d tokens", raw.Status, a.failure, len(a.tokens[0]))
			}
			eventually(t, testTimeout, "nothing runs on", func() bool { return engines[0].Stats().Sum().Running == 0 })
			wantDeadlines(t, r)
		})
	}
}

// TestEngineAPIMinWorkers: the socket opens when there are workers enough, and not later
// than it was told.
func TestEngineAPIMinWorkers(t *testing.T) {
	a, b := startSim(t, nil), startSim(t, nil)
	b.Crash()
	path := socketIn(t)
	r := launchRouter(t, func(c *config.Config) {
		c.EngineAPI.Unix, c.EngineAPI.MinWorkers, c.EngineAPI.StartWait = path, 2, time.Hour
	}, simWorker(a, worker.Aggregated, "a"), simWorker(b, worker.Aggregated, "b"))
	eventually(t, testTimeout, "a is ready", func() bool { return r.state("a") == worker.Ready })
	time.Sleep(50 * time.Millisecond)
	if _, err := client.Dial(context.Background(), "unix://"+path, client.Options{}); err == nil {
		t.Error("the socket is open with one of two workers")
	}
	b.Restart()
	if got := generateEngineAPI(t, dialEngine(t, r, "unix"), engineAPIRequest(tokenIDs(20, 1), 3)); got.failure != nil {
		t.Error(got.failure)
	}

	late := launchRouter(t, func(c *config.Config) {
		c.EngineAPI.Unix, c.EngineAPI.MinWorkers, c.EngineAPI.StartWait = socketIn(t), 2, 200*time.Millisecond
	}, simWorker(a, worker.Aggregated, "a"))
	dialEngine(t, late, "unix")
	if !strings.Contains(late.logs.String(), "fewer workers than wanted") {
		t.Error("nothing in the log")
	}

	// One that ends while it waits opens nothing.
	never := launchRouter(t, func(c *config.Config) {
		c.EngineAPI.Unix, c.EngineAPI.MinWorkers, c.EngineAPI.StartWait = socketIn(t), 2, time.Hour
	}, simWorker(a, worker.Aggregated, "a"))
	never.stop()
	if err := <-never.done; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	never.done <- nil
	if wireAddr(never, "unix") != "" {
		t.Error("a router that ended opened its socket")
	}
}

// TestEngineAPIWaitsInQueue: a request whose model no worker has told of yet waits as any
// other does: counted, bounded, and with how long it was in its decision.
func TestEngineAPIWaitsInQueue(t *testing.T) {
	e := startSim(t, func(o *sim.Options) {
		o.Listen, o.KVEvents, o.Replay = fmt.Sprintf("127.0.0.1:%d", freePort(t)), "off", "off"
	})
	e.Crash()
	r := launchRouter(t, func(c *config.Config) {
		withEngineAPI(socketIn(t))(c)
		c.Workers[0].KVEvents = []string{"off"}
		c.EngineAPI.MinWorkers, c.Limits.PoolWaiters, c.Timeouts.PoolWait = 0, 1, time.Hour
	}, simWorker(e, worker.Aggregated, "e"))
	c := dialEngine(t, r, "unix")
	req := engineAPIRequest(tokenIDs(20, 1), 3)
	req.Annotations = []string{"decision"}
	s, err := c.Generate(req)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, testTimeout, "the first waits", func() bool { return r.metric("sluice_pool_waiters") == 1 })
	if a := generateEngineAPI(t, c, engineAPIRequest(tokenIDs(20, 2), 3)); a.failure == nil || a.failure.Code != 503 || !strings.Contains(a.failure.Message, "limits.pool_waiters") {
		t.Errorf("the second: %v", a.failure)
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	a := readEngineAPI(ctx, s)
	if a.failure != nil || a.err != nil || len(a.tokens[0]) != 3 || slices.Contains(a.comments, "queued: 0s") {
		t.Errorf("the first: %v, %v, %d tokens, %q", a.failure, a.err, len(a.tokens[0]), a.comments)
	}
	eventually(t, testTimeout, "none waits", func() bool { return r.metric("sluice_pool_waiters") == 0 })
}
