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
}

// StoreResult counts what one Store did.
type StoreResult struct {
	Added    int  // blocks new for this rank and tier
	Repeated int  // blocks the rank already held there
	Orphan   bool // the parent is unknown to this rank: nothing was stored
}

// Index is the KV index. Find may be called from any goroutine at any time and
// takes no lock in the implementation to come; the writing methods may be
// called from any goroutine and are applied in an order consistent with each
// caller's own.
type Index interface {
	// Store places the blocks of one event.
	Store(ev *Stored) StoreResult
	// Remove takes blocks from a rank's tier by the engine's hashes; unknown
	// ones are counted in unknown and are harmless.
	Remove(slot worker.Slot, tier Tier, engine []EngineHash) (removed, unknown int)
	// Clear forgets everything of a rank and returns how many blocks it held.
	Clear(slot worker.Slot) int
	// Find fills o with how deep each rank holds the prompt: the number of
	// leading blocks of seqs that the rank holds without a hole, in any tier.
	Find(seqs []blockhash.Seq, o *Overlap)
	// Held is how many blocks a rank holds (each tier counts).
	Held(slot worker.Slot) int
	// Len is the number of (rank, tier, block) entries; Bytes what they take.
	Len() int
	Bytes() int64
}

// Overlap is the result of Find, owned and reused by the caller.
type Overlap struct {
	impl overlap
}

type overlap struct{}

// Reset empties o for the next use.
func (o *Overlap) Reset() { panic("contract") }

// Depth is how many leading blocks the rank in slot holds, in any tier.
func (o *Overlap) Depth(slot worker.Slot) int { panic("contract") }

// Max is the greatest depth of any rank.
func (o *Overlap) Max() int { panic("contract") }

// New makes the index.
func New(opt Options) Index { panic("contract") }

// Options of an Index and of an Approx; zero values mean the default.
type Options struct {
	MaxBytes int64 // [1 GiB]; at the bound the oldest leaves go first, counted
}
