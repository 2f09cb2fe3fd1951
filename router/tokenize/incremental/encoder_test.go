package incremental

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"sluice/dataplane/objpool"
	"sluice/router/blockhash"
)

func init() { objpool.EnableChecks() }

func special(content string) AddedToken { return AddedToken{Content: content, Special: true} }

// tokenizers are toys with every kind of stage and of added token.
func tokenizers() map[string]*toy {
	chat := func() []AddedToken {
		return []AddedToken{special("<|im_start|>"), special("<|im_end|>"), special("<think>"), {Content: "</think>"}, {Content: "<tool>", Normalized: true}}
	}
	hard := func() []AddedToken { // stripping, whole-word and overlapping tokens
		return append(chat(), AddedToken{Content: "<r>", RStrip: true}, AddedToken{Content: "<l>", LStrip: true}, AddedToken{Content: "word", SingleWord: true},
			AddedToken{Content: "<w>", SingleWord: true}, AddedToken{Content: "[INST]", RStrip: true, Special: true}, AddedToken{Content: "\n\n"}, AddedToken{Content: " <x>"},
			AddedToken{Content: "<|im", Special: true}, AddedToken{Content: "p<|im_en"}, AddedToken{Content: "<a>"}, AddedToken{Content: "<a><b>"}, AddedToken{Content: "<c><c"})
	}
	out := map[string]*toy{}
	for i, normalizer := range []string{"", "prepend", "lower", "strip"} {
		for j, pre := range []string{"bytelevel", "metaspace-first", "metaspace-always", "none"} {
			rng := rand.New(rand.NewPCG(uint64(i), uint64(j)))
			out[fmt.Sprintf("%s/%s/chat", normalizer, pre)] = newToy(rng, chat(), normalizer, pre, i%2 == 0)
			t := newToy(rng, hard(), normalizer, pre, i%2 == 1)
			t.Before, t.After = []uint32{7}, []uint32{8, 9}
			out[fmt.Sprintf("%s/%s/hard", normalizer, pre)] = t
		}
	}
	return out
}

func mustRules(t testing.TB, toy *toy) *Rules {
	t.Helper()
	r, err := NewRules(toy.file(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// fragments are what random texts are made of.
var fragments = []string{"<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|im_end|>\n", "<think>", "</think>", "<tool>", "<|im", "<r>", "<l>", "word", "p<|im_en", "d|>", "p", "\n\n", " <x>",
	"<a>", "<b>", "<c>", "<c", "[INST]", "<w>", "<", "|", ">", " ", "  ", "\n", "a", "text", "The quick brown fox ", "日本語", "é", "e\u0301", "▁", "🦊", "1234", "TOOL", "<TOOL>", "<|IM_START|>", "＜think＞", "\t", "_"}

func randomText(rng *rand.Rand, n int) string {
	var b strings.Builder
	for range n {
		b.WriteString(fragments[rng.IntN(len(fragments))])
	}
	return b.String()
}

// conversation yields the texts of a conversation's turns: mostly each extends the last one, and
// sometimes an earlier part is rewritten, as by a template that drops old reasoning.
func conversation(rng *rand.Rand, yield func(string) bool) {
	text := randomText(rng, 1+rng.IntN(12))
	for range 2 + rng.IntN(5) {
		if !yield(text) {
			return
		}
		switch rng.IntN(6) {
		case 0: // rewrite from somewhere on
			cut := rng.IntN(len(text) + 1)
			for cut < len(text) && text[cut]&0xc0 == 0x80 {
				cut++
			}
			text = text[:cut] + randomText(rng, 1+rng.IntN(10))
		default:
			text += randomText(rng, 1+rng.IntN(10))
		}
	}
}

// TestEqualsFullEncode is the package's promise: the ids are those of the whole text, for random
// conversations in every toy. SLUICE_SOAK runs 100,000 conversations for each.
func TestEqualsFullEncode(t *testing.T) {
	conversations := 150
	if os.Getenv("SLUICE_SOAK") != "" {
		conversations = 100_000
	}
	for name, toy := range tokenizers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rules := mustRules(t, toy)
			e := NewEncoder(toy, rules, NewCache(64<<10))
			e.minSegment, e.minStored = 1, 1
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(1, 2))
			cached := 0
			for range conversations {
				scope, addSpecial := rng.Uint64N(2), rng.IntN(2) == 0
				conversation(rng, func(text string) bool {
					want, _ := toy.Encode(nil, []byte(text), addSpecial)
					out := Output{IDs: []uint32{1, 2, 3}, Blocks: []blockhash.Seq{4}}
					res, err := e.EncodeText(&out, scope, []byte(text), addSpecial)
					if err != nil {
						t.Fatal(err)
					}
					got := out.IDs
					hashes := blockhash.Seqs([]blockhash.Seq{4}, blockhash.Salt(scope), want, BlockSize)
					if !slices.Equal(out.Blocks, hashes) {
						t.Fatalf("text %q: blocks %x, want %x (%d of %d ids cached, %d hashed)", text, out.Blocks, hashes, res.Cached, len(want), res.Hashed)
					}
					if !slices.Equal(got, slices.Concat([]uint32{1, 2, 3}, want)) {
						t.Fatalf("text %q: ids %v, want %v (%d cached)", text, got[3:], want, res.Cached)
					}
					cached += res.Cached
					return true
				})
			}
			if cached == 0 {
				t.Error("nothing was taken from the cache")
			}
		})
	}
}

// TestBoundaryTokens compares the rule with what the search for added tokens does.
func TestBoundaryTokens(t *testing.T) {
	for _, c := range []struct {
		tokens []AddedToken
		want   []string
	}{
		{[]AddedToken{special("<a>"), special("<b>")}, []string{"<a>", "<b>"}},
		{[]AddedToken{special("<a>"), special("<a><b>")}, []string{"<a><b>"}},               // the longer one wins
		{[]AddedToken{special("<a>"), special("x<")}, nil},                                  // x< covers the first byte of <a>, and begins with a letter
		{[]AddedToken{special("<aa<")}, nil},                                                // overlaps itself
		{[]AddedToken{special("<|im|>"), special("<|")}, []string{"<|im|>"}},                // the longest wins, and <| is the beginning of another
		{[]AddedToken{{Content: "<n>", Normalized: true}, special("<a>")}, []string{"<a>"}}, // found after the normalizer only
		{[]AddedToken{{Content: "<l>", LStrip: true}, {Content: "<r>", RStrip: true}}, []string{"<r>"}},
		{[]AddedToken{{Content: "<w>", SingleWord: true}, special("word"), special("<x_")}, nil},
		{[]AddedToken{special("<a>"), special("<a>")}, nil}, // which id?
		{[]AddedToken{special(""), special("\n\n"), special(" <x>")}, nil},
	} {
		got := []string(nil)
		for _, b := range boundaryTokens(c.tokens) {
			got = append(got, b.Content)
		}
		if !slices.Equal(got, c.want) && len(got)+len(c.want) > 0 {
			t.Errorf("tokens %v: boundaries %q, want %q", c.tokens, got, c.want)
		}
	}
}

func TestRefusedTokenizers(t *testing.T) {
	for _, c := range []struct{ file, field string }{
		{`{"normalizer":{"type":"New"}}`, "normalizer"},
		{`{"normalizer":{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"New"}]}}`, "normalizer"},
		{`{"pre_tokenizer":{"type":"New"}}`, "pre_tokenizer"},
		{`{"truncation":{"max_length":5}}`, "truncation"},
		{`{"padding":{"strategy":"BatchLongest"}}`, "padding"},
		{`{"model":{"type":"BPE","dropout":0.1}}`, "model.dropout"},
		{`{"model":{"type":"New"}}`, "model.type"},
		{`{"post_processor":{"type":"New"}}`, "post_processor"},
		{`{"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}},{"Sequence":{"id":"A"}}],"special_tokens":{}}}`, "post_processor.single"},
		{`{"post_processor":{"type":"TemplateProcessing","single":[]}}`, "post_processor.single"},
	} {
		_, err := NewRules([]byte(c.file), nil)
		if !errors.Is(err, ErrNotIncremental) || !strings.Contains(err.Error(), c.field+" is ") {
			t.Errorf("%s: error %v, want one that names %s", c.file, err, c.field)
		}
	}
	if _, err := NewRules([]byte("{"), nil); err == nil || errors.Is(err, ErrNotIncremental) {
		t.Errorf("malformed file: error %v", err)
	}
}

func TestAffixes(t *testing.T) {
	r, err := NewRules([]byte(`{"post_processor":{"type":"Sequence","processors":[{"type":"ByteLevel"},{"type":"TemplateProcessing",
		"single":[{"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}},{"SpecialToken":{"id":"</s>"}}],"special_tokens":{"<s>":{"ids":[1]},"</s>":{"ids":[2,3]}}}]}}`), nil)
	if err != nil || !slices.Equal(r.Prefix, []uint32{1}) || !slices.Equal(r.Suffix, []uint32{2, 3}) {
		t.Errorf("template: %v %v %v", r, r, err)
	}
	r, err = NewRules([]byte(`{"post_processor":{"type":"RobertaProcessing","sep":["</s>",2],"cls":["<s>",0]}}`), nil)
	if err != nil || !slices.Equal(r.Prefix, []uint32{0}) || !slices.Equal(r.Suffix, []uint32{2}) {
		t.Errorf("RoBERTa: %v %v", r, err)
	}
}

// TestCheck finds a model that was not loaded from the file of the rules.
func TestCheck(t *testing.T) {
	a := newToy(rand.New(rand.NewPCG(1, 1)), []AddedToken{special("<a>")}, "", "bytelevel", false)
	rules := mustRules(t, a)
	if err := NewEncoder(a, rules, nil).Check(); err != nil {
		t.Errorf("the model of the file: %v", err)
	}
	b := newToy(rand.New(rand.NewPCG(1, 1)), []AddedToken{{Content: "<a>", LStrip: true}}, "", "bytelevel", false)
	if err := NewEncoder(b, rules, nil).Check(); !errors.Is(err, ErrNotIncremental) {
		t.Errorf("another flag: error %v", err)
	}
	c := *a
	c.Before = []uint32{5}
	if err := NewEncoder(&c, rules, nil).Check(); !errors.Is(err, ErrNotIncremental) {
		t.Errorf("another post-processor: error %v", err)
	}
}

// longTurns returns the text of a conversation of some 300 KB and that of its next turn.
func longTurns() (old, next string) {
	var b strings.Builder
	for i := 0; b.Len() < 300<<10; i++ {
		fmt.Fprintf(&b, "<|im_start|>user\nquestion %d %s<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>\n", i, strings.Repeat("ask a little more ", 20), strings.Repeat("an answer with if a < b && c > d ", 60))
	}
	old = b.String() + "<|im_start|>assistant\n"
	return old, old + strings.Repeat("a new answer ", 60) + "<|im_end|>\n<|im_start|>user\n" + strings.Repeat("a new question ", 300) + "<|im_end|>\n<|im_start|>assistant\n"
}

// TestOnlyTheNewIsEncoded: the model sees the new turn and at most a segment before it.
func TestOnlyTheNewIsEncoded(t *testing.T) {
	toy := tokenizers()["/bytelevel/chat"]
	e := NewEncoder(toy, mustRules(t, toy), NewCache(8<<20))
	old, next := longTurns()
	first, res, _ := e.Encode(nil, 1, []byte(old), false)
	if res.Cached != 0 || res.Encoded != len(old) {
		t.Errorf("first turn: %+v, want all of %d bytes encoded", res, len(old))
	}
	second, res, _ := e.Encode(nil, 1, []byte(next), false)
	if res.Encoded > len(next)-len(old)+4<<10 || res.Cached < len(first)*9/10 || res.Hashed > (len(second)-res.Cached)/BlockSize+1 {
		t.Errorf("next turn: %+v, want little more than its %d new bytes encoded, and the blocks of its new ids hashed", res, len(next)-len(old))
	}
	if _, res, _ = e.Encode(nil, 1, []byte(next), false); res.Encoded > minSegment+minStored {
		t.Errorf("the same text again: %+v", res)
	}
	if _, res, _ = e.Encode(nil, 2, []byte(next), false); res.Cached != 0 {
		t.Errorf("another scope: %+v, want nothing cached", res)
	}
	other := NewEncoder(toy, mustRules(t, toy), e.cache)
	if _, res, _ = other.Encode(nil, 1, []byte(next), false); res.Cached != 0 {
		t.Errorf("another model: %+v, want nothing cached", res)
	}
}

// TestWithoutRules: a tokenizer whose texts cannot be cut still has whole texts cached, those with
// and without special tokens apart.
func TestWithoutRules(t *testing.T) {
	toy := tokenizers()["/bytelevel/hard"]
	e := NewEncoder(toy, nil, NewCache(1<<20))
	text := []byte(strings.Repeat("some text ", 100))
	for _, addSpecial := range []bool{false, true} {
		want, _ := toy.Encode(nil, text, addSpecial)
		for i := range 2 {
			got, res, _ := e.Encode(nil, 0, text, addSpecial)
			if !slices.Equal(got, want) || (res.Encoded == 0) != (i == 1) {
				t.Errorf("special %v, encoded for the %d. time: equal %v, %+v", addSpecial, i+1, slices.Equal(got, want), res)
			}
		}
	}
}

// failing is a model that fails on purpose.
type failing struct{}

func (failing) Encode(dst []uint32, _ []byte, _ bool) ([]uint32, error) {
	return append(dst, 99), errors.New("no")
}

func TestFailureKeepsDst(t *testing.T) {
	got, _, err := NewEncoder(failing{}, nil, NewCache(1<<20)).Encode([]uint32{5}, 0, []byte("text"), false)
	if err == nil || !slices.Equal(got, []uint32{5}) {
		t.Errorf("ids %v, error %v, want [5] and an error", got, err)
	}
}

// TestCacheBound: the bytes stay within the bound whatever is added, the tree stays whole, and a
// lower bound takes effect at once.
func TestCacheBound(t *testing.T) {
	toy := tokenizers()["/bytelevel/chat"]
	const limit = 20_000
	e := NewEncoder(toy, mustRules(t, toy), NewCache(limit))
	e.minSegment, e.minStored = 1, 1
	rng := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		conversation(rng, func(text string) bool {
			_, _, _ = e.Encode(nil, 0, []byte(text), false)
			checkTree(t, e.cache)
			return !t.Failed()
		})
	}
	if s := e.cache.Stats(); s.Bytes < limit/2 || s.Dropped == 0 || s.Hits == 0 || s.Misses == 0 {
		t.Errorf("stats %+v, want a full cache that has dropped segments", s)
	}
	e.cache.SetLimit(1000)
	checkTree(t, e.cache)
	e.cache.SetLimit(0)
	if s := e.cache.Stats(); s.Bytes != 0 || s.Segments != 0 {
		t.Errorf("without memory: %+v", s)
	}
}

func checkTree(t *testing.T, c *Cache) {
	t.Helper()
	var bytes int64
	children := map[*segment]int{}
	for k, s := range c.entries {
		bytes += s.cost()
		if s.key != k || s.parent != nil && c.entries[s.parent.key] != s.parent {
			t.Fatal("a segment's parent was dropped before it")
		}
		children[s.parent]++
	}
	leaves := 0
	for s := c.leaves.next; s != &c.leaves; s = s.next {
		leaves++
		if children[s] != 0 {
			t.Fatal("a segment with children can be dropped")
		}
	}
	for _, s := range c.entries {
		if s.children != children[s] {
			t.Fatalf("a segment has %d children, not %d", children[s], s.children)
		}
		if s.children == 0 {
			leaves--
		}
	}
	if leaves != 0 || bytes != c.bytes || bytes > c.limit {
		t.Fatalf("leaves off by %d; %d bytes, counted %d, limit %d", leaves, bytes, c.bytes, c.limit)
	}
}

func TestConcurrent(t *testing.T) {
	toy := tokenizers()["prepend/metaspace-first/hard"]
	e := NewEncoder(toy, mustRules(t, toy), NewCache(30_000))
	e.minSegment, e.minStored = 1, 1
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g%2), 0)) // two by two the same texts
			for range 60 {
				conversation(rng, func(text string) bool {
					want, _ := toy.Encode(nil, []byte(text), true)
					if got, _, _ := e.Encode(nil, 0, []byte(text), true); !slices.Equal(got, want) {
						t.Errorf("text %q: ids %v, want %v", text, got, want)
						return false
					}
					return true
				})
			}
		})
	}
	wg.Wait()
	checkTree(t, e.cache)
}

// TestMemoryOfConversations holds the goal of 384 MiB for 1,000 conversations of 70,000 tokens, by
// the cost of one with a segment every 512 bytes, the most there can be.
func TestMemoryOfConversations(t *testing.T) {
	const tokens, bytesOfText = 70_000, 300 << 10
	s := newSegment(key{}, nil, make([]uint32, tokens), tokens)
	s.blocks = make([]blockhash.Seq, tokens/BlockSize)
	if total := s.cost() + bytesOfText/minSegment*segmentOverhead; total > 384<<20/1000 {
		t.Errorf("a conversation of %d tokens takes %d bytes, want at most %d", tokens, total, 384<<20/1000)
	}
}

// BenchmarkNextTurn is a turn of 70,000 tokens of which the model's double encodes nothing: the
// scan, the hash, the lookup and the copy of the ids.
func BenchmarkNextTurn(b *testing.B) {
	toy := tokenizers()["/bytelevel/chat"]
	e := NewEncoder(toy, mustRules(b, toy), NewCache(64<<20))
	old, _ := longTurns()
	ids, _, _ := e.Encode(nil, 1, []byte(old), false)
	b.ReportMetric(float64(len(ids)), "tokens")
	text := []byte(old)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		ids, _, _ = e.Encode(ids[:0], 1, text, false)
	}
}
