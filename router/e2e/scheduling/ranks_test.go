package scheduling

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// startRankedSim starts a worker of two ranks, which are addressed by a header or by a URL each.
func startRankedSim(t *testing.T, how, r string) (*sim.Engine, config.Worker) {
	t.Helper()
	e := harness.StartSim(t, func(o *sim.Options) { o.Role, o.Ranks, o.RankPorts = r, 2, how == "urls" })
	ro, err := worker.ParseRole(r)
	if err != nil {
		t.Fatal(err)
	}
	w := harness.SimWorker(e, ro, r+"-w")
	w.Ranks = []uint16{0, 1}
	if how == "urls" {
		w.RankURLs = e.RankURLs()
	}
	return e, w
}

// TestRanksAreAddressed: the chosen rank serves the request, and the response names it.
func TestRanksAreAddressed(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"header", "urls"} {
		t.Run(how, func(t *testing.T) {
			e, w := startRankedSim(t, how, "aggregated")
			r := harness.StartRouter(t, nil, w)
			served := map[int]int{}
			for i := range 24 {
				e.ForgetRequests()
				// The router ignores a rank that the client names, which would override the choice.
				a := harness.Post(t, r.URL+"/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":2}`, i, harness.Prompt), "X-data-parallel-rank", "1")
				harness.WantStatus(t, a, 200)
				recs := harness.GenerateRequests(e)
				if len(recs) != 1 || strconv.Itoa(recs[0].Rank) != a.Header.Get("X-Sluice-Rank") {
					t.Fatalf("rank %d served, X-Sluice-Rank is %q", recs[0].Rank, a.Header.Get("X-Sluice-Rank"))
				}
				header := recs[0].Header("X-data-parallel-rank")
				if how == "header" && header != a.Header.Get("X-Sluice-Rank") || how == "urls" && header != "" {
					t.Errorf("X-data-parallel-rank %q on the engine's side", header)
				}
				served[recs[0].Rank]++
			}
			if served[0] < 2 || served[1] < 2 {
				t.Errorf("24 prompts went %d and %d", served[0], served[1])
			}
		})
	}
}

// TestChatStaysOnItsRank: later turns go to the rank that caches the conversation, and the engine
// finds as many cached tokens as predicted.
func TestChatStaysOnItsRank(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"header", "urls"} {
		t.Run(how, func(t *testing.T) {
			e, w := startRankedSim(t, how, "aggregated")
			r := harness.StartRouter(t, nil, w)
			for c := range 4 {
				msgs := fmt.Sprintf(`{"role":"user","content":"chat %d: %s"}`, c, harness.Prompt)
				rank := ""
				for turn := range 4 {
					a := harness.Post(t, r.URL+"/v1/chat/completions", `{"model":"sim","messages":[`+msgs+`],"max_tokens":24,"ignore_eos":true}`)
					harness.WantStatus(t, a, 200)
					predictedTokens, found := a.Header.Get("X-Sluice-Cached-Tokens"), cachedTokens(t, a)
					if predictedTokens != strconv.Itoa(found) {
						t.Errorf("chat %d turn %d: %s cached tokens predicted, the engine found %d", c, turn, predictedTokens, found)
					}
					if turn > 0 && (a.Header.Get("X-Sluice-Rank") != rank || found == 0) {
						t.Errorf("chat %d turn %d: rank %s with %d cached, turn before was on %s", c, turn, a.Header.Get("X-Sluice-Rank"), found, rank)
					}
					rank = a.Header.Get("X-Sluice-Rank")
					msgs += fmt.Sprintf(`,{"role":"assistant","content":%q},{"role":"user","content":"and then? %s"}`, a.Text(t), harness.Prompt)
					harness.AwaitIndexed(t, r, e)
				}
			}
			if n := r.Metric("sluice_cache_prediction_error_tokens_total"); n != 0 {
				t.Errorf("predictions were off by %v tokens in sum", n)
			}
		})
	}
}

func cachedTokens(t *testing.T, a *harness.Answer) int {
	t.Helper()
	usage := harness.Member(t, a.Body, "usage")
	details := harness.Member(t, []byte(usage), "prompt_tokens_details")
	if details == "" || details == "null" {
		return 0
	}
	n, _ := strconv.Atoi(harness.Member(t, []byte(details), "cached_tokens"))
	return n
}

// TestRanksOfBothLegs: each leg is sent to the chosen rank of its worker.
func TestRanksOfBothLegs(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"header", "urls"} {
		t.Run(how, func(t *testing.T) {
			p, wp := startRankedSim(t, how, "prefill")
			d, wd := startRankedSim(t, how, "decode")
			r := harness.StartRouter(t, nil, wp, wd)
			for i := range 8 {
				p.ForgetRequests()
				d.ForgetRequests()
				id := fmt.Sprint("both-", i)
				a := harness.Post(t, r.URL+"/v1/chat/completions", fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %s"}],"max_tokens":4}`, i, harness.Prompt), "X-Request-Id", id)
				harness.WantStatus(t, a, 200)
				pr, dr := harness.GenerateRequests(p), harness.GenerateRequests(d)
				rec := r.Explain(t, id)
				if len(rec.Decisions) != 2 || rec.Decisions[0].Chosen != fmt.Sprintf("prefill-w/%d", pr[0].Rank) || rec.Decisions[1].Chosen != fmt.Sprintf("decode-w/%d", dr[0].Rank) {
					t.Errorf("decisions %+v; prefill was served by rank %d, decode by %d", rec.Decisions, pr[0].Rank, dr[0].Rank)
				}
				if a.Header.Get("X-Sluice-Rank") != strconv.Itoa(dr[0].Rank) {
					t.Errorf("X-Sluice-Rank %q, decode was on %d", a.Header.Get("X-Sluice-Rank"), dr[0].Rank)
				}
				if !strings.Contains(string(dr[0].Body), fmt.Sprintf("_dp%d", pr[0].Rank)) {
					t.Errorf("the handle is not of prefill rank %d: %s", pr[0].Rank, dr[0].Body)
				}
			}
			if s := d.Stats().Sum(); s.Transfers != 8 || s.TransfersFailed != 0 {
				t.Errorf("%d transfers, %d failed", s.Transfers, s.TransfersFailed)
			}
			harness.WantIdle(t, r, 10*time.Second, p, d)
		})
	}
}
