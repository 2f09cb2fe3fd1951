package engineapi

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

// workerExit is a way in which a worker leaves its streams, and the outcome under which the router
// counts their migrations.
type workerExit struct {
	name, outcome string
	run           func(t *testing.T, r *harness.Router, id string, e *sim.Engine)
}

var workerExits = []workerExit{
	{"drained", "drained", func(t *testing.T, r *harness.Router, id string, _ *sim.Engine) {
		if err := r.Fleet.Drain(id, true); err != nil {
			t.Error(err)
		}
	}},
	{"taken away", "drained", func(t *testing.T, r *harness.Router, id string, _ *sim.Engine) {
		if err := r.Fleet.Remove(id); err != nil {
			t.Error(err)
		}
	}},
	{"dies", "done", func(_ *testing.T, _ *harness.Router, _ string, e *sim.Engine) { e.Crash() }},
}

func allowAnyMigration(c *config.Config) {
	c.Migration.DrainDelay = 0
	c.Timeouts.StreamIdle = 20 * time.Second
}

// migratedTokens is the length of the streams. Their first engine is slow and needs seconds for
// them, so that the worker leaves in the middle on any machine.
const migratedTokens = 1500

// startMigratingRequest starts a stream and makes its worker leave after the first tokens. It returns
// the complete response and the id of that worker.
func startMigratingRequest(t *testing.T, r *harness.Router, engines map[string]*sim.Engine, prompt []uint32, n int, move workerExit) (a *harness.EngineAPIAnswer, on string) {
	t.Helper()
	for _, e := range engines {
		e.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond, N: 2}) // a decode that declines, and the stream
	}
	req := harness.EngineAPIRequest(prompt, n)
	req.Annotations = []string{"decision"}
	s := harness.StartEngineAPI(t, harness.DialEngine(t, r, "unix"), req)
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	var head []uint32
	for len(head) < 5 {
		it, err := s.Next(ctx)
		if it == nil || it.Data == nil {
			t.Fatalf("after %d tokens: %+v, %v", len(head), it, err)
		}
		head = append(head, it.Data.TokenIDs...)
		for _, c := range it.Comment {
			if id, ok := strings.CutPrefix(c, "worker_id: "); ok {
				on = id
			}
		}
	}
	if engines[on] == nil {
		t.Fatalf("the stream is on %q", on)
	}
	for id, e := range engines {
		if id != on {
			e.ClearFaults()
		}
	}
	move.run(t, r, on, engines[on])
	a = harness.ReadEngineAPI(ctx, s)
	a.Tokens[0] = append(head, a.Tokens[0]...)
	return a, on
}

func wantUndisturbed(t *testing.T, a *harness.EngineAPIAnswer, want []uint32, prompt int) {
	t.Helper()
	if a.Failure != nil || a.Err != nil || !slices.Equal(a.Tokens[0], want) || a.Finish[0] != "length" {
		t.Errorf("%v %v %q\ngot  %v\nwant %v", a.Failure, a.Err, a.Finish[0], a.Tokens[0], want)
	}
	if u := a.Usage; u == nil || u.Prompt != prompt || u.Completion != len(want) || u.Total != prompt+len(want) {
		t.Errorf("usage %+v; want %d and %d", u, prompt, len(want))
	}
}

// TestEngineAPIStreamsMigrate: on every engine and in every API of it, a stream whose worker drains,
// is removed or dies continues without a difference for the caller.
func TestEngineAPIStreamsMigrate(t *testing.T) {
	t.Parallel()
	for _, k := range []struct {
		name string
		mod  func(*sim.Options)
		conf func(*config.Config)
	}{
		{"vLLM completions", nil, func(c *config.Config) { c.EngineAPI.VLLMDialect = "completions" }},
		{"vLLM generate", nil, func(*config.Config) {}},
		{"SGLang, whole", func(o *sim.Options) { o.Engine = "sglang" }, func(*config.Config) {}},
		{"SGLang, deltas", func(o *sim.Options) { o.Engine, o.Incremental = "sglang", true }, func(*config.Config) {}},
		{"TensorRT-LLM", func(o *sim.Options) { o.Engine = "trtllm" }, withTRTLLM},
	} {
		for i, move := range workerExits {
			t.Run(k.name+"/"+move.name, func(t *testing.T) {
				t.Parallel()
				r, all := harness.StartEngineRouter(t, 3, k.mod, func(c *config.Config) { allowAnyMigration(c); k.conf(c) })
				engines := map[string]*sim.Engine{"e0": all[0], "e1": all[1], "e2": all[2]}
				prompt := harness.TokenIDs(40, 60+i)
				a, on := startMigratingRequest(t, r, engines, prompt, migratedTokens, move)
				wantUndisturbed(t, a, referenceTokens(t, harness.StartSim(t, nil), prompt, migratedTokens), 40)
				if r.Metric(`sluice_migrations_total{outcome="`+move.outcome+`"}`) != 1 {
					t.Errorf("no stream is counted as %s", move.outcome)
				}
				delete(engines, on)
				for _, e := range engines {
					harness.WantIdle(t, r, harness.TestTimeout, e)
				}
			})
		}
	}
}

// TestEngineAPIStreamsMigrateFromDecode: the same for a decode worker, in every family. That
// includes TensorRT-LLM, because for the engine API the router requests token ids instead of text.
func TestEngineAPIStreamsMigrateFromDecode(t *testing.T) {
	t.Parallel()
	for i := range harness.MatrixFamilies {
		fam := &harness.MatrixFamilies[i]
		for k, move := range workerExits {
			if move.name == "taken away" {
				continue // a removed worker behaves like a drained one
			}
			t.Run(fam.Name+"/"+move.name, func(t *testing.T) {
				t.Parallel()
				own := *fam
				configure := fam.Config
				own.Config = func(c *config.Config) {
					allowAnyMigration(c)
					if configure != nil {
						configure(c)
					}
				}
				if prepare := fam.Prepare; prepare != nil {
					own.Prepare = func(t *testing.T, f *harness.MatrixFamily) {
						prepare(t, f)
						inner := f.Config
						f.Config = func(c *config.Config) { allowAnyMigration(c); inner(c) }
					}
				}
				f := engineAPIFleet(t, &own)
				engines := map[string]*sim.Engine{"decode-0": f.Decodes[0], "decode-1": f.Decodes[1]}
				prompt := harness.TokenIDs(50, 80+k)
				a, _ := startMigratingRequest(t, f.Router, engines, prompt, migratedTokens, move)
				wantUndisturbed(t, a, referenceTokens(t, f.Reference, prompt, migratedTokens), 50)
				if n := f.Router.Metric(`sluice_migrations_total{outcome="` + move.outcome + `"}`); n != 1 {
					t.Errorf("%v streams are counted as %s; want 1", n, move.outcome)
				}
				if !f.BecomesIdle(harness.TestTimeout) {
					t.Errorf("something is kept: %s", f.Router.ReservedLoad())
				}
			})
		}
	}
}
