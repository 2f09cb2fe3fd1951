package schedule

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

const (
	blockSize = 16
	prompts   = 4
	salt      = blockhash.Salt(1)
)

// testFleet is a fleet under load of which a tenth of the ranks (one at least) hold some
// of each prompt, each to a depth of its own.
type testFleet struct {
	scheduler *schedule.Scheduler
	index     kvindex.Index
	ranks     []*worker.Rank
	tokens    [][]uint32
	ids       []string
}

func newTestFleet(ranks, tokens int, opt schedule.Options) *testFleet {
	rng := rand.New(rand.NewPCG(42, uint64(ranks*tokens)))
	b := &testFleet{scheduler: schedule.New(opt), index: kvindex.New(kvindex.Options{MaxBytes: 4 << 30})}
	for i := range ranks {
		w := worker.New(worker.Spec{ID: fmt.Sprintf("w%d", i), BlockSize: blockSize})
		w.SetInfo(&worker.Info{BlockSize: blockSize, TotalBlocks: 20_000})
		r := w.Ranks[0]
		r.CachedBlocks.Store(int64(20_000 - i%4*1000)) // a quarter of the caches is full
		r.Slot = worker.Slot(i)
		r.Feed.Store(uint32(worker.FeedLive))
		r.EventBlockSize.Store(blockSize)
		b.ranks = append(b.ranks, r)
	}
	for _, r := range b.ranks { // some load on each, never two alike
		b.scheduler.Choose(&schedule.Query{Leg: schedule.WholeLeg, Candidates: []*worker.Rank{r}, PromptTokens: 1 + rng.IntN(8000), MaxTokens: 1 + rng.IntN(1000)})
	}
	for range prompts {
		t := make([]uint32, tokens)
		for i := range t {
			t[i] = uint32(rng.IntN(100_000))
		}
		b.tokens = append(b.tokens, t)
		locals := blockhash.Locals(nil, t, blockSize)
		for _, i := range rng.Perm(ranks)[:max(1, ranks/10)] {
			n := 1 + rng.IntN(len(locals))
			engine := make([]kvindex.EngineHash, n)
			for k := range engine {
				engine[k] = kvindex.EngineHash(rng.Uint64())
			}
			b.index.Store(&kvindex.Stored{Slot: b.ranks[i].Slot, Salt: salt, Engine: engine, Local: locals[:n]})
		}
	}
	for i := range 4096 {
		b.ids = append(b.ids, fmt.Sprintf("request-%d", i))
	}
	return b
}

// BenchmarkSelect is one request as the router thinks about it: its tokens are
// hashed in a chain, the index is asked, a rank is chosen and booked, the decision
// recorded, and the booking released. choice-ns is the part of it from the lookup's
// result to the booked and recorded choice, release included; bare-ns the same
// without a record.
func BenchmarkSelect(b *testing.B) {
	for _, ranks := range []int{8, 64, 1000} {
		for _, tokens := range []int{256, 4096, 32768} {
			b.Run(fmt.Sprintf("ranks=%d/tokens=%d", ranks, tokens), func(b *testing.B) { benchSelect(b, ranks, tokens) })
		}
	}
}

func benchSelect(b *testing.B, ranks, tokens int) {
	bed := newTestFleet(ranks, tokens, schedule.Options{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1,
		HostWeight: 0.8, DiskWeight: 0.5, InFlightWeight: 0.9, EvictionWeight: 0.5, OthersWeight: 4, Seed: 1})
	q := schedule.Query{Leg: schedule.WholeLeg, Candidates: bed.ranks, PromptTokens: tokens, MaxTokens: 256, Attempt: 1,
		Overlaps: make([]schedule.SizedOverlap, 1), KeyTokens: blockSize, Reservation: new(schedule.Reservation)}
	q.Overlaps[0].BlockSize = blockSize
	var keys []blockhash.Seq
	n := 0
	find := func() {
		keys = blockhash.Seqs(keys[:0], salt, bed.tokens[n%prompts], blockSize)
		bed.index.Find(keys, &q.Overlaps[0].Overlap)
	}
	choose := func() {
		q.Keys, q.RequestID = keys, bed.ids[n%len(bed.ids)]
		c, _ := bed.scheduler.Choose(&q)
		c.Reservation.Release()
		n++
	}
	for range 3 * len(bed.ids) { // the ring of records has been round, every buffer has grown
		find()
		choose()
	}
	b.ReportAllocs()
	b.ResetTimer()
	for b.Loop() {
		find()
		choose()
	}
	b.StopTimer()
	b.ReportMetric(bed.measureLookups(&q, find, &n, true), "choice-ns")
	b.ReportMetric(bed.measureLookups(&q, find, &n, false), "bare-ns")
}

// measureLookups times the choice over lookups made before.
func (b *testFleet) measureLookups(q *schedule.Query, find func(), n *int, recorded bool) float64 {
	const rounds = 2000
	var spent time.Duration
	for k := range prompts {
		*n = k
		find()
		q.Keys, q.RequestID = nil, ""
		began := time.Now()
		for i := range rounds {
			if recorded {
				q.RequestID = b.ids[i]
			}
			c, _ := b.scheduler.Choose(q)
			c.Reservation.Release()
		}
		spent += time.Since(began)
	}
	return float64(spent) / rounds / prompts
}

// BenchmarkHashTokens hashes a prompt's tokens into chained sequence hashes.
func BenchmarkHashTokens(b *testing.B) {
	for _, n := range []int{256, 4096, 32768} {
		b.Run(fmt.Sprintf("tokens=%d", n), func(b *testing.B) {
			tokens := make([]uint32, n)
			for i := range tokens {
				tokens[i] = uint32(i * 7919)
			}
			dst := make([]blockhash.Seq, 0, n/blockSize)
			b.ReportAllocs()
			for b.Loop() {
				dst = blockhash.Seqs(dst[:0], salt, tokens, blockSize)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n/blockSize), "ns/block")
		})
	}
}
