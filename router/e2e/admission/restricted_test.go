package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestRestrictedRequestsLetOthersPass: requests that may use a full worker alone wait for it, in their order,
// and hold up none that another worker can start, however many they are and in how many ways they are
// restricted. In the past 16 of them did.
func TestRestrictedRequestsLetOthersPass(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	left, right := harness.SimWorker(a, worker.Aggregated, "a"), harness.SimWorker(b, worker.Aggregated, "b")
	left.Labels, right.Labels = []string{"left"}, []string{"right"}
	r := harness.StartRouter(t, func(c *config.Config) {
		oneAtATime(c)
		c.Steering.Pinning = []string{"any"}
		c.Admission.MaxWait = 2 * time.Minute
	}, left, right)
	full := rankOf(t, r, "a")
	full.Requests.Add(1) // of a request that runs there
	var restricted clients
	for i := range 30 {
		restriction := [][]string{{"X-Sluice-Worker", "a"}, {"X-Sluice-Require-Labels", "left"}, {"X-Sluice-Allowed-Workers", "a"}}[i%3]
		restricted.send(t, r, fmt.Sprintf("r%02d", i), restriction...)
		testwait.UntilWithin(t, 20*time.Second, "it waits", func() bool { return waiting(r, "default") == i+1 })
	}
	for i, restriction := range [][]string{nil, {"X-Sluice-Require-Labels", "right"}, nil} {
		began := time.Now()
		answer := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf("others"), restriction...)
		if took := time.Since(began); answer.Status != 200 || answer.Header.Get("X-Sluice-Worker") != "b" || took > 10*time.Second {
			t.Errorf("request %d beside restricted ones: status %d from %q after %v; want 200 from b at once", i, answer.Status, answer.Header.Get("X-Sluice-Worker"), took)
		}
	}
	if n := waiting(r, "default"); n != 30 || len(harness.GenerateRequests(a)) != 0 {
		t.Errorf("%d restricted requests wait, %d have started; want 30 and none", n, len(harness.GenerateRequests(a)))
	}
	full.Requests.Add(-1)
	served, refused := restricted.wait(a)
	var want []string
	for i := range 30 {
		want = append(want, fmt.Sprintf("r%02d", i))
	}
	if served != fmt.Sprint(want) || refused != "[]" {
		t.Errorf("worker a served %s, refused were %s; want all in their order", served, refused)
	}
	wantEmpty(t, r, a, b)
}

// TestRestrictedRequestsOfLostWorker: requests that may use a lost worker alone are refused after pool_wait,
// although others of their model wait for a worker that is ready.
func TestRestrictedRequestsOfLostWorker(t *testing.T) {
	t.Parallel()
	a, b := harness.StartSim(t, nil), harness.StartSim(t, nil)
	lost := harness.SimWorker(a, worker.Aggregated, "a")
	lost.Labels = []string{"lost"}
	r := harness.StartRouter(t, func(c *config.Config) {
		oneAtATime(c)
		c.Health.Interval, c.Health.Timeout = 20*time.Millisecond, 5*time.Second
		c.Timeouts.PoolWait, c.Admission.MaxWait = 500*time.Millisecond, 2*time.Minute
	}, lost, harness.SimWorker(b, worker.Aggregated, "b"))
	first, second := rankOf(t, r, "a"), rankOf(t, r, "b")
	first.Requests.Add(1)
	second.Requests.Add(1)
	var restricted, others clients
	for i := range 20 {
		others.send(t, r, fmt.Sprint("other", i))
		restricted.send(t, r, fmt.Sprint("restricted", i), "X-Sluice-Require-Labels", "lost")
	}
	testwait.UntilWithin(t, 20*time.Second, "all wait", func() bool { return waiting(r, "default") == 40 })
	a.Crash()
	testwait.UntilWithin(t, 20*time.Second, "the restricted requests are refused", func() bool { return waiting(r, "default") == 20 })
	restricted.wg.Wait()
	if len(restricted.refused) != 20 || strings.Count(fmt.Sprint(restricted.refused), " 503 ") != 20 {
		t.Errorf("refused were %v; want all 20 restricted requests, with 503", restricted.refused)
	}
	first.Requests.Add(-1)
	second.Requests.Add(-1)
	if others.wg.Wait(); len(others.refused) != 0 {
		t.Errorf("refused were %v; want none of those that another worker serves", others.refused)
	}
	wantEmpty(t, r, b)
}

// TestRestrictedPromptWaitsForItsDecode: prompts being computed whose decode rank is not chosen count as far
// as they compete for the ranks that a request may use.
func TestRestrictedPromptWaitsForItsDecode(t *testing.T) {
	t.Parallel()
	p := harness.StartSim(t, harness.SimRole("prefill"))
	d0, d1 := harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) {
		c.Steering.Pinning = []string{"any"}
		c.Admission.MaxWait = 2 * time.Minute
	}, harness.SimWorker(p, worker.Prefill, "p"), limited(d0, "d0"), limited(d1, "d1"))
	release := harness.DelayAnswers(sim.Fault{Path: "/v1/chat"}, p)
	defer release()
	var o clients
	o.send(t, r, "pinned0", "X-Sluice-Worker", "d0")
	testwait.UntilWithin(t, 20*time.Second, "its prompt is computed", func() bool { return len(harness.GenerateRequests(p)) == 1 })
	o.send(t, r, "pinned1", "X-Sluice-Worker", "d1") // d1 has a place, whatever the first will take
	testwait.UntilWithin(t, 20*time.Second, "the prompt of another is computed", func() bool { return len(harness.GenerateRequests(p)) == 2 })
	o.send(t, r, "again", "X-Sluice-Worker", "d0")
	testwait.UntilWithin(t, 20*time.Second, "a third waits", func() bool { return waiting(r, "default") == 1 })
	release()
	o.wg.Wait()
	if len(o.refused) != 0 || len(harness.GenerateRequests(d0)) != 2 || len(harness.GenerateRequests(d1)) != 1 {
		t.Errorf("refused were %v, d0 served %d, d1 %d; want none, 2 and 1", o.refused, len(harness.GenerateRequests(d0)), len(harness.GenerateRequests(d1)))
	}
	wantEmpty(t, r, p, d0, d1)
}

// limited returns a decode worker with a bound of one request.
func limited(e *sim.Engine, id string) config.Worker {
	w := harness.SimWorker(e, worker.Decode, id)
	w.RankRequests = 1
	return w
}

// TestConcurrentPairWaitsForDecode: a pair of legs that are sent at once waits, if others take the last place of
// decode after it was admitted. In the past it was refused with 503.
func TestConcurrentPairWaitsForDecode(t *testing.T) {
	t.Parallel()
	fam := harness.MatrixFamilyNamed(t, "mooncake")
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Role = role; fam.Engine(o) })
	}
	p, d := engine("prefill"), engine("decode")
	w := harness.SimWorker(p, worker.Prefill, "p")
	fam.Worker(&w, p)
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.Family = fam.Name }, w, limited(d, "d"))
	until := make(chan struct{})
	p.Fault(sim.Fault{Kind: sim.Stall, Leg: "bootstrap", Until: until})
	var o clients
	o.send(t, r, "pair")
	testwait.UntilWithin(t, 20*time.Second, "the bootstrap server is asked", func() bool { return p.Stats().Faults == 1 })
	decode := rankOf(t, r, "d")
	decode.Requests.Add(1) // of another that was faster
	close(until)
	testwait.UntilWithin(t, 20*time.Second, "the pair waits", func() bool { return waiting(r, "default") == 1 || len(o.all()) > 0 })
	for _, k := range r.AllRanks() {
		if k.ID.Worker == "p" && k.Requests.Load() != 0 {
			t.Error("the pair holds its prefill rank while it waits")
		}
	}
	decode.Requests.Add(-1)
	o.wg.Wait()
	if len(o.refused) > 0 || len(harness.GenerateRequests(p)) != 1 || len(harness.GenerateRequests(d)) != 1 {
		t.Errorf("refused %v, prefill received %d legs, decode %d; want the pair once", o.refused, len(harness.GenerateRequests(p)), len(harness.GenerateRequests(d)))
	}
	wantEmpty(t, r, p, d)
}
