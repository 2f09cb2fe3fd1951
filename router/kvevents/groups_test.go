package kvevents

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
)

// Engines of hybrid models send one group's events beside the other's, under the
// same hashes: sliding windows and Mamba states skip blocks, so there are fewer
// hashes than the tokens would make, and they remove what full attention keeps. The
// index must be as if only the events of the group with full attention had come.
func TestOtherGroupsChangeNothing(t *testing.T) {
	for _, named := range []bool{true, false} { // engines before 0.22 name no kinds, and full attention is group 0
		for seed := range uint64(20) {
			t.Run(fmt.Sprintf("named=%v/seed=%d", named, seed), func(t *testing.T) {
				playGroups(t, rand.New(rand.NewPCG(seed, 5)), named)
			})
		}
	}
}

func playGroups(t *testing.T, rng *rand.Rand, named bool) {
	const size, depth, prompts = 4, 12, 6
	kinds := []string{"sliding_window", "mamba", "chunked_local_attention"}
	full := 0
	if named {
		full = rng.IntN(3)
	}
	tokens := func(prompt, from, to int) (out []any) {
		for p := from * size; p < to*size; p++ {
			if p < depth/2*size {
				out = append(out, p) // common to all
			} else {
				out = append(out, 1000*(1+prompt)+p)
			}
		}
		return out
	}
	// Prompts that begin alike have the same hashes there.
	hash := func(prompt, block int) any {
		if block < depth/2 {
			return 1 + block
		}
		return 100*(1+prompt) + block
	}
	hashes := func(prompt, from, to int) (out []any) {
		for b := from; b < to; b++ {
			out = append(out, hash(prompt, b))
		}
		return out
	}
	in := func(group int, e wireEvent) []byte {
		e.more = map[string]any{"group_idx": group}
		if named && e.kind != "BlockRemoved" {
			e.more["kv_cache_spec_kind"] = "full_attention"
			if group != full {
				e.more["kv_cache_spec_kind"] = kinds[group]
			}
		}
		return e.asMap()
	}
	stored := func(prompt, from, to int) wireEvent {
		e := wireEvent{hashes: hashes(prompt, from, to), tokens: tokens(prompt, from, to), blockSize: size}
		if from > 0 {
			e.parent = hash(prompt, from-1)
		}
		return e
	}
	got, want := applierOf(t), applierOf(t)
	first := in(full, stored(0, 0, 1))
	got.must(t, first)
	want.must(t, first)
	noise := 0
	for range 300 {
		prompt, from := rng.IntN(prompts), rng.IntN(depth)
		to := from + 1 + rng.IntN(depth-from)
		e := stored(prompt, from, to)
		if rng.IntN(3) == 0 {
			e = wireEvent{kind: "BlockRemoved", hashes: e.hashes}
		}
		if rng.IntN(2) == 0 {
			got.must(t, in(full, e))
			want.must(t, in(full, e))
		} else {
			group := (full + 1 + rng.IntN(2)) % 3
			if e.kind == "" {
				switch rng.IntN(4) {
				case 0: // skipped blocks
					e.hashes = e.hashes[rng.IntN(len(e.hashes)):]
				case 1: // blocks of another size
					e.blockSize = size * (2 + rng.IntN(3))
					e.hashes = e.hashes[:(len(e.hashes)+e.blockSize/size-1)/(e.blockSize/size)]
				case 2: // another prompt's tokens under the same hashes
					e.tokens = tokens(prompt+prompts, from, to)
				}
			}
			noise++
			got.must(t, in(group, e))
			if rng.IntN(4) == 0 { // full attention's own, with blocks skipped: not distinguishable by place
				e = stored(prompt, from, to)
				e.hashes = append(e.hashes, 7_000_000)
				noise++
				got.must(t, in(full, e))
			}
		}
		var g, w kvindex.Overlap
		for prompt := range prompts {
			var ids []uint32
			for _, token := range tokens(prompt, 0, depth) {
				ids = append(ids, uint32(token.(int)))
			}
			seqs := blockhash.Seqs(nil, blockhash.NewSalt("m", "", ""), ids, size)
			got.Index.Find(seqs, &g)
			want.Index.Find(seqs, &w)
			if g.Depth(0) != w.Depth(0) {
				t.Fatalf("prompt %d: depth %d, want %d", prompt, g.Depth(0), w.Depth(0))
			}
		}
	}
	if got.Index.Len() != want.Index.Len() || got.Index.CachedBlocks(0) == 0 {
		t.Errorf("%d entries, want %d", got.Index.Len(), want.Index.Len())
	}
	if got.counts["ignored"] != noise || want.counts["ignored"] != 0 {
		t.Errorf("%d events ignored, want %d; %d of the others", got.counts["ignored"], noise, want.counts["ignored"])
	}
	if got.Rank.EventBlockSize.Load() != size {
		t.Errorf("blocks of %d", got.Rank.EventBlockSize.Load())
	}
}
