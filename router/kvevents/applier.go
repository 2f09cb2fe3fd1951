package kvevents

import (
	"math/bits"
	"slices"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// IndexObserver sees every change that events make to the index, in their order, on the
// feed's own goroutine: it must return at once. What it is given is borrowed for
// the call.
type IndexObserver interface {
	Stored(r *worker.Rank, ev *kvindex.Stored)
	Removed(r *worker.Rank, tier kvindex.Tier, engine []kvindex.EngineHash)
	Cleared(r *worker.Rank) // all the rank held, by the engine's word or for want of trust
}

// Applier decodes one rank's messages and puts their events into the index. It
// knows nothing of sequence numbers and sockets: a feed sees to those. It belongs
// to one goroutine.
type Applier struct {
	Index    kvindex.Index
	Observer IndexObserver // nil: nobody
	// OnClear, when not nil, is told of a rank before what the index holds for it
	// is dropped, so that nobody goes on to believe more than the index.
	OnClear func(worker.Slot)
	Rank    *worker.Rank
	Model   string // salts the hashes
	// Elsewhere counts blocks that are not credited to the rank; nil: nobody does.
	Uncredited *UncreditedBlocks

	decoder *Decoder
	event   Event
	stored  kvindex.Stored
	counts  map[string]int

	// Of this life of the engine.
	blockSize  int // tokens; 0 not seen yet
	group      int // the KV cache group that is indexed
	groupKnown bool
	tierRatio  [kvindex.NumTiers]int // blocks of ours in one of a slower tier's; 0 or 1: the same
	partHashes []kvindex.EngineHash

	orphans       int  // stores in a row that could not be placed
	orphansWarned bool // a warning was given of them, see warnOrphans
}

// NewApplier makes the applier of a rank whose engine speaks as engine says
// (NewDecoder).
func NewApplier(index kvindex.Index, rank *worker.Rank, model, engine string) *Applier {
	return &Applier{Index: index, Rank: rank, Model: model, decoder: NewDecoder(engine), counts: make(map[string]int)}
}

// Apply puts one message's events into the index. An error is the first thing
// that could not be read; what could be read was applied, and where that is not
// enough to go on the rank has been cleared.
func (a *Applier) Apply(payload []byte) (err error) {
	a.counts["batches"]++
	a.Rank.Events.Add(1)
	b, err := a.decoder.Reset(payload)
	if err != nil {
		a.counts["garbage"]++
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
			a.counts["garbage"]++
			if err == nil {
				err = wrong
			}
			// A store that cannot be read is a block missed. Anything else may
			// have been a removal, without which the rank is believed to hold
			// what it does not.
			if a.event.Kind != BlockStored {
				a.clearUntrusted("resets")
			}
		default:
			a.applyEvent(&a.event)
		}
	}
}

// maxKeptEntries is how long a list is kept for the next event. Those of engines are far
// shorter; one message of the largest size would else hold its memory for good.
const maxKeptEntries = 1 << 17

func (a *Applier) releaseBuffers() {
	if max(cap(a.event.Hashes), cap(a.event.Tokens), cap(a.event.Locals), cap(a.partHashes)) > maxKeptEntries {
		a.event, a.partHashes, a.stored = Event{}, nil, kvindex.Stored{}
	}
}

// isOwnRank says whether a batch of that rank is this one's. A worker of whose ranks
// nothing was said may be one rank of a larger deployment and call itself so.
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
		// A removal is applied: at worst there is nothing to remove.
		a.counts["unlocated"]++
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

// indexed says whether an event is of the one KV cache group that is indexed:
// the first with full attention, for only such a group's blocks say how much of
// a prompt need not be computed. Releases that do not name the kinds have it as
// group 0. All other groups are passed over.
func (a *Applier) indexed(ev *Event) bool {
	if ev.CacheKind == "" || !fullAttention(ev.CacheKind) {
		return ev.Group == a.group
	}
	if ev.Group != a.group && (!a.groupKnown || ev.Group < a.group) {
		if a.Index.CachedBlocks(a.Rank.Slot) > 0 {
			a.clearUntrusted("resets") // what was taken for it was another group's
		}
		a.group = ev.Group
		a.setBlockSize(0)
	}
	a.groupKnown = true
	return ev.Group == a.group
}

// fullAttention: the kinds of vLLM's specs whose every block depends on all
// before it and is kept for as long as the prompt's.
func fullAttention(kind string) bool {
	switch kind {
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// checkBlockSize says whether blocks are of the size that prompts are cut by, and cuts
// those of slower tiers that are a multiple of it. The size is learned from the
// device's blocks. Engines also send short ones, at the end of a prompt or of
// hybrid models' groups: the largest seen counts, and what was stored by a
// smaller one is of no use.
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

// setBlockSize notes the device's block size; how many of the old one's a slower tier's
// stood for says nothing of the new one.
func (a *Applier) setBlockSize(size int) {
	a.blockSize, a.tierRatio = size, [kvindex.NumTiers]int{}
}

// setTierRatio notes how many of our blocks one of a tier's stands for. An engine
// does not change it while it lives.
func (a *Applier) setTierRatio(tier kvindex.Tier, n int) bool {
	if a.tierRatio[tier] == 0 {
		a.tierRatio[tier] = n
	}
	return a.tierRatio[tier] == n
}

// maxTierRatio bounds what one hash of a slower tier is cut into.
const maxTierRatio = 256

// splitBlocks makes of each block of a slower tier as many of ours: the last has the
// engine's hash, by which successors name it, those before get hashes made from
// it, by which a removal finds them.
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

// appendPartHashes appends n hashes for each.
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
	a.counts["repeated"] += res.Repeated
	if res.Orphan {
		a.counts["orphans"]++
	}
	a.countOrphan(res.Orphan)
	if a.Observer != nil {
		a.Observer.Stored(a.Rank, &a.stored)
	}
}

// maxPartHashes is how many of a slower tier's blocks are cut for removal at a time: a
// message may name as many as it has bytes, each of which may be maxTierRatio of ours.
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

// clear drops all the index holds for the rank.
func (a *Applier) clear() {
	if a.OnClear != nil {
		a.OnClear(a.Rank.Slot)
	}
	a.Index.Clear(a.Rank.Slot)
	if a.Observer != nil {
		a.Observer.Cleared(a.Rank)
	}
}

// clearUntrusted clears, and counts why.
func (a *Applier) clearUntrusted(reason string) {
	a.counts[reason]++
	a.clear()
}

// resetEngine drops what was learned of the engine's life, for it has a new one.
func (a *Applier) resetEngine() {
	a.blockSize, a.group, a.groupKnown, a.tierRatio = 0, 0, false, [kvindex.NumTiers]int{}
}
