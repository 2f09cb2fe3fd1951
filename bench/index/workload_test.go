package index

import (
	"fmt"
	"math/bits"
	"sync"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// The workload: `workers` ranks hold `total` (rank, block) entries in sequences of
// `depth` blocks, which come in events of 16. "unique": all blocks differ; "shared":
// nine sequences of ten begin with the same min(128, depth/2) blocks, which a rank
// stores once. All arithmetic wraps at 64 bits.
const (
	total  = 1 << 19
	large  = 1 << 23
	seed   = 42
	common = 0xFFFF000000000000
)

func mix(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return z ^ (z >> 31)
}

// queryPicker are the picks of queries.
type queryPicker uint64

func (d *queryPicker) next() uint64 {
	v := mix(uint64(*d))
	*d += 0x9E3779B97F4A7C15
	return v
}

func (d *queryPicker) below(n int) int {
	hi, _ := bits.Mul64(d.next(), uint64(n))
	return int(hi)
}

func newQueryPicker() *queryPicker {
	d := queryPicker(0xC0FFEE ^ seed)
	return &d
}

// local is the local hash of block p of stream sid.
func local(sid uint64, p int) blockhash.Local {
	return blockhash.Local(mix(mix(sid^0xD1B54A32D192ED03) + uint64(p)))
}

// sequence is a sequence's blocks: local hashes, the engine's hashes, and ours.
type sequence struct {
	locals []blockhash.Local
	engine []kvindex.EngineHash
	seqs   []blockhash.Seq
}

const salt = 1

// newSequence makes the sequence of a stream whose first prefix blocks are common.
func newSequence(sid uint64, depth, prefix int) sequence {
	s := sequence{make([]blockhash.Local, depth), make([]kvindex.EngineHash, depth), make([]blockhash.Seq, depth)}
	for p := range depth {
		l := local(sid, p)
		if p < prefix {
			l = local(common, p)
		}
		s.locals[p] = l
		if p == 0 {
			s.engine[p] = kvindex.EngineHash(l)
			s.seqs[p] = blockhash.First(salt, l)
		} else {
			s.engine[p] = kvindex.EngineHash(mix(uint64(s.engine[p-1]) ^ bits.RotateLeft64(uint64(l), 31)))
			s.seqs[p] = blockhash.Next(s.seqs[p-1], l)
		}
	}
	return s
}

// event is the store of blocks from…to of a sequence.
func (s *sequence) event(slot worker.Slot, from, to int) kvindex.Stored {
	ev := kvindex.Stored{Slot: slot, Salt: salt, Engine: s.engine[from:to], Local: s.locals[from:to]}
	if from > 0 {
		ev.HasParent, ev.Parent = true, s.engine[from-1]
	}
	return ev
}

// benchWorkload is a workload made once and kept, as several benchmarks use it.
type benchWorkload struct {
	name           string
	workers, depth int
	prefix         int // common blocks
	stores         []kvindex.Stored
	removes        []kvindex.Stored // Slot and Engine count
	sequences      []sequence
	blocks         int
	perRank        []int
}

func (l *benchWorkload) String() string {
	return fmt.Sprintf("load=%s/workers=%d/depth=%d", l.name, l.workers, l.depth)
}

var (
	loadsMu        sync.Mutex
	cachedWorkload *benchWorkload // the last one, so that no more than one is in memory
)

func newBenchWorkload(name string, workers, depth, entries, batch int) *benchWorkload {
	loadsMu.Lock()
	defer loadsMu.Unlock()
	l := &benchWorkload{name: name, workers: workers, depth: depth, perRank: make([]int, workers)}
	if name == "shared" {
		l.prefix = min(128, depth/2)
	}
	seen := make([]bool, workers)
	for round := range max(1, entries/(workers*depth)) {
		events := make([][]kvindex.Stored, workers)
		most := 0
		for w := range workers {
			sid := mix(seed ^ uint64(round*workers+w))
			prefix, from := 0, 0
			if l.prefix > 0 && mix(sid)%10 < 9 {
				if prefix = l.prefix; seen[w] {
					from = prefix
				}
				seen[w] = true
			}
			s := newSequence(sid, depth, prefix)
			l.sequences = append(l.sequences, s)
			for ; from < depth; from += batch {
				to := min(depth, from+batch)
				events[w] = append(events[w], s.event(worker.Slot(w), from, to))
				l.perRank[w] += to - from
				l.blocks += to - from
			}
			most = max(most, len(events[w]))
		}
		for k := range most {
			for w := range workers {
				if k < len(events[w]) {
					l.stores = append(l.stores, events[w][k])
				}
			}
		}
		for w := range workers {
			for k := len(events[w]) - 1; k >= 0; k-- {
				l.removes = append(l.removes, events[w][k])
			}
		}
	}
	cachedWorkload = l
	return l
}

// index makes an index with room for the load, and fills it.
func (l *benchWorkload) index(presize bool) kvindex.Index {
	ix := kvindex.New(kvindex.Options{MaxBytes: 8 << 30})
	if presize {
		for w, n := range l.perRank {
			ix.(kvindex.Reserver).Reserve(worker.Slot(w), n)
		}
	}
	return ix
}

func (l *benchWorkload) store(ix kvindex.Index) {
	for i := range l.stores {
		ix.Store(&l.stores[i])
	}
}

func (l *benchWorkload) remove(ix kvindex.Index) {
	for i := range l.removes {
		ix.Remove(l.removes[i].Slot, kvindex.Device, l.removes[i].Engine)
	}
}

// hits are the queries of stored sequences, in the order they are drawn.
func (l *benchWorkload) hits() [][]blockhash.Seq {
	d := newQueryPicker()
	queries := make([][]blockhash.Seq, min(8192, 1<<22/l.depth))
	for i := range queries {
		queries[i] = l.sequences[d.below(len(l.sequences))].seqs
	}
	return queries
}

// partials leave a stored sequence within its last half.
func (l *benchWorkload) partials() [][]blockhash.Seq {
	d := newQueryPicker()
	queries := make([][]blockhash.Seq, min(2048, 1<<22/l.depth))
	for i := range queries {
		q := append([]blockhash.Seq(nil), l.sequences[d.below(len(l.sequences))].seqs...)
		for p := l.depth/2 + d.below(l.depth/2); p < l.depth; p++ {
			q[p] = blockhash.Seq(d.next())
		}
		queries[i] = q
	}
	return queries
}

// misses are fresh; mixes are nine of ten the common prefix with a fresh end.
func (l *benchWorkload) misses() [][]blockhash.Seq { return l.fresh(0) }
func (l *benchWorkload) mixes() [][]blockhash.Seq  { return l.fresh(l.prefix) }

func (l *benchWorkload) fresh(prefix int) [][]blockhash.Seq {
	d := newQueryPicker()
	queries := make([][]blockhash.Seq, min(8192, 1<<22/l.depth))
	for i := range queries {
		n := prefix
		if d.below(10) == 9 {
			n = 0
		}
		queries[i] = newSequence(d.next(), l.depth, n).seqs
	}
	return queries
}

// grid runs a benchmark over the points that the table of targets names.
func grid(b *testing.B, do func(b *testing.B, l *benchWorkload), points ...[3]any) {
	for _, p := range points {
		name, workers, depth := p[0].(string), p[1].(int), p[2].(int)
		var l *benchWorkload
		b.Run(fmt.Sprintf("load=%s/workers=%d/depth=%d", name, workers, depth), func(b *testing.B) {
			if l == nil {
				l = newBenchWorkload(name, workers, depth, total, 16)
			}
			do(b, l)
		})
	}
}

var (
	unique16          = [3]any{"unique", 64, 16}
	unique64          = [3]any{"unique", 64, 256}
	shared64          = [3]any{"shared", 64, 256}
	uniqueDeep        = [3]any{"unique", 64, 2048}
	sharedDeep        = [3]any{"shared", 64, 2048}
	shared8           = [3]any{"shared", 8, 256}
	shared1000        = [3]any{"shared", 1000, 256}
	unique1000        = [3]any{"unique", 1000, 256}
	shared16          = [3]any{"shared", 64, 16}
	branches8         = [3]any{"shared", 1000, 16}
	concurrentWriters = [][3]any{unique16, unique64, shared64, sharedDeep, unique1000, shared1000}
)
