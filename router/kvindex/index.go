package kvindex

import (
	"sluice/router/blockhash"
	"sluice/router/worker"
)

// EngineHash is an engine's own hash of a block, folded to 64 bits; opaque.
type EngineHash uint64

// Tier says where a rank keeps a block.
type Tier uint8

// The tiers, fastest first.
const (
	Device Tier = iota
	Host
	Disk
	NumTiers
)

var tierNames = [NumTiers]string{"device", "host", "disk"}

// String gives the tier's name as it stands in metrics and logs.
func (t Tier) String() string {
	if t < NumTiers {
		return tierNames[t]
	}
	return "unknown"
}

// Stored is one BlockStored event of a rank, ready to be placed. Engine and
// Local have equal length. The slices are borrowed for the call.
type Stored struct {
	Slot      worker.Slot
	Tier      Tier
	Salt      blockhash.Salt // used when HasParent is false
	HasParent bool
	Parent    EngineHash
	Engine    []EngineHash
	Local     []blockhash.Local

	// Of an Import: our own hashes, which take the place of Salt and Local, and the
	// parent's.
	seqs      []blockhash.Seq
	parentSeq blockhash.Seq

	// Of an owner of places (see radix.owned), with seqs: Store writes here where each
	// block has come to lie, and parentAt is where the parent lies.
	places   []uint64
	parentAt uint64
}

// blocks is how many the event brings.
func (ev *Stored) blocks() int { return max(len(ev.Engine), len(ev.places)) }

// valid says whether the event can be placed at all.
func (ev *Stored) valid() bool {
	return ev.Slot < worker.MaxSlots && ev.Tier < NumTiers && ev.blocks() == max(len(ev.Local), len(ev.seqs))
}

// seq is the sequence hash of block i; before is that of the block before it.
func (ev *Stored) seq(before blockhash.Seq, i int) blockhash.Seq {
	switch {
	case ev.seqs != nil:
		return ev.seqs[i]
	case i == 0 && !ev.HasParent:
		return blockhash.First(ev.Salt, ev.Local[0])
	}
	return blockhash.Next(before, ev.Local[i])
}

// isParent says whether a block found by ev.Parent is the parent. Of events there
// is nothing else to go by, and an owner of places knows.
func (ev *Stored) isParent(seq blockhash.Seq) bool {
	return ev.seqs == nil || ev.places != nil || seq == ev.parentSeq
}

// StoreResult counts what one Store did.
type StoreResult struct {
	Added    int  // blocks new for this rank and tier
	Repeated int  // blocks the rank already held there
	Orphan   bool // the parent is unknown to this rank: nothing was stored
}

// Index is the KV index. Find may be called from any goroutine at any time; New's
// takes no lock, waits for no writer and allocates nothing. The writing methods may
// be called from any goroutine and are applied in an order consistent with each
// caller's own. What Find says of a rank was true at some moment of the call, with
// an event taken to happen one stretch of its blocks after another.
//
// Blocks are kept as sets: storing an engine hash twice and removing it once
// leaves it gone, though an engine may still hold a second copy. That forgets a
// block early (a missed hit) and never remembers one that is gone.
type Index interface {
	// Store places the blocks of one event. The parent is looked up in the
	// event's tier first, then in the rank's other tiers. An engine hash that
	// comes back with other content replaces the old: the newest wins. An event
	// for a slot or tier out of range, or with Engine and Local of different
	// lengths, stores nothing.
	Store(ev *Stored) StoreResult
	// Remove takes blocks from a rank's tier by the engine's hashes; unknown
	// ones are counted in unknown and are harmless.
	Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int)
	// Clear forgets everything of a rank and returns how many blocks it held.
	Clear(slot worker.Slot) int
	// Find fills o with how deep each rank holds the prompt: the number of
	// leading blocks of seqs that the rank holds without a hole, in any tier.
	// It resets o first.
	Find(seqs []blockhash.Seq, o *Overlap)
	// Held is how many blocks a rank holds (each tier counts).
	CachedBlocks(slot worker.Slot) int
	// Len is the number of (rank, tier, block) entries; Bytes what they take.
	Len() int
	Bytes() int64
}

// Evictor is implemented by an index that drops entries to stay in its bounds.
type Evictor interface {
	// Evicted is how many (rank, tier, block) entries have been dropped to
	// stay under Options.MaxBytes since the start.
	Evicted() uint64
}

// Reserver is implemented by an index that can make room ahead.
type Reserver interface {
	// Reserve makes room for so many blocks of a rank, such as its engine's
	// announced capacity, so that storing them moves no table. It is a hint:
	// less may be made where Options.MaxBytes asks for it, and where one rank
	// would leave none for the others.
	Reserve(slot worker.Slot, blocks int)
}

// Options of an Index; zero values mean the default.
type Options struct {
	MaxBytes int64 // [1 GiB]; at the bound the oldest leaves go first, counted
}

// defaultMaxBytes bounds an index whose owner said nothing.
const defaultMaxBytes = 1 << 30
