package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// vocabularies are where scripts/tokenizer_golden.py keeps converted vocabularies.
func vocabularies(t testing.TB) string {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			t.Skip(err)
		}
		cache = filepath.Join(dir, "sluice")
	}
	dir := filepath.Join(cache, "tokenizer", "vocab")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("%v; scripts/tokenizer_golden.py ids makes it", err)
	}
	return dir
}

// prose returns a text of at least n bytes from the project's documents and sources.
func prose(t testing.TB, n int) []byte {
	t.Helper()
	var text []byte
	for len(text) < n {
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
				text = append(text, b...)
			}
		}
	}
	return []byte(strings.ToValidUTF8(string(text[:n]), ""))
}

// cpuTime returns the CPU time of the process so far.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// reportCPU reports the CPU time of an iteration, which means something on a busy machine too.
func reportCPU(b *testing.B, began time.Duration) {
	b.ReportMetric(float64((cpuTime()-began).Microseconds())/float64(b.N), "cpu-µs/op")
}

// BenchmarkEncode compares the encoder in use with Hugging Face's tokenizers, called in the
// same way, on the vocabularies of scripts/tokenizer_golden.py.
func BenchmarkEncode(b *testing.B) {
	dir := vocabularies(b)
	for _, vocab := range []string{"qwen2", "llama-bpe", "deepseek-llm"} {
		for _, reference := range []bool{false, true} {
			m, err := open(b).Load(filepath.Join(dir, vocab), LoadOptions{Reference: reference})
			if err != nil {
				b.Skip(err)
			}
			for _, n := range []int{1 << 10, 300 << 10} {
				text := prose(b, n)
				b.Run(fmt.Sprintf("%s/%s/%dKiB", vocab, m.Info().Encoder, n>>10), func(b *testing.B) {
					b.SetBytes(int64(n))
					defer reportCPU(b, cpuTime())
					var ids []uint32
					for b.Loop() {
						if ids, err = m.Encode(ids[:0], text, false); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
			m.Close()
		}
	}
}

// chat returns a request with a conversation of about n bytes.
func chat(t testing.TB, n int) []byte {
	t.Helper()
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	text := string(prose(t, n))
	messages := []message{{"system", "You are a helpful assistant."}}
	for i := 0; len(text) > 0; i++ {
		k := min(len(text), max(200, n/8))
		messages = append(messages, message{[]string{"user", "assistant"}[i%2], strings.ToValidUTF8(text[:k], "")})
		text = text[k:]
	}
	b, err := json.Marshal(map[string]any{"messages": messages, "add_generation_prompt": true})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// BenchmarkChat renders and encodes a conversation.
func BenchmarkChat(b *testing.B) {
	m, err := open(b).Load(filepath.Join(vocabularies(b), "qwen2"), LoadOptions{})
	if err != nil {
		b.Skip(err)
	}
	defer m.Close()
	for _, n := range []int{1 << 10, 300 << 10} {
		request := chat(b, n)
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			b.SetBytes(int64(n))
			b.ReportAllocs()
			defer reportCPU(b, cpuTime())
			var text []byte
			var ids []uint32
			for b.Loop() {
				if text, err = m.Render(text[:0], "", request); err != nil {
					b.Fatal(err)
				}
				if ids, err = m.Encode(ids[:0], text, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestEncodersAgree: the fast encoder gives the ids of Hugging Face's tokenizers for the
// project's own documents and sources with every vocabulary at hand.
func TestEncodersAgree(t *testing.T) {
	dirs, err := filepath.Glob(filepath.Join(vocabularies(t), "*"))
	if err != nil || len(dirs) == 0 {
		t.Skip("no vocabularies")
	}
	if testing.Short() {
		dirs = dirs[:1]
	}
	text := prose(t, 200<<10)
	for _, dir := range dirs {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			var ids [2][]uint32
			for i := range ids {
				m, err := open(t).Load(dir, LoadOptions{Reference: i == 1})
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close()
				if i == 0 && m.Info().Encoder == "tokenizers" {
					t.Skip("this model has one encoder")
				}
				for part := range bytes.Lines(text) {
					if ids[i], err = m.Encode(ids[i], part, false); err != nil {
						t.Fatal(err)
					}
				}
				if ids[i], err = m.Encode(ids[i], text, false); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.Equal(ids[0], ids[1]) {
				t.Errorf("the encoders give different ids")
			}
		})
	}
}
