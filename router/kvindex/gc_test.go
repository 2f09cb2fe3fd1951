package kvindex

import (
	"runtime"
	"runtime/metrics"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/blockhash"
	"sluice/router/worker"
)

// fillShared stores so many entries, 16 blocks an event: 64 ranks, of which eight each
// hold the same prompts of 128 blocks.
func fillShared(ix Index, entries int) {
	const ranks, sharing, depth, batch = 64, 8, 128, 16
	for slot := range ranks {
		ix.(Reserver).Reserve(worker.Slot(slot), entries/ranks+depth)
	}
	local, engine := make([]blockhash.Local, depth), make([]EngineHash, depth)
	for prompt := 0; ix.Len() < entries; prompt++ {
		for i := range depth {
			h := mixed(uint64(prompt*depth + i))
			local[i], engine[i] = blockhash.Local(h), EngineHash(mixed(h))
		}
		first := prompt % (ranks / sharing) * sharing
		for slot := first; slot < first+sharing; slot++ {
			for at := 0; at < depth; at += batch {
				ev := Stored{Slot: worker.Slot(slot), Salt: 1, Engine: engine[at : at+batch], Local: local[at : at+batch]}
				if at > 0 {
					ev.HasParent, ev.Parent = true, engine[at-1]
				}
				ix.Store(&ev)
			}
		}
	}
}

func mixed(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// collected returns the medians of some collections' times, of the processor to mark and until all was
// swept, and how much of the heap there was to look through.
func collected() (mark, whole time.Duration, scanned uint64) {
	samples := []metrics.Sample{
		{Name: "/cpu/classes/gc/mark/assist:cpu-seconds"},
		{Name: "/cpu/classes/gc/mark/dedicated:cpu-seconds"},
		{Name: "/cpu/classes/gc/mark/idle:cpu-seconds"},
		{Name: "/gc/scan/heap:bytes"},
	}
	total := func() (sum float64) {
		metrics.Read(samples)
		for _, s := range samples[:3] {
			sum += s.Value.Float64()
		}
		return sum
	}
	var marks, wholes []time.Duration
	for range 9 {
		before, start := total(), time.Now()
		runtime.GC()
		wholes = append(wholes, time.Since(start))
		marks = append(marks, time.Duration((total()-before)*1e9))
	}
	return testwait.Median(marks...), testwait.Median(wholes...), samples[3].Value.Uint64()
}

// The collector must not feel the index: of all its memory only directories of pages
// hold pointers. The long run fills a hundred million entries and measures a cycle.
func TestCollectorPassesBy(t *testing.T) {
	entries := 1 << 20
	if invariants {
		entries = 1 << 16
	}
	long := soak && !invariants
	if long {
		entries = 100_000_000
	}
	mark0, whole0, scan0 := collected()
	ix := New(Options{MaxBytes: 16 << 30})
	start := time.Now()
	fillShared(ix, entries)
	filled := time.Since(start)
	mark1, whole1, scan1 := collected()
	t.Logf("%d entries, %d MiB, filled in %v; a collection without and with them: marks %v and %v of processor time, ends after %v and %v; %d and %d KiB to look through",
		ix.Len(), ix.Bytes()>>20, filled.Round(time.Millisecond), mark0, mark1, whole0, whole1, scan0>>10, scan1>>10)
	// Empty parts of the reader tables are most of what there is at first.
	if scan1 > scan0+256<<10+uint64(ix.Bytes())/500 {
		t.Errorf("%d bytes to look through in %d of entries", scan1-scan0, ix.Bytes())
	}
	if long && mark1-mark0 > 5*time.Millisecond {
		t.Errorf("a collection marks %v longer with the index than without", mark1-mark0)
	}
	runtime.KeepAlive(ix)
}
