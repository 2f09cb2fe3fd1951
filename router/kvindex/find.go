package kvindex

import (
	"runtime"
	"sync/atomic"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// patience is how many passes a reader makes before it raises its hand; tests make
// it less.
var patience = 7

func yield() { runtime.Gosched() }

// Find implements Index. What it promises: there is a moment within the call at
// which all that o says was true together, if an event is taken to happen one
// stretch of blocks after another. It rests on three things. Every change becomes
// visible at one moment (see fragment); a prompt lies in one shard, which has one
// writer at a time; and a pass is kept only if, after its last look, no fragment it
// went through had changed since it was read. So all of them stood as read at the
// moment of that last look, or just before the one change that the writer was in the
// middle of. Otherwise the pass is made again. Each further pass is owed to changes
// made meanwhile to the very fragments it went through; a reader overtaken too often
// asks the writers to hold back for its short time, and does not wait for them either.
func (ix *radix) Find(seqs []blockhash.Seq, o *Overlap) {
	if len(seqs) == 0 {
		o.Reset()
		return
	}
	sh := ix.shardOf(uint64(seqs[0]))
	if !sh.pass(seqs, o) {
		sh.insist(seqs, o)
	}
	if o.finds++; o.finds%sampleFinds == 0 && len(o.passed) > 0 {
		sh.seen.note(o.finds/sampleFinds, o.passed[len(o.passed)-1].id)
	}
}

// insist makes passes until one is whole.
func (sh *shard) insist(seqs []blockhash.Seq, o *Overlap) {
	for range patience {
		if sh.pass(seqs, o) {
			return
		}
	}
	sh.hands.Add(1)
	for !sh.pass(seqs, o) {
	}
	sh.hands.Add(-1)
}

// pass walks the prompt once and says whether what it found holds together.
func (sh *shard) pass(seqs []blockhash.Seq, o *Overlap) bool {
	o.Reset()
	o.passed = o.passed[:0]
	depth, words := 0, 0
	for depth < len(seqs) {
		n, id, state := sh.table.lookup(uint64(seqs[depth]))
		if n == nil {
			break
		}
		jitter()
		m := sh.along(n, state, seqs[depth:])
		held := 1
		o.holds[0] = n.load(wLow)
		if state&kindMask != 0 {
			held = sh.gather(n, state, o)
		}
		if n.load(wState) != state {
			continue // it changed under our eyes
		}
		o.passed = append(o.passed, passed{n, id, state})
		if depth == 0 {
			words = held
			copy(o.alive[:words], o.holds[:held])
		} else if words = narrow(o, words, held, depth); words == 0 {
			break // nobody holds on: what follows is of no interest
		}
		if state&hasLower != 0 {
			o.noteBelow(m, words)
		}
		depth += m
	}
	o.stop(o.alive[:words], depth)
	jitter()
	for i := range o.passed {
		if p := &o.passed[i]; p.frag.load(wState) != p.state {
			return false
		}
	}
	return true
}

// sampleFinds is of how many Finds into an Overlap one is noted for eviction.
const sampleFinds = 64

// readers is where Finds that were drawn note the last fragment they came through,
// so that what is read much does not count as cold. A note may be written over
// before it is read.
type readers struct {
	_     [cacheLine]byte
	notes [32]atomic.Uint32
	_     [cacheLine]byte
}

func (r *readers) note(n, id uint32) { r.notes[n%uint32(len(r.notes))].Store(id) }

// countReaders lets what was read count as used.
func (sh *shard) countReaders() {
	for i := range sh.seen.notes {
		id := sh.seen.notes[i].Swap(0)
		if id == 0 {
			continue
		}
		if n := sh.table.nodes.at(id); n[wState]&dead == 0 && n[wState] != 0 {
			sh.touch(n.run())
		}
	}
}

// along is how many blocks of a prompt that begins with a fragment's first block
// lie in it, by the state it was in. Sequence hashes are equal up to a place and
// different from there on.
func (sh *shard) along(n *fragment, state uint64, seqs []blockhash.Seq) int {
	length := int(state & lenMask)
	if length <= len(seqs) && uint64(seqs[length-1]) == n.load(wLast) {
		return length
	}
	at := n.load(wPlace)
	p, first := sh.words.seen(uint32(at >> 32))
	first += uint32(at >> 16 & lenMask)
	lo, hi := 1, min(length, len(seqs)) // equal below lo, different from hi on
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		// A place and a state that do not belong together lead anywhere.
		if atomic.LoadUint64(&p[(first+uint32(mid))%wordPage]) == uint64(seqs[mid]) {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// gather unites a fragment's holders over the tiers and returns how many words of
// o.holds it has filled. Where there are lower tiers it fills o.below too, with
// those who hold the fragment on the host or on disk and not on the device.
func (sh *shard) gather(n *fragment, state uint64, o *Overlap) int {
	to := &o.holds
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
		p, at := sh.words.seen(ref >> 2)
		low := to[0]
		from, into := p[at:][:width], to[:width] // sets lie on lines, within a page
		for i := range into {
			into[i] = atomic.LoadUint64(&from[i])
		}
		to[0], words = low, int(width)
	}
	if state&hasLower != 0 {
		ref := uint32(sets)
		width := setWidth(ref)
		grow(int(width))
		p, at := sh.words.seen(ref >> 2)
		for i := range width {
			host := atomic.LoadUint64(&p[(at+i)%wordPage])
			disk := atomic.LoadUint64(&p[(at+width+i)%wordPage])
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

// noteBelow notes where those alive keep the blocks of a fragment just gathered.
func (o *Overlap) noteBelow(blocks, words int) {
	host, disk := o.below[0][:words], o.below[1][:words]
	for w := range words {
		host[w] &= o.alive[w]
		disk[w] &= o.alive[w]
	}
	o.low.add(blocks, host, disk)
}

// narrow keeps of the slots alive those that hold on, notes the depth of the
// others, and returns how many words are still alive.
func narrow(o *Overlap, words, held, depth int) int {
	if held < words {
		clear(o.holds[held:words])
	}
	alive, holds := o.alive[:words], o.holds[:words]
	left, gone := 0, uint64(0)
	for w, was := range alive {
		stay := was & holds[w]
		alive[w], holds[w] = stay, was^stay
		gone |= was ^ stay
		if stay != 0 {
			left = w + 1
		}
	}
	if gone != 0 {
		o.stop(holds, depth)
	}
	return left
}
