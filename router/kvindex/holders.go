package kvindex

import (
	"math/bits"

	"sluice/router/worker"
)

// The writer's view of a node's holders. Device holders with slots below 64 are bits of wLow; up to
// four others are in wList, more in a set. Host and disk holders are in the set of the lower tiers.
const listLen = 4

func setRef(n *node) uint32   { return uint32(n[wSets] >> 32) }
func lowerRef(n *node) uint32 { return uint32(n[wSets]) }

func bitOf(slot worker.Slot) (word uint32, bit uint64) { return uint32(slot) >> 6, 1 << (slot & 63) }

// isHolder reports whether a rank has a node's blocks in a tier.
func (sh *shard) isHolder(n *node, slot worker.Slot, tier Tier) bool {
	w, bit := bitOf(slot)
	switch kind := n.kind(); {
	case tier != Device:
		return kind&hasLower != 0 && sh.words.setWord(lowerRef(n), uint32(tier-1), w)&bit != 0
	case w == 0:
		return n[wLow]&bit != 0
	case kind&hasSet != 0:
		return sh.words.setWord(setRef(n), 0, w)&bit != 0
	case kind&hasList != 0:
		for list := n[wList]; list != 0; list >>= 16 {
			if worker.Slot(list) == slot {
				return true
			}
		}
	}
	return false
}

// isSoleHolder reports whether a rank in a tier, which has a node's blocks, is the only holder.
func (sh *shard) isSoleHolder(n *node, slot worker.Slot, tier Tier) bool {
	w, bit := bitOf(slot)
	switch kind := n.kind(); {
	case tier != Device:
		return n[wLow] == 0 && kind == hasLower && sh.isHolder(n, slot, tier) && sh.words.setLen(lowerRef(n), 2) == 1
	case w == 0:
		return n[wLow] == bit && kind == 0
	default:
		return n[wLow] == 0 && kind == hasList && n[wList] == uint64(slot)
	}
}

func (sh *shard) sameHolders(n, m *node) bool {
	kind := n.kind()
	return n[wLow] == m[wLow] && kind == m.kind() &&
		(kind&hasList == 0 || n[wList] == m[wList]) &&
		(kind&hasSet == 0 || sh.words.sameSets(setRef(n), setRef(m), 1)) &&
		(kind&hasLower == 0 || sh.words.sameSets(lowerRef(n), lowerRef(m), 2))
}

// addHolder adds a rank that does not have the node's blocks in that tier.
func (sh *shard) addHolder(n *node, slot worker.Slot, tier Tier) {
	w, bit := bitOf(slot)
	kind := n.kind()
	switch {
	case tier != Device && kind&hasLower == 0:
		ref := sh.words.newSet(widthFor(uint32(slot)), 2)
		sh.words.putWord(ref, uint32(tier-1), w, bit)
		n.ready(wSets, n[wSets]&genMask|uint64(ref))
		n.commit(n.len(), kind|hasLower)
	case tier != Device:
		ref := lowerRef(n)
		sh.setBit(n, ref, 2, uint32(tier-1), slot, func(to uint32) uint64 { return n[wSets]&genMask | uint64(to) })
	case w == 0:
		n.store(wLow, n[wLow]|bit)
		n.changed()
	case kind&hasSet != 0:
		ref := setRef(n)
		sh.setBit(n, ref, 1, 0, slot, func(to uint32) uint64 { return uint64(to)<<32 | uint64(lowerRef(n)) })
	case kind&hasList == 0:
		n.ready(wList, uint64(slot))
		n.commit(n.len(), kind|hasList)
	case n[wList]>>(16*(listLen-1)) == 0:
		n.store(wList, listWith(n[wList], slot))
		n.changed()
	default:
		list := n[wList]
		ref := sh.words.newSet(widthFor(max(uint32(slot), uint32(list>>(16*(listLen-1))))), 1)
		for list = n[wList]; list != 0; list >>= 16 {
			w, bit := bitOf(worker.Slot(list))
			sh.words.putWord(ref, 0, w, sh.words.setWord(ref, 0, w)|bit)
		}
		sh.words.putWord(ref, 0, w, sh.words.setWord(ref, 0, w)|bit)
		n.store(wSets, uint64(ref)<<32|uint64(lowerRef(n)))
		n.commit(n.len(), kind&^hasList|hasSet)
	}
}

// setBit adds a slot to a node's set, or to a wider copy that replaces it.
func (sh *shard) setBit(n *node, ref uint32, arrays int, array uint32, slot worker.Slot, refs func(uint32) uint64) {
	w, bit := bitOf(slot)
	if w < setWidth(ref) {
		sh.words.putWord(ref, array, w, sh.words.setWord(ref, array, w)|bit)
		n.changed()
		return
	}
	to := sh.words.copySet(ref, widthFor(uint32(slot)), arrays)
	sh.words.putWord(to, array, w, sh.words.setWord(to, array, w)|bit)
	n.store(wSets, refs(to))
	n.changed()
	sh.words.freeSet(ref, arrays)
}

// delHolder removes a rank that has the node's blocks in that tier.
func (sh *shard) delHolder(n *node, slot worker.Slot, tier Tier) {
	w, bit := bitOf(slot)
	kind := n.kind()
	switch {
	case tier != Device:
		ref := lowerRef(n)
		sh.words.putWord(ref, uint32(tier-1), w, sh.words.setWord(ref, uint32(tier-1), w)&^bit)
		if sh.words.setLen(ref, 2) > 0 {
			n.changed()
			return
		}
		n.commit(n.len(), kind&^hasLower)
		sh.words.freeSet(ref, 2)
	case w == 0:
		n.store(wLow, n[wLow]&^bit)
		n.changed()
	case kind&hasSet != 0:
		ref := setRef(n)
		sh.words.putWord(ref, 0, w, sh.words.setWord(ref, 0, w)&^bit)
		if sh.words.setLen(ref, 1) > listLen {
			n.changed()
			return
		}
		list := uint64(0)
		for w := range setWidth(ref) {
			for set := sh.words.setWord(ref, 0, w); set != 0; set &= set - 1 {
				list = listWith(list, worker.Slot(w*64+uint32(bits.TrailingZeros64(set))))
			}
		}
		n.store(wList, list)
		n.commit(n.len(), kind&^hasSet|hasList)
		sh.words.freeSet(ref, 1)
	default:
		list := listWithout(n[wList], slot)
		n.store(wList, list)
		if list == 0 {
			kind &^= hasList
		}
		n.commit(n.len(), kind)
	}
}

// listWith inserts a slot, in order, into a list that is not full.
func listWith(list uint64, slot worker.Slot) uint64 {
	shift := 0
	for rest := list; rest != 0 && worker.Slot(rest) < slot; rest >>= 16 {
		shift += 16
	}
	below := uint64(1)<<shift - 1
	return list&below | uint64(slot)<<shift | list&^below<<16
}

func listWithout(list uint64, slot worker.Slot) uint64 {
	for shift := 0; shift < 64; shift += 16 {
		if worker.Slot(list>>shift) == slot {
			below := uint64(1)<<shift - 1
			return list&below | list>>16&^below
		}
	}
	return list
}

// eachHolder calls do for every (slot, tier) that has a node's blocks.
func (sh *shard) eachHolder(n *node, do func(worker.Slot, Tier)) {
	each := func(w uint32, set uint64, tier Tier) {
		for ; set != 0; set &= set - 1 {
			do(worker.Slot(w*64+uint32(bits.TrailingZeros64(set))), tier)
		}
	}
	kind := n.kind()
	each(0, n[wLow], Device)
	if kind&hasList != 0 {
		for list := n[wList]; list != 0; list >>= 16 {
			do(worker.Slot(list), Device)
		}
	}
	if kind&hasSet != 0 {
		for w := range setWidth(setRef(n)) {
			each(w, sh.words.setWord(setRef(n), 0, w), Device)
		}
	}
	if kind&hasLower != 0 {
		for tier := Host; tier < NumTiers; tier++ {
			for w := range setWidth(lowerRef(n)) {
				each(w, sh.words.setWord(lowerRef(n), uint32(tier-1), w), tier)
			}
		}
	}
}
