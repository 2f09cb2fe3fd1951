package scheduling

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestLoadMessagesReachTheirRanks: the load that an SGLang engine reports for each of its ranks
// reaches that rank's state, and so the scheduler's costs. The load sockets are named by the engine
// or by the configuration. Scraping is off, so that the token queue has no other source.
func TestLoadMessagesReachTheirRanks(t *testing.T) {
	t.Parallel()
	for _, named := range []bool{false, true} {
		t.Run(fmt.Sprintf("load_events=%v", named), func(t *testing.T) {
			e := harness.StartSim(t, func(o *sim.Options) {
				// A rank runs one request at a time, for a second or more, so that the next waits.
				o.Engine, o.Ranks, o.MaxSeqs, o.Speed, o.Loads = "sglang", 2, 1, 1, "auto"
			})
			w := harness.SimWorker(e, worker.Aggregated, "w")
			w.Ranks = []uint16{0, 1}
			if named {
				w.LoadEvents = []string{loadSocketOf(t, e.URL())}
				w.KVEvents = []string{"off"}
			}
			r := harness.StartRouter(t, func(c *config.Config) { c.Health.MetricsInterval = time.Hour }, w)
			ranks := r.AllRanks()
			testwait.UntilWithin(t, 10*time.Second, "both ranks have reported their load", func() bool {
				return ranks[0].QueuedTokens.Load() == 0 && ranks[1].QueuedTokens.Load() == 0
			})

			// Directly to the engine, without the router, all for rank 1.
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			for range 3 {
				body := fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":400,"ignore_eos":true}`, harness.Prompt)
				go harness.TryPost(ctx, e.URL()+"/v1/completions", body, "X-Data-Parallel-Rank", "1")
			}
			testwait.UntilWithin(t, 10*time.Second, "rank 1 has one running and two waiting", func() bool {
				return ranks[1].Running.Load() == 1 && ranks[1].Waiting.Load() == 2 && ranks[1].QueuedTokens.Load() > 0
			})
			if n, q := ranks[0].Running.Load(), ranks[0].QueuedTokens.Load(); n > 0 || q != 0 {
				t.Errorf("rank 0, which has nothing to do: %d running, %d tokens queued", n, q)
			}
			a := harness.Post(t, r.URL+"/v1/completions", `{"model":"sim","prompt":"x","max_tokens":1}`)
			if got := a.Header.Get("X-Sluice-Rank"); a.Status != 200 || got != "0" {
				t.Errorf("%d, placed on rank %q beside one that has a queue", a.Status, got)
			}
		})
	}
}

// loadSocketOf returns the endpoint that the engine names for rank 0's load messages.
func loadSocketOf(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url + "/server_info")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var info struct {
		Events struct {
			Port int `json:"load_endpoint_port_base"`
		} `json:"kv_events"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&info); err != nil || info.Events.Port == 0 {
		t.Fatalf("the engine names no load socket: %+v, %v", info, err)
	}
	return fmt.Sprintf("tcp://*:%d", info.Events.Port)
}
