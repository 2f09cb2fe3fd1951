package sessions

import (
	"context"
	"testing"
	"time"

	"sluice/bench/load"
	"sluice/bench/sim"
	"sluice/bench/sim/cost"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// runAgents runs 16 agents of 8 to 12 turns on two engines, whose KV holds about a third of what the
// agents need.
func runAgents(t *testing.T, limit bool) *load.Report {
	var workers []config.Worker
	for _, id := range []string{"a", "b"} {
		e := harness.StartSim(t, func(o *sim.Options) {
			o.Speed, o.Blocks, o.Cost = 1, 257, cost.Model{Step: time.Millisecond, PerPrefill: 120 * time.Microsecond}
		})
		workers = append(workers, harness.SimWorker(e, worker.Aggregated, id))
	}
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Sessions.LimitActive, c.Sessions.Hold = limit, 2*time.Second
	}, workers...)
	o := load.Default()
	o.URL, o.Endpoint, o.TokenIDs, o.Duration = r.URL, "completions", true, 2*time.Minute
	o.Sources = []load.Source{{Agents: 16, Turns: 8, MaxTurns: 12, PromptTokens: 600, Grow: 150, OutputTokens: 8, SharedPrefix: 0.01, Groups: 1, Spread: 0.3, Pause: 30 * time.Millisecond}}
	rep, err := load.Run(context.Background(), o, nil)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Failed > 0 || rep.Sessions.Finished != 16 {
		t.Fatalf("%d of %d requests failed (%v), %d sessions have finished", rep.Failed, rep.Requests, rep.Errors, rep.Sessions.Finished)
	}
	testwait.Until(t, "nobody waits", func() bool { return r.Runner.Sessions().Stats().Waiting == 0 })
	harness.WantIdle(t, r, 10*time.Second)
	return rep
}

// While sessions evict each other's KV, the limit of active sessions makes them find it, and all are
// done earlier.
func TestActiveSessionsAreLimited(t *testing.T) {
	without, with := runAgents(t, false), runAgents(t, true)
	share := func(r *load.Report) float64 { return float64(r.CachedTokens) / float64(r.PromptTokens) }
	t.Logf("%.0f %% of the prompt tokens cached, %.0f %% with the limit; done after %.1f s, %.1f s with it", 100*share(without), 100*share(with), without.Seconds, with.Seconds)
	if share(with) < share(without)+0.15 || with.Seconds > without.Seconds {
		t.Errorf("the limit does not help: %.2f of %.2f cached, %.1f s of %.1f s", share(with), share(without), with.Seconds, without.Seconds)
	}
}
