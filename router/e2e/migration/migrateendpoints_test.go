package migration

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

func str(v any) string { s, _ := v.(string); return s }

func numbers(v any) (out []float64) {
	l, _ := v.([]any)
	for _, x := range l {
		n, _ := x.(float64)
		out = append(out, n)
	}
	return out
}

// readOpenAIStream reads chat completions, completions and vLLM's generate.
func readOpenAIStream(a *harness.Answer) (h harness.StreamRecord) {
	harness.EachEvent(a, &h, func(name string, v map[string]any) {
		h.AddKind(name)
		if name == "[DONE]" {
			return
		}
		if id := v["request_id"]; id != nil {
			h.WantConstant(id)
		} else {
			h.WantConstant(v["id"])
		}
		choice := harness.ValueAt(v, "choices", 0)
		h.Text += str(harness.ValueAt(choice, "text")) + str(harness.ValueAt(choice, "delta", "content"))
		h.Ids = append(h.Ids, numbers(harness.ValueAt(choice, "token_ids"))...)
		if f := harness.ValueAt(choice, "finish_reason"); f != nil {
			if h.End != nil {
				h.AddError("a second end %v", f)
			}
			h.End = f
		}
		if u, ok := v["usage"].(map[string]any); ok {
			h.Usage = []any{u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]}
		}
	})
	return h
}

// readNativeStream reads SGLang's /generate in either mode.
func readNativeStream(incremental bool) func(a *harness.Answer) harness.StreamRecord {
	return func(a *harness.Answer) (h harness.StreamRecord) {
		harness.EachEvent(a, &h, func(name string, v map[string]any) {
			h.AddKind(name)
			if name == "[DONE]" {
				return
			}
			h.WantConstant(harness.ValueAt(v, "meta_info", "id"))
			text, ids := str(v["text"]), numbers(v["output_ids"])
			if incremental {
				text, ids = h.Text+text, append(slices.Clone(h.Ids), ids...)
			}
			if !strings.HasPrefix(text, h.Text) || len(ids) < len(h.Ids) || !slices.Equal(ids[:len(h.Ids)], h.Ids) {
				h.AddError("%q %v behind %q %v", text, ids, h.Text, h.Ids)
			}
			h.Text, h.Ids = text, ids
			m := v["meta_info"]
			h.Usage = []any{harness.ValueAt(m, "prompt_tokens"), harness.ValueAt(m, "completion_tokens")}
			if n, _ := harness.ValueAt(m, "completion_tokens").(float64); int(n) != len(ids) {
				h.AddError("%v tokens, %d ids", n, len(ids))
			}
			if f := harness.ValueAt(m, "finish_reason"); f != nil {
				h.End = f
			}
		})
		return h
	}
}

// promptOf returns the tokens of the prompt in Anthropic's form of usage, which counts cached ones apart.
func promptOf(usage any) any {
	u, _ := usage.(map[string]any)
	input, ok := u["input_tokens"].(float64)
	if !ok {
		return u["input_tokens"]
	}
	cached, _ := u["cache_read_input_tokens"].(float64)
	return input + cached
}

// readMessagesStream reads Anthropic's events.
func readMessagesStream(a *harness.Answer) (h harness.StreamRecord) {
	open := -1.0
	harness.EachEvent(a, &h, func(name string, v map[string]any) {
		h.AddKind(name)
		if v["type"] != name {
			h.AddError("event %q of type %v", name, v["type"])
		}
		index, _ := v["index"].(float64)
		switch name {
		case "message_start":
			h.WantConstant(harness.ValueAt(v, "message", "id"))
			h.Usage = promptOf(harness.ValueAt(v, "message", "usage"))
		case "content_block_start":
			if open >= 0 {
				h.AddError("block %v within %v", index, open)
			}
			open = index
		case "content_block_delta":
			if index != open {
				h.AddError("a delta of block %v in %v", index, open)
			}
			h.Text += str(harness.ValueAt(v, "delta", "text"))
		case "content_block_stop":
			open = -1
		case "message_delta":
			h.End = v["delta"]
			if in := promptOf(v["usage"]); in != h.Usage {
				h.AddError("input %v, then %v", h.Usage, in)
			}
			h.Usage = []any{promptOf(v["usage"]), harness.ValueAt(v, "usage", "output_tokens")}
		case "message_stop":
		default:
			h.AddError("event %q", name)
		}
	})
	return h
}

// readResponsesStream reads OpenAI's responses events.
func readResponsesStream(a *harness.Answer) (h harness.StreamRecord) {
	next := 0.0
	var item any
	harness.EachEvent(a, &h, func(name string, v map[string]any) {
		h.AddKind(name)
		if n, _ := v["sequence_number"].(float64); n != next || v["type"] != name {
			h.AddError("%s of type %v has number %v, want %v", name, v["type"], n, next)
		}
		next++
		if r := v["response"]; r != nil {
			h.WantConstant(harness.ValueAt(r, "id"))
		}
		if id := v["item_id"]; id != nil && id != item {
			h.AddError("item %v, not %v", id, item)
		}
		switch name {
		case "response.output_item.added":
			item = harness.ValueAt(v, "item", "id")
		case "response.output_text.delta":
			h.Text += str(v["delta"])
		case "response.output_text.done":
			if v["text"] != h.Text {
				h.AddError("events %q, done %q", h.Text, v["text"])
			}
		case "response.output_item.done":
			if harness.ValueAt(v, "item", "id") != item || harness.ValueAt(v, "item", "content", 0, "text") != h.Text {
				h.AddError("item %v", v)
			}
		case "response.completed", "response.incomplete":
			r := v["response"]
			h.End = []any{harness.ValueAt(r, "status"), harness.ValueAt(r, "incomplete_details")}
			u := harness.ValueAt(r, "usage")
			h.Usage = []any{harness.ValueAt(u, "input_tokens"), harness.ValueAt(u, "output_tokens"), harness.ValueAt(u, "total_tokens")}
			if harness.ValueAt(r, "output", 0, "content", 0, "text") != h.Text || harness.ValueAt(r, "output", 0, "id") != item || harness.ValueAt(r, "output", 1) != nil {
				h.AddError("output %v", harness.ValueAt(r, "output"))
			}
			h.Whole = []any{harness.ValueAt(r, "model"), harness.ValueAt(r, "max_output_tokens"), harness.ValueAt(r, "object"), harness.ValueAt(r, "output", 0, "role"), harness.ValueAt(r, "output", 0, "type"), harness.ValueAt(r, "output", 0, "status")}
		}
	})
	return h
}

var endpointCases = []harness.EndpointCase{
	{Name: "messages", Path: "/v1/messages", Body: `"messages":[{"role":"user","content":"go on and on"}],"system":"be long","max_tokens":%d,"ignore_eos":true`, Read: readMessagesStream},
	{Name: "messages to the end", Path: "/v1/messages", Body: `"messages":[{"role":"user","content":"say it now"}],"max_tokens":3%d`, Read: readMessagesStream},
	{Name: "responses", Path: "/v1/responses", Body: `"input":"go on and on","instructions":"be long","max_output_tokens":%d,"ignore_eos":true`, Read: readResponsesStream},
	{Name: "responses to the end", Path: "/v1/responses", Body: `"input":"say it now","max_output_tokens":3%d`, Read: readResponsesStream},
	{Name: "generate", Path: "/inference/v1/generate", Body: `"token_ids":[900,901,902,903],"sampling_params":{"max_tokens":%d,"ignore_eos":true,"min_tokens":3},"stream_options":{"include_usage":true}`, Read: readOpenAIStream},
	{Name: "generate, usage all along", Path: "/inference/v1/generate", Body: `"token_ids":[900,901,902],"sampling_params":{"temperature":0,"seed":4,"max_tokens":%d,"ignore_eos":true},"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, Read: readOpenAIStream},
	{Name: "sglang native", Engine: "sglang", Path: "/generate", Body: `"input_ids":[900,901,902,903],"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`, Read: readNativeStream(false)},
	{Name: "sglang native, a text", Engine: "sglang", Path: "/generate", Body: `"text":"go on and on","sampling_params":{"max_new_tokens":%d,"ignore_eos":true,"min_new_tokens":3}`, Read: readNativeStream(false)},
	{Name: "sglang native, incremental", Engine: "sglang", Path: "/generate", Body: `"input_ids":[900,901,902,903],"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`, Read: readNativeStream(true), Mod: func(o *sim.Options) { o.Incremental = true }},
	{Name: "sglang native, no text", Engine: "sglang", Path: "/generate", Body: `"input_ids":[900,901,902,903],"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`, Read: readNativeStream(false), Mod: func(o *sim.Options) { o.SkipTokenizer = true }},
	{Name: "sglang completions", Engine: "sglang", Path: "/v1/completions", Body: `"prompt":"go on and on","max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, Read: readOpenAIStream},
	{Name: "sglang completions, before ids", Engine: "sglang", Path: "/v1/completions", Body: `"prompt":"go on and on","max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, Read: readOpenAIStream, Mod: func(o *sim.Options) { o.Version = "0.5.16" }},
	{Name: "sglang chat", Engine: "sglang", Path: "/v1/chat/completions", Body: `"messages":[{"role":"user","content":"go on and on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, Read: readOpenAIStream},
}

// startEndpointFleet starts a router over n engines that serve an endpoint, and a reference engine
// without faults.
func startEndpointFleet(t *testing.T, f *harness.EndpointCase, n int, mod func(*config.Config)) *harness.MigrationFleet {
	t.Helper()
	options := func(o *sim.Options) {
		o.Engine = f.Engine
		if f.Engine == "sglang" {
			o.PD = "none"
		}
		if f.Mod != nil {
			f.Mod(o)
		}
	}
	m := &harness.MigrationFleet{Reference: harness.StartSim(t, options)}
	var workers []config.Worker
	for i := range n {
		m.Engines = append(m.Engines, harness.StartSim(t, options))
		workers = append(workers, harness.SimWorker(m.Engines[i], worker.Aggregated, fmt.Sprint("d", i)))
	}
	m.Router = harness.StartRouter(t, func(c *config.Config) {
		c.Schedule.Policy = "round_robin"
		c.Health.UnhealthyThreshold, c.Health.BreakerFailures = 1000, 1000
		c.Timeouts.StreamIdle = 100 * time.Millisecond
		if mod != nil {
			mod(c)
		}
	}, workers...)
	return m
}

// TestEveryEndpointMigrates: for every endpoint, a stream whose engine fails at any point equals
// an undisturbed stream.
func TestEveryEndpointMigrates(t *testing.T) {
	t.Parallel()
	for _, f := range endpointCases {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, &f, 2, nil)
			for _, kind := range []sim.FaultKind{sim.Reset, sim.Truncate, sim.StreamFail, sim.Stall} {
				most := 30 + rand.IntN(9)
				after := 1 + rand.IntN(12)
				if f.Path == "/v1/responses" || f.Path == "/v1/messages" {
					after += 4
				}
				body := f.Request(most, true)
				want := f.Read(harness.Post(t, m.Reference.URL()+f.Path, body))
				m.Fail("breaks", sim.Fault{Kind: kind, After: after})
				was := m.Migrated("done")
				a := harness.Post(t, m.URL+f.Path, body, "X-Request-Id", "breaks")
				m.WantSameRecord(t, fmt.Sprint(kind, " after ", after, " of ", most), &f, a, want)
				testwait.UntilWithin(t, 5*time.Second, fmt.Sprint(kind, " after ", after, ": it is counted"), func() bool { return m.Migrated("done") == was+1 })
				m.Clear()
			}
			harness.WantIdle(t, m.Router, 10*time.Second, m.Engines...)
		})
	}
}

// TestEveryEndpointInitialError: some streams begin with an event that only the first engine can
// send. If the engine fails after that event, another resumes the stream; if it fails at that
// event, another runs the request from the start. The client receives the event in both cases.
func TestEveryEndpointInitialError(t *testing.T) {
	for i := range endpointCases {
		f := &endpointCases[i]
		if f.Path != "/v1/responses" && f.Path != "/v1/messages" {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, f, 2, nil)
			body := f.Request(30, true)
			want := f.Read(harness.Post(t, m.Reference.URL()+f.Path, body))
			for after := range 4 {
				for _, kind := range []sim.FaultKind{sim.StreamFail, sim.Truncate} {
					m.Fail("begins", sim.Fault{Kind: kind, After: after})
					m.WantSameRecord(t, fmt.Sprint(kind, " after ", after), f, harness.Post(t, m.URL+f.Path, body, "X-Request-Id", "begins"), want)
					m.Clear()
				}
			}
			harness.WantIdle(t, m.Router, 20*time.Second, m.Engines...)
		})
	}
}

// TestErrorsOfResponsesAreNumbered: the error event of a Responses stream has the sequence number
// after that of the last event sent to the client, whether an engine or the router wrote it.
func TestErrorsOfResponsesAreNumbered(t *testing.T) {
	f := harness.EndpointCase{Path: "/v1/responses", Body: `"input":"go on and on","max_output_tokens":%d,"ignore_eos":true`}
	for name, breaks := range map[string][]sim.Fault{
		"where nobody takes it": {{Kind: sim.Truncate, After: 7}, {Kind: sim.Status, Body: `"prompt":[`}},
		"behind a splice point": {{Kind: sim.Truncate, After: 7}, {Kind: sim.Truncate, After: 2, Body: `"prompt":[`}},
	} {
		t.Run(name, func(t *testing.T) {
			m := startEndpointFleet(t, &f, 3, nil)
			for _, e := range m.Engines {
				for _, b := range slices.Backward(breaks) { // the entry with the request body is first
					e.Fault(b)
				}
			}
			a := harness.Post(t, m.URL+f.Path, f.Request(30, true))
			last, next := "", 0.0
			for e := range strings.SplitSeq(strings.TrimSuffix(string(a.Body), "\n\n"), "\n\n") {
				named, data, _ := strings.Cut(e, "\ndata: ")
				var v map[string]any
				if err := json.Unmarshal([]byte(data), &v); err != nil {
					t.Fatalf("%v in %q", err, e)
				}
				if n, ok := v["sequence_number"].(float64); !ok || n != next {
					t.Errorf("%s has number %v, want %v", named, v["sequence_number"], next)
				}
				last, next = named, next+1
			}
			if last != "event: error" {
				t.Errorf("it ends with %q:\n%s", last, a.Body)
			}
		})
	}
}
