package schedule

import (
	"math"
	"sync/atomic"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// reuseTable estimates how likely the cached tokens that a placement displaces are asked for again.
//
// An engine evicts what was used least recently, so that what matters is how long ago that was, and
// how long prompts wait for their next use. Both are learned from the prompts of choices. The table
// has, for each prompt and the rank that it was placed on, when that was and how many tokens only this
// prompt uses there. A prompt that continues another one, a turn of a chat or of an agent or another
// question about a document, finds the other's entry and takes its place. So the table sees each reuse
// and its age, and live has, by rank, the tokens that were used lately: each counts half after
// halfLife.
//
// A prompt is entered at one depth, the largest of those of inFlightTable, and looked up at its own
// few largest ones. The memory is constant, nothing is allocated or locked, and a lost race loses a
// hint.
type reuseTable struct {
	buckets []reuseBucket
	mask    uint64
	// live are the tokens used lately, by slot: a float32 in the upper bits, the tick for which it is
	// right in the lower ones.
	live [worker.MaxSlots]atomic.Uint64
	// What was learned: the mean ticks between two uses, the share of prompts that continue another, and
	// the number of reuses seen, up to minReuses.
	gap, share atomicFloat
	seen       atomic.Int32
}

// reuseBucket is a cache line of cells. A cell is a word with the upper bits of a key and the slot,
// and a word with the tick of the last use and, in units of reuseUnit tokens, the length of the prompt
// with its output and how much of it no other prompt uses.
type reuseBucket [4][2]atomic.Uint64

const (
	reuseBuckets  = 1 << 14 // 1 MiB
	reuseUnit     = 16      // tokens
	reuseBits     = 20
	reuseTickBits = 64 - 2*reuseBits
	reuseLookups  = 4 // depths
	maxReused     = 4 // ranks of one prompt that are found
	// halfLifeGaps is the half-life of live in mean times between two uses.
	halfLifeGaps = 2
	minReuses    = 64 // before which nothing is known
	// learnFrom is the weight of one prompt.
	learnFrom = 1.0 / 64
	// maxChance is above 1, so that of two ranks with more in use than they can hold the one with less
	// is preferred.
	maxChance = 1.5
)

// atomicFloat is a float32. A lost race loses one step.
type atomicFloat struct{ bits atomic.Uint32 }

func (f *atomicFloat) load() float64   { return float64(math.Float32frombits(f.bits.Load())) }
func (f *atomicFloat) store(v float64) { f.bits.Store(math.Float32bits(float32(v))) }

// approach moves the value a fraction of the way to v.
func (f *atomicFloat) approach(v, fraction float64) {
	old := f.load()
	f.store(old + (v-old)*fraction)
}

// usedPrompt is an entry that a prompt continues.
type usedPrompt struct {
	cell           *[2]atomic.Uint64
	key            uint64 // the cell's first word
	slot           worker.Slot
	tick           uint32
	tokens, unique int
}

// reuse is what a choice knows of reuse.
type reuse struct {
	table  *reuseTable
	tick   uint32
	decay  float64 // 1/halfLife, in ticks
	chance float64 // that a prompt is continued
	found  []usedPrompt
}

func newReuseTable() *reuseTable {
	return &reuseTable{buckets: make([]reuseBucket, reuseBuckets), mask: reuseBuckets - 1}
}

func reuseTick(now int64) uint32 { return uint32(uint64(now) / uint64(tick)) }

// find appends the entries that a prompt continues, at the greatest depth that has any.
func (t *reuseTable) find(dst []usedPrompt, keys []blockhash.Seq) []usedPrompt {
	d := nextDepth(len(keys) + 1)
	for range reuseLookups {
		if d == 0 {
			break
		}
		k := uint64(keys[d-1])
		b := &t.buckets[k&t.mask]
		for i := range b {
			w := b[i][0].Load()
			if w == 0 || w>>slotBits != k>>slotBits {
				continue
			}
			v := b[i][1].Load()
			dst = append(dst, usedPrompt{cell: &b[i], key: w, slot: worker.Slot(w & (1<<slotBits - 1)), tick: uint32(v >> (2 * reuseBits)),
				tokens: int(v>>reuseBits&(1<<reuseBits-1)) * reuseUnit, unique: int(v&(1<<reuseBits-1)) * reuseUnit})
		}
		if len(dst) > 0 {
			break
		}
		d = nextDepth(d)
	}
	return dst
}

// at returns what is known at a time.
func (t *reuseTable) at(now int64) reuse {
	u := reuse{table: t, tick: reuseTick(now)}
	if t.seen.Load() == minReuses {
		u.decay, u.chance = 1/max(1, halfLifeGaps*t.gap.load()), t.share.load()
	}
	return u
}

// find sets the entries that a prompt continues, in the memory of dst.
func (u *reuse) find(dst []usedPrompt, keys []blockhash.Seq) { u.found = u.table.find(dst, keys) }

// age returns the ticks since a use. One that seems to be in the future is of a concurrent choice.
func (u *reuse) age(tick uint32) float64 {
	d := (u.tick - tick) & (1<<reuseTickBits - 1)
	if d >= 1<<(reuseTickBits-1) {
		return 0
	}
	return float64(d)
}

// remaining returns 2^-x, to within 6 %.
func remaining(x float64) float64 {
	if x >= 60 {
		return 0
	}
	n := math.Floor(x)
	return (1 - (x-n)/2) * math.Float64frombits(uint64(1023-int(n))<<52)
}

// liveTokens returns the tokens on a slot that were used lately.
func (u *reuse) liveTokens(slot worker.Slot) float64 {
	w := u.table.live[slotAt(slot)].Load()
	return float64(math.Float32frombits(uint32(w>>32))) * remaining(float64(max(0, int32(u.tick-uint32(w))))*u.decay)
}

// displaced returns how many of a number of tokens that leave a rank's cache are expected to be asked
// for again.
//
// If tokens leave a cache of C tokens after an age of a, and at each younger age equally many are
// cached, the tokens used lately are C·(1−p)/ln(1/p), where p = 2^(−a/halfLife) is how much those that
// leave still count. The square of their share of C is within 0.06 of p.
func (u *reuse) displaced(slot worker.Slot, tokens, capacity int) int {
	return int(float64(tokens) * u.chanceOf(slot, capacity))
}

// chanceOf is displaced for one token.
func (u *reuse) chanceOf(slot worker.Slot, capacity int) float64 {
	if u.decay == 0 {
		return 1
	}
	x := u.liveTokens(slot) / float64(capacity)
	return u.chance * min(x*x, maxChance)
}

// place enters a prompt that was placed on a slot, where it has that many tokens with its output, of
// which some were cached.
func (u *reuse) place(slot worker.Slot, keys []blockhash.Seq, tokens, cached int) {
	t := u.table
	d := nextDepth(len(keys) + 1)
	if d == 0 {
		return
	}
	key := uint64(keys[d-1])>>slotBits<<slotBits | uint64(slot)
	unique, before := tokens-cached, 0.0
	var old *usedPrompt
	for i := range u.found {
		if e := &u.found[i]; e.slot == slot {
			old = e
		}
	}
	if len(u.found) > 0 {
		t.learn(u)
	} else {
		t.share.approach(0, learnFrom)
	}
	if old != nil {
		before = float64(old.unique) * remaining(u.age(old.tick)*u.decay)
		unique = old.unique + max(0, tokens-old.tokens)
	}
	t.addLive(u, slot, float64(unique)-before)
	value := uint64(u.tick)<<(2*reuseBits) | reuseUnits(tokens)<<reuseBits | reuseUnits(unique)
	if old != nil && old.key == key {
		old.cell[1].Store(value)
		return
	}
	if old != nil {
		old.cell[0].CompareAndSwap(old.key, 0)
	}
	b := &t.buckets[uint64(keys[d-1])&t.mask]
	at, oldest := 0, -1.0
	for i := range b {
		w := b[i][0].Load()
		if w == 0 || w == key {
			at = i
			break
		}
		if a := u.age(uint32(b[i][1].Load() >> (2 * reuseBits))); a > oldest {
			at, oldest = i, a
		}
	}
	b[at][1].Store(value)
	b[at][0].Store(key)
}

func reuseUnits(tokens int) uint64 {
	return uint64(min(max(0, tokens)/reuseUnit, 1<<reuseBits-1))
}

// learn takes a prompt that continues others as evidence.
func (t *reuseTable) learn(u *reuse) {
	e := &u.found[0]
	for i := range u.found {
		if u.age(u.found[i].tick) < u.age(e.tick) {
			e = &u.found[i]
		}
	}
	fraction := learnFrom
	if n := t.seen.Load(); n < minReuses {
		fraction = 1 / float64(n+1)
		t.seen.Store(n + 1)
	}
	t.gap.approach(u.age(e.tick), fraction)
	t.share.approach(1, learnFrom)
}

// addLive adds tokens to a slot's, or subtracts negative ones.
func (t *reuseTable) addLive(u *reuse, slot worker.Slot, tokens float64) {
	w := &t.live[slotAt(slot)]
	for {
		old := w.Load()
		v := max(0, u.liveTokens(slot)+tokens)
		if w.CompareAndSwap(old, uint64(math.Float32bits(float32(v)))<<32|uint64(u.tick)) {
			return
		}
	}
}

// forget removes what is known of a slot's cache: its engine has restarted or left. Its entries
// remain, and the next use of each is counted as new there.
func (t *reuseTable) forget(slot worker.Slot) { t.live[slotAt(slot)].Store(0) }
