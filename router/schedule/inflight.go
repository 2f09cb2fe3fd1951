package schedule

import (
	"math/bits"
	"sync/atomic"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// inFlightTable remembers for a short while what was sent where, because an engine tells
// of a block only when it has computed it: requests with one new prefix that come
// in a burst would else each be sent to another rank, and each compute it.
//
// Nothing is done per block: a prompt is entered, and asked for, at some depths
// only (1, 2, 3, 4, 6, 8, 12, 16, 24, … blocks, up to its own). A sequence hash
// stands for all blocks before it, so two prompts that share so many blocks have
// the same hash there, whatever comes after; what is found is at least two thirds
// of what they share. A prompt of 2,048 blocks is entered at 21 depths.
//
// A cell is one atomic word: slot, when it ends, and as much of the hash as there
// is room for. A bucket is one cache line of cells, chosen by the rest of the
// hash; the oldest cell gives way. So the memory is fixed, a lost race loses a
// hint, and a false hit has odds of some 2^-30.
type inFlightTable struct {
	buckets []bucket
	mask    uint64
	// used says of each slot whether cells may name it. An engine that clears its cache
	// again and again would otherwise cost a scan of all cells each time.
	used [worker.MaxSlots]atomic.Bool
}

type bucket [8]atomic.Uint64

const (
	inFlightBuckets = 4096 // 256 KiB
	slotBits        = 12   // worker.MaxSlots
	endBits         = 20
	// tick is the unit of the end; 2^20 of them are three hours, after which a
	// cell that nothing has replaced lives once more, for a few seconds.
	tick     = 10 * time.Millisecond
	tagShift = slotBits + endBits
	// eventLag is how long after its prefill a block is still awaited, and
	// maxInFlight how long at most.
	eventLag         = 500 * time.Millisecond
	maxInFlight      = 5 * time.Second
	maxInFlightRanks = 16 // ranks that one choice hears of
)

// inFlightBlocks is a rank to which the prompt's leading blocks were just sent.
type inFlightBlocks struct {
	slot   worker.Slot
	blocks int
	tokens int
}

func newInFlightTable() *inFlightTable {
	return &inFlightTable{buckets: make([]bucket, inFlightBuckets), mask: inFlightBuckets - 1}
}

// nextDepth is the depth below n at which prompts are entered, 0 when there is
// none: powers of two and the steps half way between them.
func nextDepth(n int) int {
	if n <= 1 {
		return 0
	}
	n--
	p := 1 << (bits.Len(uint(n)) - 1)
	if h := p + p/2; n >= h {
		return h
	}
	return p
}

func (t *inFlightTable) cell(k blockhash.Seq) (b *bucket, tag uint64) {
	return &t.buckets[uint64(k)&t.mask], uint64(k) >> tagShift << tagShift
}

func endOf(word uint64) uint64 { return word >> slotBits & (1<<endBits - 1) }

// add notes that these blocks were sent to a slot, until now + wait; of the first
// held of them events have told already, so nobody need be told here. now is ns since
// the scheduler's start.
func (t *inFlightTable) add(slot worker.Slot, keys []blockhash.Seq, confirmed int, now int64, wait time.Duration) {
	end := uint64(now+int64(min(wait, maxInFlight))+int64(tick)) / uint64(tick) & (1<<endBits - 1)
	soon := uint64(now) / uint64(tick)
	for d := nextDepth(len(keys) + 1); d > confirmed; d = nextDepth(d) {
		b, tag := t.cell(keys[d-1])
		packed := tag | end<<slotBits | uint64(slot)
		evicted, remaining := 0, ^uint64(0)
		for i := range b {
			w := b[i].Load()
			if w>>tagShift == tag>>tagShift && w&(1<<slotBits-1) == uint64(slot) {
				evicted = i
				break
			}
			if l := ticksLeft(endOf(w), soon); w == 0 || l == 0 {
				evicted, remaining = i, 0
			} else if l < remaining {
				evicted, remaining = i, l
			}
		}
		b[evicted].Store(packed)
	}
	// After the cells: a concurrent remove either sees them or leaves used set.
	if used := &t.used[slotAt(slot)]; !used.Load() {
		used.Store(true)
	}
}

// ticksLeft is how many ticks are left until end, 0 when it has passed.
func ticksLeft(end, now uint64) uint64 {
	d := (end - now) & (1<<endBits - 1)
	if d > uint64(maxInFlight/tick)+1 {
		return 0 // before now, or from another round of the clock
	}
	return d
}

// find adds to dst the slots to which leading blocks of keys were sent, each with
// the deepest that is known, of size tokens a block.
func (t *inFlightTable) find(dst []inFlightBlocks, keys []blockhash.Seq, size int, now int64) []inFlightBlocks {
	soon := uint64(now) / uint64(tick)
	for d := nextDepth(len(keys) + 1); d > 0; d = nextDepth(d) {
		b, tag := t.cell(keys[d-1])
	cells:
		for i := range b {
			w := b[i].Load()
			if w == 0 || w>>tagShift != tag>>tagShift || ticksLeft(endOf(w), soon) == 0 {
				continue
			}
			slot := worker.Slot(w & (1<<slotBits - 1))
			for k := range dst {
				if dst[k].slot == slot {
					continue cells
				}
			}
			if len(dst) == maxInFlightRanks {
				return dst
			}
			dst = append(dst, inFlightBlocks{slot: slot, blocks: d, tokens: d * size})
		}
	}
	return dst
}

// remove drops what is awaited of a slot: its engine has restarted or left.
func (t *inFlightTable) remove(slot worker.Slot) {
	if used := &t.used[slotAt(slot)]; !used.Load() || !used.Swap(false) {
		return
	}
	for i := range t.buckets {
		for k := range t.buckets[i] {
			c := &t.buckets[i][k]
			if w := c.Load(); w != 0 && w&(1<<slotBits-1) == uint64(slot) {
				c.CompareAndSwap(w, 0)
			}
		}
	}
}
