package kvindex

import (
	"math/bits"
	"slices"

	"sluice/router/worker"
)

// lowerOverlap is the part of an Overlap about the tiers below the device: segments of the prompt's
// blocks, each with the slots that have them on the host and the slots that have them on disk only.
// Most results have none.
type lowerOverlap struct {
	segments []segment
	bits     []uint64
	dense    [][2]uint32 // by slot, if isDense
	isDense  bool
}

// segment is a number of blocks. Its host words begin at from; its disk words follow.
type segment struct{ blocks, from, words uint32 }

func (l *lowerOverlap) reset() {
	l.segments, l.bits, l.isDense = l.segments[:0], l.bits[:0], false
}

// add appends a segment. host and disk have equal length; no slot is in both.
func (l *lowerOverlap) add(blocks int, host, disk []uint64) {
	words := len(host)
	for words > 0 && host[words-1]|disk[words-1] == 0 {
		words--
	}
	if words == 0 {
		return
	}
	if n := len(l.segments); n > 0 {
		s := &l.segments[n-1]
		if int(s.words) == words && slices.Equal(l.bits[s.from:][:words], host[:words]) &&
			slices.Equal(l.bits[int(s.from)+words:][:words], disk[:words]) {
			s.blocks += uint32(blocks)
			return
		}
	}
	l.segments = append(l.segments, segment{uint32(blocks), uint32(len(l.bits)), uint32(words)})
	l.bits = append(append(l.bits, host[:words]...), disk[:words]...)
}

// AnyLowerTier reports whether any rank has part of its depth outside the device tier. It takes
// constant time.
func (o *Overlap) AnyLowerTier() bool { return len(o.lower.segments) > 0 }

// LowerTiers returns how much of a rank's Depth is not on the device: host is the number of those
// blocks that it has on the host (and possibly on disk too), disk the number it has on disk alone.
// Depth-host-disk is the number on the device. If there are many segments or ranks, the first call
// computes the result for all slots.
func (o *Overlap) LowerTiers(slot worker.Slot) (host, disk int) {
	l := &o.lower
	if len(l.segments) > 4 {
		if !l.isDense {
			l.fill()
		}
		if int(slot) < len(l.dense) {
			host, disk = int(l.dense[slot][0]), int(l.dense[slot][1])
		}
		return host, disk
	}
	w, bit := uint32(slot)/64, uint64(1)<<(slot%64)
	for _, s := range l.segments {
		if w >= s.words {
			continue
		}
		if l.bits[s.from+w]&bit != 0 {
			host += int(s.blocks)
		} else if l.bits[s.from+s.words+w]&bit != 0 {
			disk += int(s.blocks)
		}
	}
	return host, disk
}

// fill computes the per-slot form.
func (l *lowerOverlap) fill() {
	words := uint32(0)
	for _, s := range l.segments {
		words = max(words, s.words)
	}
	l.dense = slices.Grow(l.dense[:0], int(words)*64)[:words*64]
	clear(l.dense)
	for _, s := range l.segments {
		for i, set := range l.bits[s.from : s.from+2*s.words] {
			below := 0
			if i >= int(s.words) {
				i, below = i-int(s.words), 1
			}
			for ; set != 0; set &= set - 1 {
				l.dense[i*64+bits.TrailingZeros64(set)][below] += s.blocks
			}
		}
	}
	l.isDense = true
}

// Frequencies returns how many ranks have each depth: element d is the number of slots with a depth
// above d, for every d below Max. It overwrites dst and grows it if necessary.
func (o *Overlap) Frequencies(dst []uint32) []uint32 {
	dst = slices.Grow(dst[:0], o.max)[:o.max]
	clear(dst)
	for i := range o.groups {
		depth, slots := o.DepthGroup(i)
		for _, w := range slots {
			dst[depth-1] += uint32(bits.OnesCount64(w))
		}
	}
	for d := len(dst) - 2; d >= 0; d-- {
		dst[d] += dst[d+1]
	}
	return dst
}
