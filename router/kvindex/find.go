package kvindex

import (
	"runtime"
	"sync/atomic"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// maxScans is the number of passes that a reader makes before it asks the writers to pause. Tests
// lower it.
var maxScans = 7

func yield() { runtime.Gosched() }

// Find implements Index. It guarantees that at some moment during the call everything in o was true
// at once, where an event counts as a sequence of changes, one per stretch of blocks. The guarantee
// rests on three facts: each change becomes visible at one moment (see node); a prompt lies in one
// shard, which has one writer at a time; and a pass counts only if none of the nodes that it
// visited changed between its first and its last look. All of them were therefore as read at the
// moment of the last look, or just before the single change that the writer was making. Otherwise
// the pass is repeated. Only changes of the visited nodes cause a repetition. A reader that is
// overtaken too often asks the writers to pause for a short time and does not wait for them.
func (ix *radix) Find(seqs []blockhash.Seq, o *Overlap) {
	if len(seqs) == 0 {
		o.Reset()
		return
	}
	sh := ix.shardOf(uint64(seqs[0]))
	if !sh.scan(seqs, o) {
		sh.retryScan(seqs, o)
	}
	if o.finds++; o.finds%sampleFinds == 0 && len(o.visited) > 0 {
		sh.readSamples.add(o.finds/sampleFinds, o.visited[len(o.visited)-1].id)
	}
}

// retryScan repeats the pass until one is consistent.
func (sh *shard) retryScan(seqs []blockhash.Seq, o *Overlap) {
	for range maxScans {
		if sh.scan(seqs, o) {
			return
		}
	}
	sh.yielders.Add(1)
	for !sh.scan(seqs, o) {
	}
	sh.yielders.Add(-1)
}

// scan walks the prompt once and reports whether the result is consistent.
func (sh *shard) scan(seqs []blockhash.Seq, o *Overlap) bool {
	o.Reset()
	o.visited = o.visited[:0]
	depth, words := 0, 0
	for depth < len(seqs) {
		n, id, state := sh.table.lookup(uint64(seqs[depth]))
		if n == nil {
			break
		}
		jitter()
		m := sh.matchLen(n, state, seqs[depth:])
		holderWords := 1
		o.holders[0] = n.load(wLow)
		if state&kindMask != 0 {
			holderWords = sh.gatherHolders(n, state, o)
		}
		if n.load(wState) != state {
			continue // the node changed while it was read
		}
		o.visited = append(o.visited, visitedNode{n, id, state})
		if depth == 0 {
			words = holderWords
			copy(o.alive[:words], o.holders[:holderWords])
		} else if words = retainHolders(o, words, holderWords, depth); words == 0 {
			break // no rank is left: later blocks cannot add depth
		}
		if state&hasLower != 0 {
			o.addLowerTiers(m, words)
		}
		depth += m
	}
	o.stop(o.alive[:words], depth)
	jitter()
	for i := range o.visited {
		if p := &o.visited[i]; p.node.load(wState) != p.state {
			return false
		}
	}
	return true
}

// sampleFinds: one in sampleFinds calls of Find with the same Overlap records its last node for
// eviction.
const sampleFinds = 64

// readSamples is where sampled Finds record the last node they visited, so that eviction counts
// reads as uses. A later sample may overwrite one that was not read yet.
type readSamples struct {
	_     [cacheLine]byte
	nodes [32]atomic.Uint32
	_     [cacheLine]byte
}

func (r *readSamples) add(n, id uint32) { r.nodes[n%uint32(len(r.nodes))].Store(id) }

// applyReadSamples marks the sampled nodes' extents as used.
func (sh *shard) applyReadSamples() {
	for i := range sh.readSamples.nodes {
		id := sh.readSamples.nodes[i].Swap(0)
		if id == 0 {
			continue
		}
		if n := sh.table.nodes.at(id); n[wState]&dead == 0 && n[wState] != 0 {
			sh.markUsed(n.extent())
		}
	}
}

// matchLen returns how many blocks of the prompt the node contains, given that the prompt begins
// with the node's first block and the node is in the given state. The sequence hashes agree up to
// some position and differ from there on, so a binary search finds it.
func (sh *shard) matchLen(n *node, state uint64, seqs []blockhash.Seq) int {
	length := int(state & lenMask)
	if length <= len(seqs) && uint64(seqs[length-1]) == n.load(wLast) {
		return length
	}
	at := n.load(wPlace)
	p, first := sh.words.readPage(uint32(at >> 32))
	first += uint32(at >> 16 & lenMask)
	lo, hi := 1, min(length, len(seqs)) // equal below lo, different from hi on
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		// A place and a state read at different times can lead to any word, hence the bound.
		if atomic.LoadUint64(&p[(first+uint32(mid))%wordsPerPage]) == uint64(seqs[mid]) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// gatherHolders combines a node's holders of all tiers in o.holders and returns how many words it
// has filled. If there are lower tiers it also fills o.below with the ranks that have the blocks on
// host or disk and not on the device.
func (sh *shard) gatherHolders(n *node, state uint64, o *Overlap) int {
	to := &o.holders
	words := 1
	grow := func(need int) {
		if need > words {
			clear(to[words:need])
			words = need
		}
	}
	if state&hasList != 0 {
		for list := n.load(wList); list != 0; list >>= 16 {
			w, bit := bitOf(worker.Slot(list) % worker.MaxSlots)
			grow(int(w) + 1)
			to[w] |= bit
		}
	}
	sets := n.load(wSets)
	if state&hasSet != 0 {
		ref := uint32(sets >> 32)
		width := setWidth(ref)
		p, at := sh.words.readPage(ref >> 2)
		low := to[0]
		from, into := p[at:][:width], to[:width] // sets are line-aligned and lie within one page
		for i := range into {
			into[i] = atomic.LoadUint64(&from[i])
		}
		to[0], words = low, int(width)
	}
	if state&hasLower != 0 {
		ref := uint32(sets)
		width := setWidth(ref)
		grow(int(width))
		p, at := sh.words.readPage(ref >> 2)
		for i := range width {
			host := atomic.LoadUint64(&p[(at+i)%wordsPerPage])
			disk := atomic.LoadUint64(&p[(at+width+i)%wordsPerPage])
			device := to[i&63]
			o.below[0][i&63], o.below[1][i&63] = host&^device, disk&^host&^device
			to[i&63] = device | host | disk
		}
		for i := int(width); i < words; i++ {
			o.below[0][i], o.below[1][i] = 0, 0
		}
	}
	for words > 1 && to[words-1] == 0 {
		words--
	}
	return words
}

// addLowerTiers records where the ranks that are still alive keep the blocks of the node just
// gathered.
func (o *Overlap) addLowerTiers(blocks, words int) {
	host, disk := o.below[0][:words], o.below[1][:words]
	for w := range words {
		host[w] &= o.alive[w]
		disk[w] &= o.alive[w]
	}
	o.lower.add(blocks, host, disk)
}

// retainHolders intersects the ranks that are alive with the node's holders, records the depth of
// the others, and returns how many words still have a rank alive.
func retainHolders(o *Overlap, words, holderWords, depth int) int {
	if holderWords < words {
		clear(o.holders[holderWords:words])
	}
	alive, holds := o.alive[:words], o.holders[:words]
	left, gone := 0, uint64(0)
	for w, before := range alive {
		staying := before & holds[w]
		alive[w], holds[w] = staying, before^staying
		gone |= before ^ staying
		if staying != 0 {
			left = w + 1
		}
	}
	if gone != 0 {
		o.stop(holds, depth)
	}
	return left
}
