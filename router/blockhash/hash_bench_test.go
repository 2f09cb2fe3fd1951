package blockhash

import (
	"fmt"
	"testing"
)

func BenchmarkHashTokens(b *testing.B) {
	for _, n := range []int{256, 4096, 32768} {
		b.Run(fmt.Sprintf("tokens=%d", n), func(b *testing.B) {
			tokens, dst := counting(1, n), make([]Seq, 0, n/16)
			b.ReportAllocs()
			for b.Loop() {
				dst = Seqs(dst[:0], 42, tokens, 16)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n/16), "ns/block")
		})
	}
}

func BenchmarkHashText(b *testing.B) {
	text, dst := make([]byte, 16384), make([]Seq, 0, 256)
	b.ReportAllocs()
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		dst = TextSeqs(dst[:0], 42, text, 64)
	}
}
