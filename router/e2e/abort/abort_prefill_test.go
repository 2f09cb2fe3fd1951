package abort

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestClientAbortsWhilePrefillAnswers: the client leaves after the prefill engine has leased the
// blocks and before it answers. Only the response names the blocks, so the router must wait for
// it; the engine would drop the response if the router closed the connection.
func TestClientAbortsWhilePrefillAnswers(t *testing.T) {
	t.Parallel()
	for _, fam := range []string{"nixl", "trtllm"} {
		for _, shape := range harness.Shapes {
			t.Run(fam+"/"+shape.Name, func(t *testing.T) {
				row := &harness.MatrixFamilies[slices.IndexFunc(harness.MatrixFamilies, func(f harness.MatrixFamily) bool { return f.Name == fam })]
				r, p, d := leasedFleet(t, row)
				var took []time.Duration
				for i := range 5 {
					release := harness.DelayAnswers(sim.Fault{Leg: "prefill"}, p)
					id := fmt.Sprint("answering-", i)
					l := harness.StartRequest(t, r, id, fmt.Sprintf(endlessChat, fmt.Sprintf(`,"seed":%d%s`, i, shape.Extra)))
					testwait.UntilWithin(t, harness.TestTimeout, "prefill has finished", func() bool { s := p.Stats().Sum(); return s.DelayedAnswers == 1 && s.Leases == 1 })
					l.Disconnect()
					testwait.Holds(t, 30*time.Millisecond, "the router waits for prefill's answer", func() bool { s := p.Stats().Sum(); return s.DelayedAnswers == 1 && s.Leases == 1 })
					release()
					answered := time.Now()
					testwait.UntilWithin(t, harness.TestTimeout, "the blocks are free", func() bool { return p.Stats().Sum().Leases == 0 })
					took = append(took, time.Since(answered))
					harness.WantClientGone(t, r, id)
				}
				slices.Sort(took)
				t.Logf("blocks of 5 abandoned prefills were free %v after the answer (median; at most %v)", took[2].Round(time.Millisecond), took[4].Round(time.Millisecond))
				if took[2] > time.Second {
					t.Errorf("the blocks were kept for %v after prefill's answer; want less than 1 s", took[2])
				}
				harness.WantIdle(t, r, 5*time.Second, p, d)
				if s := p.Stats().Sum(); s.LeasesExpired != 0 || s.LateNotifications != 0 {
					t.Errorf("%d leases ran out, %d notifications for blocks that were not kept", s.LeasesExpired, s.LateNotifications)
				}
			})
		}
	}
}

// leasedFleet starts a prefill engine of a family with leases of an hour, a decode engine, and a
// router over them.
func leasedFleet(t *testing.T, row *harness.MatrixFamily) (r *harness.Router, p, d *sim.Engine) {
	t.Helper()
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) {
			o.Role, o.Lease, o.AbortTimeout = role, time.Hour, time.Hour
			if row.Engine != nil {
				row.Engine(o)
			}
		})
	}
	p, d = engine("prefill"), engine("decode")
	workers := []config.Worker{harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0")}
	if row.Worker != nil {
		row.Worker(&workers[0], p)
		row.Worker(&workers[1], d)
	}
	return harness.StartRouter(t, func(c *config.Config) {
		c.PD.Family = row.Name
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000 // keep workers in the pool on a busy machine
	}, workers...), p, d
}

// TestLateAbortsLeaveNothingLeased: clients leave at random moments of a hand-over, with the
// default settings. No blocks stay until the lease ends, and prefill receives no notification
// for blocks that it does not hold.
func TestLateAbortsLeaveNothingLeased(t *testing.T) {
	t.Parallel()
	r, p, d := leasedFleet(t, &harness.MatrixFamilies[0])
	p.Fault(sim.Fault{Kind: sim.Slow, Leg: "prefill", Delay: 5 * time.Millisecond, P: 0.5})
	p.Fault(sim.Fault{Kind: sim.Stall, Phase: "answer", Leg: "prefill", Delay: 20 * time.Millisecond})
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: time.Millisecond})
	const clients, rounds = 10, 10
	worst := time.Duration(0)
	for round := range rounds {
		var all sync.WaitGroup
		for i := range clients {
			body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d of %d"}],"max_tokens":40,"ignore_eos":true%s}`, i, round, harness.Shapes[i%2].Extra)
			l := harness.StartRequest(t, r, fmt.Sprintf("late-%d-%d", round, i), body)
			all.Go(func() {
				testwait.Pace(rand.N(60 * time.Millisecond))
				l.Disconnect()
			})
		}
		all.Wait()
		abortedAt := time.Now()
		testwait.UntilWithin(t, 10*time.Second, "all blocks are free", func() bool {
			s := p.Stats().Sum()
			return s.Leases+s.Running+s.Waiting+s.DelayedAnswers == 0 && r.ReservedLoad() == ""
		})
		worst = max(worst, time.Since(abortedAt))
	}
	s := p.Stats().Sum()
	t.Logf("%d clients left, %d hand-overs; all blocks were free after %v at most", clients*rounds, s.LeasesCreated, worst.Round(time.Millisecond))
	if s.LeasesCreated == 0 || r.Fallbacks("abandoned_handle") == 0 {
		t.Error("nobody left between the legs: the test shows nothing")
	}
	if s.LeasesExpired != 0 || s.LateNotifications != 0 {
		t.Errorf("%d leases ran out, %d notifications for blocks that were not kept", s.LeasesExpired, s.LateNotifications)
	}
	if s := d.Stats().Sum(); s.GarbageReads != 0 {
		t.Errorf("decode read %d times what was not kept", s.GarbageReads)
	}
}

// TestAbandonedDecodeEndsByItself: a short decode that is not streamed runs to its end after its
// client has left. If it were cancelled, its engine would notify prefill a second time of blocks
// that prefill has already freed.
func TestAbandonedDecodeEndsByItself(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		goesOn  time.Duration
		version string
		want    int // notifications for blocks that prefill did not hold
	}{
		{"default", config.Default().PD.AbandonedDecodeTimeout, "0.32", 0},
		{"cut", 0, "0.32", 1},
		{"cancelled, and notified once", config.Default().PD.AbandonedDecodeTimeout, "0.20", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			engine := func(role string) *sim.Engine {
				return harness.StartSim(t, func(o *sim.Options) { o.Role, o.Release, o.Lease = role, c.version, time.Hour })
			}
			p, d := engine("prefill"), engine("decode")
			r := harness.StartRouter(t, func(cfg *config.Config) {
				cfg.PD.AbortDelay, cfg.PD.AbandonedDecodeTimeout = 50*time.Millisecond, c.goesOn
			}, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
			d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 10 * time.Millisecond})
			l := harness.StartRequest(t, r, "whole", `{"model":"sim","messages":[{"role":"user","content":"a short one"}],"max_tokens":100,"ignore_eos":true}`)
			testwait.UntilWithin(t, harness.TestTimeout, "decode makes tokens", func() bool { return d.Stats().Sum().GeneratedTokens > 2 })
			l.Disconnect()
			harness.WantIdle(t, r, 20*time.Second, p, d)
			made := d.Stats().Sum().GeneratedTokens
			if whole := made == 100; whole != (c.want == 0 && c.version == "0.32") {
				t.Errorf("decode made %d of 100 tokens", made)
			}
			testwait.UntilWithin(t, 5*time.Second, "prefill is notified as expected", func() bool { return p.Stats().Sum().LateNotifications == c.want })
		})
	}
}

// TestAbandonedDecodeIsAbortedAtTimeout: a long decode without a client is cancelled.
func TestAbandonedDecodeIsAbortedAtTimeout(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	const goesOn = 300 * time.Millisecond
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.AbortDelay, c.PD.AbandonedDecodeTimeout = 50*time.Millisecond, goesOn
	}, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	d.Fault(sim.Fault{Kind: sim.Slow, Leg: "decode", Delay: 5 * time.Millisecond})
	l := harness.StartRequest(t, r, "long", fmt.Sprintf(endlessChat, ""))
	testwait.UntilWithin(t, harness.TestTimeout, "decode makes tokens", func() bool { return d.Stats().Sum().GeneratedTokens > 2 })
	abortedAt := l.Disconnect()
	testwait.UntilWithin(t, 5*time.Second, "decode is cut", func() bool { s := d.Stats().Sum(); return s.Running+s.Waiting == 0 })
	if took := time.Since(abortedAt); took < goesOn || took > goesOn+harness.AbortSlack {
		t.Errorf("decode was cut %v after its client left, want %v", took, goesOn)
	}
	harness.WantClientGone(t, r, "long")
	harness.WantIdle(t, r, 5*time.Second, p, d)
}
