package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sluice/bench/sim"
)

// Resumable is an endpoint whose requests are written with a prompt and a limit, and how
// another engine is asked to go on with one.
type Resumable struct {
	EndpointCase
	Prompt           string // the resumed request's member of the prompt's ids
	Limit            string // its limit
	Nested           bool   // which stands in sampling_params
	RequestsTokenIDs bool   // the router asks for ids
	TextPrompt       bool   // the prompt is a text
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
func (k *Resumable) resumed(t *testing.T, body string, tokens []any, received, most int) map[string]any {
	v := exactJSON(t, []byte(body))
	for _, name := range []string{"messages", "prompt", "token_ids", "input_ids", "max_tokens", "max_completion_tokens"} {
		delete(v, name)
	}
	v[k.Prompt] = tokens
	limit := v
	if k.Nested {
		limit = v["sampling_params"].(map[string]any)
	}
	limit[k.Limit] = json.Number(fmt.Sprint(most - received))
	if k.RequestsTokenIDs {
		v["return_token_ids"] = true
	}
	return v
}

// promptOf are the ids of a request's prompt and output, from an engine that nothing disturbs.
func (m *MigrationFleet) promptOf(t *testing.T, k *Resumable, body string) (prompt, output []any) {
	t.Helper()
	if !k.TextPrompt {
		prompt, _ = exactJSON(t, []byte(body))[k.Prompt].([]any)
	}
	asked := strings.Replace(body, `{`, `{"return_token_ids":true,`, 1)
	for event := range strings.SplitSeq(string(Post(t, m.Reference.URL()+k.Path, asked).Body), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: {")
		if !ok {
			continue
		}
		v := exactJSON(t, []byte("{"+data))
		if ids, ok := v["output_ids"].([]any); ok {
			output = ids // all so far
			continue
		}
		choice := ValueAt(v, "choices", 0)
		for _, of := range []any{v, choice} {
			if ids, ok := ValueAt(of, "prompt_token_ids").([]any); ok && k.TextPrompt {
				prompt = ids
			}
		}
		ids, _ := ValueAt(choice, "token_ids").([]any)
		output = append(output, ids...)
	}
	return prompt, output
}

func (m *MigrationFleet) TestResume(t *testing.T, rng *rand.Rand, k *Resumable, id string) {
	size := 1 + rng.IntN(1<<(2+rng.IntN(11)))
	prompt := randomIDs(rng, size)
	if k.TextPrompt {
		prompt = `"` + RandomPrompt(rng, size) + `"`
	}
	most := 4 + rng.IntN(120)
	body := `{"model":"sim","stream":true,` + fmt.Sprintf(k.Body, prompt, most) + `}`
	kind := []sim.FaultKind{sim.Reset, sim.Cut, sim.StreamFail}[rng.IntN(3)]
	after := 1 + rng.IntN(most-2)
	if k.Path == "/v1/responses" || k.Path == "/v1/messages" {
		after += 4 // their first events tell no text
	}
	m.Fail(id, sim.Fault{Kind: kind, After: after})
	want := k.Read(Post(t, m.Reference.URL()+k.Path, body))
	a := Post(t, m.URL+k.Path, body, "X-Request-Id", id)
	what := fmt.Sprintf("%s, %v after %d of %d", id, kind, after, most)
	m.WantSameRecord(t, what, &k.EndpointCase, a, want)
	if k.Prompt == "" {
		return
	}
	promptIDs, outputIDs := m.promptOf(t, k, body)
	if len(promptIDs) == 0 || len(outputIDs) != most {
		t.Errorf("%s: the undisturbed stream has %d ids of the prompt, %d of the output", what, len(promptIDs), len(outputIDs))
		return
	}
	var legs []sim.Record
	for _, e := range m.Engines {
		for _, r := range GenerateRequests(e) {
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
	all, _ := got[k.Prompt].([]any)
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
