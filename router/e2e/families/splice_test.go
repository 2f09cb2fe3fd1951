package families

import (
	"fmt"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// spliced are requests of each endpoint as a client sends them, and the bodies that the prefill engine
// must receive, byte for byte. The engine's release (vLLM 0.32) accepts the token ids of a chat
// with its messages, so the router requests them from prefill.
var spliced = []struct{ name, path, client, prefill string }{
	{"chat", "/v1/chat/completions",
		`{"x_first":[1,{"b":2,"a":1}],"model":"sim","messages":[{"role":"user","content":"caf\u00e9 \/ \ud83d\ude00 ☕"}],"max_tokens":6,"seed":9007199254740993,"logit_bias":{"9":-1.50e+1}}`,
		`{"x_first":[1,{"b":2,"a":1}],"model":"sim","messages":[{"role":"user","content":"caf\u00e9 \/ \ud83d\ude00 ☕"}],"max_tokens":1,"seed":9007199254740993,"logit_bias":{"9":-1.50e+1},"stream":false,` + harness.PrefillParams + `,"return_token_ids":true}`},
	{"chat, everything rewritten", "/v1/chat/completions",
		`{ "stream" : true, "stream_options":{"include_usage":true},"model":"sim","messages":[{"role":"user","content":"all of it"}], "max_tokens":20,"max_completion_tokens":6,"min_tokens":2,"n":1,"unknown":18446744073709551615 }`,
		`{ "stream" : false, "model":"sim","messages":[{"role":"user","content":"all of it"}], "max_tokens":1,"max_completion_tokens":1,"n":1,"unknown":18446744073709551615,` + harness.PrefillParams + `,"return_token_ids":true }`},
	{"chat, min_tokens last", "/v1/chat/completions",
		`{"model":"sim","messages":[{"role":"user","content":"short"}],"max_tokens":4,"min_tokens":1}`,
		`{"model":"sim","messages":[{"role":"user","content":"short"}],"max_tokens":1,"stream":false,` + harness.PrefillParams + `,"return_token_ids":true}`},
	{"completions", "/v1/completions",
		`{"model":"sim","prompt":"a \"quoted\" word\n","max_tokens":6,"stream":false,"user":"u-1"}`,
		`{"model":"sim","prompt":"a \"quoted\" word\n","max_tokens":1,"stream":false,"user":"u-1",` + harness.PrefillParams + `}`},
	{"completions by ids", "/v1/completions",
		`{"prompt":[300,301,302,303],"max_tokens":6,"model":"sim"}`,
		`{"prompt":[300,301,302,303],"max_tokens":1,"model":"sim","stream":false,` + harness.PrefillParams + `}`},
	{"completions, a batch of one", "/v1/completions",
		`{"prompt":["only one"],"max_tokens":6,"model":"sim"}`,
		`{"prompt":["only one"],"max_tokens":1,"model":"sim","stream":false,` + harness.PrefillParams + `}`},
	{"responses", "/v1/responses",
		`{"model":"sim","input":"tell me","max_output_tokens":6,"metadata":{"z":"1","a":"2"}}`,
		`{"model":"sim","input":"tell me","max_output_tokens":1,"metadata":{"z":"1","a":"2"},"stream":false,` + harness.PrefillParams + `}`},
	{"messages", "/v1/messages",
		`{"model":"sim","max_tokens":6,"messages":[{"role":"user","content":[{"type":"text","text":"tell me"}]}],"stream":true}`,
		`{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":"tell me"}]}],"stream":false,` + harness.PrefillParams + `}`},
	{"generate", "/inference/v1/generate",
		`{"token_ids":[300,301,302],"sampling_params":{"temperature":0,"max_tokens":6,"min_tokens":2,"seed":9007199254740993},"stream":false}`,
		`{"token_ids":[300,301,302],"sampling_params":{"temperature":0,"max_tokens":1,"seed":9007199254740993},"stream":false,` + harness.PrefillParams + `}`},
}

func TestLegsAreSplicedByteForByte(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for i, k := range spliced {
		p.ForgetRequests()
		d.ForgetRequests()
		id := fmt.Sprintf("splice-%d", i)
		a := harness.Post(t, r.URL+k.path, k.client, "X-Request-Id", id)
		if a.Status != 200 {
			t.Errorf("%s: status %d: %s", k.name, a.Status, a.Body)
			continue
		}
		pr, dr := harness.GenerateRequests(p), harness.GenerateRequests(d)
		if len(pr) != 1 || len(dr) != 1 {
			t.Errorf("%s: %d prefills, %d decodes; want one each", k.name, len(pr), len(dr))
			continue
		}
		if string(pr[0].Body) != k.prefill {
			t.Errorf("%s: prefill was sent\n%s\nwant\n%s", k.name, pr[0].Body, k.prefill)
		}
		// Decode receives the client's bytes with the handle as the last member.
		before, after, ok := strings.Cut(string(dr[0].Body), `,"kv_transfer_params":`)
		if !ok {
			t.Errorf("%s: decode has no handle: %s", k.name, dr[0].Body)
			continue
		}
		end := strings.TrimPrefix(k.client, before)
		if end == k.client || strings.TrimSpace(end) != "}" || !strings.HasSuffix(after, end) {
			t.Errorf("%s: decode was sent\n%s\nwant the client's bytes and the handle as last member:\n%s", k.name, dr[0].Body, k.client)
		}
		handle := strings.TrimSuffix(after, end)
		if chat := k.path == "/v1/chat/completions"; chat != strings.Contains(handle, `"prompt_token_ids":[`) {
			t.Errorf("%s: the handle is %s; want the prompt's ids with a chat's, and only there", k.name, handle)
		}
		if !strings.HasPrefix(handle, `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[`) || !strings.HasSuffix(handle, `}`) || !strings.Contains(handle, id) {
			t.Errorf("%s: the handle is %s", k.name, handle)
		}
		for _, rec := range append(pr, dr...) {
			if rec.Path != k.path || rec.Header("X-Request-Id") != id {
				t.Errorf("%s: path %s, id %q", k.name, rec.Path, rec.Header("X-Request-Id"))
			}
		}
	}
	if s := d.Stats().Sum(); s.Transfers == 0 || s.IncompleteHandles != 0 || s.GarbageReads != 0 {
		t.Errorf("decode: %d transfers, %d incomplete handles, %d garbage reads", s.Transfers, s.IncompleteHandles, s.GarbageReads)
	}
	harness.WantIdle(t, r, 10e9, p, d)
}

// TestHandleIsForwardedVerbatim: the handle is opaque. Its bytes reach decode unchanged, including
// spaces and unknown members.
func TestHandleIsForwardedVerbatim(t *testing.T) {
	for _, handle := range []string{
		`{ "remote_block_ids" : [ [7, 8], [3] ],"x_new":{"deep":[1.50e+3, null]} , "remote_engine_id":"e\u0031","remote_host":"127.0.0.1","remote_port":5557,"x_big":18446744073709551615,"do_remote_prefill":true}`,
		`{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8,9],"remote_engine_id":"e","remote_host":"127.0.0.1","remote_port":5557}`,
	} {
		p := harness.StartScripted(t, harness.ReplyHandler(200, harness.PrefillReply(handle)))
		d := harness.StartScripted(t, harness.ReplyHandler(200, harness.PrefillReply("")))
		r := harness.StartRouter(t, nil, p.Worker(worker.Prefill, "p0"), d.Worker(worker.Decode, "d0"))
		body := harness.Chat("")
		harness.WantStatus(t, harness.Post(t, r.URL+"/v1/chat/completions", body), 200)
		want := strings.TrimSuffix(body, "}") + `,"kv_transfer_params":` + handle + "}"
		if d.Requests() != 1 || d.Bodies[0] != want {
			t.Errorf("decode was sent\n%s\nwant\n%s", d.Bodies, want)
		}
	}
}

// TestNeverDisaggregated: requests to endpoints without a KV hand-over go to one engine unchanged.
func TestNeverDisaggregated(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, k := range []struct {
		path, body string
		status     int
	}{
		{"/v1/embeddings", `{"model":"sim","input":"hello","z":1}`, 200},
		{"/v1/rerank", `{"model":"sim","query":"q","documents":["a"]}`, 404}, // not an endpoint of this engine: its own answer
		{"/v1/score", `{"model":"sim","text_1":"a","text_2":"b"}`, 404},
		{"/tokenize", `{"model":"sim","prompt":"hello"}`, 200},
		{"/detokenize", `{"model":"sim","tokens":[300]}`, 200},
	} {
		for range 3 {
			p.ForgetRequests()
			d.ForgetRequests()
			a := harness.Post(t, r.URL+k.path, k.body)
			if a.Status != k.status || a.Header.Get("X-Sluice-Prefill-Worker") != "" || a.Header.Get("X-Sluice-Worker") == "" {
				t.Errorf("%s: status %d, headers %v: %s", k.path, a.Status, a.Header, a.Body)
			}
			var got []string
			for _, e := range []*sim.Engine{p, d} {
				for _, rec := range e.Requests() {
					if rec.Method == "POST" {
						got = append(got, rec.Path+" "+string(rec.Body))
					}
				}
			}
			if len(got) != 1 || got[0] != k.path+" "+k.body {
				t.Errorf("the engines saw %q; want the client's request once", got)
			}
		}
	}
	harness.WantIdle(t, r, 10e9, p, d)
}

// TestBatchPromptsUseDecodeOnly: a batch of prompts has no single handle, so decode runs it whole, and
// the router counts the fallback.
func TestBatchPromptsUseDecodeOnly(t *testing.T) {
	p, d, alone := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode")), harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for _, batch := range []string{`["one prompt","and another"]`, `[[300,301],[302]]`} {
		body := `{"model":"sim","prompt":` + batch + `,"max_tokens":4,"n":2}`
		want, got := harness.Post(t, alone.URL()+"/v1/completions", body), harness.Post(t, r.URL+"/v1/completions", body)
		if got.Status != 200 || got.Text(t) != want.Text(t) || got.Text(t) == "" {
			t.Errorf("status %d, text %q, alone %q", got.Status, got.Text(t), want.Text(t))
		}
		if n := len(harness.GenerateRequests(p)); n != 0 {
			t.Errorf("%d prefills", n)
		}
		if recs := harness.GenerateRequests(d); string(recs[len(recs)-1].Body) != body {
			t.Errorf("decode was sent %s", recs[len(recs)-1].Body)
		}
	}
	if n := r.Fallbacks("batch_prompt"); n != 2 {
		t.Errorf("batch_prompt counted %v times, want 2", n)
	}
}
