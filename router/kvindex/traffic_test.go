package kvindex

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// traffic is what engines do, as a history: ranks store prompts of common
// beginnings in events of some blocks, each engine with hashes of its own, drop them
// from the end or, at times, from anywhere, offload them, and restart.
func traffic(rng *rand.Rand, n, ranks int) []op {
	type cached struct {
		engine []EngineHash
		tier   Tier
	}
	slots := make([]worker.Slot, ranks)
	for i := range slots {
		slots[i] = worker.Slot(i * (1 + i%7*9) % worker.MaxSlots)
	}
	prompts := make([][]cached, ranks)
	var ops []op
	for len(ops) < n {
		i := rng.IntN(ranks)
		slot := slots[i]
		switch p := rng.IntN(20); {
		case p < 9: // a prompt: a system prompt's stretch, then one of its branches
			system, branch := rng.IntN(3), rng.IntN(6)
			size := 1 + rng.IntN(120)
			common := 10 + system*25
			ev := Stored{Slot: slot, Salt: 1}
			if rng.IntN(8) == 0 {
				ev.Tier = Tier(rng.IntN(int(NumTiers)))
			}
			var h cached
			h.tier = ev.Tier
			seq := blockhash.Seq(1)
			step := 1 + rng.IntN(24)
			for b := range size {
				l := blockhash.Local(1 + system*1000 + b)
				if b >= common {
					l += blockhash.Local(1_000_000 * (1 + branch))
				}
				seq = blockhash.Next(seq, l)
				hash := EngineHash(seq) ^ EngineHash(slot)<<17
				ev.Engine, ev.Local = append(ev.Engine, hash), append(ev.Local, l)
				h.engine = append(h.engine, hash)
				if len(ev.Engine) == step || b == size-1 {
					ops = append(ops, op{kind: "store", ev: ev})
					ev = Stored{Slot: slot, Tier: ev.Tier, HasParent: true, Parent: hash}
				}
			}
			prompts[i] = append(prompts[i], h)
		case p < 15 && len(prompts[i]) > 0:
			k := rng.IntN(len(prompts[i]))
			h := &prompts[i][k]
			cut := rng.IntN(len(h.engine))
			gone := append([]EngineHash(nil), h.engine[cut:]...)
			switch rng.IntN(6) {
			case 0: // a hole
				at := rng.IntN(len(h.engine))
				gone = append([]EngineHash(nil), h.engine[at:min(len(h.engine), at+3)]...)
			case 1, 2: // from the tip, as engines do
				for a, b := 0, len(gone)-1; a < b; a, b = a+1, b-1 {
					gone[a], gone[b] = gone[b], gone[a]
				}
				fallthrough
			default:
				h.engine = h.engine[:cut]
			}
			ops = append(ops, op{kind: "remove", slot: slot, tier: h.tier, engine: gone})
			if len(h.engine) == 0 {
				prompts[i] = append(prompts[i][:k], prompts[i][k+1:]...)
			}
		case p < 16 && rng.IntN(10) == 0:
			ops = append(ops, op{kind: "clear", slot: slot})
			prompts[i] = nil
		default:
			system, branch, size := rng.IntN(3), rng.IntN(6), rng.IntN(130)
			seq := blockhash.Seq(1)
			var seqs []blockhash.Seq
			for b := range size {
				l := blockhash.Local(1 + system*1000 + b)
				if b >= 10+system*25 {
					l += blockhash.Local(1_000_000 * (1 + branch))
				}
				seq = blockhash.Next(seq, l)
				seqs = append(seqs, seq)
			}
			ops = append(ops, op{kind: "find", seqs: seqs})
		}
	}
	return ops
}

// full compares every slot's depth, and checks the index now and then.
func TestTraffic(t *testing.T) {
	defer func(step int) { moveStep = step }(moveStep)
	moveStep = 64
	mapSmallTables(t)
	first, seeds, n := envInt("KVINDEX_SEED", 1), envInt("KVINDEX_SEEDS", 6), envInt("KVINDEX_OPS", 1500)
	for seed := first; seed < first+seeds; seed++ {
		rng := rand.New(rand.NewPCG(uint64(seed), 7))
		ops := traffic(rng, n, []int{5, 20, 90}[seed%3])
		ix, model := New(Options{}), NewNaive()
		for i, o := range ops {
			got, want := apply(ix, o), apply(model, o)
			if o.kind == "find" {
				got, want = everyDepth(ix, o.seqs), everyDepth(model, o.seqs)
			}
			if got != want {
				t.Fatalf("seed %d, step %d: %v\n got %s\nwant %s", seed, i, o, got, want)
			}
			if i%16 == 0 {
				if err := ix.(*radix).check(); err != nil {
					t.Fatalf("seed %d, step %d: %v: %v", seed, i, o, err)
				}
			}
		}
		for slot := range worker.Slot(worker.MaxSlots) {
			ix.Clear(slot)
		}
		if err := ix.(*radix).check(); err != nil || ix.Bytes() != 0 {
			t.Fatalf("seed %d: %d bytes left: %v", seed, ix.Bytes(), err)
		}
	}
}

func everyDepth(ix Index, seqs []blockhash.Seq) string {
	var o Overlap
	ix.Find(seqs, &o)
	out := ""
	for slot := range worker.Slot(worker.MaxSlots) {
		if d := o.Depth(slot); d > 0 {
			out += fmt.Sprintf(" %d:%d", slot, d)
		}
	}
	return fmt.Sprint(o.Max(), len(o.Holders()), out)
}
