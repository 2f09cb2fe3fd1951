package admission

import (
	"context"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// setKV sets what the engine of a rank reports: blocks of KV, and the part of them in use.
func setKV(r *worker.Rank, blocks int, usage float64) {
	info := *r.Worker.Info()
	info.TotalBlocks = blocks
	r.Worker.SetInfo(&info)
	r.SetKVUsage(usage)
}

// withoutReports lets a test set what engines report.
func withoutReports(c *config.Config) { c.Health.MetricsInterval = -1 }

// TestTooLargeForKVLetsOthersPass: a request whose KV fits nowhere does not keep smaller ones waiting. After a time one
// rank is kept for it, but not from requests of higher classes, and it starts there when its KV fits.
func TestTooLargeForKVLetsOthersPass(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		withoutReports(c)
		c.Admission.Classes = []config.AdmissionClass{{Name: "interactive"}, {Name: "batch"}}
		c.Admission.Trusted = []string{"any"}
	}, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	ra, rb := rankOf(t, r, "a"), rankOf(t, r, "b")
	for k, usage := range map[*worker.Rank]float64{ra: 0.5, rb: 0.6} {
		setKV(k, 400, usage)
		k.Requests.Add(1)
	}
	post := func(words, class, to string) *harness.Answer {
		headers := []string{"X-Sluice-Priority", class}
		if to != "" {
			headers = append(headers, "X-Sluice-Worker", to)
		}
		answer, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", harness.ChatOf(words), headers...)
		if err != nil {
			t.Error(err)
			return &harness.Answer{}
		}
		return answer
	}
	begin := func(words, class, to string) <-chan *harness.Answer {
		c := make(chan *harness.Answer, 1)
		go func() { c <- post(words, class, to) }()
		return c
	}
	large := begin(harness.PromptWords(1500, 1), "batch", "")
	testwait.UntilWithin(t, 20*time.Second, "the large request waits", func() bool { return waiting(r, "batch") == 1 })
	small := func(what string, answer *harness.Answer, want string) {
		t.Helper()
		if got := answer.Header.Get("X-Sluice-Worker"); answer.Status != 200 || want != "" && got != want {
			t.Errorf("%s: status %d from worker %q; want 200 from %q", what, answer.Status, got, want)
		}
	}
	small("a small request behind the large one", post("a few words", "batch", ""), "")
	var behind <-chan *harness.Answer
	testwait.UntilWithin(t, 20*time.Second, "the rank that lacks the fewest blocks is kept for it", func() bool {
		c := begin("a few more words", "batch", "a")
		select {
		case <-c:
			return false
		case <-time.After(200 * time.Millisecond):
			behind = c
			return true
		}
	})
	for range 8 {
		small("a small request while a rank is kept", post("a few other words", "batch", ""), "b")
	}
	small("a request of a higher class", post("urgent words", "interactive", "a"), "a")
	ra.SetKVUsage(0.1)
	small("the large request, now that its KV fits", <-large, "a")
	small("the request that had to use the kept rank", <-behind, "a")
	for _, k := range []*worker.Rank{ra, rb} {
		k.Requests.Add(-1)
	}
	wantEmpty(t, r, a, b)
}

// TestCachedPrefixNeedsNoKV: the blocks of a prompt that a rank has cached need no room in its KV.
func TestCachedPrefixNeedsNoKV(t *testing.T) {
	t.Parallel()
	prompt := harness.PromptWords(1500, 1)
	r, holder, _, engines := startTwo(t, prompt, func(c *config.Config) {
		withoutReports(c)
		c.Admission.MaxWait = 5 * time.Second
	})
	holder.Requests.Add(1)
	setKV(holder, int(holder.CachedBlocks.Load())+10, 0.9)
	for words, want := range map[string]int{prompt: 200, harness.PromptWords(1500, 2): 429} {
		if answer := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(words), "X-Sluice-Worker", holder.ID.Worker); answer.Status != want {
			t.Errorf("status %d; want %d (a cached prompt is started, and another one of the same length has no room)", answer.Status, want)
		}
	}
	holder.Requests.Add(-1)
	wantEmpty(t, r, engines...)
}

// TestFullRankWhileNothingWaits: a request does not queue in the engine that holds its prefix, beside an idle one,
// because no other request waits in the router.
func TestFullRankWhileNothingWaits(t *testing.T) {
	t.Parallel()
	prompt := harness.PromptWords(1500, 4)
	r, holder, other, engines := startTwo(t, prompt, func(c *config.Config) {
		c.Schedule.PrefillMS = 1
		c.Admission.AffinityWait = 20 * time.Second
	})
	elsewhere := int64(r.Scheduler.PrefillTime(other, int(holder.CachedBlocks.Load())*16))
	post := func(id string) *harness.Answer {
		return harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(prompt), "X-Request-Id", id)
	}
	holder.PendingWork.Add(elsewhere / 2)
	done := make(chan *harness.Answer, 1)
	go func() { done <- post("waits") }()
	testwait.UntilWithin(t, 20*time.Second, "it waits for the holder, whose queue is short", func() bool { return waiting(r, "default") == 1 })
	holder.PendingWork.Add(-elsewhere / 2)
	if got := (<-done).Header.Get("X-Sluice-Worker"); got != holder.ID.Worker {
		t.Errorf("it was started on %s; want the holder %s", got, holder.ID.Worker)
	}
	holder.PendingWork.Add(1000 * elsewhere)
	if got := post("elsewhere").Header.Get("X-Sluice-Worker"); got != other.ID.Worker {
		t.Errorf("with a long queue on the holder it was started on %s; want %s", got, other.ID.Worker)
	}
	holder.PendingWork.Add(-1000 * elsewhere)
	wantEmpty(t, r, engines...)
}
