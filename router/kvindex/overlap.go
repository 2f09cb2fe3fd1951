package kvindex

import (
	"math/bits"

	"sluice/router/worker"
)

// Overlap is the result of a Find, owned and reused by one caller at a time;
// the zero value is ready. After its first uses a Find into it allocates
// nothing, and Reset costs as much as there were holders.
type Overlap struct {
	depth   []uint32 // by slot; all zero but for those in touched
	touched []worker.Slot
	max     int
}

// Reset empties o for the next use.
func (o *Overlap) Reset() {
	for _, s := range o.touched {
		o.depth[s] = 0
	}
	o.touched, o.max = o.touched[:0], 0
}

// Depth is how many leading blocks the rank in slot holds, in any tier.
func (o *Overlap) Depth(slot worker.Slot) int {
	if int(slot) >= len(o.depth) {
		return 0
	}
	return int(o.depth[slot])
}

// Max is the greatest depth of any rank.
func (o *Overlap) Max() int { return o.max }

// Holders are the slots with a depth above 0, in no order; borrowed until the
// next Find or Reset.
func (o *Overlap) Holders() []worker.Slot { return o.touched }

// set notes a slot's depth, which is positive; each slot comes once.
func (o *Overlap) set(slot worker.Slot, depth int) {
	if int(slot) >= len(o.depth) {
		grown := make([]uint32, (int(slot)/64+1)*64)
		copy(grown, o.depth)
		o.depth = grown
	}
	o.depth[slot] = uint32(depth)
	o.touched = append(o.touched, slot)
	o.max = max(o.max, depth)
}

// setWord notes the same depth for every slot of a 64-slot word.
func (o *Overlap) setWord(word int, slots uint64, depth int) {
	for slots != 0 {
		o.set(worker.Slot(word*64+bits.TrailingZeros64(slots)), depth)
		slots &= slots - 1
	}
}
