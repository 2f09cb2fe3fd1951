package admission

import (
	"context"
	"fmt"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// begin sends a chat and returns its answer later.
func begin(t *testing.T, r *harness.Router, body string, headers ...string) <-chan *harness.Answer {
	c := make(chan *harness.Answer, 1)
	go func() {
		a, err := harness.TryPost(context.Background(), r.URL+"/v1/chat/completions", body, headers...)
		if err != nil {
			t.Error(err)
			a = &harness.Answer{}
		}
		c <- a
	}()
	return c
}

// within returns an answer that must have the status and come within the time.
func within(t *testing.T, what string, d time.Duration, status int, c <-chan *harness.Answer) *harness.Answer {
	t.Helper()
	select {
	case a := <-c:
		if a.Status != status {
			t.Errorf("%s: status %d (%s); want %d", what, a.Status, a.Header.Get("X-Sluice-Reason"), status)
		}
		return a
	case <-time.After(d):
		t.Errorf("%s was not answered within %v", what, d)
		return <-c
	}
}

// untilWaiting waits until n requests of a class wait, and for so long that those that lack KV have a claim.
func untilWaiting(t *testing.T, r *harness.Router, class string, n int) {
	t.Helper()
	testwait.UntilWithin(t, 20*time.Second, fmt.Sprint(n, " requests wait"), func() bool { return waiting(r, class) == n })
	testwait.Holds(t, 500*time.Millisecond, "they wait", func() bool { return waiting(r, class) == n })
}

// occupy lets ranks report 400 blocks of KV, a part of them in use by a request, until the returned function is called.
func occupy(usage map[*worker.Rank]float64) func() {
	for k, part := range usage {
		setKV(k, 400, part)
		k.Requests.Add(1)
	}
	return func() {
		for k := range usage {
			k.Requests.Add(-1)
		}
	}
}

// pair is a fleet with one prefill worker and two decode workers, of which the first lacks the fewest blocks for a large
// request.
type pair struct {
	*harness.Router
	engines []*sim.Engine // prefill, a, b
	a, b    *worker.Rank
	end     func()
}

func startPair(t *testing.T, maxWait time.Duration) *pair {
	p := &pair{}
	for _, role := range []string{"prefill", "decode", "decode"} {
		p.engines = append(p.engines, harness.StartSim(t, harness.SimRole(role)))
	}
	p.Router = harness.StartRouter(t, func(c *config.Config) {
		withoutReports(c)
		c.Admission.MaxWait = maxWait
	}, harness.SimWorker(p.engines[0], worker.Prefill, "p"), harness.SimWorker(p.engines[1], worker.Decode, "a"), harness.SimWorker(p.engines[2], worker.Decode, "b"))
	p.a, p.b = rankOf(t, p.Router, "a"), rankOf(t, p.Router, "b")
	p.end = occupy(map[*worker.Rank]float64{p.a: 0.5, p.b: 0.6})
	return p
}

// TestLargeRequestsOfTwoQueues: requests with two legs, and those that decode runs whole, wait in two queues for the same
// ranks. Large ones of both do not keep a rank from each other.
func TestLargeRequestsOfTwoQueues(t *testing.T) {
	t.Parallel()
	p := startPair(t, 15*time.Second)
	two := begin(t, p.Router, harness.ChatOf(harness.PromptWords(1500, 1)))
	chat := harness.ChatOf(harness.PromptWords(1500, 2))
	whole := begin(t, p.Router, chat[:len(chat)-1]+`,"prompt_logprobs":1}`)
	untilWaiting(t, p.Router, "default", 2)
	p.a.SetKVUsage(0)
	within(t, "the one with two legs", 5*time.Second, 200, two)
	within(t, "the whole one", 5*time.Second, 200, whole)
	p.end()
	wantEmpty(t, p.Router, p.engines...)
}

// TestLargeRequestAmongPrompts: prompts that are being computed choose their decode rank later. They do not keep a large
// request from the rank that is kept for it, and leave that rank to it.
func TestLargeRequestAmongPrompts(t *testing.T) {
	t.Parallel()
	p := startPair(t, 15*time.Second)
	large := begin(t, p.Router, harness.ChatOf(harness.PromptWords(1500, 1)))
	untilWaiting(t, p.Router, "default", 1)
	release := make(chan struct{})
	p.engines[0].Fault(sim.Fault{Kind: sim.Stall, Path: "/v1/chat", Until: release})
	var small []<-chan *harness.Answer
	for i := range 6 {
		small = append(small, begin(t, p.Router, harness.ChatOf(fmt.Sprint("small ", i))))
	}
	prompts := func(n int) func() bool {
		return func() bool { return len(harness.GenerateRequests(p.engines[0])) == n }
	}
	testwait.UntilWithin(t, 20*time.Second, "six prompts are computed", prompts(6))
	p.a.SetKVUsage(0.1)
	testwait.UntilWithin(t, 5*time.Second, "the large one is computed too", prompts(7))
	close(release)
	within(t, "the large one", 5*time.Second, 200, large)
	for _, c := range small {
		within(t, "a small one", 5*time.Second, 200, c)
	}
	p.end()
	wantEmpty(t, p.Router, p.engines...)
}

// TestDecodeChoiceLeavesKeptRank: a request that chooses its decode rank after its prefill leaves out one that is kept for
// a large request.
func TestDecodeChoiceLeavesKeptRank(t *testing.T) {
	t.Parallel()
	p := startPair(t, 15*time.Second)
	large := begin(t, p.Router, harness.ChatOf(harness.PromptWords(1500, 1)))
	untilWaiting(t, p.Router, "default", 1)
	for i := range 20 {
		within(t, "a small one", 5*time.Second, 200, begin(t, p.Router, harness.ChatOf(fmt.Sprint("small words ", i))))
	}
	if n := len(harness.GenerateRequests(p.engines[1])); n > 0 {
		t.Errorf("%d of 20 small requests were decoded on the rank that is kept for the large one", n)
	}
	p.a.SetKVUsage(0)
	within(t, "the large one", 5*time.Second, 200, large)
	p.end()
	wantEmpty(t, p.Router, p.engines...)
}

// TestClaimHoldsUntilDecode: while the prompt of a large request is computed, the rank whose blocks it needs is still kept
// for it, and its decode leg goes there.
func TestClaimHoldsUntilDecode(t *testing.T) {
	t.Parallel()
	p := startPair(t, 15*time.Second)
	large := begin(t, p.Router, harness.ChatOf(harness.PromptWords(1500, 1)))
	untilWaiting(t, p.Router, "default", 1)
	release := make(chan struct{})
	p.engines[0].Fault(sim.Fault{Kind: sim.Stall, Path: "/v1/chat", Until: release, N: 1})
	p.a.SetKVUsage(0)
	testwait.UntilWithin(t, 5*time.Second, "its prompt is computed", func() bool { return len(harness.GenerateRequests(p.engines[0])) == 1 })
	for i := range 8 {
		within(t, "a small one", 5*time.Second, 200, begin(t, p.Router, harness.ChatOf(fmt.Sprint("small words ", i))))
	}
	if n := len(harness.GenerateRequests(p.engines[1])); n > 0 {
		t.Errorf("%d of 8 small requests were decoded on the rank that is kept for the large one", n)
	}
	close(release)
	within(t, "the large one", 5*time.Second, 200, large)
	if n := len(harness.GenerateRequests(p.engines[1])); n != 1 {
		t.Errorf("%d requests were decoded on the rank that was kept; want the large one", n)
	}
	p.end()
	wantEmpty(t, p.Router, p.engines...)
}

// TestLargerThanOneKV: a prompt that is larger than the whole KV of one rank waits for another, however busy that is.
func TestLargerThanOneKV(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	r := harness.StartRouter(t, withoutReports, harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b"))
	ra, rb := rankOf(t, r, "a"), rankOf(t, r, "b")
	end := occupy(map[*worker.Rank]float64{ra: 0.9})
	setKV(rb, 50, 0)                     // an idle rank
	ra.PendingWork.Add(int64(time.Hour)) // not only its KV is full
	large := begin(t, r, harness.ChatOf(harness.PromptWords(1500, 1)))
	untilWaiting(t, r, "default", 1)
	if got := within(t, "a small one", 5*time.Second, 200, begin(t, r, harness.ChatOf("a few words"))).Header.Get("X-Sluice-Worker"); got != "b" {
		t.Errorf("a small one was sent to %s; want b, which is idle", got)
	}
	ra.PendingWork.Add(-int64(time.Hour))
	ra.SetKVUsage(0)
	if got := within(t, "the large one", 5*time.Second, 200, large).Header.Get("X-Sluice-Worker"); got != "a" {
		t.Errorf("it was sent to %s, which can never hold it; want a", got)
	}
	end()
	wantEmpty(t, r, a, b)
}

// TestLargerThanAllKV: a prompt that fits into no engine is sent at once, since waiting cannot help, and keeps no rank.
func TestLargerThanAllKV(t *testing.T) {
	t.Parallel()
	a := harness.StartSim(t, nil)
	r := harness.StartRouter(t, withoutReports, harness.SimWorker(a, worker.Aggregated, "a"))
	end := occupy(map[*worker.Rank]float64{rankOf(t, r, "a"): 0.1})
	setKV(rankOf(t, r, "a"), 100, 0.1)
	within(t, "the large one", 5*time.Second, 200, begin(t, r, harness.ChatOf(harness.PromptWords(1500, 1)))) // the simulator has room
	end()
	wantEmpty(t, r, a)
}

// TestOwnerOfClaimBehindLarger: of two large requests the one that goes first does not fit. The other has the claim, and
// starts when its own KV fits.
func TestOwnerOfClaimBehindLarger(t *testing.T) {
	t.Parallel()
	a := harness.StartSim(t, nil)
	r := harness.StartRouter(t, withoutReports, harness.SimWorker(a, worker.Aggregated, "a"))
	ra := rankOf(t, r, "a")
	end := occupy(map[*worker.Rank]float64{ra: 0.9})
	setKV(ra, 800, 0.9)
	owner := begin(t, r, harness.ChatOf(harness.PromptWords(1500, 1)))
	untilWaiting(t, r, "default", 1)
	larger := begin(t, r, harness.ChatOf(harness.PromptWords(3000, 2)), "X-Sluice-Deadline-Ms", "8000")
	testwait.UntilWithin(t, 20*time.Second, "both wait", func() bool { return waiting(r, "default") == 2 })
	testwait.Holds(t, 100*time.Millisecond, "both wait", func() bool { return waiting(r, "default") == 2 })
	ra.SetKVUsage(0.5)
	within(t, "the owner of the claim", time.Second, 200, owner)
	ra.SetKVUsage(0)
	within(t, "the larger one", 5*time.Second, 200, larger)
	end()
	wantEmpty(t, r, a)
}

// TestLargeRequestWithoutPrefill: when the last prefill worker is lost, and decode computes prompts, a large request keeps
// no smaller one waiting there either.
func TestLargeRequestWithoutPrefill(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) {
		withoutReports(c)
		c.Health.Interval, c.Health.Timeout = 20*time.Millisecond, 5*time.Second
	}, harness.SimWorker(p, worker.Prefill, "p"), harness.SimWorker(d, worker.Decode, "d"))
	rd, rp := rankOf(t, r, "d"), rankOf(t, r, "p")
	end := occupy(map[*worker.Rank]float64{rd: 0.6})
	rp.PendingWork.Add(int64(time.Minute))
	large := begin(t, r, harness.ChatOf(harness.PromptWords(1500, 1)))
	testwait.UntilWithin(t, 20*time.Second, "the large one waits", func() bool { return waiting(r, "default") == 1 })
	small := begin(t, r, harness.ChatOf("small words"))
	testwait.UntilWithin(t, 20*time.Second, "both wait", func() bool { return waiting(r, "default") == 2 })
	p.Crash()
	within(t, "the small one", 10*time.Second, 200, small)
	rd.SetKVUsage(0)
	within(t, "the large one", 10*time.Second, 200, large)
	rp.PendingWork.Add(-int64(time.Minute))
	end()
	wantEmpty(t, r, d)
}

// TestClaimWithoutProgress: a large request of the lowest class keeps the only rank from its class while a higher class
// takes the blocks. It gives that up, and so another tenant of its class gets its share.
func TestClaimWithoutProgress(t *testing.T) {
	t.Parallel()
	a := harness.StartSim(t, nil)
	r := harness.StartRouter(t, func(c *config.Config) {
		withoutReports(c)
		c.Admission.Classes = []config.AdmissionClass{{Name: "interactive"}, {Name: "batch", MinShare: 0.3}}
		c.Admission.Trusted = []string{"any"}
	}, harness.SimWorker(a, worker.Aggregated, "a"))
	ra := rankOf(t, r, "a")
	end := occupy(map[*worker.Rank]float64{ra: 0.6})
	large := begin(t, r, harness.ChatOf(harness.PromptWords(1500, 1)), "X-Sluice-Priority", "batch", "X-Sluice-Tenant", "x")
	untilWaiting(t, r, "batch", 1)
	small := func(words string) <-chan *harness.Answer {
		return begin(t, r, harness.ChatOf(words), "X-Sluice-Priority", "batch", "X-Sluice-Tenant", "y")
	}
	waits := small("a few words")
	select {
	case <-waits:
		t.Error("a small request started on the rank that is kept for the large one")
	case <-time.After(500 * time.Millisecond):
	}
	within(t, "the small one", 10*time.Second, 200, waits)
	within(t, "one that arrives after that", 2*time.Second, 200, small("a few more words"))
	ra.SetKVUsage(0)
	within(t, "the large one", 10*time.Second, 200, large)
	end()
	wantEmpty(t, r, a)
}
