package kvindex

import (
	"math/bits"
	"slices"

	"sluice/router/worker"
)

// lowerOverlap is what an Overlap knows of the tiers below the device: stretches of
// the prompt's blocks, each with the slots that hold them on the host and those that
// hold them on disk at best. Most answers have none.
type lowerOverlap struct {
	segments []segment
	bits     []uint64
	dense    [][2]uint32 // by slot, if isDense
	isDense  bool
}

// segment is so many blocks; from is where its host words begin, its disk words
// follow.
type segment struct{ blocks, from, words uint32 }

func (l *lowerOverlap) reset() {
	l.segments, l.bits, l.isDense = l.segments[:0], l.bits[:0], false
}

// add notes a stretch of blocks. host and disk are of one length; no slot is in
// both.
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

// AnyLowerTier says whether any rank holds a part of its depth elsewhere than on the
// device. It is false for most answers and costs nothing.
func (o *Overlap) AnyLowerTier() bool { return len(o.lower.segments) > 0 }

// LowerTiers says how much of a rank's Depth is not on the device: host is how many of
// those blocks it holds on the host (and perhaps on disk too), disk how many on disk
// alone. Depth-host-disk is what it has on the device. Where many stretches or ranks
// are asked about, the first call costs one pass over all of them.
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

// fill makes the form by slot.
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

// Frequencies says how many ranks hold each depth: dst[d] of what it returns is the
// number of slots with a depth above d, for every d below Max. It writes over dst
// and grows it where it is too short.
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
