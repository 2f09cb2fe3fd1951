package families

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// badHandles are forms of kv_transfer_params that the router must never send to a decode engine; the
// first one crashes vLLM 0.32.
var badHandles = []struct{ name, member string }{
	{"block ids missing", `{"do_remote_prefill":true,"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`},
	{"block ids null", `{"do_remote_prefill":true,"remote_block_ids":null,"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`},
	{"block ids empty", `{"do_remote_prefill":true,"remote_block_ids":[],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`},
	{"groups without ids", `{"do_remote_prefill":true,"remote_block_ids":[[ ],[]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`},
	{"one group without ids", `{"do_remote_prefill":true,"remote_block_ids":[[]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`},
	{"block ids a string", `{"do_remote_prefill":true,"remote_block_ids":"7","remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`},
	{"no engine id", `{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_host":"127.0.0.1","remote_port":1}`},
	{"host null", `{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_host":null,"remote_port":1}`},
	{"host a number", `{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"r","remote_host":7,"remote_port":1}`},
	{"port a string", `{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":"1"}`},
	{"no port", `{"do_remote_prefill":true,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_host":"127.0.0.1"}`},
	{"null", `null`}, {"a string", `"abc"`}, {"a list", `[]`}, {"an empty object", `{}`}, {"missing", ``},
}

// TestIncompleteHandleFallsBackToDecodeOnly: each of badHandles would crash a decode engine (the
// simulated engine crashes like the real one). The router lets decode run alone instead.
func TestIncompleteHandleFallsBackToDecodeOnly(t *testing.T) {
	d, alone := harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, nil)
	var member string
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) { harness.ReplyJSON(w, 200, harness.PrefillReply(member)) })
	r := harness.StartRouter(t, nil, p.Worker(worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for i, k := range badHandles {
		for j, stream := range []string{"", `,"stream":true`} {
			member = k.member
			body := harness.Chat(fmt.Sprintf(`,"seed":%d%s`, i, stream))
			d.ForgetRequests()
			before := r.Fallbacks("incomplete_handle")
			id := fmt.Sprintf("bad-%d-%d", i, j)
			got, want := harness.Post(t, r.URL+"/v1/chat/completions", body, "X-Request-Id", id), harness.Post(t, alone.URL()+"/v1/chat/completions", body)
			if got.Status != 200 || got.Text(t) != want.Text(t) || got.Text(t) == "" {
				t.Errorf("%s%s: status %d, text %q; want %q", k.name, stream, got.Status, got.Text(t), want.Text(t))
			}
			if got.Header.Get("X-Sluice-Prefill-Worker") != "" {
				t.Errorf("%s: the answer names a prefill worker, but decode did it all", k.name)
			}
			if n := r.Fallbacks("incomplete_handle") - before; n != 1 {
				t.Errorf("%s: counted %v times, want 1", k.name, n)
			}
			if recs := harness.GenerateRequests(d); len(recs) != 1 || string(recs[0].Body) != body {
				t.Errorf("%s: decode was sent %d requests; want the client's bytes once", k.name, len(recs))
			}
			if rec := r.Outcome(t, id); len(rec.Notes) == 0 {
				t.Errorf("%s: the record says nothing of it", k.name)
			}
		}
	}
	if s := d.Stats(); !s.Alive || s.Crashes != 0 || s.Sum().IncompleteHandles != 0 {
		t.Errorf("decode: alive %v, %d crashes, %d incomplete handles", s.Alive, s.Crashes, s.Sum().IncompleteHandles)
	}
	if n := p.Requests(); n != 2*len(badHandles) {
		t.Errorf("%d prefills for %d requests", n, 2*len(badHandles))
	}
	harness.WantIdle(t, r, 10*time.Second, d)
}

// TestPrefillWithoutHandleFallsBackToDecodeOnly: prefill answers without a usable handle, with the
// simulated engine's own faults and with a body that is not JSON.
func TestPrefillWithoutHandleFallsBackToDecodeOnly(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, k := range []sim.FaultKind{sim.BadHandle, sim.NoHandle, sim.Malformed} {
		p.Fault(sim.Fault{Kind: k, Leg: "prefill", N: 1})
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""))
		if a.Status != 200 || a.Text(t) == "" {
			t.Errorf("%v: status %d: %s", k, a.Status, a.Body)
		}
	}
	if n := r.Fallbacks("incomplete_handle"); n != 3 {
		t.Errorf("incomplete_handle counted %v times, want 3", n)
	}
	if !d.Alive() || d.Stats().Crashes != 0 {
		t.Error("the decode engine died")
	}
}

// TestDecodeOnlyCanBeDisabled: if the decode-only fallback is disabled, the client receives an error that says
// so.
func TestDecodeOnlyCanBeDisabled(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.PD.DecodeOnlyFallback = false }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	p.Fault(sim.Fault{Kind: sim.NoHandle, Leg: "prefill"})
	harness.WantReason(t, harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat("")), 502, "upstream_failed")
	if n := len(harness.GenerateRequests(d)); n != 0 {
		t.Errorf("decode was sent %d requests", n)
	}
}

// llmdPrefill is the response of llm-d-inference-sim v0.10.2 to a prefill leg, byte for byte.
const llmdPrefill = `{"id":"cmpl-caea7c99-a7c8-50f7-817a-1c569cd443f7-0","model":"test","object":"text_completion","kv_transfer_params":` + llmdHandle +
	`,"created":1795486622,"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":0}},"choices":[{"index":0,"finish_reason":"remote_decode","text":"To "}]}`

const llmdHandle = `{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":"DUMMY_ID","remote_block_ids":["DUMMY_ID"],"remote_host":"DUMMY","remote_port":1234,"tp_size":1}`

// TestLLMDSimHandle: hand-overs work with engines whose block ids are strings; decode receives the
// handle byte for byte.
func TestLLMDSimHandle(t *testing.T) {
	p := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) { harness.ReplyJSON(w, 200, llmdPrefill) })
	d := harness.StartScripted(t, harness.AnswerOK)
	r := harness.StartRouter(t, nil, p.Worker(worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
	for i, more := range []string{"", `,"stream":true`} {
		a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(more))
		if a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" || a.Header.Get("X-Sluice-Plan") != "" {
			t.Errorf("status %d, headers %v: %s", a.Status, a.Header, a.Body)
		}
		if body := d.Bodies[i]; !strings.Contains(body, `"kv_transfer_params":`+llmdHandle[:len(llmdHandle)-1]) {
			t.Errorf("decode was sent %s", body)
		}
	}
	if n := r.Fallbacks("incomplete_handle"); n != 0 {
		t.Errorf("incomplete_handle counted %v times", n)
	}
}
