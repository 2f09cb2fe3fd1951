package kvindex

import (
	"slices"

	"sluice/router/worker"
)

// holders is the set of (slot, tier) that hold one block. The first 64 slots on
// the device, all there is in most fleets, are one inline word; the rest are
// chunks of 64 slots of one tier, sorted by key, none of them empty.
type holders struct {
	lo   uint64
	more []chunk
}

type chunk struct {
	key  uint32 // slot/64 * 4 + tier, so that the tiers of a word lie together
	bits uint64
}

func chunkKey(slot worker.Slot, tier Tier) uint32 { return uint32(slot)>>6<<2 | uint32(tier) }

func (h *holders) find(key uint32) (int, bool) {
	return slices.BinarySearchFunc(h.more, key, func(c chunk, key uint32) int { return int(c.key) - int(key) })
}

func (h *holders) has(slot worker.Slot, tier Tier) bool {
	bit, key := uint64(1)<<(slot&63), chunkKey(slot, tier)
	if key == 0 {
		return h.lo&bit != 0
	}
	i, ok := h.find(key)
	return ok && h.more[i].bits&bit != 0
}

func (h *holders) add(slot worker.Slot, tier Tier) {
	bit, key := uint64(1)<<(slot&63), chunkKey(slot, tier)
	if key == 0 {
		h.lo |= bit
		return
	}
	i, ok := h.find(key)
	if !ok {
		h.more = slices.Insert(h.more, i, chunk{key: key})
	}
	h.more[i].bits |= bit
}

func (h *holders) remove(slot worker.Slot, tier Tier) {
	bit, key := uint64(1)<<(slot&63), chunkKey(slot, tier)
	if key == 0 {
		h.lo &^= bit
		return
	}
	i, ok := h.find(key)
	if !ok {
		return
	}
	if h.more[i].bits &^= bit; h.more[i].bits == 0 {
		if h.more = slices.Delete(h.more, i, i+1); len(h.more) == 0 {
			h.more = nil
		}
	}
}

// wordCount is how many 64-slot words any holder lies in.
func (h *holders) wordCount() int {
	if n := len(h.more); n > 0 {
		return int(h.more[n-1].key>>2) + 1
	}
	return 1
}

// alive is a set of slots during one Find.
type alive [worker.MaxSlots / 64]uint64

// fill puts every slot of h, in any tier, into a, and returns a's word count.
func (h *holders) fill(a *alive) int {
	a[0] = h.lo
	for _, c := range h.more {
		a[c.key>>2] |= c.bits
	}
	return h.wordCount()
}

// narrow keeps in the first words of a only the slots of h, notes depth in o
// for those that go, and returns how many words may still have slots.
func (h *holders) narrow(a *alive, words, depth int, o *Overlap) int {
	left, next := 0, 0
	for w := range words {
		var in uint64
		if w == 0 {
			in = h.lo
		}
		for ; next < len(h.more) && int(h.more[next].key>>2) == w; next++ {
			in |= h.more[next].bits
		}
		if gone := a[w] &^ in; gone != 0 {
			o.setWord(w, gone, depth)
			a[w] &= in
		}
		if a[w] != 0 {
			left = w + 1
		}
	}
	return left
}
