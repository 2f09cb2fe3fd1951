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

// request is one client's request under way, pooled. Nothing uses it after the handler has
// returned; what a relayed stream needs then is in streamState.
type request struct {
	scratch
	runState
}

// scratch is memory that the next request uses again.
type scratch struct {
	prompt     tokenize.Prompt
	overlaps   []schedule.SizedOverlap // overlap per block size of the pool
	approx     kvindex.Overlap
	keys       []blockhash.Seq // of the approximate index
	keyBuf     []blockhash.Seq // for the event index
	summary    poolSummary     // of a small pool
	prefetched uint64          // keeps the loads of a prefetch alive

	call            *upstream.Call   // of the last leg, for the next; nil when another goroutine may still cancel it
	decodeAbort     *decodeAbort     // see newDecodeAbort
	prefillAbort    *prefillAbort    // see armPrefillAbort; nil until a prefill leg was sent
	completionTimer *completionTimer // see awaitCompletions; nil until a completion was waited for
	reservations    reservationPool

	excluded    []*worker.Rank // ranks that have failed the request, see exclude
	exclusions  []exclusion    // why, one for each of excluded
	skipped     []*worker.Rank // ranks that the last choice passed over: excluded, or at capacity
	fields      []upstream.Field
	legRequest  LegRequest // what the Family writes
	segments    [][]byte
	answer      []byte             // prefill's whole response; handover.Handle borrows from it
	reply       []byte             // decode's response, where the runner reads it whole
	rewritten   []byte             // the same as the client gets it, where the family changes it
	slotBuf     []byte             // for handover.Slot
	peerInfoBuf []byte             // for LearnPeerInfo
	downMonitor *engineDownMonitor // watches prefill's engine while decode waits for its KV; nil until one was needed
}

// runState is the rest of a request, by subject. It is zero when the next request begins.
type runState struct {
	r        *Runner
	settings *settings // the configuration that the request began with
	x        *front.Exchange

	clientPart
	planPart
	legsPart
	kvPart
	answerPart
	migrationPart
	accountPart
}

// clientPart is what the client asks for, in the body, in headers and in Hints.
type clientPart struct {
	id              string // X-Request-Id
	model           string
	stream          bool
	maxTokens       int       // the client's limit on the output; 0: none
	hasHandle       bool      // the body holds a handle, which one engine alone may see
	returnsTokenIDs bool      // the body asks for token ids by a member of its engine's own
	expectedOutput  int       // tokens; 0: the caller did not say
	media           []Medium  // of the prompt, where the caller listed them
	tuning          *Hints    // of the choice, where the caller tunes it; else nil
	deadline        time.Time // the caller's; zero: none
	disconnectsAt   time.Time // when the caller disconnects because its time is over; zero: it does not by itself
	waitingSince    time.Time // when it began to wait for a worker, before it came to the runner; zero: it did not
	steering        steering
	selected        Selection // the workers that headers name, where there is a WorkerSelector
}

// planPart is what the runner decided about the request, and the pool that it decided for.
type planPart struct {
	pool        *fleet.Pool
	ownPool     fleet.Pool  // the pool restricted to selected
	view        *fleet.View // the view that the plan's candidates come from
	pd          *config.PD
	plan        Plan
	prefillOnly bool
	planHeader  string // X-Sluice-Plan, "" for none
	// fallbackKind and fallbackDetail are the last that noteFallback was called with.
	fallbackKind, fallbackDetail string

	salt      blockhash.Salt
	indexKeys []blockhash.Seq // keys or keyBuf: what the event index was last asked for
	query     schedule.Query
}

// legsPart is what the request's tries share, beyond the leg under way.
type legsPart struct {
	attempt     int    // counts pairs of prefill and decode from 1
	freeTries   int    // attempts that do not count, see triesLeft
	plainDecode bool   // no more pairs: decode does the whole request
	tries       [3]int // legs sent, by schedule.LegKind
	legSent     bool   // an engine was sent a leg
	suspects    int    // engines that broke after this request was sent to them
	unsent      bool   // the last leg failed before its engine saw anything of it
	waited      time.Duration
	pause       time.Duration // the last of waitForRank
	chosenFor   [3]chosenRank // by schedule.LegKind

	reservedDecode schedule.Choice    // chosen before the prefill leg was sent
	concurrent     *concurrentPrefill // the prefill leg that runs beside decode; nil: none
	decodeByFamily bool               // the Family wrote the decode leg
}

// kvPart is the hand-over of one attempt.
type kvPart struct {
	handover      Handover // what the Family sees of it
	handleAt      time.Time
	kv            kvHandover           // of the handle's blocks
	pinned        bool                 // Runner.pinned counts the handle
	transfer      *kvtransfer.Transfer // reports of the transfer; nil: no engine reports any
	hasConnector  bool                 // the decode engine runs Sluice's connector
	prefilled     bool                 // the answer contains the work of handover.Prefill
	prefillCached int                  // predicted, in tokens
}

// answerPart is the memory of answers that limits.memory_budget counts.
type answerPart struct {
	replyLease  membudget.Lease  // of a long reply, see leaseReply
	answerLease *membudget.Lease // of handover.Answer, where a stream needs it longer than the request; nil: none does
	derived     membudget.Count  // copies of the body, and the engines' answers
	whole       bool             // all of an answer that would be relayed has come, see holdWhole
}

// migrationPart says whether the request's stream can migrate, and from which stream the
// request goes on.
type migrationPart struct {
	textOnlyCache    tristate // see Handover.textOnly
	migrationChecked bool     // unmigratable and template are set
	template         resumeTemplate
	unmigratable     string // why the stream cannot migrate, "" when it can
	legUnmigratable  string // the same of this leg

	resumption        *resumption // the stream that this request continues; nil: none
	attemptsBefore    int         // attempts of that stream
	otherChoiceTokens int         // output so far of its other choices, which are further prompts here
	legDeadline       time.Time   // the end of its leg, on whichever engine; zero: none
}

// accountPart is what the client's key pays for.
type accountPart struct {
	reservedTokens   int  // see reserveQuota
	backgroundTokens int  // output tokens of them, for a background response; 0: it is not one
	quotaCommitted   bool // commitQuota was called, or a stream has it to do
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
