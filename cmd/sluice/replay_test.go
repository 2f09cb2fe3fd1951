package main

import (
	"bytes"
	"path/filepath"
	"regexp"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/recording"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// TestReplaySeparatesRecordings: with two recordings in one folder, the blocks cached at the beginning
// of the second do not count for the requests of the first.
func TestReplaySeparatesRecordings(t *testing.T) {
	dir := t.TempDir()
	w := worker.New(worker.Spec{ID: "w", Models: []string{"m"}, BlockSize: 16})
	seqs := []blockhash.Seq{11, 12, 13, 14}
	for _, cached := range []int{0, 64} {
		recorded := make(chan struct{}) // a recording that stops earlier lacks the cached blocks
		rec := recording.New(recording.Options{Ranks: func() []*worker.Rank { return w.Ranks }, Policy: "kv",
			Contents: func(_ *worker.Rank, yield func(bool, *kvindex.Exported) bool) {
				if cached > 0 {
					yield(true, &kvindex.Exported{Engine: []kvindex.EngineHash{1, 2, 3, 4}, Seqs: seqs})
				}
				close(recorded)
			}})
		files, err := recording.NewFiles(recording.FilesOptions{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		g, err := rec.Start(files)
		if err != nil {
			t.Fatal(err)
		}
		rec.RecordChoice(&schedule.Query{Leg: schedule.WholeLeg, Candidates: w.Ranks, PromptTokens: 80, RequestID: "r", Attempt: 1},
			schedule.Choice{Rank: w.Ranks[0], CachedTokens: cached}, seqs, 16, true)
		rec.RequestEnded("r", schedule.Outcome{Status: 200, CachedTokens: cached, PromptTokens: 80, OutputTokens: 1})
		<-recorded
		if err := g.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	paths, _ := filepath.Glob(filepath.Join(dir, "*.rec"))
	if len(paths) != 2 {
		t.Fatalf("files %v", paths)
	}
	var out, errs bytes.Buffer
	if code := runArgs("replay", paths, &out, &errs); code != 0 || errs.Len() != 0 {
		t.Fatalf("%d, %s", code, &errs)
	}
	var shown []string
	for _, m := range regexp.MustCompile(`recorded choices +(\d+\.\d) %`).FindAllStringSubmatch(out.String(), -1) {
		shown = append(shown, m[1])
	}
	heads := regexp.MustCompile(`(?m)^Recording begun .*:$`).FindAllString(out.String(), -1)
	if len(shown) != 2 || shown[0] != "0.0" || shown[1] != "80.0" || len(heads) != 2 {
		t.Errorf("cached %v, under %q, want 0.0 and 80.0 of two recordings\n%s", shown, heads, &out)
	}
}
