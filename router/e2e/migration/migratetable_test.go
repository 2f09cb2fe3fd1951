package migration

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
)

// migrationTable is the rows of the table in docs/migration.md: every endpoint of every engine,
// and the releases that differ.
var migrationTable = []struct {
	engine, version string
	face            harness.EndpointCase
}{
	{"vLLM", "0.10.2 and later", harness.EndpointCase{Path: "/v1/chat/completions", Body: chatBody, Read: readOpenAIStream}},
	{"vLLM", "0.10.2 and later", harness.EndpointCase{Path: "/v1/completions", Body: promptBody, Read: readOpenAIStream}},
	{"vLLM", "before 0.10.2", harness.EndpointCase{Path: "/v1/chat/completions", Body: chatBody, Read: readOpenAIStream, Mod: func(o *sim.Options) { o.Release = "0.10.0" }}},
	{"vLLM", "", endpointCases[4]},
	{"vLLM", "", endpointCases[0]},
	{"vLLM", "", endpointCases[2]},
	{"SGLang", "", endpointCases[6]},
	{"SGLang", "0.5.19 and later", endpointCases[10]},
	{"SGLang", "before 0.5.19", endpointCases[11]},
	{"SGLang", "", endpointCases[12]},
	{"TensorRT-LLM", "", harness.EndpointCase{Engine: "trtllm", Path: "/v1/chat/completions", Body: chatBody, Read: readOpenAIStream}},
	{"TensorRT-LLM", "", harness.EndpointCase{Engine: "trtllm", Path: "/v1/completions", Body: promptBody, Read: readOpenAIStream}},
}

const (
	chatBody   = `"messages":[{"role":"user","content":"go on and on"}],"max_tokens":%d,"ignore_eos":true`
	promptBody = `"prompt":"go on and on","max_tokens":%d,"ignore_eos":true`
)

// TestMigrationTable kills the engine of a request for each endpoint, and compares the results with
// the table in docs/migration.md, or writes them there with -rewrite.
func TestMigrationTable(t *testing.T) {
	t.Parallel()
	rows := make([]string, len(migrationTable))
	t.Run("rows", func(t *testing.T) {
		for i, k := range migrationTable {
			t.Run(k.engine+k.face.Path+k.version, func(t *testing.T) {
				t.Parallel()
				m := startEndpointFleet(t, &k.face, 2, nil)
				streamed, ids := m.KilledStream(t, &k.face)
				rows[i] = fmt.Sprintf("| %s | `%s` | %s | %s | %s | %s |\n", k.engine, k.face.Path, k.version, ids, streamed, m.KilledWhole(t, &k.face))
			})
		}
	})
	const from, to = "<!-- table: go test ./router/e2e/migration -run TestMigrationTable -rewrite -->\n", "<!-- end of table -->\n"
	const path = "../../../docs/migration.md"
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
	if !*harness.Rewrite {
		t.Fatalf("%s differs from this run (go test ./router/e2e/migration -run TestMigrationTable -rewrite updates it):\n%s", path, strings.Join(rows, ""))
	}
	if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestHandoverRunsAgain: in a pool with prefill workers, a migrated stream gets a new hand-over if
// its new worker would have to compute many tokens; otherwise that worker computes them.
func TestHandoverRunsAgain(t *testing.T) {
	t.Parallel()
	for _, k := range []struct{ tokens, prefills int }{{0, 2}, {100, 2}, {100_000, 1}} {
		t.Run(fmt.Sprint(k.tokens), func(t *testing.T) {
			t.Parallel()
			m := harness.StartMigrationFleet(t, true, 2, func(c *config.Config) { c.Migration.HandoverTokens = k.tokens })
			body := `{"model":"sim","stream":true,"messages":[{"role":"user","content":"` + harness.PromptWords(200, 3) + `"}],"max_tokens":30,"ignore_eos":true,"stream_options":{"include_usage":true}}`
			want := harness.Post(t, m.Reference.URL()+"/v1/chat/completions", body)
			m.Fail("again", sim.Fault{Kind: sim.Reset, After: 6})
			harness.WantSameContent(t, harness.Post(t, m.URL+"/v1/chat/completions", body, "X-Request-Id", "again"), want)
			if n := len(harness.GenerateRequests(m.Prefill)); n != k.prefills || m.Migrated("done") != 1 {
				t.Errorf("%d prefills, want %d; %v migrations", n, k.prefills, m.Migrated("done"))
			}
			harness.WantIdle(t, m.Router, 5*time.Second, append(m.Engines, m.Prefill)...)
		})
	}
}
