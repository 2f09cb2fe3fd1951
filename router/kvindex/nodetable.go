package kvindex

import (
	"math/bits"
	"sync/atomic"

	"sluice/router/blockhash"
)

// nodeTable maps the sequence hash of a node's first block to the node: open addressing in 64 parts
// that grow independently, so that growth never delays a writer for long. A slot is one atomic
// word, tag<<32 | node. A word of 0 is empty; a word with a tag and no node is deleted.
//
// Readers probe without a lock. A part that grows is copied and published by one pointer store. A
// reader still in the old copy sees the table as it was when it started, and the garbage collector
// frees the copy after the last such reader. A deletion leaves a mark instead of shifting slots,
// which would hide other slots from readers.
//
// The fields that readers load for every node (factor, parts) are apart from those that the writer
// stores for every node (counts, the ends of the slabs).
type nodeTable struct {
	factor uint64 // odd, random: clients cannot choose which slots collide
	parts  [partCount]atomic.Pointer[part]
	_      [cacheLine]byte
	counts [partCount]counts
	nodes  nodeSlab
}

type part struct {
	mask uint64
	slot []uint64
	// A bit per tag is set for each hash that was inserted. The writer, which mostly looks up
	// absent hashes, checks it first. There are partBits bits per slot, so few are set.
	bits []uint64
}

const partBits = 16

// bit returns the position of a tag's bit.
func (p *part) bit(tag uint64) (word, bit uint64) {
	at := tag >> 32 & (partBits*(p.mask+1) - 1)
	return at / 64, 1 << (at % 64)
}

// counts of a part: slots that are not empty, slots that are not deleted, and how often bits were
// set, with repetitions.
type counts struct{ used, live, bits uint64 }

const cacheLine = 64

const (
	partCount = 64
	partShift = 64 - 6 - shardBits // below the bits that select the shard
	minPart   = 8
)

func (t *nodeTable) init(factor uint64) {
	t.factor = factor | 1
	for i := range t.parts {
		t.parts[i].Store(newPart(minPart))
	}
}

func newPart(slots uint64) *part {
	return &part{mask: slots - 1, slot: make([]uint64, slots), bits: make([]uint64, slots*partBits/64)}
}

// locate returns a hash's part and its tag, as stored in a slot. The tag's low bits select the
// first slot to probe, so a part is rebuilt without reading the nodes.
func (t *nodeTable) locate(seq uint64) (at, tag uint64) {
	x := seq * t.factor
	return x >> partShift % partCount, (x ^ x>>32) << 32
}

// prefetch loads the first slots of a few of the hashes.
func (t *nodeTable) prefetch(seqs []blockhash.Seq) (sink uint64) {
	for _, seq := range seqs[:min(len(seqs), maxNodePrefetch)] {
		at, tag := t.locate(uint64(seq))
		p := t.parts[at].Load()
		sink += atomic.LoadUint64(&p.slot[tag>>32&p.mask])
	}
	return sink
}

// maxNodePrefetch is the number of hashes whose slots prefetch loads: most blocks lie behind others
// and are not looked up here.
const maxNodePrefetch = 4

// insert publishes a node. Its hash is not in the table.
func (t *nodeTable) insert(seq uint64, id uint32) {
	at, tag := t.locate(seq)
	p := t.parts[at].Load()
	if c := &t.counts[at]; 4*(c.used+1) > 3*(p.mask+1) {
		p = t.rebuild(at)
	} else if c.bits > 2*p.mask { // bits of removed hashes are among them
		clear(p.bits)
		for _, word := range p.slot {
			if uint32(word) != 0 {
				w, bit := p.bit(word)
				p.bits[w] |= bit
			}
		}
		c.bits = c.live
	}
	t.put(at, p, tag|uint64(id))
}

func (t *nodeTable) put(at uint64, p *part, word uint64) {
	for i := word >> 32 & p.mask; ; i = (i + 1) & p.mask {
		if old := p.slot[i]; uint32(old) == 0 {
			if old == 0 {
				t.counts[at].used++
			}
			t.counts[at].live++
			t.counts[at].bits++
			w, bit := p.bit(word)
			p.bits[w] |= bit
			atomic.StoreUint64(&p.slot[i], word)
			return
		}
	}
}

// rebuild copies a part to the size that its live slots need.
func (t *nodeTable) rebuild(at uint64) *part {
	old := t.parts[at].Load().slot
	size := uint64(1) << bits.Len64(max(minPart, 2*(t.counts[at].live+1))-1)
	p := newPart(size)
	t.counts[at] = counts{}
	for _, word := range old {
		if uint32(word) != 0 {
			t.put(at, p, word)
		}
	}
	t.parts[at].Store(p)
	return p
}

const deleted = 1 << 32 // a slot that was used and is deleted

// remove removes a node.
func (t *nodeTable) remove(seq uint64, id uint32) {
	at, tag := t.locate(seq)
	p := t.parts[at].Load()
	for i := tag >> 32 & p.mask; ; i = (i + 1) & p.mask {
		switch p.slot[i] {
		case tag | uint64(id):
			t.counts[at].live--
			// If the next slot is empty, no probe has to continue past this one.
			if p.slot[(i+1)&p.mask] != 0 {
				atomic.StoreUint64(&p.slot[i], deleted)
				return
			}
			for ; ; i = (i - 1) & p.mask {
				atomic.StoreUint64(&p.slot[i], 0)
				t.counts[at].used--
				if p.slot[(i-1)&p.mask] != deleted {
					return
				}
			}
		case 0:
			return
		}
	}
}

// mayHave is for the writer: false if no node begins with seq.
func (t *nodeTable) mayHave(seq uint64) bool {
	at, tag := t.locate(seq)
	p := t.parts[at].Load()
	w, bit := p.bit(tag)
	return p.bits[w]&bit != 0
}

// find is the writer's look-up: the node that begins with seq, or 0.
func (t *nodeTable) find(seq uint64) uint32 {
	at, tag := t.locate(seq)
	p := t.parts[at].Load()
	if w, bit := p.bit(tag); p.bits[w]&bit == 0 {
		return 0
	}
	for i := tag >> 32 & p.mask; ; i = (i + 1) & p.mask {
		word := p.slot[i]
		if word == 0 {
			return 0
		}
		if word&genMask == tag && uint32(word) != 0 && t.nodes.at(uint32(word))[wFirst] == seq {
			return uint32(word)
		}
	}
}

// lookup is the readers' look-up: the node that begins with seq and its state at that moment, or 0.
// It restarts only if a node was removed while it searched.
func (t *nodeTable) lookup(seq uint64) (*node, uint32, uint64) {
again:
	at, tag := t.locate(seq)
	p := t.parts[at].Load()
	for i := tag >> 32 & p.mask; ; i = (i + 1) & p.mask {
		word := atomic.LoadUint64(&p.slot[i])
		if word == 0 {
			return nil, 0, 0
		}
		if word&genMask != tag || uint32(word) == 0 {
			continue
		}
		n := t.nodes.read(uint32(word))
		state := n.load(wState)
		if state&dead != 0 {
			goto again
		}
		if n.load(wFirst) == seq {
			return n, uint32(word), state
		}
		if atomic.LoadUint64(&p.slot[i]) != word {
			goto again
		}
	}
}
