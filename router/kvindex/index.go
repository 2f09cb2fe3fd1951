package kvindex

import (
	"sluice/router/blockhash"
	"sluice/router/worker"
)

// EngineHash is an engine's own hash of a block, folded to 64 bits. Its value is opaque.
type EngineHash uint64

// Tier is the storage tier in which a rank keeps a block.
type Tier uint8

// The tiers, fastest first.
const (
	Device Tier = iota
	Host
	Disk
	NumTiers
)

var tierNames = [NumTiers]string{"device", "host", "disk"}

// String returns the tier's name as it appears in metrics and logs.
func (t Tier) String() string {
	if t < NumTiers {
		return tierNames[t]
	}
	return "unknown"
}

// Stored is one BlockStored event of a rank, ready to be stored. Engine and Local have equal
// length. The index borrows the slices for the call.
type Stored struct {
	Slot      worker.Slot
	Tier      Tier
	Salt      blockhash.Salt // used when HasParent is false
	HasParent bool
	Parent    EngineHash
	Engine    []EngineHash
	Local     []blockhash.Local

	// Set by Import: the blocks' sequence hashes, which replace Salt and Local, and the parent's.
	seqs      []blockhash.Seq
	parentSeq blockhash.Seq

	// Set, together with seqs, by an owner of places (see radix.ownerPlaces): Store writes the
	// place of each block to places; parentAt is the parent's place.
	places   []uint64
	parentAt uint64
}

// blocks is the number of blocks in the event.
func (ev *Stored) blocks() int { return max(len(ev.Engine), len(ev.places)) }

// valid reports whether the event can be stored.
func (ev *Stored) valid() bool {
	return ev.Slot < worker.MaxSlots && ev.Tier < NumTiers && ev.blocks() == max(len(ev.Local), len(ev.seqs))
}

// seq returns the sequence hash of block i; before is that of the block before it.
func (ev *Stored) seq(before blockhash.Seq, i int) blockhash.Seq {
	switch {
	case ev.seqs != nil:
		return ev.seqs[i]
	case i == 0 && !ev.HasParent:
		return blockhash.First(ev.Salt, ev.Local[0])
	}
	return blockhash.Next(before, ev.Local[i])
}

// isParent reports whether a block that was found by ev.Parent is the parent. An event identifies
// its parent by the engine hash alone; an owner of places knows the place.
func (ev *Stored) isParent(seq blockhash.Seq) bool {
	return ev.seqs == nil || ev.places != nil || seq == ev.parentSeq
}

// StoreResult counts the effects of one Store.
type StoreResult struct {
	Added    int  // blocks new for this rank and tier
	Repeated int  // blocks that the rank already had in this tier
	Orphan   bool // the rank does not have the parent: nothing was stored
}

// Index is the KV index. All methods may be called from any goroutine. The Find of New's index
// takes no lock, waits for no writer and allocates nothing. Writes are applied in an order
// consistent with each caller's own. The result of Find for a rank was true at some moment during
// the call, where an event counts as a sequence of changes, one per stretch of its blocks.
//
// Blocks are sets: storing an engine hash twice and removing it once removes the block, although an
// engine may still have a second copy. The index may therefore miss a block that the engine has,
// and never reports one that the engine has dropped.
type Index interface {
	// Store stores the blocks of one event. It looks up the parent in the event's tier first, then
	// in the rank's other tiers. If an engine hash is stored again with different content, the new
	// content replaces the old. An event whose slot or tier is out of range, or whose Engine and
	// Local differ in length, stores nothing.
	Store(ev *Stored) StoreResult
	// Remove removes blocks from a rank's tier by their engine hashes. Unknown hashes are counted
	// in unknown and have no effect.
	Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int)
	// Clear removes all blocks of a rank and returns how many there were.
	Clear(slot worker.Slot) int
	// Find resets o and sets it to each rank's depth: the number of leading blocks of seqs that the
	// rank has without a hole, in any tier.
	Find(seqs []blockhash.Seq, o *Overlap)
	// CachedBlocks returns the number of blocks that a rank has. A block in two tiers counts twice.
	CachedBlocks(slot worker.Slot) int
	// Len returns the number of (rank, tier, block) entries; Bytes returns the memory they take.
	Len() int
	Bytes() int64
}

// TierCounter is implemented by an index that counts the blocks of each tier.
type TierCounter interface {
	// CachedBlocksByTier is CachedBlocks for each tier. The counts are loaded one after the other.
	CachedBlocksByTier(slot worker.Slot) [NumTiers]int
}

// Evictor is implemented by an index that drops entries to stay within its bounds.
type Evictor interface {
	// Evicted returns how many (rank, tier, block) entries were dropped since the start to stay
	// below Options.MaxBytes.
	Evicted() uint64
}

// Reserver is implemented by an index that can reserve space in advance.
type Reserver interface {
	// Reserve reserves space for a number of blocks of a rank, such as the capacity that its engine
	// announces, so that storing them does not move a table. It is a hint: the index reserves less
	// if Options.MaxBytes requires it or if one rank would leave nothing for the others.
	Reserve(slot worker.Slot, blocks int)
}

// Options configures an Index. Zero values select the defaults.
type Options struct {
	MaxBytes int64 // [1 GiB]; above it the least recently used leaves are evicted and counted
}

// defaultMaxBytes is the bound of an index whose Options set none.
const defaultMaxBytes = 1 << 30
