package incremental_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/native/tokenizer"
	"sluice/router/tokenize/incremental"
)

// libraryFragments are what texts for real tokenizers are made of, besides their added tokens.
var libraryFragments = []string{" ", "  ", "\n", "\n\n", "\t", "a", "The quick brown fox ", "jumps over 13 lazy dogs.", "func main() {\n\tfmt.Println(\"<|x|>\")\n}\n", "日本語のテキスト", "한국어", "é", "e\u0301",
	"ﬁ", "🦊🏽", "\u200b", "▁", "Ġ", "<", "|", ">", "[", "]", "{\"a\": [1, 2.5, null]}", "＜|im_start|＞", "\u00a0", "it's we'll", "1234567890", "_", "word", "ſ", "İ"}

// TestLibraryEqualsFullEncode is TestEqualsFullEncode with the real library and real tokenizers:
// those of native/tokenizer's testdata and the folders in SLUICE_TOKENIZERS, separated by colons.
func TestLibraryEqualsFullEncode(t *testing.T) {
	library, err := tokenizer.Open("")
	if err != nil {
		var e *tokenizer.LoadError
		if errors.As(err, &e) && e.Absent() {
			t.Skip("no tokenizer library; make builds it where cargo is installed")
		}
		t.Fatal(err)
	}
	files, _ := filepath.Glob("../../../native/tokenizer/testdata/*/tokenizer.json")
	for _, dir := range filepath.SplitList(os.Getenv("SLUICE_TOKENIZERS")) {
		files = append(files, filepath.Join(dir, "tokenizer.json"))
	}
	if len(files) == 0 {
		t.Fatal("no tokenizers")
	}
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) { compareWithLibrary(t, library, file) })
	}
}

func compareWithLibrary(t *testing.T, library *tokenizer.Library, file string) {
	model, err := library.Load(filepath.Dir(file), tokenizer.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var tokens []incremental.AddedToken
	fragments := slices.Clone(libraryFragments)
	for i, s := range model.SpecialTokens() {
		tokens = append(tokens, incremental.AddedToken{ID: s.ID, Content: s.Content, SingleWord: s.SingleWord, LStrip: s.LStrip, RStrip: s.RStrip, Normalized: s.Normalized, Special: s.Special})
		if i%(1+len(model.SpecialTokens())/30) == 0 { // as many as of the others
			fragments = append(fragments, s.Content, s.Content+"user\n")
		}
	}
	rules, err := incremental.NewRules(text, tokens)
	if errors.Is(err, incremental.ErrNotIncremental) {
		t.Logf("refused: %v", err)
		return
	} else if err != nil {
		t.Fatal(err)
	}
	e := incremental.NewEncoder(model, rules, incremental.NewCache(1<<20))
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	conversations := 100
	if os.Getenv("SLUICE_SOAK") != "" {
		conversations = 100_000
	}
	rng := rand.New(rand.NewPCG(5, 6))
	cached, total := 0, 0
	for range conversations {
		var b strings.Builder
		for range 2 + rng.IntN(5) {
			for range 20 + rng.IntN(100) {
				b.WriteString(fragments[rng.IntN(len(fragments))])
			}
			addSpecial := rng.IntN(2) == 0
			want, err := model.Encode(nil, []byte(b.String()), addSpecial)
			if err != nil {
				t.Fatal(err)
			}
			got, res, err := e.Encode(nil, 0, []byte(b.String()), addSpecial)
			if err != nil || !slices.Equal(got, want) {
				t.Fatalf("text %q: ids differ (%v)\ngot  %v\nwant %v", b.String(), err, got, want)
			}
			cached += res.Cached
			total += len(want)
		}
	}
	t.Logf("%d boundary tokens, %d of %d ids from the cache", rules.Boundaries(), cached, total)
	if rules.Boundaries() > 0 && cached == 0 {
		t.Error("nothing was taken from the cache")
	}
}
