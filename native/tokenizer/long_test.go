//go:build cgo && linux

package tokenizer

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// longTexts are texts that are hard for an encoder, by name: each returns n bytes.
var longTexts = map[string]func(t testing.TB, n int) []byte{
	"prose":   prose,
	"letter":  func(_ testing.TB, n int) []byte { return bytes.Repeat([]byte("a"), n) },
	"spaces":  func(_ testing.TB, n int) []byte { return bytes.Repeat([]byte(" "), n) },
	"signs":   func(_ testing.TB, n int) []byte { return bytes.Repeat([]byte("=-"), n/2) },
	"letters": func(_ testing.TB, n int) []byte { return randomText(n, "abcdefghijklmnopqrstuvwxyz") },
	"words":   func(_ testing.TB, n int) []byte { return randomText(n, "abcdefghijklmnopqrstuvwxyz     ") },
	"runs":    func(_ testing.TB, n int) []byte { return broken(randomText(n, "abcdefghijklmnopqrstuvwxyz"), maxRun) },
	"rows":    func(_ testing.TB, n int) []byte { return broken(bytes.Repeat([]byte("a"), n), maxRun) },
	"gaps":    func(_ testing.TB, n int) []byte { return broken(bytes.Repeat([]byte(" "), n), maxRun) },
	"chinese": func(_ testing.TB, n int) []byte {
		return randomText(n, "的一是不了在人有我他这为之大来以个中上们")
	},
}

// maxRun is MAX_RUN of encoder.rs.
const maxRun = 256 << 10

// broken writes a dot after every run of n bytes.
func broken(text []byte, n int) []byte {
	for i := n; i < len(text); i += n + 1 {
		text[i] = '.'
	}
	return text
}

// randomText returns at most n bytes of characters of an alphabet, the same each time.
func randomText(n int, alphabet string) []byte {
	letters := []rune(alphabet)
	out, x := make([]byte, 0, n), uint64(1)
	for {
		x = x*6364136223846793005 + 1442695040888963407
		c := string(letters[(x>>33)%uint64(len(letters))])
		if len(out)+len(c) > n {
			return out
		}
		out = append(out, c...)
	}
}

// resident returns a figure of /proc/self/status in bytes.
func resident(t testing.TB, field string) int {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	_, rest, _ := strings.Cut(string(text), field+":")
	kib := 0
	_, _ = fmt.Sscan(rest, &kib)
	return kib << 10
}

// BenchmarkLongText encodes the longest texts that are encoded, 4 MiB and with Hugging Face's tokenizers 1 MiB, and
// reports the CPU time, the bytes of memory for a byte of text at the peak, and the share of texts that are
// refused.
func BenchmarkLongText(b *testing.B) {
	dir := vocabularies(b)
	for _, vocab := range []string{"llama-bpe", "qwen2", "deepseek-llm", "gemma-4", "llama-spm", "bert-bge"} {
		for _, reference := range []bool{false, true} {
			m, err := open(b).Load(filepath.Join(dir, vocab), LoadOptions{Reference: reference, Timeout: 10 * time.Minute})
			if err != nil {
				b.Log(err)
				continue
			}
			if reference || m.Info().Encoder != "tokenizers" {
				size := 4 << 20
				if m.Info().Encoder == "tokenizers" {
					size = 1 << 20
				}
				for name, text := range longTexts {
					b.Run(fmt.Sprintf("%s/%s/%s", vocab, m.Info().Encoder, name), func(b *testing.B) {
						text := text(b, size)
						_ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) // resets the peak
						before, refused := resident(b, "VmRSS"), 0
						defer reportCPU(b, cpuTime())
						for b.Loop() {
							if _, err := m.Encode(nil, text, false); err != nil {
								refused++
							}
						}
						b.ReportMetric(float64(resident(b, "VmHWM")-before)/float64(size), "bytes/byte")
						b.ReportMetric(float64(refused)/float64(b.N), "refused")
					})
				}
			}
			m.Close()
		}
	}
}

// TestLongTexts: a text with a run of letters that would take seconds is refused, ordinary text of the same
// length is not, and long calls leave threads to others.
func TestLongTexts(t *testing.T) {
	l := open(t)
	m, err := l.Load("testdata/tiny", LoadOptions{Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for name, c := range map[string]struct {
		text []byte
		ok   bool
	}{
		"run":           {bytes.Repeat([]byte("a"), maxRun), true},
		"longer run":    {bytes.Repeat([]byte("a"), maxRun+1), false},
		"longer gap":    {append([]byte("a"), bytes.Repeat([]byte(" "), maxRun+1)...), false},
		"longer dashes": {append(bytes.Repeat([]byte("-="), maxRun), 'a'), false},
		"runs":          {broken(bytes.Repeat([]byte("a"), 1<<20), maxRun), true},
		"prose":         {prose(t, 1<<20), true},
	} {
		_, err := m.Encode(nil, c.text, false)
		if e, _ := err.(*Error); (err == nil) != c.ok || err != nil && (e == nil || e.Code != CodeLimit) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := cap(l.long); n < 1 || n > max(1, cap(l.here)/2) {
		t.Errorf("%d of %d threads may make long calls", n, cap(l.here))
	}
	for range cap(l.long) { // long calls that do not end
		l.long <- struct{}{}
	}
	defer func() {
		for range cap(l.long) {
			<-l.long
		}
	}()
	if _, err := m.Encode(nil, prose(t, longInput), false); err != nil {
		t.Errorf("a call beside long ones: %v", err)
	}
	m.SetTimeout(50 * time.Millisecond)
	_, err = m.Encode(nil, prose(t, longInput+1), false)
	if e, _ := err.(*Error); e == nil || e.Code != CodeDeadline {
		t.Errorf("a long call beside as many as may run: %v", err)
	}
}

// TestSlowTexts: after a text that took longer to encode than the timeout, texts of at least its length are refused at once
// instead of using a thread each, as such or in a chat. Shorter ones are encoded, and a new timeout lets all be tried.
func TestSlowTexts(t *testing.T) {
	m, err := open(t).Load("testdata/tiny", LoadOptions{Timeout: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	isLate := func(_ []uint32, err error) bool {
		e, ok := err.(*Error)
		if err != nil && (!ok || e.Code != CodeDeadline) {
			t.Fatal(err)
		}
		return err != nil
	}
	long := prose(t, 4<<20)
	if !isLate(m.Encode(nil, long, false)) {
		t.Fatal("4 MiB were encoded within a millisecond")
	}
	testwait.Until(t, "a call that ran on is noted", func() bool {
		// On a busy machine the timeout can pass before a call has its thread: then it does not run.
		return m.slow.until.Load() != 0 || isLate(m.Encode(nil, long, false)) && m.slow.until.Load() != 0
	})
	m.timeout.Store(int64(time.Minute)) // unlike SetTimeout, which lets all be tried
	if !isLate(m.Encode(nil, long, false)) {
		t.Error("a text as long was tried again")
	}
	chat := func(n int) ([]uint32, error) {
		return m.Prompt(nil, "{{ messages[0].content }}", []byte(`{"messages":[{"content":"`+strings.Repeat("word ", n/5)+`"}]}`), false, func(text []byte) []byte { return text })
	}
	if !isLate(chat(len(long) + 10)) {
		t.Error("a chat as long was tried")
	}
	if isLate(m.Encode(nil, long[:1<<20], false)) || isLate(chat(1<<20)) {
		t.Error("a shorter text was refused")
	}
	m.slow.until.Store(time.Now().UnixNano())
	if isLate(m.Encode(nil, long, false)) {
		t.Error("a text was refused after the pause")
	}
	m.slow.add(len(long))
	m.SetTimeout(time.Minute)
	if isLate(m.Encode(nil, long, false)) {
		t.Error("a text was refused with a new timeout")
	}
}
