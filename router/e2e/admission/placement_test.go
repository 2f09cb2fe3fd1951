package admission

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// rankOf returns the rank of a worker that has one.
func rankOf(t *testing.T, r *harness.Router, id string) *worker.Rank {
	t.Helper()
	for _, k := range r.AllRanks() {
		if k.ID.Worker == id {
			return k
		}
	}
	t.Fatalf("there is no worker %s", id)
	return nil
}

// startTwo starts a router over two engines, of which the one with the returned rank holds the prefix of prompt.
func startTwo(t *testing.T, prompt string, configure func(*config.Config)) (r *harness.Router, holder, other *worker.Rank, engines []*sim.Engine) {
	t.Helper()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r = harness.StartRouter(t, configure, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	answer := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(prompt))
	if answer.Status != 200 {
		t.Fatalf("status %d: %s", answer.Status, answer.Body)
	}
	holder, other = rankOf(t, r, "a"), rankOf(t, r, "b")
	if answer.Header.Get("X-Sluice-Worker") == "b" {
		holder, other = other, holder
	}
	testwait.UntilWithin(t, 20*time.Second, "the prefix is in the index and the load has ended", func() bool {
		return holder.CachedBlocks.Load() > 0 && holder.Requests.Load() == 0
	})
	return r, holder, other, []*sim.Engine{a, b}
}

// TestWaitForPrefix: a request waits for the full rank that holds its prefix, but no longer than
// affinity_wait, and not if the forecast there is later by more than others would lose by computing the prefix
// elsewhere.
func TestWaitForPrefix(t *testing.T) {
	t.Parallel()
	prompt := harness.PromptWords(1500, 1)
	ms := func(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }
	for _, c := range []struct {
		name string
		wait time.Duration
		// frees: the holder has capacity again while the request waits. queue: how long it computes other prompts,
		// as a multiple of the time that the prefix takes elsewhere, where three others would lose that time.
		frees    bool
		queue    float64
		isCopied bool                                   // the other rank holds the prefix too, and computes other prompts
		target   func(elsewhere time.Duration) []string // header and value; elsewhere: what the prefix takes there
		slow     bool                                   // each output token takes long on the holder
		isHolder bool
	}{
		{name: "the holder becomes free", wait: time.Minute, frees: true, isHolder: true},
		{name: "the holder stays full", wait: 300 * time.Millisecond},
		{name: "the holder's queue costs less than others would lose", wait: time.Minute, frees: true, queue: 2.5, isHolder: true},
		{name: "the holder's queue is long", wait: time.Minute, queue: 1000},
		{name: "the target cannot be met behind the holder's queue", wait: time.Minute, queue: 2.5, target: func(d time.Duration) []string {
			return []string{"x-llm-d-slo-ttft-ms", ms(2 * d)}
		}},
		{name: "the target can be met elsewhere only for a time", wait: time.Minute, target: func(d time.Duration) []string {
			return []string{"x-llm-d-slo-ttft-ms", ms((d + 1500*time.Millisecond) * 10 / 9)}
		}},
		{name: "so can the deadline", wait: time.Minute, target: func(d time.Duration) []string {
			return []string{"X-Sluice-Deadline-Ms", ms((d + 1500*time.Millisecond) * 10 / 9)}
		}},
		{name: "output tokens take too long there", wait: time.Minute, slow: true, target: func(time.Duration) []string {
			return []string{"x-llm-d-slo-tpot-ms", "10000"}
		}},
		{name: "the other holds as much, and would start it later", wait: time.Minute, isCopied: true},
		{name: "no wait"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, holder, other, engines := startTwo(t, prompt, func(cfg *config.Config) {
				cfg.Limits.RankRequests = 4
				cfg.Admission.AffinityWait = c.wait
				cfg.Schedule.PrefillMS = 1
			})
			elsewhere := r.Scheduler.PrefillTime(other, int(holder.CachedBlocks.Load())*16)
			others := int64(0)
			if c.isCopied {
				others = 100 // ms or tokens, less than admission.engine_queue
				other.PendingWork.Add(others * int64(time.Millisecond))
				other.PrefillTokens.Add(others)
				harness.Post(t, other.URL+"/v1/chat/completions", harness.ChatOf(prompt))
				testwait.Until(t, "the index has the copy", func() bool { return other.CachedBlocks.Load() >= holder.CachedBlocks.Load() })
			}
			holder.Requests.Add(4)
			other.Requests.Add(4) // so that it waits
			queue, blocks := int64(c.queue*float64(elsewhere)), int64(0)
			if c.slow {
				blocks = 1 << 40
			}
			holder.PendingWork.Add(queue)
			holder.DecodeBlocks.Add(blocks)
			free := func() {
				holder.PendingWork.Add(-queue)
				holder.DecodeBlocks.Add(-blocks)
				holder.Requests.Add(-4)
			}
			headers := []string{"X-Request-Id", "waits"}
			if c.target != nil {
				headers = append(headers, c.target(elsewhere)...)
			}
			var answer *harness.Answer
			done := make(chan struct{})
			go func() {
				defer close(done)
				answer = harness.Post(t, r.URL+"/v1/chat/completions", strings.Replace(harness.ChatOf(prompt), "{", `{"stream":true,`, 1), headers...)
			}()
			testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r, "default") == 1 })
			begun := time.Now()
			other.Requests.Add(-1)
			if c.frees {
				testwait.Holds(t, 150*time.Millisecond, "it waits for the holder", func() bool { return waiting(r, "default") == 1 })
				free()
			}
			<-done
			took := time.Since(begun)
			if !c.frees {
				free()
			}
			want := other
			if c.isHolder {
				want = holder
			}
			if got := answer.Header.Get("X-Sluice-Worker"); answer.Status != 200 || got != want.ID.Worker {
				t.Errorf("status %d from worker %s; want 200 from %s; notes %v", answer.Status, got, want.ID.Worker, r.Outcome(t, "waits").Notes)
			}
			if bounded := c.wait < time.Minute; bounded && took < c.wait {
				t.Errorf("it went elsewhere after %v; want at least %v", took, c.wait)
			}
			other.Requests.Add(-3)
			other.PendingWork.Add(-others * int64(time.Millisecond))
			other.PrefillTokens.Add(-others)
			wantEmpty(t, r, engines...)
		})
	}
}

// TestNoWaitForOthersSake: a request that goes before another which has waited much longer does not wait for the
// holder of its prefix for what others would lose, only where its own first token is expected earlier.
func TestNoWaitForOthersSake(t *testing.T) {
	t.Parallel()
	prompt := harness.PromptWords(1500, 3)
	r, holder, other, engines := startTwo(t, prompt, func(cfg *config.Config) {
		cfg.Limits.RankRequests = 4
		cfg.Admission.AffinityWait = 2 * time.Second
		cfg.Admission.Classes = []config.AdmissionClass{{Name: "interactive"}, {Name: "batch"}}
		cfg.Admission.Trusted = []string{"any"}
		cfg.Schedule.PrefillMS = 1
	})
	queue := int64(2.5 * float64(r.Scheduler.PrefillTime(other, int(holder.CachedBlocks.Load())*16)))
	holder.PendingWork.Add(queue)
	holder.Requests.Add(4)
	other.Requests.Add(4)
	var o clients
	o.send(t, r, "older", "X-Sluice-Priority", "batch")
	testwait.UntilWithin(t, 20*time.Second, "the older one waits", func() bool { return waiting(r, "batch") == 1 })
	testwait.UntilWithin(t, 20*time.Second, "it has waited much longer", func() bool {
		return r.Metric(`sluice_admission_oldest_wait_seconds{class="batch"}`) > 2.5
	})
	done := make(chan string)
	go func() {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(prompt), "X-Sluice-Priority", "interactive")
		done <- a.Header.Get("X-Sluice-Worker")
	}()
	testwait.UntilWithin(t, 20*time.Second, "the other one waits", func() bool { return waiting(r, "interactive") == 1 })
	begun := time.Now()
	other.Requests.Add(-1)
	if got, took := <-done, time.Since(begun); got != other.ID.Worker || took > 1500*time.Millisecond {
		t.Errorf("while an older request waits, worker %s served it after %s; want %s at once", got, took, other.ID.Worker)
	}
	holder.Requests.Add(-4)
	other.Requests.Add(-3)
	holder.PendingWork.Add(-queue)
	if o.wg.Wait(); len(o.refused) > 0 {
		t.Errorf("refused: %v", o.refused)
	}
	wantEmpty(t, r, engines...)
}

// TestPrefersRanksWithinTarget: a rank on which the first token or each output token is expected to take longer
// than the request's target is left out, although it holds the prefix, unless all do.
func TestPrefersRanksWithinTarget(t *testing.T) {
	t.Parallel()
	prompt := harness.PromptWords(1500, 2)
	r, holder, other, engines := startTwo(t, prompt, func(c *config.Config) { c.Admission.EngineQueue = time.Minute })
	body := strings.Replace(harness.ChatOf(prompt), "{", `{"stream":true,`, 1)
	send := func(id string, headers ...string) string {
		t.Helper()
		answer := harness.Post(t, r.URL+"/v1/chat/completions", body, append(headers, "X-Request-Id", id)...)
		if answer.Status != 200 {
			t.Fatalf("%s: status %d: %s", id, answer.Status, answer.Body)
		}
		return answer.Header.Get("X-Sluice-Worker")
	}
	if got := send("no target"); got != holder.ID.Worker {
		t.Fatalf("without a target worker %s served it; want %s, which holds the prefix", got, holder.ID.Worker)
	}
	for header, c := range map[string]struct {
		load   func(*worker.Rank) *atomic.Int64
		amount int64
	}{
		"x-llm-d-slo-tpot-ms": {func(k *worker.Rank) *atomic.Int64 { return &k.DecodeBlocks }, 1 << 40},
		"x-llm-d-slo-ttft-ms": {func(k *worker.Rank) *atomic.Int64 { return &k.PendingWork }, int64(30 * time.Second)}, // less than admission.engine_queue
	} {
		load, amount := c.load, c.amount
		load(holder).Add(amount)
		got := send(header, header, "10000")
		if notes := fmt.Sprint(r.Outcome(t, header).Notes); got != other.ID.Worker || !strings.Contains(notes, "1 of 2 ranks were left out") {
			t.Errorf("with %s worker %s served it, notes %s; want %s, and a note that a rank was left out", header, got, notes, other.ID.Worker)
		}
		load(other).Add(amount)
		send("all slow for "+header, header, "10000") // better a slow rank than none
		load(holder).Add(-amount)
		load(other).Add(-amount)
	}
	wantEmpty(t, r, engines...)
}

// TestDecodeRanksOfPromptsAreCounted: no more prompts are computed at a time than decode ranks can take, although
// a request chooses its decode rank only when its prompt has been computed.
func TestDecodeRanksOfPromptsAreCounted(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	decode := harness.SimWorker(d, worker.Decode, "d0")
	decode.RankRequests = 2
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), decode)
	release := hang(p)
	defer release()
	var o clients
	for i := range 6 {
		o.send(t, r, fmt.Sprint("r", i))
		n := i + 1
		testwait.UntilWithin(t, 20*time.Second, "it is dispatched or waits", func() bool {
			return len(harness.GenerateRequests(p))+waiting(r, "default") == n
		})
	}
	if prompts := len(harness.GenerateRequests(p)); prompts != 2 {
		t.Errorf("%d prompts are computed for a decode rank with two places; want 2", prompts)
	}
	release()
	if o.wg.Wait(); len(o.refused) > 0 || len(harness.GenerateRequests(d)) != 6 {
		t.Errorf("decode served %d requests, refused %v; want all 6", len(harness.GenerateRequests(d)), o.refused)
	}
	wantEmpty(t, r, p, d)
}
