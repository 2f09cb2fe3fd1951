package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
)

// migrationTable are the rows of the table in docs/migration.md: every endpoint of every
// engine, and releases that differ.
var migrationTable = []struct {
	engine, version string
	face            endpointCase
}{
	{"vLLM", "0.10.2 and later", endpointCase{path: "/v1/chat/completions", body: chatBody, read: readOpenAIStream}},
	{"vLLM", "0.10.2 and later", endpointCase{path: "/v1/completions", body: promptBody, read: readOpenAIStream}},
	{"vLLM", "before 0.10.2", endpointCase{path: "/v1/chat/completions", body: chatBody, read: readOpenAIStream, mod: func(o *sim.Options) { o.Release = "0.10.0" }}},
	{"vLLM", "", endpointCases[4]},
	{"vLLM", "", endpointCases[0]},
	{"vLLM", "", endpointCases[2]},
	{"SGLang", "", endpointCases[6]},
	{"SGLang", "0.5.19 and later", endpointCases[10]},
	{"SGLang", "before 0.5.19", endpointCases[11]},
	{"SGLang", "", endpointCases[12]},
	{"TensorRT-LLM", "", endpointCase{engine: "trtllm", path: "/v1/chat/completions", body: chatBody, read: readOpenAIStream}},
	{"TensorRT-LLM", "", endpointCase{engine: "trtllm", path: "/v1/completions", body: promptBody, read: readOpenAIStream}},
}

const (
	chatBody   = `"messages":[{"role":"user","content":"go on and on"}],"max_tokens":%d,"ignore_eos":true`
	promptBody = `"prompt":"go on and on","max_tokens":%d,"ignore_eos":true`
)

// TestMigrationTable writes what becomes of each endpoint's requests whose engine
// dies into docs/migration.md, as it was seen.
func TestMigrationTable(t *testing.T) {
	rows := make([]string, len(migrationTable))
	t.Run("rows", func(t *testing.T) {
		for i, k := range migrationTable {
			t.Run(k.engine+k.face.path+k.version, func(t *testing.T) {
				t.Parallel()
				m := startEndpointFleet(t, &k.face, 2, nil)
				streamed, ids := m.killedStream(t, &k.face)
				rows[i] = fmt.Sprintf("| %s | `%s` | %s | %s | %s | %s |\n", k.engine, k.face.path, k.version, ids, streamed, m.killedWhole(t, &k.face))
			})
		}
	})
	const from, to = "<!-- table: go test ./cmd/sluice -run TestMigrationTable -rewrite -->\n", "<!-- end of table -->\n"
	const path = "../../docs/migration.md"
	doc, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(doc), from)
	_, after, ok2 := strings.Cut(rest, to)
	if !ok || !ok2 {
		t.Fatalf("%s has no table between %q and %q", path, from, to)
	}
	want := before + from + "| engine | endpoint | release | token ids | its engine dies during a stream | … during a whole answer |\n| --- | --- | --- | --- | --- | --- |\n" + strings.Join(rows, "") + to + after
	if want == string(doc) {
		return
	}
	if !*rewrite {
		t.Fatalf("%s is not what was seen (go test ./cmd/sluice -run TestMigrationTable -rewrite writes it anew):\n%s", path, strings.Join(rows, ""))
	}
	if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

// killedStream kills the engine of a stream, and tells what the client got of it and
// where its ids came from.
func (m *migrationFleet) killedStream(t *testing.T, f *endpointCase) (got, ids string) {
	t.Helper()
	body := f.request(33, true)
	want := f.read(post(t, m.reference.URL()+f.path, body))
	m.fail("dies", sim.Fault{Kind: sim.Reset, After: 9})
	a := post(t, m.URL+f.path, body, "X-Request-Id", "dies")
	defer m.clear()
	h := f.read(a)
	h.id, want.id = nil, nil
	asked, made := false, false
	for _, e := range m.engines {
		for _, r := range e.Requests() {
			asked = asked || bytes.Contains(r.Body, []byte(`"return_token_ids":true`)) && bytes.Contains(r.Body, []byte(`"stream":true`)) && r.Path == f.path
			made = made || r.Path == "/tokenize" && !bytes.Contains(r.Body, []byte(`go on`))
		}
	}
	ids = "in every stream"
	header := a.Header.Get("X-Sluice-Migration")
	switch {
	case header != "ready":
		ids = "unavailable"
	case made:
		ids = "from the text"
	case asked:
		ids = "requested"
	}
	switch {
	case reflect.DeepEqual(h, want) && header == "ready":
		return "goes on elsewhere", ids
	case len(h.broken) > 0 && strings.HasPrefix(want.text, h.text):
		return "error event (`" + strings.TrimPrefix(header, "no; ") + "`)", ids
	}
	t.Errorf("migration %q: %+v, want %+v", header, h, want)
	return "wrong", ids
}

// killedWhole is killedStream for a request that is not streamed.
func (m *migrationFleet) killedWhole(t *testing.T, f *endpointCase) string {
	t.Helper()
	body := f.request(33, false)
	want := post(t, m.reference.URL()+f.path, body)
	for _, kind := range []sim.FaultKind{sim.Reset, sim.Cut} {
		for _, phase := range []string{"", "body"} {
			id := "whole" + kind.String() + phase
			m.fail(id, sim.Fault{Kind: kind, Phase: phase, After: 5})
			a := post(t, m.URL+f.path, body, "X-Request-Id", id)
			tried := 0
			for _, e := range m.engines {
				for _, r := range e.Requests() {
					if r.Path == f.path && strings.HasPrefix(r.Header("X-Request-Id"), id) {
						tried++
					}
				}
			}
			if a.Status != 200 || tried < 2 || !reflect.DeepEqual(normalizedAnswer(t, a.Body), normalizedAnswer(t, want.Body)) {
				t.Errorf("%s %q: status %d after %d tries\ngot  %s\nwant %s", kind, phase, a.Status, tried, a.Body, want.Body)
				return "wrong"
			}
			m.clear()
		}
	}
	return "run again elsewhere"
}

// normalizedAnswer is a whole answer without what differs between two runs.
func normalizedAnswer(t *testing.T, body []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(body, &v); err != nil {
		t.Errorf("%v in %s", err, body)
	}
	var scrub func(v any)
	scrub = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, x := range v {
				switch k {
				case "id", "request_id", "created", "created_at", "e2e_latency", "system_fingerprint":
					delete(v, k)
				default:
					scrub(x)
				}
			}
		case []any:
			for _, x := range v {
				scrub(x)
			}
		}
	}
	scrub(v)
	return v
}

// TestHandoverRunsAgain: a stream that moves in a pool with prefill workers is handed over
// again when its new worker would have to compute much; else that worker does it.
func TestHandoverRunsAgain(t *testing.T) {
	for _, k := range []struct{ tokens, prefills int }{{0, 2}, {100, 2}, {100_000, 1}} {
		t.Run(fmt.Sprint(k.tokens), func(t *testing.T) {
			t.Parallel()
			m := startMigrationFleet(t, true, 2, func(c *config.Config) { c.Migration.HandoverTokens = k.tokens })
			body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"` + promptWords(200, 3) + `"}],"max_tokens":30,"ignore_eos":true,"stream_options":{"include_usage":true}}`
			want := post(t, m.reference.URL()+"/v1/chat/completions", body)
			m.fail("anew", sim.Fault{Kind: sim.Reset, After: 6})
			wantSameContent(t, post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "anew"), want)
			if n := len(generateRequests(m.prefill)); n != k.prefills || m.migrated("done") != 1 {
				t.Errorf("%d prefills, want %d; %v migrations", n, k.prefills, m.migrated("done"))
			}
			wantIdle(t, m.testRouter, 5*time.Second, append(m.engines, m.prefill)...)
		})
	}
}
