package kvindex

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

var (
	_ Exporter = (*radix)(nil)
	_ Exporter = (*Naive)(nil)
	_ Exporter = (*Approx)(nil)
	_ Importer = (*radix)(nil)
	_ Importer = (*Naive)(nil)
	_ Importer = (*Approx)(nil)
)

// exported is what Export gives of a rank as lines of text, one an entry, checking
// on the way that parents come first.
func exported(t *testing.T, ix any, slot worker.Slot) []string {
	t.Helper()
	var out []string
	known := map[blockhash.Seq]bool{}
	hashes := map[EngineHash]blockhash.Seq{}
	ix.(Exporter).Export(slot, func(x *Exported) bool {
		if len(x.Engine) != len(x.Seqs) || len(x.Seqs) == 0 {
			t.Fatalf("slot %d: %d engine hashes of %d blocks", slot, len(x.Engine), len(x.Seqs))
		}
		if x.HasParent && (!known[x.ParentSeq]) {
			t.Fatalf("slot %d: block %x comes before its parent %x", slot, x.Seqs[0], x.ParentSeq)
		}
		before, has := x.ParentSeq, x.HasParent
		for i, seq := range x.Seqs {
			out = append(out, fmt.Sprintf("%v %x after %v %x as %d", x.Tier, seq, has, before, x.Engine[i]))
			known[seq], hashes[x.Engine[i]] = true, seq
			before, has = seq, true
		}
		return true
	})
	slices.Sort(out)
	return out
}

// leafTraffic is a history in which ranks remove only blocks that nothing they hold
// follows, as engines with a radix cache do.
func leafTraffic(rng *rand.Rand, n int, slots []worker.Slot) (ops []op) {
	type block struct {
		ev   Stored // that stores it alone
		seq  blockhash.Seq
		kids int
		up   *block
	}
	cached := make([]map[blockhash.Seq]*block, len(slots))
	for i := range cached {
		cached[i] = make(map[blockhash.Seq]*block)
	}
	for len(ops) < n {
		i := rng.IntN(len(slots))
		if rng.IntN(3) == 0 {
			leaves := make([]*block, 0)
			for _, b := range cached[i] {
				if b.kids == 0 {
					leaves = append(leaves, b)
				}
			}
			slices.SortFunc(leaves, func(a, b *block) int { return cmp.Compare(a.seq, b.seq) })
			for b := range slices.Values(leaves[:min(len(leaves), rng.IntN(3))]) {
				var gone []EngineHash
				for b != nil && b.kids == 0 && len(gone) < 60 {
					gone = append(gone, b.ev.Engine[0])
					delete(cached[i], b.seq)
					if b = b.up; b != nil {
						b.kids--
					}
				}
				ops = append(ops, op{kind: "remove", slot: slots[i], engine: gone})
			}
			continue
		}
		var up *block
		ev, prompt := Stored{Slot: slots[i], Salt: 1}, []blockhash.Seq(nil)
		seq := blockhash.Seq(1)
		for k := range 1 + rng.IntN(150) {
			l := blockhash.Local(1 + k)
			if k%40 == 39 {
				l += blockhash.Local(1000 * rng.IntN(3))
			}
			seq = blockhash.Next(seq, l)
			prompt = append(prompt, seq)
			hash := EngineHash(seq) ^ EngineHash(slots[i])
			if cached[i][seq] == nil {
				cached[i][seq] = &block{ev: Stored{Engine: []EngineHash{hash}}, seq: seq, up: up}
				if up != nil {
					up.kids++
				}
			}
			up = cached[i][seq]
			ev.Engine, ev.Local = append(ev.Engine, hash), append(ev.Local, l)
			if rng.IntN(20) == 0 {
				ops = append(ops, op{kind: "store", ev: ev})
				ev = Stored{Slot: slots[i], HasParent: true, Parent: hash}
			}
		}
		ops = append(ops, op{kind: "store", ev: ev})
		ops = append(ops, op{kind: "find", seqs: prompt})
	}
	return ops
}

// The export equals the model's export, and imported into an empty index it
// gives the same answers. Where blocks were taken from the middle, some may be left
// out, and nothing else.
func TestExportEqualsTheModel(t *testing.T) {
	for seed := range envInt("KVINDEX_SEEDS", 9) {
		rng := rand.New(rand.NewPCG(uint64(seed), 11))
		slots := testSlots
		var ops []op
		switch seed % 3 {
		case 0:
			ops = leafTraffic(rng, 500, slots)
		case 1:
			ops = generate(rng, 700)
		case 2:
			ops = traffic(rng, 700, 20)
			slots = nil
			for i := range 20 {
				slots = append(slots, worker.Slot(i*(1+i%7*9)%worker.MaxSlots))
			}
		}
		ix, model := New(Options{}), NewNaive()
		for i, o := range ops {
			if got, want := apply(ix, o), apply(model, o); got != want {
				t.Fatalf("seed %d, step %d: %v\n got %s\nwant %s", seed, i, o, got, want)
			}
		}
		again, naive := New(Options{}), NewNaive()
		entries := 0
		for _, slot := range slots {
			got, want := exported(t, ix, slot), exported(t, model, slot)
			entries += len(got)
			if seed%3 == 0 && !slices.Equal(got, want) {
				t.Fatalf("seed %d, slot %d: %d exported, want %d", seed, slot, len(got), len(want))
			}
			for _, line := range got {
				if _, ok := slices.BinarySearch(want, line); !ok {
					t.Fatalf("seed %d, slot %d: exported %s, which the model does not", seed, slot, line)
				}
			}
			ix.(Exporter).Export(slot, func(x *Exported) bool {
				res := again.(Importer).Import(slot, x)
				if other := naive.Import(slot, x); res != other || res.Orphan {
					t.Fatalf("seed %d, slot %d: import gave %+v, the model %+v", seed, slot, res, other)
				}
				return true
			})
			if back := exported(t, again, slot); !slices.Equal(back, got) {
				t.Fatalf("seed %d, slot %d: %d exported of what was imported, want %d", seed, slot, len(back), len(got))
			}
		}
		if entries == 0 {
			t.Fatalf("seed %d: nothing was exported", seed)
		}
		if err := again.(*radix).check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for _, o := range ops {
			if o.kind == "find" {
				if got, want := everyDepth(again, o.seqs), everyDepth(naive, o.seqs); got != want {
					t.Fatalf("seed %d: %v\n got %s\nwant %s", seed, o, got, want)
				}
			}
		}
	}
}

// Blocks held throughout are exported once, despite concurrent changes of others and
// however tables grow.
func TestExportWhileWriting(t *testing.T) {
	defer func(step int) { moveStep = step }(moveStep)
	moveStep = 256
	ix := New(Options{})
	const kept = 60
	for sid := range kept {
		ev, _ := chain(3, sid, 50)
		ix.Store(&ev)
	}
	var stop atomic.Bool
	var writers sync.WaitGroup
	for k := range 2 {
		writers.Go(func() {
			for sid := 1000 * (k + 1); !stop.Load(); sid++ {
				ev, _ := chain(worker.Slot(3+k), sid%3000, 40)
				ix.Store(&ev)
				ev, _ = chain(worker.Slot(3+k), 1000*(k+1)+(sid*7)%2000, 40)
				ix.Remove(ev.Slot, Device, ev.Engine[sid%20:])
			}
		})
	}
	for range envInt("KVINDEX_ROUNDS", 12) {
		seen := map[blockhash.Seq]int{}
		ix.(Exporter).Export(3, func(x *Exported) bool {
			for _, seq := range x.Seqs {
				seen[seq]++
			}
			return true
		})
		for sid := range kept {
			_, seqs := chain(3, sid, 50)
			for i, seq := range seqs {
				if seen[seq] != 1 {
					t.Fatalf("block %d of prompt %d came %d times", i, sid, seen[seq])
				}
			}
		}
	}
	stop.Store(true)
	writers.Wait()
	if err := ix.(*radix).check(); err != nil {
		t.Error(err)
	}
}

// Observations held throughout are exported once, despite concurrent writers.
func TestApproxExportWhileWriting(t *testing.T) {
	a := NewApprox(ApproxOptions{})
	prompt := func(sid int) []blockhash.Seq {
		_, seqs := chain(0, 1, 30)
		_, tail := chain(0, 100+sid, 5)
		return append(seqs[:sid%30:sid%30], tail...)
	}
	want := make(map[blockhash.Seq]int)
	for sid := range 500 {
		a.Observe(1, prompt(sid))
		for _, seq := range prompt(sid) {
			want[seq] = 1
		}
	}
	var stop atomic.Bool
	var writers sync.WaitGroup
	for n := range 3 {
		writers.Go(func() {
			for i := n; !stop.Load(); i += 3 {
				a.Observe(1, prompt(500+i%1000))
				a.Observe(2, prompt(i%1000))
				_, other := chain(0, 10_000+i%100, 20)
				a.Observe(1, other)
				a.Confirm(1, other, 0)
				a.Confirm(1, other, 0)
			}
		})
	}
	for range 10 {
		got := make(map[blockhash.Seq]int)
		a.Export(1, func(x *Exported) bool {
			for _, seq := range x.Seqs {
				got[seq]++
			}
			return true
		})
		for seq := range want {
			if got[seq] != 1 {
				t.Fatalf("a block came %d times", got[seq])
			}
		}
	}
	stop.Store(true)
	writers.Wait()
	if err := a.check(); err != nil {
		t.Error(err)
	}
}

func TestApproxExport(t *testing.T) {
	a, again := NewApprox(ApproxOptions{}), NewApprox(ApproxOptions{})
	var prompts [][]blockhash.Seq
	for sid := range 40 {
		_, seqs := chain(0, sid%7, 700)
		_, tail := chain(0, 100+sid, 20)
		seqs = append(seqs[:10*sid:10*sid], tail...)
		prompts = append(prompts, seqs)
		a.Observe(worker.Slot(sid%3), seqs)
	}
	for slot := range worker.Slot(3) {
		want := exported(t, a, slot)
		a.Export(slot, func(x *Exported) bool {
			if res := again.Import(slot, x); res.Orphan || res.Added != len(x.Seqs) {
				t.Fatalf("import gave %+v of %d", res, len(x.Seqs))
			}
			return true
		})
		if got := exported(t, again, slot); len(want) == 0 || !slices.Equal(got, want) {
			t.Fatalf("slot %d: %d entries came back of %d", slot, len(got), len(want))
		}
	}
	for sid, seqs := range prompts {
		slot := worker.Slot(sid % 3)
		if got, want := depthOf(again, slot, seqs), depthOf(a, slot, seqs); got != want || want != len(seqs) {
			t.Errorf("prompt %d: depth %d, was %d of %d", sid, got, want, len(seqs))
		}
	}
	if res := again.Import(1, &Exported{HasParent: true, ParentSeq: 4711, Engine: []EngineHash{1}, Seqs: []blockhash.Seq{1}}); !res.Orphan {
		t.Errorf("a chain of an unknown parent: %+v", res)
	}
	if err := again.check(); err != nil {
		t.Error(err)
	}
}
