package jsonscan

import (
	"fmt"
	"strings"
	"testing"
)

const prose = `The router reads the body once.\nIt never decodes it into maps, and so \"max_tokens\": 12345678901234567890 arrives as it was sent. `

// chatBody is a chat request of about n bytes: a system prompt, then turns of
// about 4 KiB (or less in a small body), as agents send them.
func chatBody(n int) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"meta-llama/Llama-3.1-8B-Instruct","messages":[{"role":"system","content":"You are helpful."}`)
	role := "user"
	for b.Len() < n-300 {
		size := min(4096, n-300-b.Len())
		fmt.Fprintf(&b, `,{"role":%q,"content":"%s"}`, role, strings.Repeat(prose, size/len(prose)+1))
		role = map[string]string{"user": "assistant", "assistant": "user"}[role]
	}
	b.WriteString(`],"temperature":0.7,"top_p":0.95,"max_tokens":256,"stream":true,"stream_options":{"include_usage":true},"seed":9007199254740993}`)
	return []byte(b.String())
}

func BenchmarkScan(b *testing.B) {
	for _, size := range []struct {
		name string
		body []byte
	}{
		{"1k", chatBody(1 << 10)},
		{"32k", chatBody(32 << 10)},
		{"1m", chatBody(1 << 20)},
		{"32k-noescape", []byte(`{"model":"m","prompt":"` + strings.Repeat("all of it is plain text ", 32<<10/24) + `"}`)},
		{"32k-utf8", []byte(`{"model":"m","prompt":"` + strings.Repeat("слово 漢字 ", 32<<10/18) + `"}`)},
		{"32k-ids", []byte(`{"model":"m","prompt":` + string(AppendTokenIDs(nil, benchIDs(5200))) + `}`)},
	} {
		b.Run(size.name, func(b *testing.B) {
			var d Doc
			b.SetBytes(int64(len(size.body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := d.Scan(size.body, Limits{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func benchIDs(n int) []uint32 {
	ids := make([]uint32, n)
	x := uint32(1)
	for i := range ids {
		x = x*1664525 + 1013904223
		ids[i] = x >> 8 % 128256
		ids[i] %= 128256
	}
	return ids
}

func BenchmarkSplice(b *testing.B) {
	body := chatBody(32 << 10)
	var d Doc
	if err := d.Scan(body, Limits{}); err != nil {
		b.Fatal(err)
	}
	one, no, handle := []byte("1"), []byte("false"), []byte(`{"do_remote_decode":true,"do_remote_prefill":false}`)
	edits := []Edit{{KeyMaxTokens, Set, one}, {KeyStream, Set, no}, {Key: KeyStreamOptions, Op: Remove}, {KeyMaxCompletionTokens, Replace, one}, {KeyKVTransferParams, Set, handle}}
	b.Run("edited", func(b *testing.B) {
		dst := make([]byte, 0, len(body)+256)
		b.ReportAllocs()
		for b.Loop() {
			dst = d.Edited(dst[:0], edits...)
		}
	})
	b.Run("segments", func(b *testing.B) {
		dst := make([][]byte, 0, 32)
		b.ReportAllocs()
		for b.Loop() {
			dst = d.Segments(dst[:0], edits...)
		}
	})
	b.Run("segments-one", func(b *testing.B) {
		dst := make([][]byte, 0, 32)
		b.ReportAllocs()
		for b.Loop() {
			dst = d.Segments(dst[:0], edits[4:]...)
		}
	})
}

func BenchmarkTokenIDs(b *testing.B) {
	ids := benchIDs(8192)
	raw := AppendTokenIDs(nil, ids)
	b.Run("parse", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		b.ReportAllocs()
		for b.Loop() {
			ids, _ = TokenIDs(ids[:0], raw)
		}
	})
	b.Run("append", func(b *testing.B) {
		b.SetBytes(int64(len(raw)))
		b.ReportAllocs()
		for b.Loop() {
			raw = AppendTokenIDs(raw[:0], ids)
		}
	})
}
