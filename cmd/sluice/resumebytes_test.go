package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"sluice/bench/sim"
	"sluice/router/config"
)

// resumable is an endpoint whose requests are written with a prompt and a limit, and how
// another engine is asked to go on with one.
type resumable struct {
	endpointCase
	prompt           string // the resumed request's member of the prompt's ids
	limit            string // its limit
	nested           bool   // which stands in sampling_params
	requestsTokenIDs bool   // the router asks for ids
	textPrompt       bool   // the prompt is a text
}

// Each body has a prompt, a limit, and members that go along, some of them unknown.
var resumables = []resumable{
	{endpointCase{path: "/v1/chat/completions", read: readOpenAIStream,
		body: `"messages":[{"role":"user","content":%s}],"max_completion_tokens":%d,"ignore_eos":true,"temperature":0.70,"top_p":9.5e-1,"user":"u\u00e9 ☕","x_more":[1,{"b":2.50}],"stream_options":{"include_usage":true}`},
		"prompt", "max_tokens", false, true, true},
	{endpointCase{path: "/v1/completions", read: readOpenAIStream,
		body: `"top_k":20,"prompt":%s,"max_tokens":%d,"x_more":{"a":18446744073709551615},"ignore_eos":true,"stream_options":{"include_usage":true}`},
		"prompt", "max_tokens", false, true, true},
	{endpointCase{path: "/inference/v1/generate", read: readOpenAIStream,
		body: `"token_ids":%s,"sampling_params":{"temperature":0.5,"max_tokens":%d,"ignore_eos":true},"stream_options":{"include_usage":true}`},
		"token_ids", "max_tokens", true, false, false},
	{endpointCase{engine: "sglang", path: "/generate", read: readNativeStream(false),
		body: `"input_ids":%s,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true,"temperature":0.5}`},
		"input_ids", "max_new_tokens", true, false, false},
	// The client's stream only: it tells no ids to compare with.
	{endpointCase: endpointCase{name: "messages", path: "/v1/messages", read: readMessagesStream,
		body: `"messages":[{"role":"user","content":%s}],"system":"be long","max_tokens":%d,"ignore_eos":true`}, textPrompt: true},
	{endpointCase: endpointCase{name: "responses", path: "/v1/responses", read: readResponsesStream,
		body: `"input":%s,"instructions":"be long","max_output_tokens":%d,"ignore_eos":true`}, textPrompt: true},
	{endpointCase: endpointCase{name: "incremental", engine: "sglang", path: "/generate", read: readNativeStream(true),
		body: `"text":%s,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}`,
		mod:  func(o *sim.Options) { o.Incremental = true }}, textPrompt: true},
}

// randomIDs is a prompt as token ids.
func randomIDs(rng *rand.Rand, n int) string {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = 300 + rng.IntN(90_000)
	}
	text, _ := json.Marshal(ids)
	return string(text)
}

func exactJSON(t *testing.T, text []byte) (v map[string]any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Errorf("%v in %.300q", err, text)
	}
	return v
}

// resumed is the body that another engine must be asked with for a request of which told
// tokens of most are told.
func (k *resumable) resumed(t *testing.T, body string, tokens []any, received, most int) map[string]any {
	v := exactJSON(t, []byte(body))
	for _, name := range []string{"messages", "prompt", "token_ids", "input_ids", "max_tokens", "max_completion_tokens"} {
		delete(v, name)
	}
	v[k.prompt] = tokens
	limit := v
	if k.nested {
		limit = v["sampling_params"].(map[string]any)
	}
	limit[k.limit] = json.Number(fmt.Sprint(most - received))
	if k.requestsTokenIDs {
		v["return_token_ids"] = true
	}
	return v
}

// promptOf are the ids of a request's prompt and output, from an engine that nothing disturbs.
func (m *migrationFleet) promptOf(t *testing.T, k *resumable, body string) (prompt, output []any) {
	t.Helper()
	if !k.textPrompt {
		prompt, _ = exactJSON(t, []byte(body))[k.prompt].([]any)
	}
	asked := strings.Replace(body, `{`, `{"return_token_ids":true,`, 1)
	for event := range strings.SplitSeq(string(post(t, m.reference.URL()+k.path, asked).Body), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: {")
		if !ok {
			continue
		}
		v := exactJSON(t, []byte("{"+data))
		if ids, ok := v["output_ids"].([]any); ok {
			output = ids // all so far
			continue
		}
		choice := valueAt(v, "choices", 0)
		for _, of := range []any{v, choice} {
			if ids, ok := valueAt(of, "prompt_token_ids").([]any); ok && k.textPrompt {
				prompt = ids
			}
		}
		ids, _ := valueAt(choice, "token_ids").([]any)
		output = append(output, ids...)
	}
	return prompt, output
}

// TestResumedByteForByte kills engines under random tokens of random requests, several at a
// time: what the next engine is asked with is the client's request, every id told so far behind
// the prompt's, and the client's stream has the undisturbed one's text and ids.
func TestResumedByteForByte(t *testing.T) {
	for _, k := range resumables {
		t.Run(k.path+k.name, func(t *testing.T) {
			t.Parallel()
			mod := k.mod
			k.mod = func(o *sim.Options) {
				if o.Records = 100_000; mod != nil {
					mod(o)
				}
			}
			m := startEndpointFleet(t, &k.endpointCase, 3, func(c *config.Config) { c.Timeouts.StreamIdle = 5e9 })
			var wg sync.WaitGroup
			for client := range 3 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					rng := rand.New(rand.NewPCG(41, uint64(client)))
					for i := range trials(12) {
						m.testResume(t, rng, &k, fmt.Sprintf("c%di%dn", client, i))
						if t.Failed() {
							return
						}
					}
				}()
			}
			wg.Wait()
		})
	}
}

func (m *migrationFleet) testResume(t *testing.T, rng *rand.Rand, k *resumable, id string) {
	size := 1 + rng.IntN(1<<(2+rng.IntN(11)))
	prompt := randomIDs(rng, size)
	if k.textPrompt {
		prompt = `"` + randomPrompt(rng, size) + `"`
	}
	most := 4 + rng.IntN(120)
	body := `{"model":"sim","stream":true,` + fmt.Sprintf(k.body, prompt, most) + `}`
	kind := []sim.FaultKind{sim.Reset, sim.Cut, sim.StreamFail}[rng.IntN(3)]
	after := 1 + rng.IntN(most-2)
	if k.path == "/v1/responses" || k.path == "/v1/messages" {
		after += 4 // their first events tell no text
	}
	m.fail(id, sim.Fault{Kind: kind, After: after})
	want := k.read(post(t, m.reference.URL()+k.path, body))
	a := post(t, m.URL+k.path, body, "X-Request-Id", id)
	what := fmt.Sprintf("%s, %v after %d of %d", id, kind, after, most)
	m.wantSameRecord(t, what, &k.endpointCase, a, want)
	if k.prompt == "" {
		return
	}
	promptIDs, outputIDs := m.promptOf(t, k, body)
	if len(promptIDs) == 0 || len(outputIDs) != most {
		t.Errorf("%s: the undisturbed stream has %d ids of the prompt, %d of the output", what, len(promptIDs), len(outputIDs))
		return
	}
	var legs []sim.Record
	for _, e := range m.engines {
		for _, r := range generateRequests(e) {
			if strings.HasPrefix(r.Header("X-Request-Id"), id) {
				legs = append(legs, r)
			}
		}
	}
	slices.SortFunc(legs, func(a, b sim.Record) int { return a.Arrived.Compare(b.Arrived) })
	if len(legs) != 2 {
		t.Errorf("%s: %d engines were asked", what, len(legs))
		return
	}
	if kind == sim.Reset && bytes.Equal(legs[1].Body, legs[0].Body) {
		return // the reset overtook all events: the request was tried again, not resumed
	}
	got := exactJSON(t, legs[1].Body)
	all, _ := got[k.prompt].([]any)
	received := len(all) - len(promptIDs)
	if received < 0 || received == 0 && kind != sim.Reset || received >= most {
		t.Errorf("%s: resumed with %d ids, the prompt has %d", what, len(all), len(promptIDs))
		return
	}
	ids := append(slices.Clone(promptIDs), outputIDs[:received]...)
	if want := k.resumed(t, body, ids, received, most); !reflect.DeepEqual(got, want) {
		t.Errorf("%s: resumed behind %d with\n%.3000s\nwant\n%.3000v", what, received, legs[1].Body, want)
	}
}
