package tokenizer

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// kimiConfig and qwenConfig name the programs by which tiktoken's ranks are read.
const (
	kimiConfig = `{"auto_map":{"AutoTokenizer":["tokenization_kimi.TikTokenTokenizer",null]},"added_tokens_decoder":{"260":{"content":"<|im_end|>","special":true}}}`
	qwenConfig = `{"auto_map":{"AutoTokenizer":["org/model--tokenization_qwen.QWenTokenizer",null]}}`
)

// ranksFile returns tiktoken's file of all bytes and these tokens, in the order of their ranks.
func ranksFile(tokens [][]byte) []byte {
	var out []byte
	for rank := range 256 + len(tokens) {
		token := []byte{byte(rank)}
		if rank >= 256 {
			token = tokens[rank-256]
		}
		out = fmt.Appendf(out, "%s %d\n", base64.StdEncoding.EncodeToString(token), rank)
	}
	return out
}

// tekkenFile returns Mistral's file of the same tokens, with ten special ones.
func tekkenFile(tokens [][]byte, pattern string) []byte {
	out := fmt.Appendf(nil, `{"config":{"pattern":%q,"default_vocab_size":%d,"default_num_special_tokens":10},"vocab":[`, pattern, 266+len(tokens))
	for i, line := range strings.Split(strings.TrimSpace(string(ranksFile(tokens))), "\n") {
		token, _, _ := strings.Cut(line, " ")
		if i > 0 {
			out = append(out, ',')
		}
		out = fmt.Appendf(out, `{"rank":%d,"token_bytes":%q}`, i, token)
	}
	return append(out, "]}"...)
}

// rewrite fills a folder with these files alone.
func rewrite(t testing.TB, dir string, files map[string][]byte) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
	}
	for name, data := range files {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// FuzzVocabularyFile: whatever a model's files contain, loading gives a model that encodes, or an
// *Error that is neither a panic of this library's own parsers nor a mistake of its caller.
func FuzzVocabularyFile(f *testing.F) {
	words := [][]byte{[]byte("ab"), []byte("abc"), []byte("cab")}
	tiny, err := os.ReadFile("testdata/tiny/tokenizer.json")
	if err != nil {
		f.Fatal(err)
	}
	names := []string{"tekken.json", "tiktoken.model", "qwen.tiktoken", "tokenizer.json"}
	for kind, seeds := range [][][2]string{
		{{string(tekkenFile(words, `[a-z]+|[^a-z]+`)), ""}, {`{"vocab":[]}`, "{}"}, {`{"config":{"pattern":"a","default_vocab_size":10,"default_num_special_tokens":10},"vocab":[]}`, ""},
			{strings.Replace(string(tekkenFile(nil, `(?=(a+))\1`)), `"vocab"`, `"special_tokens":[{"token_str":"<s>","rank":9}],"vocab"`, 1), ""}},
		{{string(ranksFile(words)), kimiConfig}, {"YWI= 0\n", kimiConfig}, {string(ranksFile(nil)) + "YWJj 4194303\nYWI= 0\n", kimiConfig}, {"= 1", `{"auto_map":{"AutoTokenizer":[]}}`}},
		{{string(ranksFile(words)), qwenConfig}, {string(ranksFile(nil)) + "!!! 0\n", qwenConfig}, {"", `{"auto_map":{"AutoTokenizer":"tokenization_qwen.T"}}`}},
		{{string(tiny), ""}, {string(tiny), `{"added_tokens_decoder":{"300":{"content":"<x>","lstrip":true}},"chat_template":[{"name":"tool_use","template":"{{ x"}]}`}, {"{}", "[]"}},
	} {
		for _, s := range seeds {
			f.Add(uint8(kind), []byte(s[0]), []byte(s[1]), "abcab <|im_end|>é")
		}
	}
	l, dir := open(f), f.TempDir()
	f.Fuzz(func(t *testing.T, kind uint8, file, config []byte, text string) {
		files := map[string][]byte{names[int(kind)%len(names)]: file}
		if len(config) > 0 {
			files["tokenizer_config.json"] = config
		}
		rewrite(t, dir, files)
		var e *Error
		// The comparison of the encoders takes most of the time of loading, and on a busy machine longer
		// than the ten seconds after which an input counts as one that hangs. FuzzRanks has it.
		m, err := l.Load(dir, LoadOptions{Reference: true})
		if err != nil {
			// The parser of tokenizer.json, in the tokenizers crate, panics for some malformed files.
			panics := files["tokenizer.json"] != nil
			if !errors.As(err, &e) || e.Code == CodePanic && !panics || e.Code == CodeArgument || e.Code == CodeInput {
				t.Errorf("Load = %#v", err)
			}
			return
		}
		defer m.Close()
		if _, err = m.Encode(nil, []byte(text), true); err != nil && (!errors.As(err, &e) || e.Code != CodeInput && e.Code != CodeLimit) {
			t.Errorf("Encode = %#v", err)
		} else if err == nil && !utf8.ValidString(text) {
			t.Errorf("Encode accepts the malformed UTF-8 of %q", text)
		}
	})
}

// FuzzRanks: a converted vocabulary gives the ids of tiktoken's rule, which merges the two neighbours
// with the lowest rank until no two make a token. Words are letters a to d.
func FuzzRanks(f *testing.F) {
	for _, s := range [][2]string{{"ab abc cab", "abcab"}, {"abc ab", "abcabab"}, {"aaa aa", "aaaaaaa"}, {"ab cd abcd bc", "abcdbcd"}, {"aaaa aaa aa", "aaaaaaaaaaa"}, {"bcd abcd ab cd", "aabcdd"}} {
		f.Add([]byte(s[0]), s[1])
	}
	l, dir := open(f), f.TempDir()
	f.Fuzz(func(t *testing.T, list []byte, text string) {
		letters := func(s []byte) []byte {
			out := make([]byte, len(s))
			for i, c := range s {
				out[i] = 'a' + c%4
			}
			return out
		}
		ranks, tokens := map[string]int{}, [][]byte(nil)
		for b := range 256 {
			ranks[string([]byte{byte(b)})] = b
		}
		for word := range bytes.FieldsSeq(list) {
			token := letters(word)
			if _, ok := ranks[string(token)]; !ok && len(tokens) < 64 && len(token) < 64 {
				ranks[string(token)] = 256 + len(tokens)
				tokens = append(tokens, token)
			}
		}
		if len(text) > 512 {
			return
		}
		word := letters([]byte(text))
		var want []uint32
		for _, part := range mergeByRanks(word, ranks) {
			want = append(want, uint32(10+ranks[string(part)]))
		}
		rewrite(t, dir, map[string][]byte{"tekken.json": tekkenFile(tokens, `[a-z]+|[^a-z]+`)})
		for _, reference := range []bool{true, false}[:1+len(text)&1] { // the comparison of the encoders takes long
			m, err := l.Load(dir, LoadOptions{Reference: reference})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if got, err := m.Encode(nil, word, false); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s with the tokens %q: Encode(%q) = %v, %v; want %v", m.Info().Encoder, tokens, word, got, err, want)
			}
		}
	})
}

// mergeByRanks is tiktoken's encoding of one word.
func mergeByRanks(word []byte, ranks map[string]int) [][]byte {
	if len(word) == 0 {
		return nil
	}
	if _, ok := ranks[string(word)]; ok {
		return [][]byte{word}
	}
	parts := slices.Collect(slices.Chunk(word, 1))
	for {
		best, at := len(ranks), -1
		for i := range len(parts) - 1 {
			if r, ok := ranks[string(parts[i])+string(parts[i+1])]; ok && r < best {
				best, at = r, i
			}
		}
		if at < 0 {
			return parts
		}
		joined := slices.Concat(parts[at], parts[at+1])
		parts = slices.Replace(parts, at, at+2, joined)
	}
}
