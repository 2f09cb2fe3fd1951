package kvindex

import (
	"math/bits"

	"sluice/router/worker"
)

// Overlap is the result of a Find. One caller at a time owns and reuses it. The zero value is ready
// for use. Once its buffers have grown, Find allocates nothing.
//
// The result is stored as groups of equal depth: a depth and the set of the slots with that depth.
// Most results have one or two groups, however many ranks have the prompt. The per-slot forms are
// computed on first use.
type Overlap struct {
	groups []depthGroup
	bits   []uint64 // of all groups
	max    int

	dense    []uint32 // by slot, if isDense
	isDense  bool
	fill     [64]uint32
	slots    []worker.Slot // if isListed
	isListed bool

	lower lowerOverlap // blocks outside the device tier

	// Used by Find: the slots still alive, the holders of a node, those of them without the node on
	// the device, and the visited nodes.
	alive, holders [worker.MaxSlots / 64]uint64
	below          [2][worker.MaxSlots / 64]uint64
	visited        []visitedNode
	finds          uint32
}

type depthGroup struct{ depth, from, words uint32 }

type visitedNode struct {
	node  *node
	id    uint32
	state uint64
}

// Reset empties o for the next use.
func (o *Overlap) Reset() {
	o.groups, o.bits, o.max = o.groups[:0], o.bits[:0], 0
	o.isDense, o.isListed = false, false
	if len(o.lower.segments) > 0 {
		o.lower.reset()
	}
}

// Depth returns how many leading blocks the rank in slot has, in any tier.
func (o *Overlap) Depth(slot worker.Slot) int {
	if !o.isDense {
		if len(o.groups) > 4 {
			o.Depths()
		} else {
			for i := range o.groups {
				r := &o.groups[i]
				if w := uint32(slot) / 64; w < r.words && o.bits[r.from+w]>>(slot%64)&1 != 0 {
					return int(r.depth)
				}
			}
			return 0
		}
	}
	if int(slot) >= len(o.dense) {
		return 0
	}
	return int(o.dense[slot])
}

// Max returns the greatest depth of any rank.
func (o *Overlap) Max() int { return o.max }

// DepthGroups returns the number of groups. DepthGroup(i) returns a depth above 0 and the slots
// with exactly that depth: bit s%64 of word s/64. The words are borrowed until the next Find or
// Reset. A slot is in at most one group; several groups may have the same depth.
func (o *Overlap) DepthGroups() int { return len(o.groups) }

// DepthGroup is described at DepthGroups.
func (o *Overlap) DepthGroup(i int) (depth int, slots []uint64) {
	r := o.groups[i]
	return int(r.depth), o.bits[r.from : r.from+r.words]
}

// Depths returns the depth of every slot, indexed by slot; slots beyond its length have depth 0.
// The slice is borrowed until the next Find or Reset.
func (o *Overlap) Depths() []uint32 {
	if o.isDense {
		return o.dense
	}
	words := uint32(0)
	for i := range o.groups {
		words = max(words, o.groups[i].words)
	}
	if n := int(words) * 64; n > cap(o.dense) {
		o.dense = make([]uint32, n)
	} else {
		o.dense = o.dense[:n]
		clear(o.dense)
	}
	// A word most of whose slots have the same depth is filled with that depth first.
	for i := range o.groups {
		r := &o.groups[i]
		filled := false
		for w, set := range o.bits[r.from : r.from+r.words] {
			if bits.OnesCount64(set) <= 32 {
				continue
			}
			if !filled {
				for k := range o.fill {
					o.fill[k] = r.depth
				}
				filled = true
			}
			to := o.dense[w*64 : w*64+64]
			copy(to, o.fill[:])
			for not := ^set; not != 0; not &= not - 1 {
				to[bits.TrailingZeros64(not)&63] = 0
			}
		}
	}
	for i := range o.groups {
		r := &o.groups[i]
		for w, set := range o.bits[r.from : r.from+r.words] {
			if set == 0 || bits.OnesCount64(set) > 32 {
				continue
			}
			to := o.dense[w*64 : w*64+64]
			for ; set != 0; set &= set - 1 {
				to[bits.TrailingZeros64(set)&63] = r.depth
			}
		}
	}
	o.isDense = true
	return o.dense
}

// Holders returns the slots with a depth above 0, in no particular order. The slice is borrowed
// until the next Find or Reset.
func (o *Overlap) Holders() []worker.Slot {
	if o.isListed {
		return o.slots
	}
	o.slots = o.slots[:0]
	for i := range o.groups {
		r := &o.groups[i]
		for w, set := range o.bits[r.from : r.from+r.words] {
			for ; set != 0; set &= set - 1 {
				o.slots = append(o.slots, worker.Slot(w*64+bits.TrailingZeros64(set)))
			}
		}
	}
	o.isListed = true
	return o.slots
}

// set records a slot's depth, which is positive. It is called at most once per slot.
func (o *Overlap) set(slot worker.Slot, depth int) {
	o.setWord(int(slot)/64, 1<<(slot%64), depth)
}

// setWord records the same depth for every slot of a 64-slot word.
func (o *Overlap) setWord(word int, slots uint64, depth int) {
	if slots == 0 {
		return
	}
	if n := len(o.groups); n == 0 || o.groups[n-1].depth != uint32(depth) {
		o.groups = append(o.groups, depthGroup{depth: uint32(depth), from: uint32(len(o.bits))})
		o.max = max(o.max, depth)
	}
	r := &o.groups[len(o.groups)-1]
	for int(r.words) <= word {
		o.bits = append(o.bits, 0)
		r.words++
	}
	o.bits[int(r.from)+word] |= slots
}

// stop records the depth of the slots of a set that has at least one.
func (o *Overlap) stop(set []uint64, depth int) {
	for len(set) > 0 && set[len(set)-1] == 0 {
		set = set[:len(set)-1]
	}
	if len(set) == 0 {
		return
	}
	o.groups = append(o.groups, depthGroup{uint32(depth), uint32(len(o.bits)), uint32(len(set))})
	o.bits = append(o.bits, set...)
	o.max = max(o.max, depth)
}
