package disagg

import (
	"log/slog"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/reuse"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/patrol"
	"sluice/router/schedule"
	"sluice/router/sidechannel"
	"sluice/router/tokenize"
	"sluice/router/transfers"
	"sluice/router/worker"
)

// Observer counts what the runner does. Methods run on the request path: they
// must not block or allocate.
type Observer interface {
	// LegStarted and LegEnded enclose one engine call. outcome is "ok", a
	// front.Reason, or the engine's status class ("4xx", "5xx").
	LegStarted(leg schedule.Leg, id worker.ID)
	LegEnded(leg schedule.Leg, id worker.ID, outcome string, took time.Duration)
	// FellBack: the plan was not run as made ("incomplete_handle",
	// "plain_decode", "no_fact", "stale_fact", "declined", "not_completed",
	// "silent_prefill", "transfer_lost", "endpoint", "lease_expired", "batch_prompt",
	// "many_choices", "no_output", "abandoned_handle", …).
	FellBack(kind string)
	// Migrated: an engine failed in the middle of a stream, and what became of that:
	// "done" (another goes on with it), "failed" (none took it), "limit", or why it
	// could not.
	Migrated(outcome string)
	// Planned: prefill on another rank ("remote") was weighed against prefill on
	// the decode rank ("local"), reason being one of schedule's Why constants; or
	// the request is "prefill_only", by its "header" or its "max_tokens".
	Planned(plan, reason string)
	// Retried: a leg was run again elsewhere.
	Retried(leg schedule.Leg)
	// FirstToken: time from the request's head to its first token.
	FirstToken(endpoint string, took time.Duration)
	// Streamed is told once a stream has ended.
	Streamed(endpoint string, res *relay.Result)
	// Cached compares what was predicted with what the engine reported; actual
	// is -1 when it reported nothing.
	Cached(id worker.ID, promptTokens, predicted, actual int)
}

// Recorder is told every choice; record.Recorder is one. seqs, of blockSize tokens
// each, are borrowed; exact says that they are the index's and not the
// approximate one's. It runs on the request path and must return at once.
type Recorder interface {
	Chose(q *schedule.Query, c schedule.Choice, seqs []blockhash.Seq, blockSize int, exact bool)
}

// Options of a Runner. All but Recorder, Completions, Transfers, SideChannel and Log are required.
type Options struct {
	Fleet     *fleet.Fleet
	Scheduler *schedule.Scheduler
	Index     kvindex.Index
	Approx    *kvindex.Approx
	Tokenizer *tokenize.Tokenizer
	Observer  Observer
	Recorder  Recorder
	PD        config.PD               // for models without an override
	Models    map[string]config.Model // overrides by model name
	Timeouts  config.Timeouts
	Steering  config.Steering
	Migration config.Migration
	// Completions tells of KV transfers that have ended, for families that wait
	// for it (Awaiter); nil: decode follows prefill's answer alone.
	Completions Completions
	// Transfers tells what became of KV transfers, where engines report it; nil:
	// their HTTP answers alone tell. TransferStall is after how long without a
	// word or an answer a watched transfer is given up; 0: never.
	Transfers     *transfers.Watch
	TransferStall time.Duration
	// Namer reads the headers by which requests name workers; nil: none do.
	Namer Namer
	// SideChannel renews leases of handles between the legs and releases abandoned
	// ones; nil: engines' own time-outs do.
	SideChannel *sidechannel.Keeper
	// PoolWaiters bounds how many requests wait for a healthy worker at once;
	// 0: no bound.
	PoolWaiters int
	Log         *slog.Logger
}

// Completions tells of transfers by the ids that engines were given. Its
// methods are called on the request path.
type Completions interface {
	// Expect registers interest in count completions of id, before the leg that
	// causes them is sent.
	Expect(id string, count int) Expectation
}

// Expectation is one wait for completions.
type Expectation interface {
	// Done is closed when all have come.
	Done() <-chan struct{}
	// Forget ends the wait; called exactly once, whatever came.
	Forget()
}

// Runner runs requests. It is the front's Handler, safe for concurrent use.
type Runner struct {
	now       atomic.Pointer[settled]
	requests  reuse.Pool[request]
	besides   reuse.Pool[beside]
	facts     facts
	silences  silences
	alone     alone
	censuses  censuses
	next      atomic.Uint32 // rotates whom we ask to tokenize
	pinned    atomic.Int64  // see Pinned
	waiting   atomic.Int64  // see Waiting
	vigils    *patrol.Patrol[vigil]
	movers    movers
	stored    storedResponses
	inquiries inquiries
}

// Waiting is how many requests wait for a pool to have a healthy worker.
func (r *Runner) Waiting() int64 { return r.waiting.Load() }

// Pinned is how many handles are held whose decode has not been seen to begin:
// hand-overs for which a prefill worker keeps blocks.
func (r *Runner) Pinned() int64 { return r.pinned.Load() }

type modelPD struct {
	pd     config.PD
	family Family // nil: no disaggregation for this model
	traits Traits
}

// NewRunner makes a Runner; it fails on a family it does not know.
func NewRunner(opt Options) (*Runner, error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	r := &Runner{vigils: newVigils()}
	s, err := settle(opt)
	if err != nil {
		return nil, err
	}
	r.now.Store(s)
	r.requests.New, r.besides.New = func() *request { return new(request) }, newBeside
	if w := opt.Transfers; w != nil {
		opt.Scheduler.UsePairRate(func(from, to *worker.Rank) float64 { return w.From(from).NSPerToken(int(to.Slot)) / 1e6 })
	}
	return r, nil
}

func newModelPD(pd config.PD) (modelPD, error) {
	switch pd.Family {
	case "off":
		return modelPD{pd: pd}, nil
	case "":
		pd.Family = "nixl"
	}
	f, err := FamilyByName(pd.Family)
	if err != nil {
		return modelPD{}, err
	}
	if c, ok := f.(configured); ok {
		f = c.configure(&pd)
	}
	return modelPD{pd: pd, family: f, traits: f.Traits()}, nil
}

// ServeInference implements front.Handler.
func (r *Runner) ServeInference(x *front.Exchange) {
	if x.Endpoint.Kind == front.StoredResponse {
		r.serveStored(x)
		return
	}
	q := r.requests.Get()
	q.r, q.x, q.id = r, x, x.RequestID
	defer q.recycle()
	q.derived = x.Budget().Count()

	q.stream = x.Doc.Bool(jsonscan.KeyStream)
	q.maxTokens = askedTokens(&x.Doc, x.Endpoint.Kind)
	q.hint()
	if !q.name() || !q.findPool() {
		return
	}
	if !q.steer() || !q.followStored() {
		return
	}
	r.opt().Fleet.Requested(q.pool)
	q.findPrompt()
	if x.Gone() {
		q.refuse(front.ClientGone, "the client closed the connection before a worker was chosen", 0)
		return
	}
	if !q.reserve() {
		return
	}
	if by, answered := q.warms(); answered {
		return
	} else if by != "" {
		q.warm(by)
		return
	}
	if !q.fit() {
		return
	}
	q.handedIn()
	if why := q.plan.Why; why != "" {
		q.fellBack(why, "one rank does the whole request")
		if q.planned = "local; reason=" + why; q.plan.lacks {
			q.decodedAlone(why, q.lacking())
		}
	}
	if !q.admitted() {
		return
	}
	x.Dispatched()
	if q.plan.Family == nil {
		q.runWhole()
	} else {
		q.runDisaggregated()
	}
}

// hold counts the request's handle among the pinned ones, or takes it out.
func (q *request) hold(on bool) {
	if q.holding == on {
		return
	}
	q.holding = on
	if on {
		q.r.pinned.Add(1)
	} else {
		q.r.pinned.Add(-1)
	}
}

// askedTokens is the client's limit on output, 0 when it gave none.
func askedTokens(doc *jsonscan.Doc, kind front.Kind) int {
	keys := [...]jsonscan.Key{jsonscan.KeyMaxCompletionTokens, jsonscan.KeyMaxTokens}
	switch kind {
	case front.ResponsesAPI:
		keys[0] = jsonscan.KeyMaxOutputTokens
	case front.Generate:
		keys[0] = jsonscan.KeySamplingMaxTokens
	case front.NativeGenerate:
		keys[0] = jsonscan.KeySamplingMaxNewTokens
	}
	for _, k := range keys {
		if n, ok := doc.Int(k); ok && n > 0 {
			return int(min(n, 1<<24))
		}
	}
	return 0
}

// refuse answers with an error of the router's own and ends the explain record.
func (q *request) refuse(reason front.Reason, message string, retryAfter time.Duration) {
	q.refuseParam(reason, "", message, retryAfter)
}

// refuseParam is refuse for a reason that has to do with one member of the request. What
// did not come to be before the caller's time was over failed for want of that.
func (q *request) refuseParam(reason front.Reason, param, message string, retryAfter time.Duration) {
	if (reason.Status() >= 500 || reason == front.ClientGone) && q.late() {
		reason, retryAfter = front.Deadline, 0
		message = "the request's time is over: " + message
	}
	q.chargeLeft(reason)
	q.x.Error(reason, param, message, retryAfter)
	q.endRecord(schedule.Outcome{
		Status: reason.Status(), Reason: string(reason), CachedTokens: -1, Total: time.Since(q.x.Received),
	})
}

// endRecord ends the explain record, unless the stream that goes on does.
func (q *request) endRecord(out schedule.Outcome) {
	if q.taking == nil {
		q.r.opt().Scheduler.End(q.x.RequestID, out)
	}
}

// fellBack counts a departure from the plan, logs it and notes it for explain.
func (q *request) fellBack(kind, detail string) {
	q.fell, q.fellFor = kind, detail
	q.r.opt().Observer.FellBack(kind)
	q.r.opt().Scheduler.Note(q.x.RequestID, kind+": "+detail)
	q.x.Log().Info("plan changed", "kind", kind, "detail", detail)
}
