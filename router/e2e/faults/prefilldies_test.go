package faults

import (
	"fmt"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestPrefillDiesBeforeItsKVIsPulled: decode waits for blocks of a prefill engine that has died.
// The router cancels it and runs both legs again, long before decode's timeout.
func TestPrefillDiesBeforeItsKVIsPulled(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprint("stream=", stream), func(t *testing.T) {
			t.Parallel()
			plain := harness.StartSim(t, nil)
			prefills := map[string]*sim.Engine{"p0": harness.StartSim(t, harness.SimRole("prefill")), "p1": harness.StartSim(t, harness.SimRole("prefill"))}
			d0, d1 := harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, harness.SimRole("decode"))
			r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = "nixl" }, harness.SimWorker(prefills["p0"], worker.Prefill, "p0"), harness.SimWorker(prefills["p1"], worker.Prefill, "p1"),
				harness.SimWorker(d0, worker.Decode, "d0"), harness.SimWorker(d1, worker.Decode, "d1"))
			for _, d := range []*sim.Engine{d0, d1} {
				for _, leg := range []string{"decode", "handover"} { // not for the legs that are run again
					d.Fault(sim.Fault{Kind: sim.Slow, ID: "pulls-", Leg: leg})
				}
				d.Fault(sim.Fault{Kind: sim.Stall, ID: "pulls", Leg: "handover", Delay: time.Hour})
				d.Fault(sim.Fault{Kind: sim.Stall, ID: "pulls", Leg: "decode", Phase: "body"})
			}
			body := harness.Chat(fmt.Sprintf(`,"stream":%v`, stream))
			want := harness.Post(t, plain.URL()+"/v1/chat/completions", body)
			got := make(chan *harness.Answer, 1)
			began := time.Now()
			go func() {
				a, _ := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", body, "X-Request-Id", "pulls")
				got <- a
			}()
			testwait.UntilWithin(t, 10*time.Second, "decode waits for the KV", func() bool { return len(harness.GenerateRequests(d0))+len(harness.GenerateRequests(d1)) == 1 })
			died := ""
			for id, p := range prefills {
				if len(harness.GenerateRequests(p)) > 0 {
					died = id
					p.Crash()
				}
			}
			select {
			case a := <-got:
				if a == nil || a.Status != 200 || a.Text(t) != want.Text(t) {
					t.Fatalf("%+v, want %q", a, want.Text(t))
				}
				if by := a.Header.Get("X-Sluice-Prefill-Worker"); by == died || by == "" {
					t.Errorf("prefilled on %q, and %s had died", by, died)
				}
			case <-time.After(15 * time.Second):
				t.Fatal("the request still waits for an engine that is gone")
			}
			t.Logf("answered %v after it was sent", time.Since(began).Round(time.Millisecond))
			if n := r.Fallbacks("transfer_prefill_down"); n != 1 {
				t.Errorf("counted %v times", n)
			}
			for _, d := range []*sim.Engine{d0, d1} {
				d.ClearFaults()
			}
			harness.WantIdle(t, r, 10*time.Second, d0, d1)
		})
	}
}
