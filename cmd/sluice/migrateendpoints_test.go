package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/worker"
)

// endpointCase is one endpoint of one engine, whose streams are to go on elsewhere.
type endpointCase struct {
	name, engine, path, body string
	mod                      func(*sim.Options)
	read                     func(*answer) streamRecord
}

// streamRecord is what a client makes of a stream, whoever wrote its events: what may differ
// between two runs (ids, times) must be the same all along in each of them.
type streamRecord struct {
	text   string
	ids    []float64
	kinds  []string // of events, repeated ones once
	usage  any
	end    any // how it ended
	whole  any // what the end repeats of the answer
	id     any
	broken []string
}

func (h *streamRecord) addError(format string, args ...any) {
	h.broken = append(h.broken, fmt.Sprintf(format, args...))
}

func (h *streamRecord) addKind(k string) {
	if n := len(h.kinds); n == 0 || h.kinds[n-1] != k {
		h.kinds = append(h.kinds, k)
	}
}

// wantConstant notes an id that all events must have.
func (h *streamRecord) wantConstant(id any) {
	if h.id == nil {
		h.id = id
	}
	if id == nil || id == "" || id != h.id {
		h.addError("id %v behind %v", id, h.id)
	}
}

// eachEvent gives the events of a stream: their name and JSON; "[DONE]" as a name.
func eachEvent(a *answer, h *streamRecord, f func(name string, v map[string]any)) {
	events := strings.SplitAfter(string(a.Body), "\n\n")
	if last := events[len(events)-1]; last != "" {
		h.addError("it ends in %q", last)
	}
	for _, e := range events[:len(events)-1] {
		name, data := "", ""
		for line := range strings.Lines(e) {
			line = strings.TrimSuffix(line, "\n")
			switch key, value, _ := strings.Cut(line, ": "); {
			case key == "event" && name == "":
				name = value
			case key == "data" && data == "":
				data = value
			case line != "":
				h.addError("line %q", line)
			}
		}
		if data == "[DONE]" {
			f(data, nil)
			continue
		}
		var v map[string]any
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			h.addError("%v in %q", err, data)
			continue
		}
		if v["error"] != nil || name == "error" {
			h.addError("an error: %s", data)
		}
		f(name, v)
	}
}

func valueAt(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[p]
		case int:
			l, _ := v.([]any)
			if p >= len(l) {
				return nil
			}
			v = l[p]
		}
	}
	return v
}

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
func readOpenAIStream(a *answer) (h streamRecord) {
	eachEvent(a, &h, func(name string, v map[string]any) {
		h.addKind(name)
		if name == "[DONE]" {
			return
		}
		if id := v["request_id"]; id != nil {
			h.wantConstant(id)
		} else {
			h.wantConstant(v["id"])
		}
		choice := valueAt(v, "choices", 0)
		h.text += str(valueAt(choice, "text")) + str(valueAt(choice, "delta", "content"))
		h.ids = append(h.ids, numbers(valueAt(choice, "token_ids"))...)
		if f := valueAt(choice, "finish_reason"); f != nil {
			if h.end != nil {
				h.addError("a second end %v", f)
			}
			h.end = f
		}
		if u, ok := v["usage"].(map[string]any); ok {
			h.usage = []any{u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]}
		}
	})
	return h
}

// readNativeStream reads SGLang's /generate in either mode.
func readNativeStream(incremental bool) func(a *answer) streamRecord {
	return func(a *answer) (h streamRecord) {
		eachEvent(a, &h, func(name string, v map[string]any) {
			h.addKind(name)
			if name == "[DONE]" {
				return
			}
			h.wantConstant(valueAt(v, "meta_info", "id"))
			text, ids := str(v["text"]), numbers(v["output_ids"])
			if incremental {
				text, ids = h.text+text, append(slices.Clone(h.ids), ids...)
			}
			if !strings.HasPrefix(text, h.text) || len(ids) < len(h.ids) || !slices.Equal(ids[:len(h.ids)], h.ids) {
				h.addError("%q %v behind %q %v", text, ids, h.text, h.ids)
			}
			h.text, h.ids = text, ids
			m := v["meta_info"]
			h.usage = []any{valueAt(m, "prompt_tokens"), valueAt(m, "completion_tokens")}
			if n, _ := valueAt(m, "completion_tokens").(float64); int(n) != len(ids) {
				h.addError("%v tokens, %d ids", n, len(ids))
			}
			if f := valueAt(m, "finish_reason"); f != nil {
				h.end = f
			}
		})
		return h
	}
}

// readMessagesStream reads Anthropic's events.
func readMessagesStream(a *answer) (h streamRecord) {
	open := -1.0
	eachEvent(a, &h, func(name string, v map[string]any) {
		h.addKind(name)
		if v["type"] != name {
			h.addError("event %q of type %v", name, v["type"])
		}
		index, _ := v["index"].(float64)
		switch name {
		case "message_start":
			h.wantConstant(valueAt(v, "message", "id"))
			h.usage = valueAt(v, "message", "usage", "input_tokens")
		case "content_block_start":
			if open >= 0 {
				h.addError("block %v within %v", index, open)
			}
			open = index
		case "content_block_delta":
			if index != open {
				h.addError("a delta of block %v in %v", index, open)
			}
			h.text += str(valueAt(v, "delta", "text"))
		case "content_block_stop":
			open = -1
		case "message_delta":
			h.end = v["delta"]
			if in := valueAt(v, "usage", "input_tokens"); in != h.usage {
				h.addError("input %v, then %v", h.usage, in)
			}
			h.usage = []any{valueAt(v, "usage", "input_tokens"), valueAt(v, "usage", "output_tokens")}
		case "message_stop":
		default:
			h.addError("event %q", name)
		}
	})
	return h
}

// readResponsesStream reads OpenAI's responses events.
func readResponsesStream(a *answer) (h streamRecord) {
	next := 0.0
	var item any
	eachEvent(a, &h, func(name string, v map[string]any) {
		h.addKind(name)
		if n, _ := v["sequence_number"].(float64); n != next || v["type"] != name {
			h.addError("%s of type %v has number %v, want %v", name, v["type"], n, next)
		}
		next++
		if r := v["response"]; r != nil {
			h.wantConstant(valueAt(r, "id"))
		}
		if id := v["item_id"]; id != nil && id != item {
			h.addError("item %v, not %v", id, item)
		}
		switch name {
		case "response.output_item.added":
			item = valueAt(v, "item", "id")
		case "response.output_text.delta":
			h.text += str(v["delta"])
		case "response.output_text.done":
			if v["text"] != h.text {
				h.addError("told %q, done %q", h.text, v["text"])
			}
		case "response.output_item.done":
			if valueAt(v, "item", "id") != item || valueAt(v, "item", "content", 0, "text") != h.text {
				h.addError("item %v", v)
			}
		case "response.completed", "response.incomplete":
			r := v["response"]
			h.end = []any{valueAt(r, "status"), valueAt(r, "incomplete_details")}
			u := valueAt(r, "usage")
			h.usage = []any{valueAt(u, "input_tokens"), valueAt(u, "output_tokens"), valueAt(u, "total_tokens")}
			if valueAt(r, "output", 0, "content", 0, "text") != h.text || valueAt(r, "output", 0, "id") != item || valueAt(r, "output", 1) != nil {
				h.addError("output %v", valueAt(r, "output"))
			}
			h.whole = []any{valueAt(r, "model"), valueAt(r, "max_output_tokens"), valueAt(r, "object"), valueAt(r, "output", 0, "role"), valueAt(r, "output", 0, "type"), valueAt(r, "output", 0, "status")}
		}
	})
	return h
}

var endpointCases = []endpointCase{
	{name: "messages", path: "/v1/messages", body: `"messages":[{"role":"user","content":"go on and on"}],"system":"be long","max_tokens":%d,"ignore_eos":true`, read: readMessagesStream},
	{name: "messages to the end", path: "/v1/messages", body: `"messages":[{"role":"user","content":"say it now"}],"max_tokens":3%d`, read: readMessagesStream},
	{name: "responses", path: "/v1/responses", body: `"input":"go on and on","instructions":"be long","max_output_tokens":%d,"ignore_eos":true`, read: readResponsesStream},
	{name: "responses to the end", path: "/v1/responses", body: `"input":"say it now","max_output_tokens":3%d`, read: readResponsesStream},
	{name: "generate", path: "/inference/v1/generate", body: `"token_ids":[900,901,902,903],"sampling_params":{"max_tokens":%d,"ignore_eos":true,"min_tokens":3},"stream_options":{"include_usage":true}`, read: readOpenAIStream},
	{name: "generate, usage all along", path: "/inference/v1/generate", body: `"token_ids":[900,901,902],"sampling_params":{"temperature":0,"seed":4,"max_tokens":%d,"ignore_eos":true},"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, read: readOpenAIStream},
	{name: "sglang native", engine: "sglang", path: "/generate", body: `"input_ids":[900,901,902,903],"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`, read: readNativeStream(false)},
	{name: "sglang native, a text", engine: "sglang", path: "/generate", body: `"text":"go on and on","sampling_params":{"max_new_tokens":%d,"ignore_eos":true,"min_new_tokens":3}`, read: readNativeStream(false)},
	{name: "sglang native, incremental", engine: "sglang", path: "/generate", body: `"input_ids":[900,901,902,903],"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`, read: readNativeStream(true), mod: func(o *sim.Options) { o.Incremental = true }},
	{name: "sglang native, no text", engine: "sglang", path: "/generate", body: `"input_ids":[900,901,902,903],"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`, read: readNativeStream(false), mod: func(o *sim.Options) { o.SkipTokenizer = true }},
	{name: "sglang completions", engine: "sglang", path: "/v1/completions", body: `"prompt":"go on and on","max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, read: readOpenAIStream},
	{name: "sglang completions, before ids", engine: "sglang", path: "/v1/completions", body: `"prompt":"go on and on","max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, read: readOpenAIStream, mod: func(o *sim.Options) { o.Version = "0.5.16" }},
	{name: "sglang chat", engine: "sglang", path: "/v1/chat/completions", body: `"messages":[{"role":"user","content":"go on and on"}],"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true}`, read: readOpenAIStream},
}

func (f *endpointCase) request(most int, stream bool) string {
	body := f.body
	if !stream {
		body, _, _ = strings.Cut(body, `,"stream_options"`)
	}
	return fmt.Sprintf(`{"model":"sim","stream":%v,`, stream) + fmt.Sprintf(body, most) + `}`
}

// startEndpointFleet starts a router over n engines of a face, and one engine beside them that
// nothing disturbs.
func startEndpointFleet(t *testing.T, f *endpointCase, n int, mod func(*config.Config)) *migrationFleet {
	t.Helper()
	options := func(o *sim.Options) {
		o.Engine = f.engine
		if f.engine == "sglang" {
			o.PD = "none"
		}
		if f.mod != nil {
			f.mod(o)
		}
	}
	m := &migrationFleet{reference: startSim(t, options)}
	var workers []config.Worker
	for i := range n {
		m.engines = append(m.engines, startSim(t, options))
		workers = append(workers, simWorker(m.engines[i], worker.Aggregated, fmt.Sprint("d", i)))
	}
	m.testRouter = startRouter(t, func(c *config.Config) {
		c.Schedule.Policy = "round_robin"
		c.Health.FailAfter, c.Health.BreakAfter = 1000, 1000
		c.Timeouts.StreamIdle = 100 * time.Millisecond
		if mod != nil {
			mod(c)
		}
	}, workers...)
	return m
}

// TestEveryEndpointMigrates: the stream of any endpoint whose engine fails at any point is
// that of one which nothing disturbed.
func TestEveryEndpointMigrates(t *testing.T) {
	for _, f := range endpointCases {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, &f, 2, nil)
			for _, kind := range []sim.FaultKind{sim.Reset, sim.Cut, sim.StreamFail, sim.Stall} {
				most := 30 + rand.IntN(9)
				after := 1 + rand.IntN(12)
				if f.path == "/v1/responses" || f.path == "/v1/messages" {
					after += 4
				}
				body := f.request(most, true)
				want := f.read(post(t, m.reference.URL()+f.path, body))
				m.fail("breaks", sim.Fault{Kind: kind, After: after})
				was := m.migrated("done")
				a := post(t, m.URL+f.path, body, "X-Request-Id", "breaks")
				m.wantSameRecord(t, fmt.Sprint(kind, " after ", after, " of ", most), &f, a, want)
				eventually(t, 5*time.Second, fmt.Sprint(kind, " after ", after, ": it is counted"), func() bool { return m.migrated("done") == was+1 })
				m.clear()
			}
			wantIdle(t, m.testRouter, 10*time.Second, m.engines...)
		})
	}
}

func (m *migrationFleet) wantSameRecord(t *testing.T, what string, f *endpointCase, a *answer, want streamRecord) {
	t.Helper()
	got := f.read(a)
	if want.end == nil || want.usage == nil || len(want.broken) > 0 || want.text == "" && len(want.ids) == 0 {
		t.Fatalf("the undisturbed stream cannot be read: %+v", want)
	}
	got.id, want.id = nil, nil
	if h := a.Header.Get("X-Sluice-Migration"); a.Status != 200 || h != "ready" || !reflect.DeepEqual(got, want) {
		t.Errorf("%s: status %d, migration %q\ngot  %+v\nwant %+v\n%s", what, a.Status, h, got, want, a.Body[:min(len(a.Body), 4000)])
	}
}

// TestEveryEndpointInitialError: of a stream whose first event nobody else can tell, the client
// gets that event whenever the engine fails: behind it another goes on, at it another
// begins anew.
func TestEveryEndpointInitialError(t *testing.T) {
	for i := range endpointCases {
		f := &endpointCases[i]
		if f.path != "/v1/responses" && f.path != "/v1/messages" {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			m := startEndpointFleet(t, f, 2, nil)
			body := f.request(30, true)
			want := f.read(post(t, m.reference.URL()+f.path, body))
			for after := range 4 {
				for _, kind := range []sim.FaultKind{sim.StreamFail, sim.Cut} {
					m.fail("begins", sim.Fault{Kind: kind, After: after})
					m.wantSameRecord(t, fmt.Sprint(kind, " after ", after), f, post(t, m.URL+f.path, body, "X-Request-Id", "begins"), want)
					m.clear()
				}
			}
			wantIdle(t, m.testRouter, 20*time.Second, m.engines...)
		})
	}
}

// TestErrorsOfResponsesAreNumbered: the error that a Responses stream ends with has the
// number behind the last event that the client was given, whoever made that.
func TestErrorsOfResponsesAreNumbered(t *testing.T) {
	f := endpointCase{path: "/v1/responses", body: `"input":"go on and on","max_output_tokens":%d,"ignore_eos":true`}
	for name, breaks := range map[string][]sim.Fault{
		"where nobody takes it": {{Kind: sim.Cut, After: 7}, {Kind: sim.Status, Body: `"prompt":[`}},
		"behind a seam":         {{Kind: sim.Cut, After: 7}, {Kind: sim.Cut, After: 2, Body: `"prompt":[`}},
	} {
		t.Run(name, func(t *testing.T) {
			m := startEndpointFleet(t, &f, 3, nil)
			for _, e := range m.engines {
				for _, b := range slices.Backward(breaks) { // what names a body stands first
					e.Fault(b)
				}
			}
			a := post(t, m.URL+f.path, f.request(30, true))
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
