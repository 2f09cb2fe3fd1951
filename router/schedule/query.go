package schedule

import (
	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer/completion"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// LegKind is the kind of leg that a choice is for.
type LegKind uint8

// The legs. Whole is prefill and decode on one aggregated worker.
const (
	WholeLeg LegKind = iota
	PrefillLeg
	DecodeLeg

	numLegs // the number of legs
)

var legNames = [...]string{WholeLeg: "whole", PrefillLeg: "prefill", DecodeLeg: "decode"}

// String returns the leg's name as it appears in metrics, logs and explain records.
func (l LegKind) String() string {
	if int(l) < len(legNames) {
		return legNames[l]
	}
	return "unknown"
}

// Query is the input of a choice. The caller owns and reuses it; Choose keeps only pointers to
// ranks.
type Query struct {
	Leg LegKind
	// Candidates must not change after the first call with it: for a large pool the scheduler
	// remembers the slice itself.
	Candidates []*worker.Rank
	// Overlap is by slot, for ranks whose feed is live, in blocks of each rank's own BlockSize; nil
	// if no tokens were found.
	Overlap *kvindex.Overlap
	// Overlaps, for fleets with several block sizes: each applies to the ranks of its size only. If
	// not empty, Overlap is ignored.
	Overlaps []SizedOverlap
	// Approx is the predicted overlap, used for ranks whose feed is not live and for all ranks if
	// there is no other.
	Approx *kvindex.Overlap
	// PromptTokens is exact or estimated; 0 unknown.
	PromptTokens int
	// Source is where the prompt's token ids are from, for the explain record.
	Source tokenize.Source
	// ApproxBlockTokens is the number of tokens per block of Approx.
	ApproxBlockTokens int
	// MaxTokens is the client's limit; 0 unknown.
	MaxTokens int
	// Unseen says that the router does not see the first token of a whole leg, because its answer is
	// not streamed.
	Unseen bool
	// Keys are the prompt's sequence hashes in blocks of KeyTokens tokens, by which it is
	// recognised before events report it; nil disables that. They are borrowed for the call.
	Keys      []blockhash.Seq
	KeyTokens int
	// Session is a hash of the client's session, 0 for none, and SessionRank the rank that took the
	// leg of its last request, nil if none did. They are hints, see pickBySession.
	Session     uint64
	SessionRank *worker.Rank
	// SessionID names the session in the explain record; 0: none.
	SessionID uint32
	// Reservation, if not nil, is memory for the Choice's reservation and must be released;
	// otherwise one is allocated.
	Reservation *Reservation
	// Excluded ranks have already failed for this request.
	Excluded []*worker.Rank
	// TransferRates are the measured transfers from the chosen prefill rank, for a decode leg's
	// transfer term; nil: the candidates' learned rates are used. In large pools, where not every
	// candidate is evaluated, the learned rates are used anyway.
	TransferRates *completion.Row
	// OverlapWeight and Temperature, if not nil, replace those of the Options.
	OverlapWeight, Temperature *float64
	// RequestID names the explain record; "" makes none.
	RequestID string
	// Attempt counts from 1.
	Attempt int
}

// SizedOverlap is the overlap of the ranks of one block size, in tokens. If several have the same
// size, a rank is in at most one.
type SizedOverlap struct {
	BlockSize int
	Overlap   kvindex.Overlap
}

// Choice is the chosen rank and its expected overlap.
type Choice struct {
	Rank          *worker.Rank
	OverlapBlocks int
	CachedTokens  int // predicted
	Cost          float64
	// Reservation is the load of this choice until Release.
	Reservation *Reservation
}

// Assumptions where neither the client nor the engine gives a value.
const (
	assumedPrompt    = 256  // tokens
	assumedOutput    = 256  // tokens, if max_tokens is absent
	maxOutput        = 2048 // tokens; max_tokens is a limit and often far above the actual length
	assumedBlockSize = 16   // tokens
)

// outputTokens estimates how many tokens will be generated for a max_tokens of n.
func outputTokens(n int) int {
	if n <= 0 {
		return assumedOutput
	}
	return min(n, maxOutput)
}

// sizeOf returns the block size of a rank, in tokens.
func sizeOf(r *worker.Rank) int {
	if n := r.BlockSize(); n > 0 {
		return n
	}
	return assumedBlockSize
}

// blocksFor returns the KV blocks that a request needs on r when it is decoded there.
func blocksFor(r *worker.Rank, prompt, output int) int {
	size := sizeOf(r)
	return max(1, (prompt+output+size-1)/size)
}
