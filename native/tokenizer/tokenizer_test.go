package tokenizer

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"sluice/native/dl"
)

// open returns the library that `make build` has built.
func open(t testing.TB) *Library {
	t.Helper()
	path := filepath.Join("..", "..", "bin", Name)
	if v := os.Getenv(Variable); v != "" {
		path = v
	}
	l, err := Open(path)
	if err != nil {
		t.Skipf("%v; `make build` builds the library where cargo is installed", err)
	}
	return l
}

func load1(t testing.TB, dir string) *Model {
	t.Helper()
	m, err := open(t).Load(dir, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func TestOpenWithoutLibrary(t *testing.T) {
	_, err := Open(filepath.Join(t.TempDir(), Name))
	var e *LoadError
	if !errors.As(err, &e) || !e.Absent() {
		t.Fatalf("Open of an absent file: %v, want a LoadError that is Absent", err)
	}
	if dl.ABI() == 0 {
		return
	}
	garbage := filepath.Join(t.TempDir(), Name)
	if err := os.WriteFile(garbage, []byte("\x7fELF, but no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = Open(garbage); !errors.As(err, &e) || e.Absent() || e.Attempts[0].Code != dl.LoadBroken {
		t.Fatalf("Open of a broken file: %v, want LoadBroken", err)
	}
	// LoadOther if a test before this one has loaded the library.
	if _, err = Open("libm.so.6"); !errors.As(err, &e) || e.Attempts[0].Code != dl.LoadSymbol && e.Attempts[0].Code != dl.LoadOther {
		t.Fatalf("Open of another library: %v, want LoadSymbol", err)
	}
}

func TestSelfTest(t *testing.T) {
	l := open(t)
	if err := l.SelfTest(); err != nil {
		t.Error(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	t.Setenv("TMPDIR", "/proc/absent") // as in a container with a read-only root file system
	if err := l.SelfTest(); err != nil {
		t.Errorf("without a writable folder for temporary files: %v", err)
	}
}

func TestModel(t *testing.T) {
	m := load1(t, "testdata/tiny")
	info := m.Info()
	if info.Kind != "bpe" || info.BOS == nil || *info.BOS != 256 || !slices.Equal(info.AddedIDs, []uint32{256}) || !slices.Equal(info.Templates, []string{"default"}) {
		t.Errorf("Info = %+v", info)
	}
	ids, err := m.Encode([]uint32{7}, []byte("ab<|end|>é"), true)
	// Ids 0 to 255 are the bytes, 256 is <|begin|>, 257 is <|end|>.
	if want := []uint32{7, 256, 'a', 'b', 257, 0xc3, 0xa9}; err != nil || !slices.Equal(ids, want) {
		t.Errorf("Encode = %v, %v; want %v", ids, err, want)
	}
	text, err := m.Render([]byte("> "), "", []byte(`{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":true}`))
	if want := "> <|begin|>user: hi<|end|>\nassistant:"; err != nil || string(text) != want {
		t.Errorf("Render = %q, %v; want %q", text, err, want)
	}
}

// TestClasses: a folder is loaded only if an engine encodes with its tokenizer.json as it is, whatever the class
// of the tokenizer and the files that name its special tokens say. scripts/tokenizer_golden.py compares with transformers.
func TestClasses(t *testing.T) {
	l := open(t)
	vocabulary, err := os.ReadFile("testdata/tiny/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	const named, general = `"bos_token":"<|begin|>","eos_token":"<|end|>"`, `"tokenizer_class":"PreTrainedTokenizerFast"`
	for name, c := range map[string]struct {
		config, model string
		others        map[string]string
		refused       string // part of the reason, "" if it is loaded
	}{
		"general":                      {general, "llama", nil, ""},
		"no class":                     {named, "", nil, ""},
		"Llama":                        {`"tokenizer_class":"LlamaTokenizer"`, "llama", nil, "LlamaTokenizer replaces the model's options"},
		"Llama, a wrong class":         {`"tokenizer_class":"LlamaTokenizerFast"`, "deepseek_v3", nil, ""},
		"Llama, a general model":       {`"tokenizer_class":"LlamaTokenizer"`, "mistral", nil, ""},
		"general, a wrong class":       {general, "qwen2", nil, "Qwen2Tokenizer replaces the normalizer"},
		"by the model type":            {named, "qwen3", nil, "Qwen2Tokenizer replaces the normalizer"},
		"a class without known rules":  {`"tokenizer_class":"RobertaTokenizer"`, "roberta", nil, "its rules are not known"},
		"a class that nobody knows":    {`"tokenizer_class":"NewTokenizer"`, "", nil, "its rules are not known"},
		"own code":                     {`"auto_map":{"AutoTokenizer":["a.B",null]}`, "", nil, "auto_map"},
		"own code of something else":   {`"auto_map":{"AutoProcessor":"a.B"}`, "", nil, ""},
		"split special tokens":         {`"split_special_tokens":true`, "", nil, "split_special_tokens"},
		"files of releases":            {`"fast_tokenizer_files":["tokenizer.json","tokenizer.4.0.json"]`, "", nil, "fast_tokenizer_files"},
		"additional token":             {`"additional_special_tokens":["<|tool|>"]`, "", nil, `"<|tool|>", which is not an added token`},
		"additional token, known":      {`"additional_special_tokens":["<|end|>"]`, "", nil, ""},
		"extra tokens":                 {`"extra_special_tokens":{"a":"<|tool|>"}`, "", nil, `"<|tool|>", which is not an added token`},
		"token of a name of its own":   {`"image_token":"<image>"`, "", nil, `"<image>", which is not an added token`},
		"token of the vocabulary":      {`"pad_token":"a"`, "", nil, `"a", which is not an added token`},
		"special_tokens_map.json":      {named, "", map[string]string{"special_tokens_map.json": `{"eos_token":"</s>"}`}, `"</s>", which is not an added token`},
		"the same, known":              {named, "", map[string]string{"special_tokens_map.json": `{"eos_token":{"content":"<|begin|>"}}`}, ""},
		"the same, unused":             {named + `,"added_tokens_decoder":{}`, "", map[string]string{"special_tokens_map.json": `{"eos_token":"</s>"}`}, ""},
		"added_tokens.json":            {named, "", map[string]string{"added_tokens.json": `{"<|tool|>":258}`}, `"<|tool|>" of added_tokens.json`},
		"added_tokens.json, another":   {named, "", map[string]string{"added_tokens.json": `{"<|end|>":258}`}, `"<|end|>" of added_tokens.json`},
		"added_tokens.json, known":     {named, "", map[string]string{"added_tokens.json": `{"<|end|>":257}`}, ""},
		"added_tokens_decoder":         {named + `,"added_tokens_decoder":{"258":{"content":"<|tool|>","lstrip":false,"rstrip":false,"normalized":false,"single_word":false,"special":true}}`, "", nil, ""},
		"a class of the configuration": {named, `llama","tokenizer_class":"LlamaTokenizer`, nil, "LlamaTokenizer replaces"},
	} {
		dir := t.TempDir()
		files := map[string]string{"tokenizer.json": string(vocabulary), "tokenizer_config.json": "{" + c.config + "}"}
		if c.model != "" {
			files["config.json"] = `{"model_type":"` + c.model + `"}`
		}
		for file, text := range c.others {
			files[file] = text
		}
		for file, text := range files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		m, err := l.Load(dir, LoadOptions{})
		if c.refused == "" && err != nil || c.refused != "" && (err == nil || !strings.Contains(err.Error(), c.refused)) {
			t.Errorf("%s: %v, want %q", name, err, c.refused)
		}
		if err != nil {
			continue
		}
		if name == "the same, known" {
			text, err := m.Render(nil, "{{ bos_token }}{{ eos_token }}", []byte(`{"messages":[{"role":"user","content":"x"}]}`))
			if string(text) != "<|begin|><|begin|>" {
				t.Errorf("%s: a template prints %q, %v", name, text, err)
			}
		}
		m.Close()
	}
}

// TestVocabularyFiles: models without tokenizer.json. Ranks 0 to 255 are the bytes, then come "ab",
// "abc" and "cab", which is also the order of merging.
func TestVocabularyFiles(t *testing.T) {
	l := open(t)
	var ranks strings.Builder
	var vocab []map[string]any
	add := func(token string) {
		b := base64.StdEncoding.EncodeToString([]byte(token))
		fmt.Fprintf(&ranks, "%s %d\n", b, len(vocab))
		vocab = append(vocab, map[string]any{"rank": len(vocab), "token_bytes": b, "token_str": nil})
	}
	for b := range 256 {
		add(string([]byte{byte(b)}))
	}
	for _, token := range []string{"ab", "abc", "cab"} {
		add(token)
	}
	tekken, err := json.Marshal(map[string]any{"vocab": vocab, "config": map[string]any{
		"pattern": `[a-z]+|[^a-z]+`, "default_vocab_size": 10 + len(vocab), "default_num_special_tokens": 10, "version": "v3"}})
	if err != nil {
		t.Fatal(err)
	}
	kimi := `{"auto_map":{"AutoTokenizer":["tokenization_kimi.TikTokenTokenizer",null]},"added_tokens_decoder":{"260":{"content":"<|im_end|>","special":true}}}`
	for name, c := range map[string]struct {
		files  map[string]string
		format string
		want   []uint32 // of "abcab <|im_end|>cab", with special tokens
	}{
		"Tekken": {map[string]string{"tekken.json": string(tekken)}, "tekken",
			[]uint32{1, 267, 266, 42, 70, 134, 115, 119, 105, 111, 120, 110, 134, 72, 268}},
		"Mistral's folder": {map[string]string{"tekken.json": string(tekken), "consolidated.safetensors": "", "tokenizer.json": "{}", "chat_template.jinja": "x"}, "tekken",
			[]uint32{1, 267, 266, 42, 70, 134, 115, 119, 105, 111, 120, 110, 134, 72, 268}},
		"Kimi": {map[string]string{"tiktoken.model": ranks.String(), "tokenizer_config.json": kimi}, "tiktoken",
			[]uint32{257, 256, ' ', 260, 258}},
		"Qwen": {map[string]string{"qwen.tiktoken": ranks.String(), "tokenizer_config.json": strings.ReplaceAll(kimi, "kimi", "qwen")}, "tiktoken",
			[]uint32{257, 256, ' ', 261, 258}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			m, err := l.Load(dir, LoadOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if i := m.Info(); i.Format != c.format || i.HasTemplate() || !json.Valid(m.Spec()) {
				t.Errorf("Info = %+v, Spec = %s", i, m.Spec())
			}
			if ids, err := m.Encode(nil, []byte("abcab <|im_end|>cab"), true); err != nil || !slices.Equal(ids, c.want) {
				t.Errorf("Encode = %v, %v; want %v", ids, err, c.want)
			}
			_, err = m.Encode(nil, bytes.Repeat([]byte("ab"), 12_501), false)
			var e *Error
			if name == "Kimi" && (!errors.As(err, &e) || e.Code != CodeLimit) || name != "Kimi" && err != nil {
				t.Errorf("Encode of a word of 25,002 letters: %v", err)
			}
		})
	}
	for name, files := range map[string]map[string]string{
		"other module":    {"tiktoken.model": ranks.String(), "tokenizer_config.json": `{"auto_map":{"AutoTokenizer":["tokenization_x.T",null]}}`},
		"lacks a byte":    {"tiktoken.model": "YWI= 0\n", "tokenizer_config.json": kimi},
		"no base64":       {"tiktoken.model": "!!! 0\n", "tokenizer_config.json": kimi},
		"a token twice":   {"tiktoken.model": ranks.String() + "YWI= 300\n", "tokenizer_config.json": kimi},
		"Tekken's config": {"tekken.json": `{"vocab":[]}`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := l.Load(dir, LoadOptions{})
			var e *Error
			if !errors.As(err, &e) || e.Code != CodeUnsupported {
				t.Errorf("Load = %v; want CodeUnsupported", err)
			}
		})
	}
}

// TestTemplatesByName: a request with tools selects the template tool_use. One that cannot be rendered is
// an error then, and no reason to render another.
func TestTemplatesByName(t *testing.T) {
	l := open(t)
	vocabulary, err := os.ReadFile("testdata/tiny/tokenizer.json")
	if err != nil {
		t.Fatal(err)
	}
	const plain, withTools = `{"messages":[{"role":"user","content":"hi"}]}`, `{"messages":[{"role":"user","content":"hi"}],"tools":[]}`
	for name, c := range map[string]struct {
		files     map[string]string
		templates []string
		plain     string // "": an error
		withTools string
	}{
		"both in the configuration": {map[string]string{"tokenizer_config.json": `{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"t"}]}`},
			[]string{"default", "tool_use"}, "d", "t"},
		"tool_use is broken": {map[string]string{"tokenizer_config.json": `{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"{% if %}"}]}`},
			[]string{"default"}, "d", ""},
		"a broken file": {map[string]string{"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "{{ 'x' | safe + 'y' }}"},
			[]string{"default"}, "d", ""},
		"the only one is broken": {map[string]string{"chat_template.jinja": "{% if %}"}, []string{}, "", ""},
		"another is broken": {map[string]string{"chat_template.jinja": "d", "additional_chat_templates/rag.jinja": "{% if %}"},
			[]string{"default"}, "d", "d"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "additional_chat_templates"), 0o700); err != nil {
				t.Fatal(err)
			}
			c.files["tokenizer.json"] = string(vocabulary)
			for file, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			m, err := l.Load(dir, LoadOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if got := m.Info().Templates; !slices.Equal(got, c.templates) {
				t.Errorf("templates %q, want %q", got, c.templates)
			}
			for input, want := range map[string]string{plain: c.plain, withTools: c.withTools} {
				text, err := m.Render(nil, "", []byte(input))
				var e *Error
				if want == "" && (!errors.As(err, &e) || e.Code != CodeUnsupported || !strings.Contains(e.Reason, "the chat template")) || want != "" && (err != nil || string(text) != want) {
					t.Errorf("%s: %q, %v; want %q", input, text, err, want)
				}
			}
		})
	}
}

// TestLineEnds: the texts are those of transformers 5.19.
func TestLineEnds(t *testing.T) {
	m := load1(t, "testdata/tiny")
	for template, want := range map[string]string{
		"a\r\nb{{ 'x\r\ny' }}\r\n{% if true %}\r\n  q\r\n{% endif %}\r\nz\rk": "a\nbx\ny\n  q\nz\nk",
		"x\r\n":                             "x",
		"{{ messages[0].content }}\r\n\r\n": "hi\r\nyou\n",
	} {
		if got, err := m.Render(nil, template, []byte(`{"messages":[{"role":"user","content":"hi\r\nyou"}]}`)); err != nil || string(got) != want {
			t.Errorf("%q: %q, %v; want %q", template, got, err, want)
		}
	}
}

// TestEscapes: tojson escapes every character as json.dumps of Python does, by the digests that
// `scripts/tokenizer_golden.py rewrite` has recorded. The text has all characters of the basic
// plane and some of the others.
func TestEscapes(t *testing.T) {
	m := load1(t, "testdata/tiny")
	recorded, err := os.ReadFile("testdata/escapes.json")
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]string
	if err := json.Unmarshal(recorded, &want); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for c := rune(0); c <= 0x10ffff; c++ {
		if (c < 0x10000 || c%0x1000 < 4 || c == 0x1f642) && utf8.ValidRune(c) {
			text.WriteRune(c)
		}
	}
	input, err := json.Marshal(map[string]any{"messages": []map[string]string{{"role": "user", "content": text.String()}}})
	if err != nil {
		t.Fatal(err)
	}
	if len(want) != 2 {
		t.Errorf("%d digests", len(want))
	}
	for filter, digest := range want {
		got, err := m.Render(nil, "{{ messages[0].content | "+filter+" }}", input)
		if sum := fmt.Sprintf("%x", sha256.Sum256(got)); err != nil || sum != digest {
			t.Errorf("%s: %v, %d bytes with the digest %s, want %s; `scripts/tokenizer_golden.py escapes` finds the first difference", filter, err, len(got), sum, digest)
		}
	}
}

func TestErrors(t *testing.T) {
	m := load1(t, "testdata/tiny")
	const chat = `{"messages":[{"role":"user","content":"secret"}]}`
	for name, c := range map[string]struct {
		template, input string
		want            Code
		reason          string
	}{
		"not JSON":            {"", `{"messages"`, CodeInput, "not JSON"},
		"not UTF-8":           {"", "{\"messages\":\"\xff\"}", CodeInput, "UTF-8"},
		"half a surrogate":    {"", `{"messages":[{"role":"\ud800"}]}`, CodeInput, "surrogate"},
		"no messages":         {"", `{}`, CodeInput, "messages"},
		"empty messages":      {"", `{"messages":[]}`, CodeInput, "messages"},
		"unknown member":      {"", `{"messages":[{}],"model":"x"}`, CodeInput, "model"},
		"deep":                {"", `{"messages":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`, CodeInput, "128 levels"},
		"raise_exception":     {"{{ raise_exception('no ' ~ messages[0].content) }}", chat, CodeRefused, "no secret"},
		"syntax":              {"{% if %}", chat, CodeTemplate, ""},
		"endless loop":        {"{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% set x = a %}{% endfor %}{% endfor %}{% endfor %}", chat, CodeLimit, "steps"},
		"doubling":            {"{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", chat, CodeLimit, "bytes"},
		"doubling of a list":  {"{% set ns = namespace(s=[1, 2]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}", chat, CodeLimit, "items"},
		"a value in itself":   {"{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", chat, CodeTemplate, "namespace"},
		"nested values":       {"{% set ns = namespace() %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}", chat, CodeLimit, "deeply"},
		"chained operators":   {"{{ 1" + strings.Repeat("+1", 60000) + " }}", chat, CodeTemplate, "operators"},
		"chained elif":        {"{% if 0 %}" + strings.Repeat("{% elif 1 %}", 20000) + "{% endif %}", chat, CodeTemplate, "elif"},
		"markup":              {"{{ 'a'|safe + '<' }}", chat, CodeUnsupported, "safe"},
		"repeated string":     {"{{ 'x' * 4000000000 }}", chat, CodeLimit, "steps"},
		"recursive macro":     {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", chat, CodeTemplate, ""},
		"immutable":           {"{{ messages.append(1) }}", chat, CodeTemplate, ""},
		"unknown attribute":   {"{{ messages[0].a.b }}", chat, CodeTemplate, ""},
		"generation + prompt": {"", `{"messages":[{"role":"user","content":"x"}],"add_generation_prompt":true,"continue_final_message":true}`, CodeInput, "exclude"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := m.Render(nil, c.template, []byte(c.input))
			var e *Error
			if !errors.As(err, &e) || e.Code != c.want || !strings.Contains(e.Reason, c.reason) {
				t.Fatalf("Render = %#v; want code %q and a reason with %q", err, c.want, c.reason)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("the error quotes the request: %v", err)
			}
		})
	}
	if _, err := m.Encode(nil, []byte("a\xffb"), true); !errors.As(err, new(*Error)) || !strings.Contains(err.Error(), "byte 1") {
		t.Errorf("Encode of malformed UTF-8 = %v; want an error that names byte 1", err)
	}
	small, err := open(t).Load("testdata/tiny", LoadOptions{MaxInput: 10})
	if err != nil {
		t.Fatal(err)
	}
	var e *Error
	if _, err = small.Encode(nil, []byte("0123456789x"), false); !errors.As(err, &e) || e.Code != CodeLimit {
		t.Errorf("Encode beyond MaxInput = %v; want CodeLimit", err)
	}
	small.Close()
	if _, err = small.Encode(nil, nil, false); !errors.Is(err, ErrClosed) {
		t.Errorf("Encode of a closed model = %v; want ErrClosed", err)
	}
	if _, err = open(t).Load(t.TempDir(), LoadOptions{}); !errors.As(err, &e) || e.Code != CodeUnsupported || !strings.Contains(e.Reason, "tokenizer.json") {
		t.Errorf("Load of an empty folder = %v; want CodeUnsupported that names tokenizer.json", err)
	}
}
