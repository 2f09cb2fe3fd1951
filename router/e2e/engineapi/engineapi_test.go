package engineapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// referenceTokens returns the tokens that one engine generates for a prompt.
func referenceTokens(t testing.TB, e *sim.Engine, prompt []uint32, n int) []uint32 {
	t.Helper()
	body, _ := json.Marshal(map[string]any{"model": "sim", "prompt": prompt, "max_tokens": n, "ignore_eos": true, "return_token_ids": true, "temperature": 0})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, err := harness.TryPost(ctx, e.URL()+"/v1/completions", string(body))
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Choices []struct {
			IDs []uint32 `json:"token_ids"`
		}
	}
	if err := json.Unmarshal(a.Body, &v); err != nil || len(v.Choices) != 1 || len(v.Choices[0].IDs) != n {
		t.Fatalf("%v in %s", err, a.Body)
	}
	return v.Choices[0].IDs
}

// TestEngineAPIFamilies: every family, over both networks of the socket and over HTTP, runs both
// legs and returns the tokens of one undisturbed engine.
func TestEngineAPIFamilies(t *testing.T) {
	t.Parallel()
	for _, fam := range harness.MatrixFamilies {
		t.Run(fam.Name, func(t *testing.T) {
			f := engineAPIFleet(t, &fam)
			for i, network := range []string{"unix", "tcp"} {
				c := harness.DialEngine(t, f.Router, network)
				prompt := harness.TokenIDs(50, 10+i)
				f.ForgetRequests()
				r := harness.EngineAPIRequest(prompt, 12)
				r.Annotations = []string{"decision"}
				r.Context.ID = fmt.Sprint("routed-", network)
				r.Context.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
				a := harness.GenerateEngineAPI(t, c, r)
				want := referenceTokens(t, f.Reference, prompt, 12)
				if a.Failure != nil || a.Err != nil || !slices.Equal(a.Tokens[0], want) || a.Finish[0] != "length" {
					t.Errorf("%s: %v %v %q\ngot  %v\nwant %v", network, a.Failure, a.Err, a.Finish[0], a.Tokens[0], want)
				}
				if a.Usage == nil || a.Usage.Prompt != 50 || a.Usage.Completion != 12 || a.Usage.Total != 62 {
					t.Errorf("%s: usage %+v", network, a.Usage)
				}
				if !slices.ContainsFunc(a.Comments, func(s string) bool { return strings.HasPrefix(s, "worker_id: decode-") }) {
					t.Errorf("%s: the decision is %q", network, a.Comments)
				}
				p, d := harness.LegCount(f.Prefills), harness.LegCount(f.Decodes)
				if p == 0 || d == 0 {
					t.Errorf("%s: %d prefill and %d decode legs; want both", network, p, d)
				}
				for _, e := range f.Engines() {
					for _, seen := range harness.GenerateRequests(e) {
						if !strings.HasPrefix(seen.Header("X-Request-Id"), r.Context.ID) {
							t.Errorf("%s: an engine saw the request id %q", network, seen.Header("X-Request-Id"))
						}
						if got := seen.Header("traceparent"); got != r.Context.Traceparent {
							t.Errorf("%s: an engine saw the trace parent %q", network, got)
						}
					}
				}
			}
			prompt := harness.TokenIDs(50, 20)
			f.ForgetRequests()
			r := harness.EngineAPIRequest(prompt, 12)
			r.Annotations = []string{"decision"}
			r.Context.ID, r.Context.Traceparent = "routed-http", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
			raw, a := harness.GenerateEngineAPIHTTP(t, f.Router, harness.EngineAPIRequestJSON(r))
			if want := referenceTokens(t, f.Reference, prompt, 12); raw.Status != 200 || !slices.Equal(a.Tokens[0], want) || a.Finish[0] != "length" || a.Usage == nil || a.Usage.Completion != 12 {
				t.Errorf("HTTP: %d %q %+v\ngot  %v\nwant %v\n%s", raw.Status, a.Finish[0], a.Usage, a.Tokens[0], want, raw.Body)
			}
			if !slices.ContainsFunc(a.Comments, func(s string) bool { return strings.HasPrefix(s, "worker_id: decode-") }) {
				t.Errorf("HTTP: the decision is %q", a.Comments)
			}
			for _, e := range f.Engines() {
				for _, seen := range harness.GenerateRequests(e) {
					if got := seen.Header("traceparent"); got != r.Context.Traceparent || !strings.HasPrefix(seen.Header("X-Request-Id"), r.Context.ID) {
						t.Errorf("HTTP: an engine saw the trace parent %q and the request id %q", got, seen.Header("X-Request-Id"))
					}
				}
			}
			for _, private := range []string{"kv_transfer_params", "disaggregated_params", "remote_host", "bootstrap"} {
				if bytes.Contains(raw.Body, []byte(private)) {
					t.Errorf("the caller sees %s: %s", private, raw.Body)
				}
			}
		})
	}
}

// withTRTLLM configures for all workers what TensorRT-LLM engines do not report.
func withTRTLLM(c *config.Config) {
	for i := range c.Workers {
		harness.WithoutEvents(&c.Workers[i], nil)
	}
}

// TestEngineAPIDialects: each API of an engine returns the same tokens.
func TestEngineAPIDialects(t *testing.T) {
	for _, c := range []struct {
		name, path string
		mod        func(*sim.Options)
		conf       func(*config.Config)
	}{
		{"completions", "/v1/completions", nil, func(c *config.Config) { c.EngineAPI.VLLMDialect = "completions" }},
		{"generate", "/inference/v1/generate", nil, nil},
		{"SGLang, whole", "/generate", func(o *sim.Options) { o.Engine = "sglang" }, nil},
		{"SGLang, deltas", "/generate", func(o *sim.Options) { o.Engine, o.Incremental = "sglang", true }, nil},
		{"TensorRT-LLM", "/v1/completions", func(o *sim.Options) { o.Engine = "trtllm" }, withTRTLLM},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, engines := harness.StartEngineRouter(t, 1, c.mod, c.conf)
			plain := harness.StartSim(t, nil)
			cl := harness.DialEngine(t, r, "unix")
			prompt := harness.TokenIDs(40, 3)
			a := harness.GenerateEngineAPI(t, cl, harness.EngineAPIRequest(prompt, 30))
			if want := referenceTokens(t, plain, prompt, 30); a.Failure != nil || !slices.Equal(a.Tokens[0], want) || a.Finish[0] != "length" {
				t.Errorf("%v %q\ngot  %v\nwant %v", a.Failure, a.Finish[0], a.Tokens[0], want)
			}
			if a.Usage == nil || a.Usage.Prompt != 40 || a.Usage.Completion != 30 {
				t.Errorf("usage %+v", a.Usage)
			}
			if seen := harness.GenerateRequests(engines[0]); len(seen) != 1 || seen[0].Path != c.path {
				t.Errorf("the engine saw %d requests; want one at %s", len(seen), c.path)
			}
			two := harness.EngineAPIRequest(prompt, 10)
			two.SamplingOptions["n"] = 2
			if a := harness.GenerateEngineAPI(t, cl, two); a.Failure != nil || len(a.Tokens[0]) != 10 || len(a.Tokens[1]) != 10 || a.Finish[1] != "length" || a.Usage == nil || a.Usage.Completion != 20 {
				t.Errorf("n = 2: %v %v %v %+v", a.Failure, a.Tokens, a.Finish, a.Usage)
			}
		})
	}
}

// TestEngineAPIStopAndKill: after a stop the caller receives the output so far and then an end that
// names the stop; the router cancels both legs.
func TestEngineAPIStopAndKill(t *testing.T) {
	r, engines := harness.StartEngineRouter(t, 1, nil, nil)
	engines[0].Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond})
	c := harness.DialEngine(t, r, "unix")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	begin := func(salt int) *client.Stream {
		t.Helper()
		s, err := c.Generate(harness.EngineAPIRequest(harness.TokenIDs(30, salt), 3000))
		if err != nil {
			t.Fatal(err)
		}
		if it, err := s.Next(ctx); it == nil || it.Data == nil {
			t.Fatalf("%v, %v", it, err)
		}
		return s
	}
	s := begin(1)
	s.Stop()
	a := harness.ReadEngineAPI(ctx, s)
	if a.Err != nil || a.Failure != nil || a.Finish[0] != "cancelled" || a.Usage == nil || a.Usage.Prompt != 30 || a.Usage.Completion < 1 {
		t.Errorf("after stop: %v %v %q %+v", a.Err, a.Failure, a.Finish[0], a.Usage)
	}
	idle := func() bool { return engines[0].Stats().Sum().Running == 0 }
	testwait.UntilWithin(t, 5*time.Second, "the stopped leg is gone", idle)
	s = begin(2)
	s.Kill()
	if a := harness.ReadEngineAPI(ctx, s); !client.Killed(a.Err) || len(a.Finish) > 0 {
		t.Errorf("after kill: %v %v", a.Err, a.Finish)
	}
	testwait.UntilWithin(t, 5*time.Second, "the killed leg is gone", idle)
	s = begin(3)
	gone := harness.DialEngine(t, r, "tcp")
	vanished, err := gone.Generate(harness.EngineAPIRequest(harness.TokenIDs(30, 4), 3000))
	if err != nil {
		t.Fatal(err)
	}
	if it, err := vanished.Next(ctx); it == nil {
		t.Fatal(err)
	}
	gone.Close()
	testwait.UntilWithin(t, 5*time.Second, "only the other caller's leg is left", func() bool { return engines[0].Stats().Sum().Running == 1 })
	s.Kill()
	testwait.UntilWithin(t, 5*time.Second, "nothing is left", idle)
	timed := harness.EngineAPIRequest(harness.TokenIDs(30, 5), 3000)
	timed.Context.TimeoutMS = 150
	began := time.Now()
	if a := harness.GenerateEngineAPI(t, c, timed); a.Failure == nil || a.Failure.Code != 504 || time.Since(began) > 3*time.Second {
		t.Errorf("after its time: %v after %v", a.Failure, time.Since(began))
	}
	testwait.UntilWithin(t, 5*time.Second, "the overdue leg is gone", idle)
	testwait.UntilWithin(t, 5*time.Second, "nothing is left behind", func() bool { // the caller receives its last item a moment earlier
		st := r.Wire.Stats()
		return st.Streams == 0 && st.Requests == 0
	})
}

// TestEngineAPIErrors: the error names the invalid field before anything is sent to an engine, and
// is the same over the socket and over HTTP.
func TestEngineAPIErrors(t *testing.T) {
	r, engines := harness.StartEngineRouter(t, 1, func(o *sim.Options) { o.MaxModelLen = 256 }, func(c *config.Config) {
		c.EngineAPI.AllowedHosts, c.MediaHosts = []string{"10.1.0.0/16", "prefill.local"}, []string{"images.example"}
	})
	c := harness.DialEngine(t, r, "unix")
	with := func(key string, v any) map[string]any { return map[string]any{key: v} }
	tokens := with("token_ids", []any{1, 2, 3})
	merge := func(a, b map[string]any) map[string]any {
		out := map[string]any{}
		for _, m := range []map[string]any{a, b} {
			for k, v := range m {
				out[k] = v
			}
		}
		return out
	}
	for _, k := range []struct {
		body       map[string]any
		field, say string
	}{
		{with("model", "sim"), "token_ids", "nothing"},
		{with("token_ids", "a"), "token_ids", ""},
		{with("token_ids", []any{}), "token_ids", "at least one"},
		{with("token_ids", []any{1, -2}), "token_ids", ""},
		{with("token_ids", []any{1.5}), "token_ids", ""},
		{map[string]any{"token_ids": slices.Repeat([]any{1}, 257), "stop_conditions": with("max_tokens", 1)}, "token_ids", "got 257 ids; want fewer than 256"},
		{merge(tokens, with("model", 7)), "model", "string"},
		{merge(tokens, with("model", "other")), "model", `got "other"; want one that is served here: sim`},
		{merge(tokens, with("stop_conditions", []any{})), "stop_conditions", "object"},
		{merge(tokens, with("stop_conditions", with("max_tokens", "ten"))), "stop_conditions.max_tokens", "integer"},
		{merge(tokens, with("stop_conditions", with("max_tokens", -1))), "stop_conditions.max_tokens", "integer"},
		{merge(tokens, with("stop_conditions", map[string]any{"max_tokens": 2, "min_tokens": 3})), "stop_conditions.min_tokens", "at most"},
		{merge(tokens, with("stop_conditions", with("stop", []any{1}))), "stop_conditions.stop", "strings"},
		{merge(tokens, with("sampling_options", with("temperature", -0.5))), "sampling_options.temperature", "0 to 100"},
		{merge(tokens, with("sampling_options", with("top_p", 0))), "sampling_options.top_p", "above 0"},
		{merge(tokens, with("sampling_options", with("n", 0))), "sampling_options.n", "1 to 128"},
		{merge(tokens, with("sampling_options", with("kv_transfer_params", map[string]any{}))), "sampling_options.kv_transfer_params", "router"},
		{merge(tokens, with("output_options", with("logprobs", true))), "output_options.logprobs", "integer"},
		{merge(tokens, with("eos_token_ids", []any{"x"})), "eos_token_ids", "ids"},
		{merge(tokens, with("annotations", "x")), "annotations", "strings"},
		{merge(tokens, with("routing", with("dp_rank", -1))), "routing.dp_rank", "65535"},
		{merge(tokens, with("routing", with("dp_rank", 1))), "routing.dp_rank", "worker"},
		{merge(tokens, with("routing", with("allowed_worker_ids", []any{}))), "routing.allowed_worker_ids", "at least one"},
		{merge(tokens, with("routing", with("backend_instance_id", "a\r\nX: y"))), "routing.backend_instance_id", "worker"},
		{merge(tokens, with("routing", with("decode_worker_id", "nobody"))), "routing.decode_worker_id", "there is no worker"},
		{merge(tokens, with("routing", merge(with("decode_worker_id", "nobody"), with("prefill_worker_id", "e0")))), "routing", "there is no worker"},
		{merge(tokens, with("routing", with("allowed_worker_ids", []any{"nobody"}))), "routing.allowed_worker_ids", "there is no worker"},
		{merge(tokens, with("routing", with("routing_constraints", with("labels", []any{"none"})))), "routing.routing_constraints.labels", "no worker has"},
		{merge(tokens, with("routing", with("prefered_worker", "e0"))), "routing.prefered_worker", "backend_instance_id"},
		{merge(tokens, with("routing", with("routing_constraints", map[string]any{"labels": []any{"a"}, "zones": []any{"b"}}))), "routing.routing_constraints.zones", "want labels"},
		{merge(tokens, with("routing", with("routing_constraints", map[string]any{}))), "routing.routing_constraints", "labels"},
		{merge(tokens, with("prefill_result", map[string]any{"disaggregated_params": map[string]any{}, "handle": 1})), "prefill_result.handle", "disaggregated_params, prompt_tokens_details"},
		{merge(tokens, with("bootstrap_info", with("host", "10.1.2.3"))), "bootstrap_info.host", "bootstrap_host"},
		{merge(tokens, with("mm_routing_info", with("block_infos", []any{}))), "mm_routing_info.block_infos", "block_mm_infos"},
		{merge(tokens, with("router_config_override", with("spell", 1))), "router_config_override.spell", "overlap_score_weight, router_temperature"},
		{merge(tokens, with("bootstrap_info", map[string]any{"bootstrap_host": "10.1.2.3", "bootstrap_port": 1})), "bootstrap_info.bootstrap_room", "nothing"},
		{merge(tokens, with("bootstrap_info", map[string]any{"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": 5})), "bootstrap_info.bootstrap_host", "allow-list"},
		{merge(tokens, with("prefill_result", with("disaggregated_params", with("kv_transfer_params", with("remote_host", "10.2.0.1"))))), "prefill_result.disaggregated_params.kv_transfer_params.remote_host", "allow-list"},
		{merge(tokens, with("prefill_result", with("disaggregated_params", with("kv_transfer_params", with("peers", []any{with("url", "http://169.254.169.254/")}))))), "prefill_result.disaggregated_params.kv_transfer_params.peers[0].url", "allow-list"},
		{merge(tokens, with("stream", false)), "stream", "router"},
		{merge(tokens, with("n", 3)), "n", "router"},
		{merge(tokens, with("routing", with(strings.Repeat("x", 5000), 1))), "routing." + strings.Repeat("x", 192) + "…", "not known"},
		{merge(tokens, with("context", with("timeout_ms", 0))), "context.timeout_ms", "1 to"},
		{merge(tokens, with("extra_args", with("kv_transfer_params", with("x", 1)))), "extra_args.kv_transfer_params", "router"},
		{merge(tokens, with("extra_args", with("kv_hints", with("x", 1)))), "extra_args.kv_hints", "router"},
		{merge(tokens, with("multi_modal_data", with("image_url", []any{"https://other.example/a.png"}))), "multi_modal_data.image_url.0", "media_hosts"},
		{merge(tokens, with("multi_modal_data", with("image_url", []any{with("Url", "http://169.254.169.254/")}))), "multi_modal_data.image_url.0.Url", "media_hosts"},
		{merge(tokens, with("video_url", with("url", "file:///etc/passwd"))), "video_url.url", "an engine may open a file"},
		{merge(tokens, with("content_parts", []any{map[string]any{"type": "image", "url": "/etc/passwd"}})), "content_parts.0.url", "an engine may open a file"},
		{merge(tokens, with("sampling_options", with("input_audio", "http://other.example/a"))), "sampling_options.input_audio", "media_hosts"},
		{merge(tokens, with("output_options", with("extra", with("image_url", "http://other.example/a")))), "output_options.extra.image_url", "media_hosts"},
		{merge(tokens, with("mm_routing_info", with("block_mm_infos", []any{1}))), "mm_routing_info.block_mm_infos[0]", "mm_objects"},
	} {
		body := merge(with("model", "sim"), k.body)
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		ans, err := harness.TryPost(ctx, r.URL+"/v1/engine/generate", string(raw))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		message, _, param := ans.ErrorOf(t)
		if ans.Status != 400 || param != k.field || !strings.Contains(message, k.say) {
			t.Errorf("HTTP %s: %d, param %q, %s; want field %q and %q", raw, ans.Status, param, message, k.field, k.say)
		}
		a := harness.GenerateEngineAPI(t, c, &client.Request{Extra: body})
		if a.Failure == nil || a.Failure.Code != 400 || a.Failure.Param != k.field || !strings.Contains(a.Failure.Message, k.say) || a.Err != nil {
			// The message differs if the JSON scanner finds the error first.
			t.Errorf("socket %s: %+v, %v; want field %q and %q", raw, a.Failure, a.Err, k.field, k.say)
		}
	}
	for _, garbage := range [][]byte{{}, {0xc1}, {0x80, 1}, {0x93, 1, 2, 3}, {0x81, 0x01, 0x01}, bytes.Repeat([]byte{0x91}, 100), {0x81, 0xa9, 't', 'o', 'k', 'e', 'n', '_', 'i', 'd', 's', 0xcb, 0x7f, 0xf8, 0, 0, 0, 0, 0, 0}} {
		s, err := c.GenerateRaw(garbage)
		if err != nil {
			t.Fatal(err)
		}
		if a := harness.ReadEngineAPI(context.Background(), s); a.Failure == nil || a.Failure.Code != 400 || a.Err != nil {
			t.Errorf("%x: %+v, %v", garbage, a.Failure, a.Err)
		}
	}
	if n := len(harness.GenerateRequests(engines[0])); n != 0 {
		t.Errorf("%d requests reached the engine", n)
	}
	allowed := harness.EngineAPIRequest([]uint32{1, 2, 3}, 2)
	allowed.Extra = with("multi_modal_data", with("image_url", []any{"https://images.example/a.png", "data:image/png;base64,AA=="}))
	if a := harness.GenerateEngineAPI(t, c, allowed); a.Failure != nil || a.Err != nil {
		t.Errorf("a URL of media_hosts: %+v, %v", a.Failure, a.Err)
	}
}

// TestEngineAPIForwardsFields: fields that the router does not know reach the engine unchanged; the
// others are translated to the engine's API.
func TestEngineAPIForwardsFields(t *testing.T) {
	everywhere := map[string]string{"extra_args": `{"reasoning":{"big":9007199254740993}}`, "mm_processor_kwargs": `{"x":1}`, "future": `["ü\n",null,true]`, "cache_salt": `"pepper"`, "stream": "true"}
	sampled := map[string]string{"stop_token_ids": "[9,11,2,7]", "logit_bias": `{"5":-1.5}`, "new_stop": `[1]`, "new_output": `"x"`}
	with := func(base map[string]string, more ...string) map[string]string {
		m := maps.Clone(base)
		for i := 0; i < len(more); i += 2 {
			m[more[i]] = more[i+1]
		}
		return m
	}
	for _, c := range []struct {
		name, vllm  string
		mod         func(*sim.Options)
		worker      func(*config.Worker, *sim.Engine)
		top, within map[string]string // within: members of sampling_params; nil: all are at the top level
		closed      bool              // the engine refuses unknown members
	}{
		{"completions", "completions", nil, nil,
			with(everywhere, "structured_outputs", `{"regex":"a\"b"}`, "logprobs", "2", "return_tokens_as_token_ids", "true", "return_token_ids", "true", "priority", "-3", "max_tokens", "5"), nil, false},
		{"generate", "generate", nil, nil,
			with(everywhere, "priority", "-3"), with(sampled, "structured_outputs", `{"regex":"a\"b"}`, "logprobs", "2", "max_tokens", "5"), false},
		{"SGLang", "", func(o *sim.Options) { o.Engine = "sglang" }, nil,
			with(everywhere, "return_logprob", "true", "top_logprobs_num", "2", "priority", "-3"), with(sampled, "regex", `"a\"b"`, "max_new_tokens", "5"), false},
		{"TensorRT-LLM", "", func(o *sim.Options) { o.Engine = "trtllm" }, harness.WithoutEvents,
			map[string]string{"response_format": `{"type":"regex","regex":"a\"b"}`, "logprobs": "2", "detokenize": "false", "max_tokens": "5", "stop_token_ids": "[9,11,2,7]", "stream": "true"}, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := harness.StartSim(t, c.mod)
			w := harness.SimWorker(e, worker.Aggregated, "e0")
			if c.worker != nil {
				c.worker(&w, e)
			}
			on := harness.WithEngineAPI(harness.SocketIn(t))
			r := harness.StartRouter(t, func(conf *config.Config) {
				if on(conf); c.vllm != "" {
					conf.EngineAPI.VLLMDialect = c.vllm
				}
			}, w)
			req := harness.EngineAPIRequest(harness.TokenIDs(20, 2), 5)
			req.EOSTokenIDs = []uint32{2, 7}
			req.StopConditions = map[string]any{"max_tokens": 5, "stop_token_ids": []any{9}, "stop_token_ids_hidden": []any{11}, "new_stop": []any{1}}
			req.SamplingOptions["logit_bias"] = map[string]any{"5": -1.5}
			req.SamplingOptions["guided_decoding"] = map[string]any{"regex": `a"b`}
			req.OutputOptions = map[string]any{"logprobs": 2, "new_output": "x", "kv_transfer_params": nil}
			req.Routing = map[string]any{"cache_salt": "pepper", "priority": -3}
			req.Context = client.Context{ID: "carried", Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
			req.Extra = map[string]any{"extra_args": map[string]any{"reasoning": map[string]any{"big": int64(9007199254740993)}}, "mm_processor_kwargs": map[string]any{"x": 1}, "future": []any{"ü\n", nil, true}, "request_id": nil}
			if c.closed {
				if a := harness.GenerateEngineAPI(t, harness.DialEngine(t, r, "unix"), req); a.Failure == nil || a.Failure.Code != 400 || len(harness.GenerateRequests(e)) != 0 {
					t.Errorf("a salt that the engine would not know: %v", a.Failure)
				}
				delete(req.Routing, "cache_salt")
				for _, m := range []map[string]any{req.StopConditions, req.SamplingOptions, req.OutputOptions, req.Extra} {
					for _, name := range []string{"new_stop", "logit_bias", "new_output", "extra_args", "mm_processor_kwargs", "future"} {
						delete(m, name)
					}
				}
			}
			if a := harness.GenerateEngineAPI(t, harness.DialEngine(t, r, "unix"), req); a.Failure != nil || a.Err != nil {
				t.Fatal(a.Failure, a.Err)
			}
			seen := harness.GenerateRequests(e)
			if len(seen) != 1 {
				t.Fatalf("%d requests", len(seen))
			}
			var top, within map[string]json.RawMessage
			if err := json.Unmarshal(seen[0].Body, &top); err != nil {
				t.Fatal(err)
			}
			want := c.top
			switch {
			case c.closed:
			case c.within == nil:
				want = maps.Clone(want)
				maps.Copy(want, sampled)
			default:
				if err := json.Unmarshal(top["sampling_params"], &within); err != nil {
					t.Fatal(err)
				}
			}
			for in, members := range map[string]map[string]string{"": want, "sampling_params": c.within} {
				got := top
				if in != "" {
					got = within
				}
				for name, value := range members {
					if string(got[name]) != value {
						t.Errorf("%s.%s is %s, want %s, in %s", in, name, got[name], value, seen[0].Body)
					}
				}
			}
			for _, name := range []string{"request_id", "kv_transfer_params"} {
				if top[name] != nil || within[name] != nil {
					t.Errorf("%s, which was null, is in %s", name, seen[0].Body)
				}
			}
			if got := seen[0].Header("traceparent"); got != req.Context.Traceparent {
				t.Errorf("traceparent %q", got)
			}
			if got := seen[0].Header("X-Request-Id"); got != "carried" {
				t.Errorf("request id %q", got)
			}
		})
	}
}

// TestEngineAPIHints: requests that name workers, prefill-only requests, and the refusal of an
// unknown worker.
func TestEngineAPIHints(t *testing.T) {
	r, engines := harness.StartEngineRouter(t, 3, nil, nil)
	c := harness.DialEngine(t, r, "unix")
	for i := range engines {
		req := harness.EngineAPIRequest(harness.TokenIDs(40, i), 4)
		req.Routing = map[string]any{"backend_instance_id": fmt.Sprint("e", i), "dp_rank": 0, "expected_output_tokens": 9, "session_id": "s"}
		req.Extra = map[string]any{"router_config_override": map[string]any{"overlap_score_weight": 0.5, "router_temperature": 0.2}}
		if a := harness.GenerateEngineAPI(t, c, req); a.Failure != nil || len(harness.GenerateRequests(engines[i])) != 1 {
			t.Errorf("direct to e%d: %v, %d requests", i, a.Failure, len(harness.GenerateRequests(engines[i])))
		}
	}
	req := harness.EngineAPIRequest(harness.TokenIDs(40, 9), 4)
	req.Routing = map[string]any{"allowed_worker_ids": []any{"e1"}}
	if a := harness.GenerateEngineAPI(t, c, req); a.Failure != nil || len(harness.GenerateRequests(engines[1])) != 2 {
		t.Errorf("allowed e1: %v", a.Failure)
	}
	req.Routing = map[string]any{"backend_instance_id": "nobody"}
	if a := harness.GenerateEngineAPI(t, c, req); a.Failure == nil || a.Failure.Code != 400 || !strings.Contains(a.Failure.Message, "nobody") {
		t.Errorf("an unknown worker: %v", a.Failure)
	}
	req = harness.EngineAPIRequest(harness.TokenIDs(64, 30), 4)
	req.Routing = map[string]any{"prefill_only": true}
	a := harness.GenerateEngineAPI(t, c, req)
	extra, _ := a.Extra.(map[string]any)
	if a.Failure != nil || a.Finish[0] != "stop" || len(a.Tokens[0]) != 0 || extra["object"] != "sluice.prefill" || a.Usage == nil || a.Usage.Prompt != 64 {
		t.Errorf("prefill only: %v %v %v %+v", a.Failure, a.Finish, a.Extra, a.Usage)
	}
}

// TestEngineAPIMedia: the same token ids with another image are a different prompt.
func TestEngineAPIMedia(t *testing.T) {
	r, _ := harness.StartEngineRouter(t, 2, nil, func(c *config.Config) {
		for i := range c.Workers {
			c.Workers[i].KVEvents = []string{"off"} // the router predicts from its own choices
		}
	})
	c := harness.DialEngine(t, r, "unix")
	prompt := harness.TokenIDs(160, 5)
	ask := func(prompt []uint32, info map[string]any) (overlap string) {
		req := harness.EngineAPIRequest(prompt, 2)
		req.Annotations = []string{"decision"}
		req.Extra = map[string]any{"mm_routing_info": info}
		a := harness.GenerateEngineAPI(t, c, req)
		if a.Failure != nil {
			t.Fatal(a.Failure)
		}
		for _, s := range a.Comments {
			if n, ok := strings.CutPrefix(s, "overlap_tokens: "); ok {
				overlap = n
			}
		}
		return overlap
	}
	showing := func(image any, offsets ...any) map[string]any {
		blocks := make([]any, 10)
		blocks[1] = map[string]any{"mm_objects": []any{map[string]any{"mm_hash": image, "offsets": offsets}}}
		return map[string]any{"block_size": 16, "block_mm_infos": blocks}
	}
	at := []any{2, 40}
	// An engine that has all ten blocks computes the last one, because of the prompt's last token.
	for _, step := range []struct {
		info    map[string]any
		overlap string
	}{
		{showing("cat", at), "0"}, {showing("cat", at), "144"}, {showing("dog", at), "16"}, {showing("dog", at), "144"},
		{showing(uint64(1)), "16"}, {showing(uint64(1)), "144"}, {showing(uint64(2)), "16"}, // in the format of Dynamo's vLLM preprocessor
	} {
		if got := ask(prompt, step.info); got != step.overlap {
			t.Errorf("%v: %s tokens predicted, want %s", step.info, got, step.overlap)
		}
	}
	// In the format of Dynamo's frontend: placeholder ids for the image, padded to whole blocks.
	short := harness.TokenIDs(100, 6)
	for i, want := range []string{"0", "144", "16"} {
		ids := harness.TokenIDs(160, 7)
		for j := 16; j < 100; j++ {
			ids[j] = uint32(i/2) + 1<<30
		}
		clear(ids[150:])
		if got := ask(short, map[string]any{"routing_token_ids": ids, "block_mm_infos": []any{}, "expanded_prompt_len": 150}); got != want {
			t.Errorf("padded, %d: %s tokens predicted, want %s", i, got, want)
		}
	}
}

// TestEngineAPIPrefillResult: a caller that ran prefill itself passes the result, and decode
// continues from it.
func TestEngineAPIPrefillResult(t *testing.T) {
	f := harness.StartMatrixFleet(t, &harness.MatrixFamily{Name: "nixl", HandoverFault: harness.SlowDecodeFault, Config: func(c *config.Config) {
		harness.WithEngineAPI(harness.SocketIn(t))(c)
		c.EngineAPI.AllowedHosts = []string{"127.0.0.0/8"}
	}})
	c := harness.DialEngine(t, f.Router, "unix")
	prompt := harness.TokenIDs(50, 40)
	body, _ := json.Marshal(map[string]any{"model": "sim", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": map[string]any{"do_remote_decode": true, "do_remote_prefill": false}})
	pre := harness.Post(t, f.Prefills[0].URL()+"/v1/completions", string(body))
	var v struct {
		KV map[string]any `json:"kv_transfer_params"`
	}
	dec := json.NewDecoder(bytes.NewReader(pre.Body))
	if err := dec.Decode(&v); err != nil || v.KV == nil {
		t.Fatalf("%v in %s", err, pre.Body)
	}
	f.ForgetRequests()
	before := f.Computed()
	req := harness.EngineAPIRequest(prompt, 12)
	req.Extra = map[string]any{"prefill_result": map[string]any{"disaggregated_params": map[string]any{"kv_transfer_params": integers(v.KV)}}}
	a := harness.GenerateEngineAPI(t, c, req)
	if want := referenceTokens(t, f.Reference, prompt, 12); a.Failure != nil || !slices.Equal(a.Tokens[0], want) {
		t.Errorf("%v\ngot  %v\nwant %v", a.Failure, a.Tokens[0], want)
	}
	if p, d, computed := harness.LegCount(f.Prefills), harness.LegCount(f.Decodes), f.Computed()-before; p != 0 || d != 1 || computed >= 40 {
		t.Errorf("%d prefill and %d decode legs, %d tokens computed by decode; want 0, 1 and few", p, d, computed)
	}
}

// integers converts the floats of decoded JSON to integers.
func integers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			v[k] = integers(e)
		}
	case []any:
		for i, e := range v {
			v[i] = integers(e)
		}
	case float64:
		if v == float64(int64(v)) {
			return int64(v)
		}
	}
	return v
}

// TestEngineAPIMigrates: an engine dies during its streams; the callers do not notice.
func TestEngineAPIMigrates(t *testing.T) {
	r, engines := harness.StartEngineRouter(t, 3, nil, func(c *config.Config) { c.Schedule.Policy = "round_robin" })
	plain := harness.StartSim(t, nil)
	engines[0].Fault(sim.Fault{Kind: sim.Truncate, After: 7})
	c := harness.DialEngine(t, r, "unix")
	moved := 0
	for i := range 9 {
		prompt := harness.TokenIDs(40, 100+i)
		a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(prompt, 20))
		want := referenceTokens(t, plain, prompt, 20)
		if a.Failure != nil || a.Err != nil || !slices.Equal(a.Tokens[0], want) || a.Finish[0] != "length" || a.Usage == nil || a.Usage.Completion != 20 || a.Usage.Prompt != 40 {
			t.Errorf("request %d: %v %v %q %+v\ngot  %v\nwant %v", i, a.Failure, a.Err, a.Finish[0], a.Usage, a.Tokens[0], want)
		}
		if len(harness.GenerateRequests(engines[0])) > moved {
			moved = len(harness.GenerateRequests(engines[0]))
		}
	}
	if moved == 0 {
		t.Error("no stream began on the engine that fails")
	}
}

// TestEngineAPIRestart: a router that is stopped and started again serves the same socket. The old
// streams end and new ones work.
func TestEngineAPIRestart(t *testing.T) {
	e := harness.StartSim(t, nil)
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond})
	path := harness.SocketIn(t)
	start := func() *harness.Router {
		return harness.StartRouter(t, func(c *config.Config) { harness.WithEngineAPI(path)(c); c.Timeouts.Drain = 50 * time.Millisecond }, harness.SimWorker(e, worker.Aggregated, "e"))
	}
	r := start()
	c := harness.DialEngine(t, r, "unix")
	s, err := c.Generate(harness.EngineAPIRequest(harness.TokenIDs(30, 1), 3000))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if it, err := s.Next(ctx); it == nil {
		t.Fatal(err)
	}
	r.Stop()
	if a := harness.ReadEngineAPI(ctx, s); a.Err == nil && a.Failure == nil {
		t.Errorf("the stream of a router that ended: %v %v", a.Err, a.Finish)
	}
	<-c.Done()
	testwait.UntilWithin(t, 10*time.Second, "the first router is down", func() bool { _, err := os.Stat(path); return os.IsNotExist(err) })
	e.ClearFaults()
	again := harness.DialEngine(t, start(), "unix")
	if a := harness.GenerateEngineAPI(t, again, harness.EngineAPIRequest(harness.TokenIDs(30, 2), 5)); a.Failure != nil || len(a.Tokens[0]) != 5 {
		t.Errorf("after the restart: %v %v", a.Failure, a.Err)
	}
}

// TestEngineAPISlowConsumer: a stream that its caller does not read stops without stopping others.
func TestEngineAPISlowConsumer(t *testing.T) {
	r, _ := harness.StartEngineRouter(t, 1, nil, nil)
	addr := "unix://" + r.Config.EngineAPI.UnixSocket
	harness.DialEngine(t, r, "unix").Close()
	c, err := client.Dial(context.Background(), addr, client.Options{Window: 512})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	slow, err := c.Generate(harness.EngineAPIRequest(harness.TokenIDs(20, 1), 5000))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(20, 2+i), 50)); a.Failure != nil || len(a.Tokens[0]) != 50 {
			t.Fatalf("beside a stream that stands: %v %v", a.Failure, a.Err)
		}
	}
	a := harness.ReadEngineAPI(context.Background(), slow)
	if a.Failure != nil || a.Err != nil || len(a.Tokens[0]) != 5000 {
		t.Errorf("the slow one in the end: %v %v, %d tokens", a.Failure, a.Err, len(a.Tokens[0]))
	}
}

// TestEngineAPITenThousandStreams: 10,000 requests at once on one connection.
func TestEngineAPITenThousandStreams(t *testing.T) {
	n, wait := 10_000, 5*time.Second
	if testing.Short() {
		n, wait = 500, 500*time.Millisecond
	}
	// The engines run in processes of their own, because both ends of a request's connection
	// would exceed the descriptors of one process. All engines wait, so that all requests run at
	// the same time.
	var workers []config.Worker
	for i := range 2 {
		p := harness.Launch(t, nil, "sim", "--speed", "inf", "--blocks", "200000", "--max-num-seqs", fmt.Sprint(n), "--fault", fmt.Sprintf("kind=stall,path=/inference/v1/generate,delay=%s", wait))
		workers = append(workers, config.Worker{ID: fmt.Sprint("e", i), URL: "http://" + p.Addr, KVEvents: []string{"auto"}})
	}
	path := harness.SocketIn(t)
	r := harness.StartRouter(t, func(c *config.Config) {
		harness.WithEngineAPI(path)(c)
		c.Limits.EngineConns = 12_000
		c.Health.Timeout, c.Health.UnhealthyThreshold = 20*time.Second, 100 // the engines share two cores with their load
		c.Timeouts.Connect = 2 * time.Minute
	}, workers...)
	c := harness.DialEngine(t, r, "unix")
	var wg sync.WaitGroup
	var mu sync.Mutex
	bad := 0
	prompt := harness.TokenIDs(16, 1)
	began := time.Now()
	for range n {
		s, err := c.Generate(harness.EngineAPIRequest(prompt, 3))
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
			defer cancel()
			if a := harness.ReadEngineAPI(ctx, s); a.Failure != nil || a.Err != nil || len(a.Tokens[0]) != 3 {
				mu.Lock()
				if bad++; bad < 4 {
					t.Errorf("%v %v %v", a.Failure, a.Err, a.Tokens)
				}
				mu.Unlock()
			}
		})
	}
	most := int64(0)
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for waiting := true; waiting; {
		select {
		case <-done:
			waiting = false
		case <-time.After(5 * time.Millisecond):
			most = max(most, r.Wire.Stats().Streams)
		}
	}
	took := time.Since(began)
	t.Logf("%d at once at most, %d failed, in %v", most, bad, took)
	// On a machine that starts the requests more slowly than the engines wait, the first end
	// before the last begin.
	if most < int64(n)*9/10 && took < 2*wait {
		t.Errorf("only %d of %d were in progress together", most, n)
	}
	// The router sends the last frame before it updates the counters of the stream.
	testwait.UntilWithin(t, harness.TestTimeout, "nothing is left behind", func() bool {
		st := r.Wire.Stats()
		return st.Streams == 0 && st.Requests == 0
	})
}
