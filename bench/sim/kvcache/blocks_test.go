package kvcache

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func blockHashOf(n byte) *BlockHash { return &BlockHash{n} }

// TestEvictionOrder: least recently used first, and of one prompt the tail first.
func TestEvictionOrder(t *testing.T) {
	var gone []byte
	p := NewPool(7, func(h *BlockHash) { gone = append(gone, h[0]) })
	fill := func(hashes ...byte) (ids []int32) {
		for _, h := range hashes {
			id := p.Allocate()
			p.Store(id, blockHashOf(h))
			ids = append(ids, id)
		}
		return
	}
	a, b := fill(1, 2, 3), fill(4, 5, 6)
	p.Release(a)
	p.Release(b)
	id, ok := p.Lookup(blockHashOf(2)) // used again: its turn is last
	if !ok {
		t.Fatal("2 is not cached")
	}
	p.Share(id)
	p.Release([]int32{id})
	for range 6 {
		p.Allocate()
	}
	if fmt.Sprint(gone) != "[3 1 6 5 4 2]" {
		t.Errorf("evicted %v", gone)
	}
	if p.Free != 0 || p.Copies != 0 || len(p.cached) != 0 {
		t.Errorf("%d free, %d cached, %d copies", p.Free, len(p.cached), p.Copies)
	}
}

// TestPoolAgainstModel drives the pool at random against maps that say the same.
func TestPoolAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	copies := map[BlockHash]int{}
	p := NewPool(20, func(h *BlockHash) {
		if copies[*h]--; copies[*h] == 0 {
			delete(copies, *h)
		}
	})
	refs := map[int32]int{}
	for step := range 20000 {
		switch rng.IntN(4) {
		case 0:
			if p.Free > 0 {
				id := p.Allocate()
				if refs[id] != 0 || id == 0 {
					t.Fatalf("step %d: block %d given out twice", step, id)
				}
				refs[id] = 1
				h := blockHashOf(byte(rng.IntN(12)))
				p.Store(id, h)
				copies[*h]++
			}
		case 1:
			if id, ok := p.Lookup(blockHashOf(byte(rng.IntN(12)))); ok {
				p.Share(id)
				refs[id]++
			}
		default:
			if id := int32(rng.IntN(20)); refs[id] > 0 {
				p.Release([]int32{id})
				if refs[id]--; refs[id] == 0 {
					delete(refs, id)
				}
			}
		}
		total := 0
		for h, n := range copies {
			total += n
			id, ok := p.Lookup(&h)
			if !ok {
				t.Fatalf("step %d: %x is lost", step, h[0])
			}
			for newer := int32(0); id != 0; newer, id = id, p.Blocks[id].older {
				if n--; p.Blocks[id].newer != newer || p.Blocks[id].Hash != h || !p.Blocks[id].Hashed {
					t.Fatalf("step %d: block %d among the copies of %x: %+v", step, id, h[0], p.Blocks[id])
				}
			}
			if n != 0 {
				t.Fatalf("step %d: %d copies of %x more than are found", step, n, h[0])
			}
		}
		if total != p.Copies || p.Free != p.Total()-len(refs) || len(p.cached) != len(copies) {
			t.Fatalf("step %d: %d copies (want %d), %d free (want %d)", step, p.Copies, total, p.Free, p.Total()-len(refs))
		}
	}
	if p.Clear() {
		t.Error("cleared while in use")
	}
	for id, n := range refs {
		for range n {
			p.Release([]int32{id})
		}
	}
	if !p.Clear() || p.Copies != 0 {
		t.Error("not cleared when free")
	}
}
