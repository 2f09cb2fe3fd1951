package sim

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

func blockHashOf(n byte) *blockHash { return &blockHash{n} }

// TestEvictionOrder: least recently used first, and of one prompt the tail first.
func TestEvictionOrder(t *testing.T) {
	var gone []byte
	p := newPool(7, func(h *blockHash) { gone = append(gone, h[0]) })
	fill := func(hashes ...byte) (ids []int32) {
		for _, h := range hashes {
			id := p.allocate()
			p.store(id, blockHashOf(h))
			ids = append(ids, id)
		}
		return
	}
	a, b := fill(1, 2, 3), fill(4, 5, 6)
	p.release(a)
	p.release(b)
	id, ok := p.lookup(blockHashOf(2)) // used again: its turn is last
	if !ok {
		t.Fatal("2 is not cached")
	}
	p.share(id)
	p.release([]int32{id})
	for range 6 {
		p.allocate()
	}
	if fmt.Sprint(gone) != "[3 1 6 5 4 2]" {
		t.Errorf("evicted %v", gone)
	}
	if p.nfree != 0 || p.copies != 0 || len(p.cached) != 0 {
		t.Errorf("%d free, %d cached, %d copies", p.nfree, len(p.cached), p.copies)
	}
}

// TestPoolAgainstModel drives the pool at random against maps that say the same.
func TestPoolAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	copies := map[blockHash]int{}
	p := newPool(20, func(h *blockHash) {
		if copies[*h]--; copies[*h] == 0 {
			delete(copies, *h)
		}
	})
	refs := map[int32]int{}
	for step := range 20000 {
		switch rng.IntN(4) {
		case 0:
			if p.nfree > 0 {
				id := p.allocate()
				if refs[id] != 0 || id == 0 {
					t.Fatalf("step %d: block %d given out twice", step, id)
				}
				refs[id] = 1
				h := blockHashOf(byte(rng.IntN(12)))
				p.store(id, h)
				copies[*h]++
			}
		case 1:
			if id, ok := p.lookup(blockHashOf(byte(rng.IntN(12)))); ok {
				p.share(id)
				refs[id]++
			}
		default:
			if id := int32(rng.IntN(20)); refs[id] > 0 {
				p.release([]int32{id})
				if refs[id]--; refs[id] == 0 {
					delete(refs, id)
				}
			}
		}
		total := 0
		for h, n := range copies {
			total += n
			id, ok := p.lookup(&h)
			if !ok {
				t.Fatalf("step %d: %x is lost", step, h[0])
			}
			for newer := int32(0); id != 0; newer, id = id, p.blocks[id].older {
				if n--; p.blocks[id].newer != newer || p.blocks[id].hash != h || !p.blocks[id].hashed {
					t.Fatalf("step %d: block %d among the copies of %x: %+v", step, id, h[0], p.blocks[id])
				}
			}
			if n != 0 {
				t.Fatalf("step %d: %d copies of %x more than are found", step, n, h[0])
			}
		}
		if total != p.copies || p.nfree != p.total()-len(refs) || len(p.cached) != len(copies) {
			t.Fatalf("step %d: %d copies (want %d), %d free (want %d)", step, p.copies, total, p.nfree, p.total()-len(refs))
		}
	}
	if p.clear() {
		t.Error("cleared while in use")
	}
	for id, n := range refs {
		for range n {
			p.release([]int32{id})
		}
	}
	if !p.clear() || p.copies != 0 {
		t.Error("not cleared when free")
	}
}
