package families

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestFewTokensPrefillOnDecode: a prompt that the decode worker has not cached runs on a prefill
// worker. If all but a few tokens are cached, the decode worker runs the request alone.
func TestFewTokensPrefillOnDecode(t *testing.T) {
	t.Parallel()
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.LocalPrefillTokens = 64 }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	body := harness.ChatOf(strings.Repeat("a long prompt that is worth a hand-over, ", 30))
	first := harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "far")
	if first.Status != 200 || first.Header.Get("X-Sluice-Plan") != "remote; reason=uncached" || first.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Fatalf("%d %s %v", first.Status, first.Body, first.Header)
	}
	rec := r.Explain(t, "far")
	if len(rec.Joint) != 1 || rec.Joint[0].Plan != "remote" || rec.Joint[0].Remote.Prefill != "p0/0" || rec.Joint[0].Remote.Decode != "d0/0" || rec.Joint[0].Local == nil {
		t.Errorf("pairs %+v", rec.Joint)
	}
	if len(rec.Decisions) != 2 {
		t.Errorf("%d decisions, want both legs'", len(rec.Decisions))
	}
	var near *harness.Answer
	testwait.UntilWithin(t, 10*time.Second, "decode holds the prompt", func() bool {
		near = harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "near")
		return near.Header.Get("X-Sluice-Plan") == "local; reason=few_uncached"
	})
	if near.Status != 200 || near.Text(t) != first.Text(t) || near.Header.Get("X-Sluice-Prefill-Worker") != "" || near.Header.Get("X-Sluice-Worker") != "d0" {
		t.Errorf("%d %s %v", near.Status, near.Body, near.Header)
	}
	prefills := len(harness.GenerateRequests(p))
	streamed := harness.Post(t, r.URL+"/v1/chat/completions", strings.Replace(body, "{", `{"stream":true,`, 1))
	if streamed.Status != 200 || streamed.Text(t) != first.Text(t) || streamed.Header.Get("X-Sluice-Plan") != "local; reason=few_uncached" {
		t.Errorf("streamed: %d %s %v", streamed.Status, streamed.Body, streamed.Header)
	}
	if n := len(harness.GenerateRequests(p)); n != prefills {
		t.Errorf("prefill saw %d requests of a local plan", n-prefills)
	}
	if n := r.Metric(`sluice_plans_total{plan="local",reason="few_uncached"}`); n < 2 {
		t.Errorf("%v counted", n)
	}
	rec = r.Explain(t, "near")
	if len(rec.Joint) != 1 || rec.Joint[0].Plan != "local" || rec.Joint[0].Local.Uncached >= 64 || len(rec.Decisions) != 1 || rec.Decisions[0].Leg != "whole" {
		t.Errorf("pairs %+v, decisions %+v", rec.Joint, rec.Decisions)
	}
	explain := exec.Command(harness.BuiltBinary(t), "explain", "--runtime-file", r.Config.Admin.RuntimeFile, "near")
	out, err := explain.CombinedOutput()
	if err != nil {
		t.Errorf("explain: %v", err)
	}
	for _, want := range []string{"local, too few uncached tokens for a hand-over to be worthwhile", "remote: prefill on p0/0, decode on d0/0", "→ local: all on d0/0"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
}

// TestEstimateChoosesLocalPrefill: between idle workers the estimate is lower without a hand-over.
func TestEstimateChoosesLocalPrefill(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.LocalWhenFaster = true }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "est")
	if a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "local; reason=faster" || a.Header.Get("X-Sluice-Worker") != "d0" || len(harness.GenerateRequests(p)) != 0 {
		t.Fatalf("%d %s %v, %d prefills", a.Status, a.Body, a.Header, len(harness.GenerateRequests(p)))
	}
	e := r.Explain(t, "est").Joint[0]
	if e.Local.Cost >= e.Remote.Cost || e.Remote.Terms.Transfer <= 0 || e.Remote.Terms.Prefill <= 0 {
		t.Errorf("%+v", e)
	}
	// With the estimate off, the router compares no plans and records no reason.
	off := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	if a := harness.Post(t, off.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "off"); a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("off: %d %v", a.Status, a.Header)
	}
	if rec := off.Explain(t, "off"); len(rec.Joint) != 0 {
		t.Errorf("off: pairs %+v", rec.Joint)
	}
}

// TestFailedLocalPrefillRetriesElsewhere: if a decode worker fails a request that it runs alone, the
// router excludes it and chooses both legs again.
func TestFailedLocalPrefillRetriesElsewhere(t *testing.T) {
	bad := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		harness.ReplyJSON(w, 503, `{"error":{"message":"full"}}`)
	})
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.LocalPrefillTokens = 1 << 20 },
		harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"), bad.Worker(worker.Decode, "d1"))
	for i := 0; i < 50 && bad.Requests() == 0; i++ {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.ChatOf(fmt.Sprint("prompt ", i)), "X-Request-Id", "again")
		if a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "d0" {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
	}
	rec := r.Explain(t, "again")
	if bad.Requests() != 1 || len(rec.Joint) != 2 || rec.Joint[0].Local.Rank != "d1/0" || rec.Joint[1].Local.Rank != "d0/0" || rec.Joint[1].Attempt != 2 {
		t.Errorf("the bad one saw %d; pairs %+v", bad.Requests(), rec.Joint)
	}
	testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
}

// TestReservedDecodeIsRemoved: a decode worker that was chosen together with the prefill worker and
// is lost while prefill runs does not receive the decode leg.
func TestReservedDecodeIsRemoved(t *testing.T) {
	arrived, on := make(chan struct{}, 1), make(chan struct{})
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-on
		harness.ReplyJSON(w, 200, harness.PrefillReply(`{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"q","remote_host":"127.0.0.1","remote_port":1,"tp_size":1}`))
	})
	decodes := map[string]*harness.ScriptedEngine{"d0/0": harness.StartScripted(t, harness.AnswerOK), "d1/0": harness.StartScripted(t, harness.AnswerOK)}
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.LocalPrefillTokens, c.Tokens.Mode = 1, "text" },
		p.Worker(worker.Prefill, "p0"), decodes["d0/0"].Worker(worker.Decode, "d0"), decodes["d1/0"].Worker(worker.Decode, "d1"))
	done := make(chan *harness.Answer, 1)
	go func() {
		a, _ := harness.TryPost(t.Context(), r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "lost")
		done <- a
	}()
	<-arrived
	reserved := r.Explain(t, "lost").Joint[0].Remote.Decode
	decodes[reserved].CloseClientConnections()
	decodes[reserved].Close()
	testwait.UntilWithin(t, 10*time.Second, "it is out", func() bool { return r.State(strings.TrimSuffix(reserved, "/0")) == worker.Unhealthy })
	close(on)
	a := <-done
	if a == nil || a.Status != 200 || a.Header.Get("X-Sluice-Worker") == strings.TrimSuffix(reserved, "/0") {
		t.Fatalf("booked %s: %+v", reserved, a)
	}
	if n := r.Metric(`sluice_leg_retries_total{leg="decode"}`); n > 0 {
		t.Errorf("%v retries: the lost one was tried", n)
	}
	testwait.UntilWithin(t, 5*time.Second, "nothing is booked", func() bool { return r.ReservedLoad() == "" })
}

// TestSGLangIsNeverLocal: SGLang's decode engines cannot prefill, so the router never lets them run
// a request alone, whatever the configuration for all models says.
func TestSGLangIsNeverLocal(t *testing.T) {
	engine := func(role string) func(*sim.Options) {
		return func(o *sim.Options) { o.Role, o.Engine = role, "sglang" }
	}
	p, d := harness.StartSim(t, engine("prefill")), harness.StartSim(t, engine("decode"))
	w := harness.SimWorker(p, worker.Prefill, "p0")
	harness.WithBootstrap(&w, p)
	r := harness.StartRouter(t, func(c *config.Config) {
		c.PD.LocalPrefillTokens, c.PD.LocalWhenFaster = 1<<20, true
		own := c.PD
		own.Family = "sglang"
		c.Models = map[string]config.Model{"sim": {PD: &own}}
	}, w, harness.SimWorker(d, worker.Decode, "d0"))
	for i := range 3 { // the second and third find the prompt cached
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", fmt.Sprint("never-", i))
		if a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || len(harness.GenerateRequests(p)) != i+1 {
			t.Errorf("request %d: %d %s %v, %d prefills", i, a.Status, a.Body, a.Header, len(harness.GenerateRequests(p)))
		}
	}
	if rec := r.Explain(t, "never-2"); len(rec.Joint) != 0 {
		t.Errorf("pairs %+v", rec.Joint)
	}
}

// TestUnlearnedEstimates: without learned rates and measured transfers the router still chooses a
// plan, and the record names the default values that it used.
func TestUnlearnedEstimates(t *testing.T) {
	p, d := harness.StartScripted(t, harness.AnswerOK), harness.StartScripted(t, harness.AnswerOK)
	for _, mode := range []string{"text", "ids"} {
		r := harness.StartRouter(t, func(c *config.Config) { c.PD.LocalWhenFaster, c.Tokens.Mode = true, mode }, p.Worker(worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Request-Id", "first")
		plan := a.Header.Get("X-Sluice-Plan")
		if a.Status != 200 || plan != "local; reason=faster" && plan != "remote; reason=unknown_prompt" {
			t.Errorf("tokens %s: %d, plan %q", mode, a.Status, plan)
		}
		if rec := r.Explain(t, "first"); len(rec.Joint) != 1 {
			t.Errorf("tokens %s: pairs %+v", mode, rec.Joint)
		}
	}
}
