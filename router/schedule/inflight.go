package schedule

import (
	"math/bits"
	"sync/atomic"
	"time"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// inFlightTable remembers for a short time which prompts were sent to which rank. An engine reports
// a block only when it has computed it; without this table, simultaneous requests with the same new
// prefix would go to different ranks, and each would compute it.
//
// The cost does not depend on the number of blocks: a prompt is stored and looked up at a few
// depths only (1, 2, 3, 4, 6, 8, 12, 16, 24, … blocks, up to its own). A sequence hash covers all
// blocks before it, so two prompts that share that many blocks have the same hash there. A look-up
// finds at least two thirds of the shared blocks. A prompt of 2,048 blocks is stored at 21 depths.
//
// A cell is one atomic word: the slot, its expiry, and as much of the hash as fits. A bucket is one
// cache line of cells, selected by the rest of the hash; the oldest cell is replaced. The memory is
// therefore constant, a lost race loses a hint, and the probability of a false hit is about 2^-30.
type inFlightTable struct {
	buckets []bucket
	mask    uint64
	// used reports for each slot whether cells may name it. Otherwise an engine that clears its
	// cache repeatedly would cost a scan of all cells each time.
	used [worker.MaxSlots]atomic.Bool
}

type bucket [8]atomic.Uint64

const (
	inFlightBuckets = 4096 // 256 KiB
	slotBits        = 12   // worker.MaxSlots
	endBits         = 20
	// tick is the unit of the expiry. 2^20 ticks are three hours; a cell that was not replaced by
	// then becomes valid again for a few seconds.
	tick     = 10 * time.Millisecond
	tagShift = slotBits + endBits
	// eventLag is how long after its prefill a block remains in the table, and maxInFlight the
	// upper limit.
	eventLag         = 500 * time.Millisecond
	maxInFlight      = 5 * time.Second
	maxInFlightRanks = 16 // the largest number of ranks that one look-up returns
)

// inFlightBlocks is a rank to which the prompt's leading blocks were sent recently.
type inFlightBlocks struct {
	slot   worker.Slot
	blocks int
	tokens int
}

func newInFlightTable() *inFlightTable {
	return &inFlightTable{buckets: make([]bucket, inFlightBuckets), mask: inFlightBuckets - 1}
}

// nextDepth returns the largest depth below n at which prompts are stored, or 0: powers of two and
// the midpoints between them.
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

// add records that these blocks were sent to a slot, valid until now + wait. Events have already
// reported the first confirmed of them, which are not stored. now is in ns since the scheduler's
// start.
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
	// Set after the cells: a concurrent remove either sees them or leaves used set.
	if used := &t.used[slotAt(slot)]; !used.Load() {
		used.Store(true)
	}
}

// ticksLeft returns how many ticks are left until end, or 0 if it has passed.
func ticksLeft(end, now uint64) uint64 {
	d := (end - now) & (1<<endBits - 1)
	if d > uint64(maxInFlight/tick)+1 {
		return 0 // in the past, or from another cycle of the clock
	}
	return d
}

// find appends to dst the slots to which leading blocks of keys were sent, each with its greatest
// depth, at size tokens per block.
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

// remove removes a slot's cells: its engine has restarted or left.
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
