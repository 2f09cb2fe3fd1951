package pd

import (
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/pd/family"
	"sluice/router/pd/migration"
	"sluice/router/requestlog"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// request is the state of one client request. It is pooled. Nothing uses it after the handler has
// returned; streamState holds what a relayed stream needs after that.
type request struct {
	scratch
	runState
}

// scratch is memory that later requests reuse.
type scratch struct {
	prompt     tokenize.Prompt
	overlaps   []schedule.SizedOverlap // overlap per block size of the pool
	approx     kvindex.Overlap
	keys       []blockhash.Seq // of the approximate index
	keyBuf     []blockhash.Seq // for the event index
	summary    poolSummary     // of a small pool
	prefetched uint64          // keeps the loads of a prefetch alive

	prefillLeg      prefillLeg
	decodeLeg       decodeLeg
	completionTimer *completionTimer // see awaitCompletions; nil until the first wait for a completion
	reservations    reservationPool

	excluded    []*worker.Rank // ranks that have failed the request, see exclude
	exclusions  []exclusion    // the reason for each rank in excluded
	skipped     []*worker.Rank // ranks that the last choice skipped because they were excluded or at capacity
	fields      []upstream.Field
	legRequest  family.LegRequest // written by the Family
	segments    [][]byte
	answer      []byte // prefill's whole response; handover.Handle borrows from it
	reply       []byte // decode's response if the runner reads it whole
	rewritten   []byte // reply as sent to the client, if the family changes it
	slotBuf     []byte // for handover.Slot
	peerInfoBuf []byte // for LearnPeerInfo
}

// runState is the rest of a request's state, grouped by subject. It is zero at the start of a
// request.
type runState struct {
	r        *Runner
	settings *settings // the configuration when the request began
	x        front.Exchange
	req      *front.RequestInfo // x.Request()

	clientPart
	admissionPart
	planPart
	legsPart
	answerPart
	migrationPart
	accountPart
}

// clientPart holds what the client asks for in the body, in headers and in Hints.
type clientPart struct {
	id              string // X-Request-Id
	model           string
	modelObserver   ModelObserver // nil until the model is known
	stream          bool
	maxTokens       int       // the client's limit on the output; 0: none
	hasHandle       bool      // the body holds a KV handle, so only one engine may receive it
	returnsTokenIDs bool      // the body asks for token ids by an engine-specific member
	expectedOutput  int       // in tokens; 0 if unknown
	media           []Medium  // media of the prompt, if the caller listed them
	tuning          *Hints    // the caller's scheduling parameters; nil if it set none
	deadline        time.Time // the caller's deadline; zero if none
	deadlineFrom    string    // what has set it: a header, or a field of the configuration or of the engine API
	disconnectsAt   time.Time // when the caller disconnects because its own deadline has passed; zero if never
	waitingSince    time.Time // when the caller began to wait for a worker; zero if it did not wait
	steering        steering
	sessionTenant   string         // the tenant in which a session is named
	sessionKey      session.Key    // of its session, zero if it has none
	sessionFrom     session.Origin // what named it
	turn            session.Turn
	turnResult      session.Result
	selected        Selection // the workers that headers name, if there is a WorkerSelector
}

// planPart holds the plan of the request and the pool for which it was made.
type planPart struct {
	pool        *fleet.Pool
	ownPool     fleet.Pool  // the pool restricted to selected
	view        *fleet.View // the view from which the plan's candidates come
	pd          *config.PD
	plan        Plan
	prefillOnly bool
	planHeader  string // X-Sluice-Plan, "" for none
	// fallbackKind and fallbackDetail are the arguments of the last call of noteFallback.
	fallbackKind, fallbackDetail string

	salt      blockhash.Salt
	indexKeys []blockhash.Seq // keys or keyBuf, whichever the event index was last searched with
	query     schedule.Query
}

// legsPart holds the state that all tries of the request share.
type legsPart struct {
	attempt    int          // number of the current pair of legs, from 1
	freeTries  int          // attempts that do not count, see triesLeft
	decodeOnly bool         // no more pairs: decode runs the whole request
	tries      [3]int       // legs sent, indexed by schedule.LegKind
	legSent    bool         // an engine has been sent a leg
	suspects   int          // engines that broke after this request had been sent to them
	unsent     bool         // the last leg failed before its engine had received any of it
	refusedIDs *worker.Rank // the prefill rank that refused the prompt as token ids; nil if none has
	waited     time.Duration
	pause      backoff.Backoff // of waitForRank
	chosenFor  [3]chosenRank   // indexed by schedule.LegKind

	reservedDecode schedule.Choice    // chosen before the prefill leg was sent
	concurrent     *concurrentPrefill // the prefill leg that runs concurrently with decode; nil if none
	decodeByFamily bool               // the Family wrote the decode leg
	handover       family.Handover    // the legs of the attempt as the Family sees them
	prefillCached  int                // predicted cached tokens of the prefill rank
}

// answerPart holds the response memory that counts in limits.memory_budget.
type answerPart struct {
	replyLease  membudget.Lease  // of a long response, see leaseReply
	answerLease *membudget.Lease // of handover.Answer, if a stream needs it longer than the request; else nil
	derived     membudget.Count  // of copies of the body and of the engines' responses
	whole       bool             // a response that would be relayed has arrived completely, see holdWhole
}

// migrationPart says whether the request's stream can migrate, and which stream the request
// continues.
type migrationPart struct {
	textOnlyCache    family.Tristate // see Handover.textOnly
	migrationChecked bool            // unmigratable and template have been set
	template         migration.Template
	unmigratable     string // why the stream cannot migrate; "" if it can
	legUnmigratable  string // why the stream of this leg cannot migrate; "" if it can

	resumption        *resumption // the stream that this request continues; nil if none
	attemptsBefore    int         // attempts of the stream before this request
	otherChoiceTokens int         // output tokens so far of the stream's other choices, which are further prompts of this request
	legDeadline       time.Time   // the deadline of the stream's decode leg on any engine; zero if none
}

// accountPart holds what the client's key is charged, and what the request log reports.
type accountPart struct {
	entry         *requestlog.Entry // nil: there is no request log
	responseBytes int64             // of a response that is not relayed

	reservedTokens   int  // see reserveQuota
	backgroundTokens int  // number of output tokens in reservedTokens, for a background response; else 0
	quotaCommitted   bool // commitQuota was called, or a stream will call it
}

// recycle drops everything that borrows from the Exchange and returns the request to the pool with
// its scratch memory, if that is not too large.
func (q *request) recycle() {
	const maxScratch = 1 << 20
	r := q.r
	if q.x != nil {
		q.x.OnClientGone(nil) // after a panic the last leg's callback may still be armed
		q.commitQuota(0)
	}
	q.endPlace(session.Refused)
	r.endTurn(&q.turn, q.turnResult)
	q.prefillLeg.abandon()
	q.decodeLeg.monitor.Reset()
	q.releaseAdmitted()
	r.kvClaims.release(q)
	q.preemption.end()
	if q.answerLease != nil {
		q.answerLease.Release()
	}
	q.derived.Release()
	if q.replyLease.Size() > 0 {
		q.reply = nil
		q.replyLease.Release()
	}
	if cap(q.answer) > maxScratch || cap(q.reply) > maxScratch || cap(q.rewritten) > maxScratch || q.legRequest.Memory() > maxScratch || cap(q.keys) > maxScratch/8 || cap(q.keyBuf) > maxScratch/8 || cap(q.prompt.Tokens) > maxScratch/4 {
		return // do not pool the memory of a huge prompt
	}
	q.scratch.reset()
	q.runState = runState{}
	r.requests.Put(q)
}

// reset clears everything but the memory.
func (s *scratch) reset() {
	s.prompt = tokenize.Prompt{Tokens: s.prompt.Tokens[:0], Blocks: s.prompt.Blocks[:0]}
	s.overlaps, s.keys, s.keyBuf = s.overlaps[:0], s.keys[:0], s.keyBuf[:0]
	clear(s.summary.baseModels[:cap(s.summary.baseModels)])
	s.summary = poolSummary{blockSizes: s.summary.blockSizes[:0], baseModels: s.summary.baseModels[:0]}
	s.prefillLeg.reset()
	s.decodeLeg.reset()
	if s.completionTimer != nil && len(s.completionTimer.clientGone) > 0 {
		s.completionTimer = nil // the client disconnected; its channel is not empty
	}
	s.reservations = s.reservations.idle()
	clear(s.excluded[:cap(s.excluded)]) // drops references to removed ranks
	clear(s.skipped[:cap(s.skipped)])
	s.excluded, s.exclusions, s.skipped = s.excluded[:0], s.exclusions[:0], s.skipped[:0]
	clear(s.fields[:cap(s.fields)])
	clear(s.legRequest.Edits[:cap(s.legRequest.Edits)])
	clear(s.segments[:cap(s.segments)])
	s.fields, s.segments = s.fields[:0], s.segments[:0]
	s.legRequest.Reset()
	s.answer, s.reply, s.rewritten, s.slotBuf = s.answer[:0], s.reply[:0], s.rewritten[:0], s.slotBuf[:0]
}
