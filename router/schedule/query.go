package schedule

import (
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer/completion"
	"sluice/router/worker"
)

// LegKind says what a choice is for.
type LegKind uint8

// The legs. Whole is an aggregated worker's prefill and decode in one.
const (
	WholeLeg LegKind = iota
	PrefillLeg
	DecodeLeg

	numLegs // how many there are
)

var legNames = [...]string{WholeLeg: "whole", PrefillLeg: "prefill", DecodeLeg: "decode"}

// String gives the leg's name as it stands in metrics, logs and explain records.
func (l LegKind) String() string {
	if int(l) < len(legNames) {
		return legNames[l]
	}
	return "unknown"
}

// Query is what a choice is made from. The caller owns and reuses it; Choose
// keeps nothing of it but pointers to ranks.
type Query struct {
	Leg LegKind
	// Candidates must not change once it was given: of a big pool the scheduler
	// remembers the slice itself.
	Candidates []*worker.Rank
	// Overlap by slot, for ranks whose feed is live, in blocks of each rank's
	// own BlockSize; nil when no tokens were found.
	Overlap *kvindex.Overlap
	// Overlaps, where fleets mix block sizes: each holds for the ranks of its
	// size only. When not empty, Overlap is not looked at.
	Overlaps []SizedOverlap
	// Approx is the text-mode overlap, used for ranks whose feed is not live
	// and for all ranks when there is no other.
	Approx *kvindex.Overlap
	// PromptTokens is exact or estimated; 0 unknown.
	PromptTokens int
	// ApproxBlockTokens is how many tokens one block of Approx stands for.
	ApproxBlockTokens int
	// MaxTokens the client asked for; 0 unknown.
	MaxTokens int
	// Keys are the prompt's sequence hashes in blocks of KeyTokens tokens, by
	// which it is known again while no event has told of it; nil does without.
	// They are borrowed for the call.
	Keys      []blockhash.Seq
	KeyTokens int
	// Session is a hash of the client's session, 0 for none: it stays on one rank
	// while that has no more than its share of the load.
	Session uint64
	// Reservation, when not nil, is memory for the Choice's, which must hold
	// nothing any more; else one is allocated.
	Reservation *Reservation
	// Excluded ranks have failed for this request already.
	Excluded []*worker.Rank
	// Pulls is what transfers from the prefill rank chosen were measured to take,
	// for a decode leg's transfer term; nil: the candidates' learned rates count.
	// In big pools, where not every candidate is weighed, those count anyway.
	TransferRates *completion.Row
	// OverlapWeight and Temperature, when not nil, count in place of the Options'.
	OverlapWeight, Temperature *float64
	// RequestID, for the explain record; "" keeps none.
	RequestID string
	// Attempt counts from 1.
	Attempt int
}

// SizedOverlap is the overlap of the ranks of one block size, in tokens. Of several
// of one size, a rank is in one at most.
type SizedOverlap struct {
	BlockSize int
	Overlap   kvindex.Overlap
}

// Choice is the rank chosen and what it was expected to hold.
type Choice struct {
	Rank          *worker.Rank
	OverlapBlocks int
	CachedTokens  int // predicted
	Cost          float64
	// Reservation holds the load of this choice until Release.
	Reservation *Reservation
}

// What is assumed where the client or the engine said nothing.
const (
	assumedPrompt    = 256  // tokens
	assumedOutput    = 256  // tokens, when max_tokens is not given
	maxOutput        = 2048 // tokens; max_tokens is a limit, often set far above what comes
	assumedBlockSize = 16   // tokens
)

// outputTokens estimates what will be generated for a max_tokens of n.
func outputTokens(n int) int {
	if n <= 0 {
		return assumedOutput
	}
	return min(n, maxOutput)
}

// sizeOf is the block size of a rank, in tokens.
func sizeOf(r *worker.Rank) int {
	if n := r.BlockSize(); n > 0 {
		return n
	}
	return assumedBlockSize
}

// blocksFor is the KV blocks a request takes on r when it is decoded there.
func blocksFor(r *worker.Rank, prompt, output int) int {
	size := sizeOf(r)
	return max(1, (prompt+output+size-1)/size)
}
