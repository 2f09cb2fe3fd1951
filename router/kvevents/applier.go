package kvevents

import (
	"math/bits"
	"slices"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// IndexObserver receives every change that events make to the index, in order, on the feed's
// goroutine. Its methods must return at once. The arguments are borrowed for the call.
type IndexObserver interface {
	// Stored reports an event that the index has applied, also if the rank had some of its blocks.
	Stored(r *worker.Rank, ev *kvindex.Stored)
	// Removed reports the hashes of an event, also those that were not in the index.
	Removed(r *worker.Rank, tier kvindex.Tier, engine []kvindex.EngineHash)
	Cleared(r *worker.Rank) // all blocks of the rank, because the engine cleared its cache or because they cannot be trusted
}

// Applier decodes one rank's messages and applies their events to the index. Sequence numbers and
// sockets are the feed's concern. An Applier belongs to one goroutine.
type Applier struct {
	Index    kvindex.Index
	Observer IndexObserver // nil: none
	// OnClear, when not nil, is called before the rank's blocks are dropped from the index, so that
	// other predictions about the rank can be dropped too.
	OnClear func(worker.Slot)
	Rank    *worker.Rank
	Model   string // part of the block hashes
	// Uncredited counts blocks that are not credited to the rank; nil: they are not counted.
	Uncredited *UncreditedBlocks

	decoder *Decoder
	event   Event
	stored  kvindex.Stored
	counts  map[string]int

	// The fields below describe the engine's current incarnation.
	blockSize  int // tokens; 0: not known yet
	group      int // the KV cache group that is indexed
	groupKnown bool
	tierRatio  [kvindex.NumTiers]int // device blocks per block of a slower tier; 0 or 1: the same size
	partHashes []kvindex.EngineHash

	orphans       int  // consecutive stores whose parent is unknown
	orphansWarned bool // warnOrphans has logged this series
}

// NewApplier returns the applier of a rank. engine selects the decoder, see NewDecoder.
func NewApplier(index kvindex.Index, rank *worker.Rank, model, engine string) *Applier {
	return &Applier{Index: index, Rank: rank, Model: model, decoder: NewDecoder(engine), counts: make(map[string]int)}
}

// Apply applies one message's events to the index. It returns the first decoding error. Events that
// can be decoded are applied nevertheless; the rank is cleared if the others leave its state
// unknown.
func (a *Applier) Apply(payload []byte) (err error) {
	a.counts["batches"]++
	a.Rank.Events.Add(1)
	b, err := a.decoder.Reset(payload)
	if err != nil {
		a.counts["malformed"]++
		a.clearUntrusted("resets")
		return err
	}
	if b.HasRank && !a.isOwnRank(b.Rank) {
		a.counts["wrong_rank"]++
		return nil
	}
	defer a.releaseBuffers()
	for {
		more, wrong := a.decoder.Next(&a.event)
		switch {
		case !more:
			return err
		case wrong != nil:
			a.counts["malformed"]++
			if err == nil {
				err = wrong
			}
			// After an undecodable store the index lacks a block. Any other undecodable event may
			// be a removal; without it the index would contain blocks that the rank no longer has.
			if a.event.Kind != BlockStored {
				a.clearUntrusted("resets")
			}
		default:
			a.applyEvent(&a.event)
		}
	}
}

// maxKeptEntries is the largest capacity of a list that is kept for the next event. Engines' lists
// are far shorter. Without the bound, one message of maximum size would keep its memory for good.
const maxKeptEntries = 1 << 17

func (a *Applier) releaseBuffers() {
	if max(cap(a.event.Hashes), cap(a.event.Tokens), cap(a.event.Locals), cap(a.partHashes)) > maxKeptEntries {
		a.event, a.partHashes, a.stored = Event{}, nil, kvindex.Stored{}
	}
}

// isOwnRank reports whether a batch of that rank number belongs to this feed. A worker with one
// rank and no configured ranks may be one rank of a larger deployment and use that rank's number.
func (a *Applier) isOwnRank(rank int) bool {
	r := a.Rank
	return rank == r.EngineRank() || r.Worker != nil && len(r.Worker.Ranks) == 1 && len(r.Worker.Spec.Ranks) == 0
}

func (a *Applier) applyEvent(ev *Event) {
	if ev.Kind == AllBlocksCleared {
		a.counts["cleared"]++
		a.clear()
		return
	}
	tier, known := TierOf(ev.Medium)
	switch {
	case ev.Kind == Unknown || !known:
	case ev.Locality == Remote:
		a.counts["remote"]++
		a.Uncredited.add(ev)
		return
	case ev.Kind == BlockStored && ev.Locality == Unspecified && isSharedMedium(ev.Medium):
		// Removals are applied: removing an absent block has no effect.
		a.counts["unknown_locality"]++
		a.Uncredited.add(ev)
		return
	case !a.indexed(ev):
	case ev.Kind == BlockRemoved:
		a.remove(tier, ev.Hashes)
		return
	case len(ev.Locals) > 0 && a.checkBlockSize(ev, tier):
		a.store(ev, tier)
		return
	}
	a.counts["ignored"]++
}

// indexed reports whether an event belongs to the KV cache group that is indexed: the first group
// with full attention, because only its blocks tell how much of a prompt need not be computed.
// Releases that do not name the group kinds use group 0 for it. Events of other groups are ignored.
func (a *Applier) indexed(ev *Event) bool {
	if ev.CacheKind == "" || !fullAttention(ev.CacheKind) {
		return ev.Group == a.group
	}
	if ev.Group != a.group && (!a.groupKnown || ev.Group < a.group) {
		if a.Index.CachedBlocks(a.Rank.Slot) > 0 {
			a.clearUntrusted("resets") // the blocks stored so far belong to another group
		}
		a.group = ev.Group
		a.setBlockSize(0)
	}
	a.groupKnown = true
	return ev.Group == a.group
}

// fullAttention reports whether kind is one of vLLM's cache specs in which every block depends on
// all blocks before it and is kept as long as the prompt.
func fullAttention(kind string) bool {
	switch kind {
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// checkBlockSize reports whether the event's blocks have the device's block size, after splitting
// blocks of slower tiers whose size is a multiple of it. The size is learned from device blocks.
// Engines also send smaller ones, at the end of a prompt or for groups of hybrid models, so the
// largest size seen is used; blocks stored with a smaller size are dropped.
func (a *Applier) checkBlockSize(ev *Event, tier kvindex.Tier) bool {
	size := ev.BlockSize
	if size > a.blockSize && tier == kvindex.Device {
		if a.blockSize != 0 {
			a.clearUntrusted("resets")
		}
		a.setBlockSize(size)
		a.Rank.EventBlockSize.Store(int64(size))
	}
	if size == a.blockSize {
		return tier == kvindex.Device || a.setTierRatio(tier, 1)
	}
	return a.blockSize > 0 && size%a.blockSize == 0 && !ev.Pairs && !ev.Extra && a.splitBlocks(ev, tier)
}

// setBlockSize sets the device's block size and forgets the tiers' ratios, which depend on it.
func (a *Applier) setBlockSize(size int) {
	a.blockSize, a.tierRatio = size, [kvindex.NumTiers]int{}
}

// setTierRatio records how many device blocks one block of a tier holds, and reports whether it is
// consistent. The ratio is constant during an incarnation.
func (a *Applier) setTierRatio(tier kvindex.Tier, n int) bool {
	if a.tierRatio[tier] == 0 {
		a.tierRatio[tier] = n
	}
	return a.tierRatio[tier] == n
}

// maxTierRatio bounds the number of device blocks per block of a slower tier.
const maxTierRatio = 256

// splitBlocks splits each block of a slower tier into device-sized ones. The last of them keeps the
// engine's hash, by which successors name their parent. The others get hashes derived from it, by
// which a removal finds them.
func (a *Applier) splitBlocks(ev *Event, tier kvindex.Tier) bool {
	n := ev.BlockSize / a.blockSize
	if tier == kvindex.Device || n > maxTierRatio || !a.setTierRatio(tier, n) {
		return false
	}
	ev.Locals = blockhash.Locals(ev.Locals[:0], ev.Tokens, a.blockSize)
	a.partHashes = appendPartHashes(a.partHashes[:0], ev.Hashes, n)
	ev.Hashes = append(ev.Hashes[:0], a.partHashes...)
	return true
}

// appendPartHashes appends n hashes per hash.
func appendPartHashes(dst, hashes []kvindex.EngineHash, n int) []kvindex.EngineHash {
	for _, h := range hashes {
		for i := range n - 1 {
			dst = append(dst, kvindex.EngineHash(bits.RotateLeft64(uint64(h)*0x9E3779B97F4A7C15+uint64(i), 23)*0xBF58476D1CE4E5B9))
		}
		dst = append(dst, h)
	}
	return dst
}

func (a *Applier) store(ev *Event, tier kvindex.Tier) {
	a.stored = kvindex.Stored{
		Slot: a.Rank.Slot, Tier: tier, Salt: blockhash.NewSalt(a.Model, ev.LoRA, ev.CacheSalt),
		HasParent: ev.HasParent, Parent: ev.Parent, Engine: ev.Hashes, Local: ev.Locals,
	}
	res := a.Index.Store(&a.stored)
	a.counts["stored"] += res.Added
	a.counts["duplicate"] += res.Repeated
	if res.Orphan {
		a.counts["orphans"]++
	}
	a.countOrphan(res.Orphan)
	if a.Observer != nil {
		a.Observer.Stored(a.Rank, &a.stored)
	}
}

// maxPartHashes is the number of hashes of a slower tier that one removal step expands. A message
// may contain as many hashes as its size permits, and each expands to up to maxTierRatio.
const maxPartHashes = 64

func (a *Applier) remove(tier kvindex.Tier, hashes []kvindex.EngineHash) {
	n := a.tierRatio[tier]
	if n <= 1 {
		a.removeBlocks(tier, hashes)
		return
	}
	for some := range slices.Chunk(hashes, maxPartHashes) {
		a.partHashes = appendPartHashes(a.partHashes[:0], some, n)
		a.removeBlocks(tier, a.partHashes)
	}
}

func (a *Applier) removeBlocks(tier kvindex.Tier, hashes []kvindex.EngineHash) {
	removed, unknown := a.Index.Remove(a.Rank.Slot, tier, hashes)
	a.counts["removed"] += removed
	a.counts["unknown_removed"] += unknown
	if a.Observer != nil {
		a.Observer.Removed(a.Rank, tier, hashes)
	}
}

// clear removes all blocks of the rank from the index.
func (a *Applier) clear() {
	if a.OnClear != nil {
		a.OnClear(a.Rank.Slot)
	}
	a.Index.Clear(a.Rank.Slot)
	if a.Observer != nil {
		a.Observer.Cleared(a.Rank)
	}
}

// clearUntrusted clears the rank and counts the reason.
func (a *Applier) clearUntrusted(reason string) {
	a.counts[reason]++
	a.clear()
}

// resetEngine forgets what was learned of the engine's previous incarnation.
func (a *Applier) resetEngine() {
	a.blockSize, a.group, a.groupKnown, a.tierRatio = 0, 0, false, [kvindex.NumTiers]int{}
}
