package migration

import (
	"fmt"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/nixl"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestMigratedStreamKeepsLease: a stream that continues with a prefill of its own has a second
// handle, whose blocks prefill keeps under a lease. The router renews that lease while the decode
// engine has not begun, for longer than the lease would last, and has the blocks freed when decode
// fails.
func TestMigratedStreamKeepsLease(t *testing.T) {
	t.Parallel()
	const lease = 12 * time.Second // the router renews leases that are between 5 and 10 s old
	fam := harness.MatrixFamilies[0]
	harness.WithRealNIXL(t, &fam)
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Role, o.Lease = role, lease; fam.Engine(o) })
	}
	reference := harness.StartSim(t, nil)
	p, decodes := engine("prefill"), []*sim.Engine{engine("decode"), engine("decode")}
	w := harness.SimWorker(p, worker.Prefill, "p0")
	fam.Worker(&w, p)
	workers := []config.Worker{w}
	for i, d := range decodes {
		workers = append(workers, harness.SimWorker(d, worker.Decode, fmt.Sprint("d", i)))
	}
	r := harness.StartRouter(t, func(c *config.Config) {
		fam.Config(c)
		c.PD.Lease, c.PD.LeaseMargin = lease, time.Second
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000
		c.Migration.HandoverTokens = 0 // prefill again
	}, workers...)
	testwait.UntilWithin(t, 60*time.Second, "the NIXL tier is up", func() bool { return r.Transfers.Up(nixl.TierNIXL) })
	// breakAnd breaks the stream id after some events, and then its next decode leg by f.
	breakAnd := func(id string, f sim.Fault) {
		f.ID, f.Leg = id+"-", "decode"
		for _, d := range decodes {
			d.Fault(f)
			d.Fault(sim.Fault{Kind: sim.Reset, ID: id, After: 5})
		}
	}
	clearFaults := func() {
		for _, d := range decodes {
			d.ClearFaults()
		}
	}
	body := func(prompt string) string {
		return fmt.Sprintf(`{"model":"sim","stream":true,"prompt":%q,"max_tokens":40,"ignore_eos":true}`, prompt)
	}

	// The decode engine of the continuation does not begin until its lease has been renewed twice.
	begin := make(chan struct{})
	breakAnd("waits", sim.Fault{Kind: sim.Stall, N: 1, Until: begin})
	answer := make(chan *harness.Answer, 1)
	go func() {
		a, err := harness.TryPost(t.Context(), r.URL+"/v1/completions", body("go on"), "X-Request-Id", "waits")
		if err != nil {
			t.Error(err)
			a = new(harness.Answer)
		}
		answer <- a
	}()
	testwait.UntilWithin(t, 20*time.Second, "prefill has run again", func() bool { return p.Stats().Sum().LeasesCreated == 2 })
	began := time.Now()
	testwait.UntilWithin(t, 40*time.Second, "the second lease is renewed twice, and would have ended", func() bool {
		renewed, _, _ := r.SideChannel.Counts()
		return renewed >= 2 && time.Since(began) > lease+4*time.Second
	})
	if s := p.Stats().Sum(); s.Leases != 1 || s.LeasesReleased != 1 || s.LeasesExpired != 0 {
		t.Errorf("while decode waits: %d leases, %d released, %d ran out; want 1, 1, 0", s.Leases, s.LeasesReleased, s.LeasesExpired)
	}
	// One lease is renewed every 5 s from its age of 5 s on. By now two would have been renewed four
	// times together.
	elapsed := time.Since(began)
	if renewed, _, failed := r.SideChannel.Counts(); renewed > int64((elapsed+time.Second)/(5*time.Second)) || failed != 0 {
		t.Errorf("%d renewals in %v, %d failed; is the first handle, which decode has read, renewed too?", renewed, elapsed, failed)
	}
	close(begin)
	harness.WantSameContent(t, <-answer, harness.Post(t, reference.URL()+"/v1/completions", body("go on")))
	testwait.UntilWithin(t, 20*time.Second, "prefill holds nothing", func() bool { return p.Stats().Sum().Leases == 0 })
	clearFaults()

	// Every decode engine of the continuation fails before it has read the blocks.
	_, was, _ := r.SideChannel.Counts()
	breakAnd("fails", sim.Fault{Kind: sim.Reset})
	if s := harness.ReadStreamContent(harness.Post(t, r.URL+"/v1/completions", body("and on"), "X-Request-Id", "fails")); s.Err == "" {
		t.Errorf("the stream has no error: %+v", s)
	}
	testwait.UntilWithin(t, lease/2, "prefill holds nothing after the failed decode", func() bool { return p.Stats().Sum().Leases == 0 })
	testwait.UntilWithin(t, 20*time.Second, "the router has the blocks freed", func() bool { _, now, _ := r.SideChannel.Counts(); return now > was })
	if s := p.Stats().Sum(); s.LeasesExpired != 0 {
		t.Errorf("%d leases ran out", s.LeasesExpired)
	}
	clearFaults()
	harness.WantIdle(t, r, 20*time.Second, append(decodes, p)...)
}
