package kvindex

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// approxModel is what an Approx without bounds believes: for each rank its blocks, and of
// each whether one request alone has brought it.
type approxModel map[worker.Slot]map[blockhash.Seq]bool

func (m approxModel) observe(slot worker.Slot, seqs []blockhash.Seq, brought bool) {
	if m[slot] == nil {
		m[slot] = map[blockhash.Seq]bool{}
	}
	for _, seq := range seqs {
		_, known := m[slot][seq]
		m[slot][seq] = brought && !known
	}
}

func (m approxModel) confirm(slot worker.Slot, seqs []blockhash.Seq, cached int) {
	for _, seq := range seqs[cached:] {
		if fresh, known := m[slot][seq]; known && !fresh {
			delete(m[slot], seq)
		}
	}
	m.observe(slot, seqs[:cached], false)
}

func (m approxModel) forget(slot worker.Slot, seqs []blockhash.Seq, keep int) {
	for _, seq := range seqs[keep:] {
		delete(m[slot], seq)
	}
}

func (m approxModel) depth(slot worker.Slot, seqs []blockhash.Seq) (n int) {
	for n < len(seqs) {
		if _, ok := m[slot][seqs[n]]; !ok {
			break
		}
		n++
	}
	return n
}

func (m approxModel) len() (n int) {
	for _, blocks := range m {
		n += len(blocks)
	}
	return n
}

// Prompts of hundreds of blocks that branch, go on, and are found to be held in part, so with
// holes in what is believed: whatever is asked for, each block is found that a plain map has.
func TestApproxMatchesModel(t *testing.T) {
	for seed := range uint64(4) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		a, m := NewApprox(ApproxOptions{}), approxModel{}
		trunks := make([][]blockhash.Seq, 3)
		for i := range trunks {
			_, trunks[i] = chain(0, i, 1+rnd.IntN(300))
		}
		prompt := func() []blockhash.Seq {
			trunk := trunks[rnd.IntN(len(trunks))]
			from := 1 + rnd.IntN(len(trunk))
			_, tail := chain(0, 100+rnd.IntN(6), rnd.IntN(200))
			for i := range tail { // its own for each place where it branches off
				tail[i] ^= blockhash.Seq(spread(uint64(trunk[from-1])))
			}
			return append(trunk[:from:from], tail...)
		}
		for step := range 200 {
			slot, seqs := worker.Slot(rnd.IntN(3)), prompt()
			switch op := rnd.IntN(20); {
			case op < 12:
				a.Observe(slot, seqs)
				m.observe(slot, seqs, true)
			case op < 14:
				keep := rnd.IntN(len(seqs) + 1)
				a.Forget(slot, seqs, keep)
				m.forget(slot, seqs, keep)
			case op < 18:
				cached := rnd.IntN(len(seqs) + 1)
				a.Confirm(slot, seqs, cached)
				m.confirm(slot, seqs, cached)
			case op < 19:
				if n := a.Clear(slot); n != len(m[slot]) {
					t.Fatalf("seed %d, step %d: Clear forgot %d, want %d", seed, step, n, len(m[slot]))
				}
				delete(m, slot)
			default: // what one process has learned, and another comes to believe beside what it has
				var lines []Exported
				a.Export(slot, func(x *Exported) bool {
					line := *x
					line.Seqs = append([]blockhash.Seq(nil), x.Seqs...)
					lines = append(lines, line)
					return true
				})
				for i := range lines {
					a.Import(slot, &lines[i])
					m.observe(slot, lines[i].Seqs, false)
				}
			}
			asked := prompt()
			if got, want := depthOf(a, slot, asked), m.depth(slot, asked); got != want {
				t.Fatalf("seed %d, step %d: depth %d, want %d", seed, step, got, want)
			}
			if a.Len() != m.len() {
				t.Fatalf("seed %d, step %d: %d entries, want %d", seed, step, a.Len(), m.len())
			}
			if err := a.check(); step%20 == 0 && err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
		}
	}
}

// Hashes that come twice in a prompt do not come from a prompt, but a search for them finds some:
// nothing is held then that cannot be given back.
func TestApproxRepeatedHashes(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		a := NewApprox(ApproxOptions{})
		for range 20 {
			seqs := make([]blockhash.Seq, 1+rnd.IntN(150))
			for i := range seqs {
				seqs[i] = blockhash.Seq(1 + rnd.IntN(1+rnd.IntN(6)))
			}
			slot := worker.Slot(rnd.IntN(2))
			a.Observe(slot, seqs)
			a.Confirm(slot, seqs, rnd.IntN(len(seqs)+1))
			a.Forget(slot, seqs, rnd.IntN(len(seqs)+1))
			a.index.checks.Store(0) // it is not checked meanwhile, for it takes hashes for blocks'
		}
		a.Clear(0)
		if a.Clear(1); a.Len() != 0 || a.Bytes() != 0 || a.check() != nil {
			t.Fatalf("round %d: %d entries, %d bytes are left: %v", round, a.Len(), a.Bytes(), a.check())
		}
	}
}

// isReached says whether a rank holds the block before one. Where one has gone and come again
// the index does not tell what was behind it, and this says yes.
func (sh *shard) isReached(r *extent, pos int, slot worker.Slot) bool {
	before := uint32(0)
	if pos > 0 {
		before = sh.nodeOf(r, pos-1)
	} else if r.root {
		return true
	} else {
		before = sh.parentOf(r)
	}
	return before == 0 || sh.isHolder(sh.table.nodes.at(before), slot, Device)
}

// Blocks that stay where those before them went are looked for until they have gone too, and
// then no more.
func TestApproxGapsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(5, 6))
		a := NewApprox(ApproxOptions{TTL: time.Minute})
		_, trunk := chain(0, 1, 40)
		torn, whole := 0, 0
		for step := range 3000 {
			from := 1 + rnd.IntN(len(trunk))
			_, tail := chain(0, 100*from+rnd.IntN(4), rnd.IntN(40))
			seqs := append(trunk[:from:from], tail...)
			slot := worker.Slot(rnd.IntN(2))
			a.Observe(slot, seqs)
			if step/300%2 == 0 && rnd.IntN(4) == 0 {
				a.Confirm(slot, seqs, rnd.IntN(len(seqs)))
			}
			time.Sleep(time.Duration(rnd.IntN(1500)) * time.Millisecond)
			if err := a.check(); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			if s := a.shard(trunk[0]); s.seen.at(s.first).at > s.gapsSince {
				whole++
			} else {
				torn++
			}
		}
		if torn < 500 || whole < 500 {
			t.Errorf("%d steps with blocks that may not be reached, %d without: the test shows nothing", torn, whole)
		}
	})
}

// BenchmarkApproxLong is a request of 1,024 blocks of which half are new, found, observed and
// confirmed, in a table that is full.
func BenchmarkApproxLong(b *testing.B) {
	a := NewApprox(ApproxOptions{MaxBytes: 32 << 20})
	var heads [8][]blockhash.Seq
	for i := range heads {
		_, heads[i] = chain(0, i, 512)
	}
	seqs, sid := make([]blockhash.Seq, 1024), 1000
	var o Overlap
	one := func() {
		copy(seqs, heads[sid%len(heads)])
		for i := 512; i < len(seqs); i++ {
			seqs[i] = blockhash.Next(seqs[i-1], blockhash.Local(sid))
		}
		sid++
		a.Find(seqs, &o)
		a.Observe(1, seqs)
		a.Confirm(1, seqs, 512)
	}
	for a.Evicted() == 0 {
		one()
	}
	b.ReportAllocs()
	for b.Loop() {
		one()
	}
}
