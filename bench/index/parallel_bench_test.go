package index

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"
)

// BenchmarkIndexStoreParallel is several writers, each of its own ranks, storing the
// whole load into one index: blocks a second of all together, by the wall's clock.
func BenchmarkIndexStoreParallel(b *testing.B) {
	for _, name := range []string{"unique", "shared"} {
		for writers := 1; writers <= runtime.GOMAXPROCS(0); writers *= 2 {
			b.Run(fmt.Sprintf("load=%s/workers=64/depth=256/writers=%d", name, writers), func(b *testing.B) {
				l := newBenchWorkload(name, 64, 256, total, 16)
				var took time.Duration
				for b.Loop() {
					ix := l.index(true)
					runtime.GC()
					start := time.Now()
					var wg sync.WaitGroup
					for w := range writers {
						wg.Go(func() {
							for i := range l.stores {
								if ev := &l.stores[i]; int(ev.Slot)%writers == w {
									ix.Store(ev)
								}
							}
						})
					}
					wg.Wait()
					took += time.Since(start)
					if ix.Len() != l.blocks {
						b.Fatalf("%d entries of %d", ix.Len(), l.blocks)
					}
				}
				b.ReportMetric(float64(l.blocks)*float64(b.N)/took.Seconds(), "blocks/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
