package schedule

import (
	"time"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Leg says what a choice is for.
type Leg uint8

// The legs. Whole is an aggregated worker's prefill and decode in one.
const (
	Whole Leg = iota
	PrefillLeg
	DecodeLeg
)

// Query is what a choice is made from. The caller owns and reuses it.
type Query struct {
	Leg        Leg
	Candidates []*worker.Rank
	// Overlap by slot for ranks of the block size it was made for; nil when no
	// tokens were found. OverlapOf overrides it where fleets mix block sizes.
	Overlap *kvindex.Overlap
	// Approx is the text-mode overlap, used for ranks whose feed is not live.
	Approx *kvindex.Overlap
	// PromptTokens is exact or estimated; 0 unknown.
	PromptTokens int
	// ApproxBlockTokens is how many tokens one block of Approx stands for.
	ApproxBlockTokens int
	// MaxTokens the client asked for; 0 unknown.
	MaxTokens int
	// Excluded ranks have failed for this request already.
	Excluded []*worker.Rank
	// RequestID, for the explain record.
	RequestID string
	// Attempt counts from 1.
	Attempt int
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

// Options of a Scheduler; see config.Schedule for the defaults.
type Options struct {
	OverlapWeight, PrefillWeight, DecodeWeight, QueueWeight float64
	Temperature                                             float64
	Policy                                                  string
	Explain                                                 int
	Seed                                                    uint64 // 0: random
}

// Scheduler chooses. Safe for concurrent use.
type Scheduler struct {
	impl scheduler
}

type scheduler struct{}

// New makes a Scheduler.
func New(opt Options) *Scheduler { panic("contract") }

// Choose picks the candidate of least cost and books its load. ok is false
// when every candidate is excluded or there is none. It writes the decision
// with all its terms to the explain record of q.RequestID.
func (s *Scheduler) Choose(q *Query) (c Choice, ok bool) { panic("contract") }

// Reservation is the load one choice put on a rank, counted in the rank's
// PrefillTokens, DecodeBlocks and Requests. Methods may be called once each, in
// any order with Release last; Release is idempotent.
type Reservation struct {
	impl reservation
}

type reservation struct{}

// PrefillDone takes the prefill work off the rank: its first token has come.
func (r *Reservation) PrefillDone() { panic("contract") }

// Release takes everything off.
func (r *Reservation) Release() { panic("contract") }

// Outcome is how a request ended, added to its explain record.
type Outcome struct {
	Status       int
	Reason       string // front.Reason or relay.Cause, "" when well
	CachedTokens int    // as the engine reported; -1 unknown
	PromptTokens int
	OutputTokens int
	TTFT         time.Duration // 0: no token came
	Total        time.Duration
}

// Note adds a free line to a request's record (a retry and why, a fall-back).
func (s *Scheduler) Note(requestID, text string) { panic("contract") }

// End completes a request's record.
func (s *Scheduler) End(requestID string, out Outcome) { panic("contract") }

// Explain gives the record of a request as JSON; ok is false when it is not
// among the last N.
func (s *Scheduler) Explain(requestID string) (json []byte, ok bool) { panic("contract") }
