package main

import (
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// TestFewTokensPrefillOnDecode: a prompt that the decode worker does not hold is
// prefilled elsewhere; when it does, all but a few tokens, decode does it alone.
func TestFewTokensPrefillOnDecode(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, func(c *config.Config) { c.PD.LocalPrefillTokens = 64 }, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	body := chatOf(strings.Repeat("a long prompt that is worth a hand-over, ", 30))
	first := post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "far")
	if first.Status != 200 || first.Header.Get("X-Sluice-Plan") != "remote; reason=uncached" || first.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Fatalf("%d %s %v", first.Status, first.Body, first.Header)
	}
	rec := r.explain(t, "far")
	if len(rec.Joint) != 1 || rec.Joint[0].Plan != "remote" || rec.Joint[0].Remote.Prefill != "p0/0" || rec.Joint[0].Remote.Decode != "d0/0" || rec.Joint[0].Local == nil {
		t.Errorf("pairs %+v", rec.Joint)
	}
	if len(rec.Decisions) != 2 {
		t.Errorf("%d decisions, want both legs'", len(rec.Decisions))
	}
	var near *answer
	eventually(t, 10*time.Second, "decode holds the prompt", func() bool {
		near = post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", "near")
		return near.Header.Get("X-Sluice-Plan") == "local; reason=few_uncached"
	})
	if near.Status != 200 || near.text(t) != first.text(t) || near.Header.Get("X-Sluice-Prefill-Worker") != "" || near.Header.Get("X-Sluice-Worker") != "d0" {
		t.Errorf("%d %s %v", near.Status, near.Body, near.Header)
	}
	prefills := len(generateRequests(p))
	streamed := post(t, r.URL+"/v1/chat/completions", strings.Replace(body, "{", `{"stream":true,`, 1))
	if streamed.Status != 200 || streamed.text(t) != first.text(t) || streamed.Header.Get("X-Sluice-Plan") != "local; reason=few_uncached" {
		t.Errorf("streamed: %d %s %v", streamed.Status, streamed.Body, streamed.Header)
	}
	if n := len(generateRequests(p)); n != prefills {
		t.Errorf("prefill saw %d requests of a local plan", n-prefills)
	}
	if n := r.metric(`sluice_plans_total{plan="local",reason="few_uncached"}`); n < 2 {
		t.Errorf("%v counted", n)
	}
	rec = r.explain(t, "near")
	if len(rec.Joint) != 1 || rec.Joint[0].Plan != "local" || rec.Joint[0].Local.Uncached >= 64 || len(rec.Decisions) != 1 || rec.Decisions[0].Leg != "whole" {
		t.Errorf("pairs %+v, decisions %+v", rec.Joint, rec.Decisions)
	}
	explain := exec.Command(builtBinary(t), "explain", "--runtime-file", r.Config.Admin.RuntimeFile, "near")
	out, err := explain.CombinedOutput()
	if err != nil {
		t.Errorf("explain: %v", err)
	}
	for _, want := range []string{"local, too few tokens are left for a hand-over to pay", "remote: prefill on p0/0, decode on d0/0", "→ local: all on d0/0"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	eventually(t, 5*time.Second, "nothing is booked", func() bool { return r.reservedLoad() == "" })
}

// TestEstimateChoosesLocalPrefill: between idle workers a hand-over only costs.
func TestEstimateChoosesLocalPrefill(t *testing.T) {
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, func(c *config.Config) { c.PD.LocalWhenFaster = true }, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	a := post(t, r.URL+"/v1/chat/completions", chat(""), "X-Request-Id", "est")
	if a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "local; reason=faster" || a.Header.Get("X-Sluice-Worker") != "d0" || len(generateRequests(p)) != 0 {
		t.Fatalf("%d %s %v, %d prefills", a.Status, a.Body, a.Header, len(generateRequests(p)))
	}
	e := r.explain(t, "est").Joint[0]
	if e.Local.Cost >= e.Remote.Cost || e.Remote.Terms.Transfer <= 0 || e.Remote.Terms.Prefill <= 0 {
		t.Errorf("%+v", e)
	}
	// Off, nothing is weighed and nothing said.
	off := startRouter(t, nil, simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"))
	if a := post(t, off.URL+"/v1/chat/completions", chat(""), "X-Request-Id", "off"); a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
		t.Errorf("off: %d %v", a.Status, a.Header)
	}
	if rec := off.explain(t, "off"); len(rec.Joint) != 0 {
		t.Errorf("off: pairs %+v", rec.Joint)
	}
}

// TestFailedLocalPrefillRetriesElsewhere: a decode worker that breaks under a local plan is left
// out, and both legs are weighed again.
func TestFailedLocalPrefillRetriesElsewhere(t *testing.T) {
	bad := startScripted(t, func(w http.ResponseWriter, _ *http.Request) { replyJSON(w, 503, `{"error":{"message":"full"}}`) })
	p, d := startSim(t, simRole("prefill")), startSim(t, simRole("decode"))
	r := startRouter(t, func(c *config.Config) { c.PD.LocalPrefillTokens = 1 << 20 },
		simWorker(p, worker.Prefill, "p0"), simWorker(d, worker.Decode, "d0"), bad.worker(worker.Decode, "d1"))
	for i := 0; i < 50 && bad.requests() == 0; i++ {
		a := post(t, r.URL+"/v1/chat/completions", chatOf(fmt.Sprint("prompt ", i)), "X-Request-Id", "again")
		if a.Status != 200 || a.Header.Get("X-Sluice-Worker") != "d0" {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
	}
	rec := r.explain(t, "again")
	if bad.requests() != 1 || len(rec.Joint) != 2 || rec.Joint[0].Local.Rank != "d1/0" || rec.Joint[1].Local.Rank != "d0/0" || rec.Joint[1].Attempt != 2 {
		t.Errorf("the bad one saw %d; pairs %+v", bad.requests(), rec.Joint)
	}
	eventually(t, 5*time.Second, "nothing is booked", func() bool { return r.reservedLoad() == "" })
}

// TestReservedDecodeIsRemoved: a decode worker that was chosen with prefill's and is
// lost while prefill runs is not sent its leg.
func TestReservedDecodeIsRemoved(t *testing.T) {
	arrived, on := make(chan struct{}, 1), make(chan struct{})
	p := startScripted(t, func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-on
		replyJSON(w, 200, prefillReply(`{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"q","remote_host":"127.0.0.1","remote_port":1,"tp_size":1}`))
	})
	decodes := map[string]*scriptedEngine{"d0/0": startScripted(t, answerOK), "d1/0": startScripted(t, answerOK)}
	r := startRouter(t, func(c *config.Config) { c.PD.LocalPrefillTokens, c.Tokens.Mode = 1, "text" },
		p.worker(worker.Prefill, "p0"), decodes["d0/0"].worker(worker.Decode, "d0"), decodes["d1/0"].worker(worker.Decode, "d1"))
	done := make(chan *answer, 1)
	go func() {
		a, _ := tryPost(t.Context(), r.URL+"/v1/chat/completions", chat(""), "X-Request-Id", "lost")
		done <- a
	}()
	<-arrived
	reserved := r.explain(t, "lost").Joint[0].Remote.Decode
	decodes[reserved].CloseClientConnections()
	decodes[reserved].Close()
	eventually(t, 10*time.Second, "it is out", func() bool { return r.state(strings.TrimSuffix(reserved, "/0")) == worker.Unhealthy })
	close(on)
	a := <-done
	if a == nil || a.Status != 200 || a.Header.Get("X-Sluice-Worker") == strings.TrimSuffix(reserved, "/0") {
		t.Fatalf("booked %s: %+v", reserved, a)
	}
	if n := r.metric(`sluice_leg_retries_total{leg="decode"}`); n > 0 {
		t.Errorf("%v retries: the lost one was tried", n)
	}
	eventually(t, 5*time.Second, "nothing is booked", func() bool { return r.reservedLoad() == "" })
}

// TestSGLangIsNeverLocal: its decode engines cannot prefill, whatever is set for all
// models.
func TestSGLangIsNeverLocal(t *testing.T) {
	engine := func(role string) func(*sim.Options) {
		return func(o *sim.Options) { o.Role, o.Engine = role, "sglang" }
	}
	p, d := startSim(t, engine("prefill")), startSim(t, engine("decode"))
	w := simWorker(p, worker.Prefill, "p0")
	withBootstrap(&w, p)
	r := startRouter(t, func(c *config.Config) {
		c.PD.LocalPrefillTokens, c.PD.LocalWhenFaster = 1<<20, true
		own := c.PD
		own.Family = "sglang"
		c.Models = map[string]config.Model{"sim": {PD: &own}}
	}, w, simWorker(d, worker.Decode, "d0"))
	for i := range 3 { // the second and third find the prompt held
		a := post(t, r.URL+"/v1/chat/completions", chat(""), "X-Request-Id", fmt.Sprint("never-", i))
		if a.Status != 200 || a.Header.Get("X-Sluice-Plan") != "" || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || len(generateRequests(p)) != i+1 {
			t.Errorf("request %d: %d %s %v, %d prefills", i, a.Status, a.Body, a.Header, len(generateRequests(p)))
		}
	}
	if rec := r.explain(t, "never-2"); len(rec.Joint) != 0 {
		t.Errorf("pairs %+v", rec.Joint)
	}
}

// TestUnlearnedEstimates: where nothing was learned of the workers and no transfer was
// measured, a request is planned all the same, and says by what.
func TestUnlearnedEstimates(t *testing.T) {
	p, d := startScripted(t, answerOK), startScripted(t, answerOK)
	for _, mode := range []string{"text", "ids"} {
		r := startRouter(t, func(c *config.Config) { c.PD.LocalWhenFaster, c.Tokens.Mode = true, mode }, p.worker(worker.Prefill, "p0"), d.worker(worker.Decode, "d0"))
		a := post(t, r.URL+"/v1/chat/completions", chat(""), "X-Request-Id", "first")
		plan := a.Header.Get("X-Sluice-Plan")
		if a.Status != 200 || plan != "local; reason=faster" && plan != "remote; reason=unknown_prompt" {
			t.Errorf("tokens %s: %d, plan %q", mode, a.Status, plan)
		}
		if rec := r.explain(t, "first"); len(rec.Joint) != 1 {
			t.Errorf("tokens %s: pairs %+v", mode, rec.Joint)
		}
	}
}
