package kvindex

import (
	"math/bits"

	"sluice/router/worker"
)

// Overlap is the result of a Find, owned and reused by one caller at a time;
// the zero value is ready. After its first uses a Find into it allocates
// nothing.
//
// It is kept as runs: a depth and the set of the slots that stop there, of which
// there are one or two in most answers, however many ranks hold the prompt. The
// forms by slot are made from them when first asked for.
type Overlap struct {
	groups []depthGroup
	bits   []uint64 // of all runs
	max    int

	dense    []uint32 // by slot, if isDense
	isDense  bool
	fill     [64]uint32
	slots    []worker.Slot // if isListed
	isListed bool

	lower lowerOverlap // what is held below the device

	// A Find's own: the slots not yet stopped, the holders of a fragment and
	// those of them that do not hold it on the device, and what it has passed.
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

// Depth is how many leading blocks the rank in slot holds, in any tier.
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

// Max is the greatest depth of any rank.
func (o *Overlap) Max() int { return o.max }

// DepthGroups is how many runs there are; Run gives the i-th: a depth above 0 and the
// slots that hold so much and no more, bit s%64 of word s/64. The words are
// borrowed until the next Find or Reset. A slot is in one run at most, a depth may
// have several.
func (o *Overlap) DepthGroups() int { return len(o.groups) }

// DepthGroup is described at Runs.
func (o *Overlap) DepthGroup(i int) (depth int, slots []uint64) {
	r := o.groups[i]
	return int(r.depth), o.bits[r.from : r.from+r.words]
}

// Depths gives every slot's depth by its number, 0 for the slots beyond; borrowed
// until the next Find or Reset.
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
	// A word most of whose slots stop at one depth is filled with it first.
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

// Holders are the slots with a depth above 0, in no order; borrowed until the
// next Find or Reset.
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

// set notes a slot's depth, which is positive; each slot comes once.
func (o *Overlap) set(slot worker.Slot, depth int) {
	o.setWord(int(slot)/64, 1<<(slot%64), depth)
}

// setWord notes the same depth for every slot of a 64-slot word.
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

// stop notes the depth of the slots of a set with at least one.
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
