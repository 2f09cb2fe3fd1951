package main

import (
	"fmt"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// TestPrefillDiesBeforeItsKVIsPulled: decode, which waits for blocks of an engine
// that is no more, is cut and the pair run again, long before its time-out.
func TestPrefillDiesBeforeItsKVIsPulled(t *testing.T) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprint("stream=", stream), func(t *testing.T) {
			t.Parallel()
			plain := startSim(t, nil)
			prefills := map[string]*sim.Engine{"p0": startSim(t, simRole("prefill")), "p1": startSim(t, simRole("prefill"))}
			d0, d1 := startSim(t, simRole("decode")), startSim(t, simRole("decode"))
			r := startRouter(t, func(c *config.Config) { c.PD.Family = "nixl" }, simWorker(prefills["p0"], worker.Prefill, "p0"), simWorker(prefills["p1"], worker.Prefill, "p1"),
				simWorker(d0, worker.Decode, "d0"), simWorker(d1, worker.Decode, "d1"))
			for _, d := range []*sim.Engine{d0, d1} {
				for _, leg := range []string{"decode", "handover"} { // the pair that is run again is spared
					d.Fault(sim.Fault{Kind: sim.Slow, ID: "pulls-", Leg: leg})
				}
				d.Fault(sim.Fault{Kind: sim.Stall, ID: "pulls", Leg: "handover", Delay: time.Hour})
				d.Fault(sim.Fault{Kind: sim.Stall, ID: "pulls", Leg: "decode", Phase: "body"})
			}
			body := chat(fmt.Sprintf(`,"stream":%v`, stream))
			want := post(t, plain.URL()+"/v1/chat/completions", body)
			got := make(chan *answer, 1)
			began := time.Now()
			go func() {
				a, _ := tryPost(t.Context(), r.URL+"/v1/chat/completions", body, "X-Request-Id", "pulls")
				got <- a
			}()
			eventually(t, 10*time.Second, "decode waits for the KV", func() bool { return len(generateRequests(d0))+len(generateRequests(d1)) == 1 })
			died := ""
			for id, p := range prefills {
				if len(generateRequests(p)) > 0 {
					died = id
					p.Crash()
				}
			}
			select {
			case a := <-got:
				if a == nil || a.Status != 200 || a.text(t) != want.text(t) {
					t.Fatalf("%+v, want %q", a, want.text(t))
				}
				if by := a.Header.Get("X-Sluice-Prefill-Worker"); by == died || by == "" {
					t.Errorf("prefilled on %q, and %s had died", by, died)
				}
			case <-time.After(15 * time.Second):
				t.Fatal("the request still waits for an engine that is gone")
			}
			t.Logf("answered %v after it was sent", time.Since(began).Round(time.Millisecond))
			if n := r.fallbacks("transfer_prefill_down"); n != 1 {
				t.Errorf("counted %v times", n)
			}
			for _, d := range []*sim.Engine{d0, d1} {
				d.ClearFaults()
			}
			wantIdle(t, r, 10*time.Second, d0, d1)
		})
	}
}
