package pd

import (
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// request is one client's request under way, pooled. It is not used after the handler has
// returned; what a relayed stream needs then stands in streamState.
type request struct {
	scratch
	runState
}

// scratch is the memory of a request that the next one uses again.
type scratch struct {
	prompt     tokenize.Prompt
	overlaps   []schedule.SizedOverlap // overlap per block size of the pool
	approx     kvindex.Overlap
	keys       []blockhash.Seq // of the approximate index
	keyBuf     []blockhash.Seq // scratch for the event index
	summary    poolSummary     // of a small pool
	prefetched uint64          // what was looked at before it was needed

	call        *upstream.Call // of the last leg, for the next; nil: somebody else may cut it yet
	decodeAbort *decodeAbort   // the memory of leaves
	// answers is the memory of armPrefillAbort; nil until a prefill leg was sent.
	prefillAbort *prefillAbort
	// between is the memory of await; nil until a completion was waited for.
	completionTimer *completionTimer
	reservations    reservationPool

	excluded    []*worker.Rank // they have failed the request, see exclude
	exclusions  []exclusion    // why, one for each of excluded
	skipped     []*worker.Rank // passed over by the last choice: excluded, or full
	fields      []upstream.Field
	legRequest  LegRequest // what the Family writes
	segments    [][]byte
	answer      []byte             // prefill's whole response; pair.Handle borrows from it
	reply       []byte             // decode's, where it is held whole
	rewritten   []byte             // it, as the client gets it, where the family changes it
	slotBuf     []byte             // scratch of pair.Ticket
	peerInfoBuf []byte             // what a Learner found
	downMonitor *engineDownMonitor // over prefill's engine while decode waits for its KV; nil until one was needed
}

// runState is all else of it: the next one's begins empty.
type runState struct {
	r        *Runner
	settings *settings // the configuration that the request began with
	x        *front.Exchange
	id       string // X-Request-Id
	model    string
	pool     *fleet.Pool
	pd       *config.PD
	plan     Plan

	view        *fleet.View   // that the plan's candidates are of
	waited      time.Duration // for workers, by retries
	pause       time.Duration // the last, see waitForRank
	prefillOnly bool          // the request is prefill-only
	chosenFor   [3]chosenRank // by schedule.Leg

	steering steering
	selected Selection  // what headers name, where there is a Namer
	ownPool  fleet.Pool // the pool with what was named in it

	stream         bool
	maxTokens      int
	attempt        int    // counts prefill/decode pairs from 1
	freeTries      int    // attempts that do not count, see triesLeft
	plainDecode    bool   // no more pairs: decode does the whole request
	tries          [3]int // legs sent, by schedule.Leg
	reservedTokens int    // tokens of the client's key, see reserve
	quotaCommitted bool   // what was reserved is settled, or the stream's to settle

	backgroundTokens int  // output tokens reserved for a background response; 0: it is not one
	legSent          bool // a leg was given to an engine
	suspects         int  // engines that broke after this request was sent to them
	unsent           bool // the last leg failed before its engine saw anything of it

	media        []Medium  // of the prompt, where the caller told them
	waitingSince time.Time // it waited for a worker before it came here; zero: it did not

	returnsTokenIDs bool      // the body asks for token ids in its engine's own words
	expectedOutput  int       // tokens the caller expects; 0: it did not say
	tuning          *Hints    // of the choice, where the caller tunes it; else nil
	deadline        time.Time // the caller's; zero: none
	disconnectsAt   time.Time // when the caller leaves for that; zero: it does not by itself
	hasHandle       bool      // the body holds a handle: one engine may see it

	replyLease       membudget.Lease // of a long reply; see leaseReply
	derived          membudget.Count // what was made of the body, and the engines' answers
	textOnlyCache    tristate        // see Pair.textOnly
	migrationChecked bool            // movability was
	template         resumeTemplate
	unmigratable     string
	legUnmigratable  string // of this leg

	resumption        *resumption // the stream that this request is the rest of; nil: none
	attemptsBefore    int         // attempts of it
	otherChoiceTokens int         // tokens that its other choices have told, which are prompts beside its own
	legDeadline       time.Time   // its end, wherever it runs; zero: none

	salt      blockhash.Salt
	indexKeys []blockhash.Seq // keys or keyBuf: what the event index was asked last

	query       schedule.Query
	handover    Handover // what the Family sees of this attempt
	handleAt    time.Time
	pinned      bool               // the handle is counted in Runner.pinned
	concurrent  *concurrentPrefill // the prefill leg that runs beside decode; nil: none
	answerLease *membudget.Lease   // pair.Answer, where the stream outlives the request with it; nil: it does not

	transfer     *kvtransfer.Transfer // for what is told of the hand-over; nil: nobody would tell
	kv           kvHandover           // of the handle's blocks
	hasConnector bool                 // the decode engine chosen runs the connector

	reservedDecode               schedule.Choice // of decode, made before prefill was sent
	fallbackKind, fallbackDetail string          // the last kind and detail of noteFallback
	planHeader                   string          // X-Sluice-Plan, "" for none
	prefillCached                int             // predicted, tokens
	prefilled                    bool            // pair.Prefill's work is in the answer
	decodeByFamily               bool            // the Family wrote the decode leg
	whole                        bool            // all of the answer that would be relayed has come, see holdWhole
}

// recycle forgets what borrows from the exchange, keeps bounded scratch.
func (q *request) recycle() {
	const maxScratch = 1 << 20
	r := q.r
	if q.x != nil {
		q.x.OnClientGone(nil) // behind a panic the last leg's cut may be armed yet
		q.commitQuota(0)
	}
	q.setPinned(false)
	q.unwatchTransfer()
	q.kv.on(kvAbandoned)
	q.downMonitor.reset()
	q.reservedDecode.Reservation.Release()
	if q.answerLease != nil {
		q.answerLease.Release()
	}
	q.derived.Release()
	if q.replyLease.Size() > 0 {
		q.reply = nil
		q.replyLease.Release()
	}
	if cap(q.answer) > maxScratch || cap(q.reply) > maxScratch || cap(q.rewritten) > maxScratch || cap(q.legRequest.buf) > maxScratch || cap(q.keys) > maxScratch/8 || cap(q.keyBuf) > maxScratch/8 || cap(q.prompt.Tokens) > maxScratch/4 {
		return // let the collector have what one huge prompt needed
	}
	q.scratch.reset()
	q.runState = runState{}
	r.requests.Put(q)
}

// reset leaves nothing but memory.
func (s *scratch) reset() {
	s.prompt = tokenize.Prompt{Tokens: s.prompt.Tokens[:0]}
	s.overlaps, s.keys, s.keyBuf = s.overlaps[:0], s.keys[:0], s.keyBuf[:0]
	clear(s.summary.baseModels[:cap(s.summary.baseModels)])
	s.summary = poolSummary{blockSizes: s.summary.blockSizes[:0], baseModels: s.summary.baseModels[:0]}
	if s.decodeAbort.wasStarted() {
		s.call, s.decodeAbort = nil, nil
	}
	if s.completionTimer != nil && len(s.completionTimer.clientGone) > 0 {
		s.completionTimer = nil // somebody has left
	}
	if s.prefillAbort.wasStarted() { // behind a panic
		s.call, s.prefillAbort = nil, nil
	}
	s.reservations = s.reservations.idle()
	clear(s.excluded[:cap(s.excluded)]) // lets go of ranks that have left
	clear(s.skipped[:cap(s.skipped)])
	s.excluded, s.exclusions, s.skipped = s.excluded[:0], s.exclusions[:0], s.skipped[:0]
	clear(s.fields[:cap(s.fields)])
	clear(s.legRequest.Edits[:cap(s.legRequest.Edits)])
	clear(s.segments[:cap(s.segments)])
	s.fields, s.segments = s.fields[:0], s.segments[:0]
	s.legRequest.reset()
	s.answer, s.reply, s.rewritten, s.slotBuf = s.answer[:0], s.reply[:0], s.rewritten[:0], s.slotBuf[:0]
}
