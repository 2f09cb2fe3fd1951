package scheduling

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/native/tokenizer"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestTokenizerFollowsEngines: a folder without a chat template is used with the one that the engines report.
// Their ids differ from the folder's here, so that the model is left to them, until the engine that
// differed is gone: then it is tried with the other one, once.
func TestTokenizerFollowsEngines(t *testing.T) {
	t.Parallel()
	if _, err := tokenizer.Open(""); err != nil {
		if _, err = tokenizer.Open(filepath.Join("..", "..", "..", "bin", tokenizer.Name)); err != nil {
			t.Skipf("%v; make builds the library where cargo is installed", err)
		}
	}
	vocabulary, err := os.ReadFile("../../../native/tokenizer/testdata/tiny/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), vocabulary, 0o600); err != nil {
		t.Fatal(err)
	}
	var workers []config.Worker
	for _, id := range []string{"a", "b"} {
		e := harness.StartSim(t, func(o *sim.Options) {
			o.Model, o.ChatTemplate = "sim", "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
		})
		workers = append(workers, harness.SimWorker(e, worker.Aggregated, id))
	}
	r := harness.StartRouter(t, func(c *config.Config) { c.Models = map[string]config.Model{"sim": {Tokenizer: dir}} }, workers...)
	n := 0
	native := func() float64 {
		n++
		if a := harness.Post(t, r.URL+"/v1/chat/completions", fmt.Sprintf(`{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"prompt %d"}]}`, n)); a.Status != 200 {
			t.Fatalf("status %d: %s", a.Status, a.Body)
		}
		return r.Metric(`sluice_prompts_total{source="native"}`)
	}
	testwait.Until(t, "a prompt is rendered with the engines' template", func() bool { return native() == 1 })
	mismatch := func() bool { return r.Metric(`sluice_tokenizer_native_models{state="mismatch"}`) == 1 }
	testwait.Until(t, "the ids differ", mismatch)
	for range 6 {
		if got := native(); got != 1 {
			t.Fatalf("%v prompts are native in spite of the difference", got)
		}
	}
	for i := range workers {
		_, page := r.Pages.Ready(true)
		at := 0
		if strings.Contains(string(page), workers[1].URL) {
			at = 1
		}
		if !strings.Contains(string(page), workers[at].URL) {
			t.Fatalf("/readyz names no engine: %s", page)
		}
		if i == 1 {
			break
		}
		if err := r.Fleet.Remove(workers[at].ID); err != nil {
			t.Fatal(err)
		}
		testwait.Until(t, "the model is tried again", func() bool { return native() == 2 })
		testwait.Until(t, "the ids differ from the other engine's", mismatch)
	}
}
