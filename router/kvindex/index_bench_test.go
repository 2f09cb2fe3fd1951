package kvindex

import (
	"fmt"
	"math/bits"
	"testing"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// The workload: W workers hold benchTotal (worker, block) entries in prompts of
// D blocks, 16 blocks an event, interleaved across workers round by round.
// "unique": all blocks differ; "shared": nine prompts of ten begin with the
// same min(128, D/2) blocks, which a worker stores once.
const (
	benchTotal = 1 << 19
	benchBatch = 16
	benchSeed  = 42
)

func mix(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return z ^ (z >> 31)
}

func benchLocal(sid uint64, p int) blockhash.Local {
	return blockhash.Local(mix(mix(sid^0xD1B54A32D192ED03) + uint64(p)))
}

type benchLoad struct {
	stores  []Stored
	prompts [][]blockhash.Seq
	blocks  int
}

func newBenchLoad(load string, workers, depth int) *benchLoad {
	const common = 0xFFFF000000000000
	l := &benchLoad{}
	rounds := max(1, benchTotal/(workers*depth))
	seen := make([]bool, workers)
	for i := range rounds {
		events := make([][]Stored, workers)
		for w := range workers {
			sid := mix(benchSeed ^ uint64(i*workers+w))
			prefix := 0
			if load == "shared" && mix(sid)%10 < 9 {
				prefix = min(128, depth/2)
			}
			var seqs []blockhash.Seq
			var locals []blockhash.Local
			seq := blockhash.Seq(1)
			for p := range depth {
				loc := benchLocal(sid, p)
				if p < prefix {
					loc = benchLocal(common, p)
				}
				seq = blockhash.Next(seq, loc)
				seqs, locals = append(seqs, seq), append(locals, loc)
			}
			from := 0
			if prefix > 0 && seen[w] {
				from = prefix
			}
			seen[w] = seen[w] || prefix > 0
			for ; from < depth; from += benchBatch {
				to := min(depth, from+benchBatch)
				ev := Stored{Slot: worker.Slot(w), Salt: 1, Local: locals[from:to]}
				if from > 0 {
					ev.HasParent, ev.Parent = true, EngineHash(seqs[from-1])
				}
				for _, s := range seqs[from:to] {
					ev.Engine = append(ev.Engine, EngineHash(s))
				}
				events[w] = append(events[w], ev)
				l.blocks += to - from
			}
			l.prompts = append(l.prompts, seqs)
		}
		for w := range events {
			l.stores = append(l.stores, events[w]...)
		}
	}
	return l
}

func (l *benchLoad) fill(ix Index) {
	for i := range l.stores {
		ix.Store(&l.stores[i])
	}
}

func eachLoad(b *testing.B, do func(b *testing.B, load string, workers, depth int)) {
	for _, c := range []struct {
		load           string
		workers, depth int
	}{{"unique", 64, 256}, {"shared", 64, 256}, {"shared", 64, 2048}, {"shared", 1000, 256}} {
		b.Run(fmt.Sprintf("load=%s/workers=%d/depth=%d", c.load, c.workers, c.depth), func(b *testing.B) {
			do(b, c.load, c.workers, c.depth)
		})
	}
}

func BenchmarkIndexStore(b *testing.B) {
	eachLoad(b, func(b *testing.B, load string, workers, depth int) {
		l := newBenchLoad(load, workers, depth)
		var took time.Duration
		var perEntry float64
		for b.Loop() {
			ix := New(Options{})
			start := time.Now()
			l.fill(ix)
			took += time.Since(start)
			perEntry = float64(ix.Bytes()) / float64(ix.Len())
		}
		b.ReportMetric(float64(took.Nanoseconds())/float64(b.N)/float64(l.blocks), "ns/block")
		b.ReportMetric(perEntry, "B/entry")
	})
}

func BenchmarkIndexRemove(b *testing.B) {
	eachLoad(b, func(b *testing.B, load string, workers, depth int) {
		l := newBenchLoad(load, workers, depth)
		var took time.Duration
		for b.Loop() {
			ix := New(Options{})
			l.fill(ix)
			start := time.Now()
			for i := len(l.stores) - 1; i >= 0; i-- {
				ix.Remove(l.stores[i].Slot, Device, l.stores[i].Engine)
			}
			took += time.Since(start)
			if ix.Len() != 0 {
				b.Fatalf("%d entries left", ix.Len())
			}
		}
		b.ReportMetric(float64(took.Nanoseconds())/float64(b.N)/float64(l.blocks), "ns/block")
	})
}

func BenchmarkIndexHit(b *testing.B) {
	eachLoad(b, func(b *testing.B, load string, workers, depth int) {
		l := newBenchLoad(load, workers, depth)
		ix := New(Options{})
		l.fill(ix)
		var o Overlap
		state := uint64(0xC0FFEE ^ benchSeed)
		b.ReportAllocs()
		b.ResetTimer()
		for b.Loop() {
			pick, _ := bits.Mul64(mix(state), uint64(len(l.prompts)))
			state += 0x9E3779B97F4A7C15
			if ix.Find(l.prompts[pick], &o); o.Max() != depth {
				b.Fatalf("depth %d, want %d", o.Max(), depth)
			}
		}
	})
}

func BenchmarkIndexMiss(b *testing.B) {
	eachLoad(b, func(b *testing.B, load string, workers, depth int) {
		l := newBenchLoad(load, workers, depth)
		ix := New(Options{})
		l.fill(ix)
		fresh := make([]blockhash.Seq, depth)
		var o Overlap
		state := uint64(1)
		b.ReportAllocs()
		b.ResetTimer()
		for b.Loop() {
			state += 0x9E3779B97F4A7C15
			fresh[0] = blockhash.Seq(mix(state))
			if ix.Find(fresh, &o); o.Max() != 0 {
				b.Fatal("a fresh hash was found")
			}
		}
	})
}
