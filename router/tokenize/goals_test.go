package tokenize_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/native/tokenizer"
	"sluice/router/blockhash"
	"sluice/router/tokenize"
	"sluice/router/tokenize/chatinput"
	"sluice/router/tokenize/incremental"
)

var (
	goals         = flag.String("goals", "", "measure, and write the figures to `FILE` as JSON: make bench-tokens")
	conversations = flag.Int("goals.conversations", 1000, "`N` conversations whose ids are kept in memory")
	rounds        = flag.Int("goals.rounds", 9, "`N` rounds of each measurement")
	memoryOnly    = flag.Bool("goals.memory", false, "measure only the memory of conversations")
)

// The shape of the goals: an agent's turn.
const (
	oldTokens, newTokens = 70_000, 1_500
	coldBytes            = 300 << 10
	cacheBytes           = 384 << 20
)

// figures are the results, in µs and bytes. Times are medians over the rounds, of the wall clock and
// of the process's CPU.
type figures struct {
	Library string           `json:"library"`
	Cold    map[string]*cold `json:"cold"` // by vocabulary
	Turns   map[string]*turn `json:"turns"`
	Chat    *chat            `json:"chat"`
	Engine  *engineFigures   `json:"engine"`
	Memory  *memory          `json:"memory"`
}

type cold struct {
	Encoder      string  `json:"encoder"`
	Wall, HFWall float64 // of the encoder in use, and of Hugging Face's tokenizers
	CPU, HFCPU   float64
	Ratio        float64 // of the wall-clock times
	LowHigh      [2]float64
}

type turn struct {
	Tokens, Bytes, NewTokens int
	Wall, CPU                float64 // of Tokenizer.PromptInProcess
	LowHigh                  [2]float64
	Encoded, Hashed          int     // bytes and blocks in one turn
	Convert                  float64 // the body to the template's input
	Render                   float64 // the template, with the hand-over to the library's thread
	EncodeTail               float64 // of that part which is new
	AllBlocks                float64 // the hashes of all blocks, which are cached
	Cold, HF                 float64 // the same turn with an empty cache; rendered and encoded whole by HF's tokenizers
}

type chat struct {
	Bytes, Tokens           int
	Wall, CPU, HF, HFEncode float64
	LowHigh                 [2]float64
}

type engineFigures struct {
	ShortWall, ShortCPU, LongWall, LongCPU float64
	LongTokens                             int
}

type memory struct {
	Conversations, Tokens, Kept int
	CacheBytes                  int64
	Heap                        int64 // what the process's heap has grown by
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// timed returns the wall-clock and CPU time of a call in µs.
func timed(call func()) (wall, cpu float64) {
	c, began := cpuTime(), time.Now()
	call()
	return float64(time.Since(began).Nanoseconds()) / 1e3, float64((cpuTime() - c).Microseconds())
}

// each returns the medians and the range of the wall-clock time of n calls.
func each(n int, call func(i int)) (wall, cpu float64, lowHigh [2]float64) {
	var walls, cpus []float64
	for i := range n {
		w, c := timed(func() { call(i) })
		walls, cpus = append(walls, w), append(cpus, c)
	}
	return median(walls), median(cpus), [2]float64{slices.Min(walls), slices.Max(walls)}
}

// corpus has the paragraphs of the project's documents and sources.
func corpus(t testing.TB) []string {
	var all []string
	for _, pattern := range []string{"../../docs/*.md", "../*/*.go", "../../scripts/*.py"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no files match %s: %v", pattern, err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for p := range strings.SplitSeq(strings.ToValidUTF8(string(b), ""), "\n\n") {
				if len(p) > 40 && len(p) < 4000 {
					all = append(all, p)
				}
			}
		}
	}
	return all
}

// prose returns a text of n bytes, another for each rng.
func prose(rng *rand.Rand, paragraphs []string, n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(paragraphs[rng.IntN(len(paragraphs))])
		b.WriteString("\n\n")
	}
	return strings.ToValidUTF8(b.String()[:n], "")
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

func body(messages []message) *jsonscan.Doc {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(map[string]any{"model": "m", "stream": true, "messages": messages}); err != nil {
		panic(err)
	}
	var d jsonscan.Doc
	if err := d.Scan(b.Bytes(), jsonscan.Limits{}); err != nil {
		panic(err)
	}
	return &d
}

// loaded is a model as router/app loads it, and the same one with Hugging Face's encoder.
type loaded struct {
	model, reference *tokenizer.Model
	rules            *incremental.Rules
	settings         chatinput.Settings
}

// load makes a folder of a converted vocabulary and a template ("": its own) and loads it.
func load(t testing.TB, library *tokenizer.Library, vocabulary, template string) *loaded {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(home, "sluice")
	}
	from := filepath.Join(cache, "tokenizer", "vocab", vocabulary)
	file, err := os.ReadFile(filepath.Join(from, "tokenizer.json"))
	if err != nil {
		t.Fatalf("%v; scripts/tokenizer_golden.py ids makes it", err)
	}
	dir := t.TempDir()
	config, _ := os.ReadFile(filepath.Join(from, "tokenizer_config.json"))
	if template != "" {
		text, err := os.ReadFile(filepath.Join(cache, "tokenizer/archive/vendor/llama.cpp/models/templates", template))
		if err != nil {
			t.Fatalf("%v; scripts/tokenizer_golden.py templates makes it", err)
		}
		write(t, dir, "chat_template.jinja", text)
	}
	write(t, dir, "tokenizer.json", file)
	write(t, dir, "tokenizer_config.json", config)
	l := new(loaded)
	for i, m := range []**tokenizer.Model{&l.model, &l.reference} {
		if *m, err = library.Load(dir, tokenizer.LoadOptions{Reference: i == 1}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup((*m).Close)
	}
	var tokens []incremental.AddedToken
	for _, s := range l.model.SpecialTokens() {
		tokens = append(tokens, incremental.AddedToken{ID: s.ID, Content: s.Content, SingleWord: s.SingleWord, LStrip: s.LStrip, RStrip: s.RStrip, Normalized: s.Normalized, Special: s.Special})
	}
	if l.rules, err = incremental.NewRules(file, tokens); err != nil {
		t.Fatal(err)
	}
	return l
}

func write(t testing.TB, dir, name string, text []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (l *loaded) tokenizer(t testing.TB, opt tokenize.Options) *tokenize.Tokenizer {
	t.Helper()
	to := tokenize.New(opt)
	n, err := to.NewInProcess("m", l.model, l.rules, l.settings)
	if err != nil {
		t.Fatal(err)
	}
	to.SetNatives(map[string]*tokenize.InProcess{"m": n})
	return to
}

// agent returns a conversation of about n tokens with messages of the sizes of an agent's.
func (l *loaded) agent(t testing.TB, rng *rand.Rand, paragraphs []string, n int) []message {
	t.Helper()
	messages := []message{{"system", prose(rng, paragraphs, 12_000)}}
	text := func() string { return prose(rng, paragraphs, 500+rng.IntN(7000)) }
	const bytesPerToken = 4
	for size, i := 12_000, 0; size < n*bytesPerToken; i++ {
		m := message{[]string{"user", "assistant"}[i%2], text()}
		messages = append(messages, m)
		size += len(m.Content)
	}
	for l.count(t, messages) > n {
		messages = messages[:len(messages)-1]
	}
	for { // up to the goal's length
		lack := n - l.count(t, messages)
		if lack < 100 {
			return messages
		}
		messages = append(messages, message{[]string{"user", "assistant"}[len(messages)%2], prose(rng, paragraphs, max(200, lack*3))})
	}
}

func (l *loaded) count(t testing.TB, messages []message) int {
	t.Helper()
	n := 0
	for _, m := range messages {
		ids, err := l.model.Encode(nil, []byte(m.Content), false)
		if err != nil {
			t.Fatal(err)
		}
		n += len(ids) + 5
	}
	return n
}

func (l *loaded) input(t testing.TB, d *jsonscan.Doc) []byte {
	t.Helper()
	var in chatinput.Input
	if reason := in.Read(chatinput.Chat, d.Body, &l.settings); reason != "" {
		t.Fatal(reason)
	}
	return in.Chat
}

// TestGoals measures what native tokenization costs. It asserts only that what it measures is right;
// scripts/bench_tokens.py prints the goals beside the figures.
func TestGoals(t *testing.T) {
	if *goals == "" {
		t.Skip("measured by make bench-tokens")
	}
	library, err := tokenizer.Open("")
	if err != nil {
		t.Fatal(err)
	}
	paragraphs := corpus(t)
	f := figures{Library: library.Version(), Cold: map[string]*cold{}, Turns: map[string]*turn{}}
	qwen := load(t, library, "qwen2", "")
	if !*memoryOnly {
		for _, v := range []string{"qwen2", "llama-bpe", "deepseek-llm"} {
			f.Cold[v] = measureCold(t, load(t, library, v, ""), paragraphs)
		}
		f.Turns["ChatML"] = measureTurn(t, qwen, paragraphs)
		f.Turns["Qwen3"] = measureTurn(t, load(t, library, "qwen2", "Qwen-Qwen3-0.6B.jinja"), paragraphs)
		f.Chat = measureChat(t, qwen, paragraphs)
		f.Engine = measureEngine(t, qwen, paragraphs)
	}
	f.Memory = measureMemory(t, qwen, paragraphs)
	out, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(*goals, append(out, '\n'), 0o600); err != nil {
		t.Fatal(err)
	}
}

func measureCold(t *testing.T, l *loaded, paragraphs []string) *cold {
	c := &cold{Encoder: l.model.Info().Encoder}
	rng := rand.New(rand.NewPCG(1, 2))
	var ratios []float64
	var walls, cpus [2][]float64
	for range *rounds {
		text := []byte(prose(rng, paragraphs, coldBytes))
		var ids [2][]uint32
		var cpu [2]float64
		for i, m := range []*tokenizer.Model{l.model, l.reference} {
			var w float64
			w, cpu[i] = timed(func() { ids[i], _ = m.Encode(nil, text, false) })
			walls[i], cpus[i] = append(walls[i], w), append(cpus[i], cpu[i])
		}
		if len(ids[0]) == 0 || !slices.Equal(ids[0], ids[1]) {
			t.Fatal("the encoders give different ids")
		}
		ratios = append(ratios, walls[0][len(walls[0])-1]/walls[1][len(walls[1])-1])
	}
	c.Ratio, c.LowHigh = median(ratios), [2]float64{ratios[0], ratios[len(ratios)-1]}
	c.Wall, c.HFWall, c.CPU, c.HFCPU = median(walls[0]), median(walls[1]), median(cpus[0]), median(cpus[1])
	return c
}

func measureTurn(t *testing.T, l *loaded, paragraphs []string) *turn {
	rng := rand.New(rand.NewPCG(3, 4))
	base := l.agent(t, rng, paragraphs, oldTokens)
	n := 4 * *rounds
	var docs []*jsonscan.Doc // each continues the base in its own way
	for range n {
		var reply []message
		for l.count(t, reply) < newTokens-100 {
			reply = append(reply, message{[]string{"user", "assistant"}[(len(base)+len(reply))%2], prose(rng, paragraphs, 1200)})
		}
		docs = append(docs, body(append(slices.Clone(base), reply...)))
	}
	to := l.tokenizer(t, tokenize.Options{CacheBytes: cacheBytes})
	query := func(d *jsonscan.Doc, scope uint64) *tokenize.NativeQuery {
		return &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: d, Scope: scope}
	}
	var p tokenize.Prompt
	if !to.PromptInProcess(&p, query(body(base), 1)) {
		t.Fatal("the first turn was not tokenized")
	}
	r := &turn{Bytes: len(docs[0].Body)}
	r.NewTokens = -p.Count
	before := to.Stats()
	r.Wall, r.CPU, r.LowHigh = each(n, func(i int) {
		if !to.PromptInProcess(&p, query(docs[i], 1)) {
			t.Fatal("a turn was not tokenized")
		}
	})
	r.Encoded = int(to.Stats().NativeEncoded-before.NativeEncoded) / n
	r.Tokens = p.Count
	r.NewTokens += p.Count
	if want := blockhash.Seqs(nil, 1, p.Tokens, incremental.BlockSize); !slices.Equal(p.Blocks, want) {
		t.Error("the hashes of the blocks are wrong")
	}
	last := l.input(t, docs[n-1])
	text, err := l.model.Render(nil, "", last)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := l.reference.Encode(nil, text, false)
	if err != nil || !slices.Equal(whole, p.Tokens) {
		t.Errorf("the ids are not those of the whole text (%v)", err)
	}

	var in chatinput.Input
	r.Convert, _, _ = each(n, func(i int) { in.Read(chatinput.Chat, docs[i].Body, &l.settings) })
	inputs := make([][]byte, n)
	for i := range inputs {
		inputs[i] = l.input(t, docs[i])
	}
	r.Render, _, _ = each(n, func(i int) {
		if _, err := l.model.Prompt(nil, "", inputs[i], false, func([]byte) []byte { return nil }); err != nil {
			t.Fatal(err)
		}
	})
	tail := text[len(text)-r.Encoded:]
	r.EncodeTail, _, _ = each(n, func(int) { whole, err = l.model.Encode(whole[:0], tail, false) })
	seqs := make([]blockhash.Seq, 0, len(p.Blocks))
	r.AllBlocks, _, _ = each(n, func(int) { seqs = blockhash.Seqs(seqs[:0], 1, p.Tokens, incremental.BlockSize) })
	r.Hashed = len(p.Blocks)
	r.Cold, _, _ = each(*rounds, func(i int) { to.PromptInProcess(&p, query(docs[i], 2+uint64(i))) })
	r.HF, _, _ = each(*rounds, func(i int) {
		text, _ = l.reference.Render(text[:0], "", inputs[i])
		whole, _ = l.reference.Encode(whole[:0], text, false)
	})
	return r
}

func measureChat(t *testing.T, l *loaded, paragraphs []string) *chat {
	rng := rand.New(rand.NewPCG(5, 6))
	to := l.tokenizer(t, tokenize.Options{CacheBytes: cacheBytes})
	n := 100 * *rounds
	var docs []*jsonscan.Doc
	for range n {
		docs = append(docs, body([]message{{"system", "You are a helpful assistant."}, {"user", prose(rng, paragraphs, 1000)}}))
	}
	c := &chat{Bytes: len(docs[0].Body)}
	var p tokenize.Prompt
	c.Wall, c.CPU, c.LowHigh = each(n, func(i int) {
		if !to.PromptInProcess(&p, &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: docs[i], Scope: 1}) {
			t.Fatal("a chat was not tokenized")
		}
	})
	c.Tokens = p.Count
	var text []byte
	var ids []uint32
	c.HF, _, _ = each(n, func(i int) {
		text, _ = l.reference.Render(text[:0], "", l.input(t, docs[i]))
		ids, _ = l.reference.Encode(ids[:0], text, false)
	})
	c.HFEncode, _, _ = each(n, func(int) { ids, _ = l.reference.Encode(ids[:0], text, false) })
	// The CPU of one short call is below the kernel's resolution: that of all of them, divided.
	_, cpu := timed(func() {
		for i := range n {
			to.PromptInProcess(&p, &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: docs[i], Scope: 2})
		}
	})
	c.CPU = cpu / float64(n)
	return c
}

// measureEngine measures the other way: an engine's /tokenize, here one that answers at once in the
// same process, so that its share of the CPU is contained.
func measureEngine(t *testing.T, l *loaded, paragraphs []string) *engineFigures {
	var answer []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = w.Write(answer)
	}))
	t.Cleanup(server.Close)
	ep, err := upstream.NewEndpoint(server.URL, upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ep.Close)
	rng := rand.New(rand.NewPCG(7, 8))
	to := tokenize.New(tokenize.Options{Timeout: 5 * time.Second})
	ask := func(docs []*jsonscan.Doc, tokens int) (wall, cpu float64) {
		ids := make([]uint32, tokens)
		for i := range ids {
			ids[i] = 50_000 + rng.Uint32N(50_000)
		}
		answer = fmt.Appendf(nil, `{"count":%d,"tokens":%s}`, tokens, jsonscan.AppendTokenIDs(nil, ids))
		var p tokenize.Prompt
		_, total := timed(func() {
			wall, _, _ = each(len(docs), func(i int) {
				if to.Prompt(&p, tokenize.Chat, docs[i], ep, new(upstream.Call)); p.Source != tokenize.FromEngine {
					t.Fatal(p.Err)
				}
			})
		})
		return wall, total / float64(len(docs))
	}
	e := &engineFigures{LongTokens: oldTokens + newTokens}
	var short, long []*jsonscan.Doc
	// The numbers keep them from being equal: the answer for an equal prompt is kept.
	for i := range 100 {
		short = append(short, body([]message{{"user", fmt.Sprint("Question ", i, ". ", prose(rng, paragraphs, 1000))}}))
	}
	for i := range *rounds {
		long = append(long, body([]message{{"user", fmt.Sprint("Question ", i, ". ", prose(rng, paragraphs, 4*e.LongTokens))}}))
	}
	e.ShortWall, e.ShortCPU = ask(short, 250)
	e.LongWall, e.LongCPU = ask(long, e.LongTokens)
	return e
}

func measureMemory(t *testing.T, l *loaded, paragraphs []string) *memory {
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return int64(s.HeapAlloc)
	}
	rng := rand.New(rand.NewPCG(9, 10))
	base := l.agent(t, rng, paragraphs, oldTokens+newTokens)
	to := l.tokenizer(t, tokenize.Options{CacheBytes: cacheBytes})
	before := heap()
	m := &memory{Conversations: *conversations}
	var p tokenize.Prompt
	ask := func(i int) {
		messages := slices.Clone(base)
		messages[0].Content = fmt.Sprintf("Conversation %d. %s", i, messages[0].Content) // nothing is shared
		if !to.PromptInProcess(&p, &tokenize.NativeQuery{Model: "m", Kind: tokenize.Chat, Doc: body(messages), Scope: 1}) {
			t.Fatal("a conversation was not tokenized")
		}
	}
	for i := range *conversations {
		ask(i)
	}
	m.Tokens, m.CacheBytes, m.Heap = p.Count, to.Stats().CacheBytes, heap()-before
	for i := range *conversations {
		had := to.Stats().NativeCached
		ask(i)
		if int(to.Stats().NativeCached-had) >= p.Count-newTokens {
			m.Kept++
		}
	}
	return m
}
