package pd

import (
	"log/slog"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/objpool"
	"sluice/dataplane/relay"
	"sluice/router/admission"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/notify"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/pd/reqbody"
	"sluice/router/requestlog"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/sweeper"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Observer counts what the runner does. Its methods run on the request path: they must
// neither block nor allocate.
type Observer interface {
	// Model returns the observer of a model's requests. The name is one of the fleet's.
	Model(name string) ModelObserver
	// LegStarted and LegEnded bracket one engine call. outcome is "ok", a front.Reason, or the
	// class of the engine's status ("4xx", "5xx").
	LegStarted(leg schedule.LegKind, id worker.ID)
	LegEnded(leg schedule.LegKind, id worker.ID, outcome string, took time.Duration)
	// FallbackUsed counts a departure from the plan ("incomplete_handle",
	// "decode_only", "peer_info_unavailable", "peer_info_stale", "declined", "not_completed",
	// "notifications_missing", "transfer_lost", "endpoint", "lease_expired", "batch_prompt",
	// "multiple_choices", "no_output", "abandoned_handle", …).
	FallbackUsed(kind string)
	// Migrated counts the interruptions of streams by outcome: "done" (another engine continues the
	// stream), "failed" (no engine could), "limit", or the reason why the stream could not migrate.
	Migrated(outcome string)
	// Planned counts a decision between prefill on another rank ("remote") and on the decode rank
	// ("local"); reason is then one of schedule's constants. It also counts a "prefill_only"
	// request; reason is then "header" or "max_tokens".
	Planned(plan, reason string)
	// PromptSent counts the prompt of a prefill leg by form, if pd.prefill_by_ids is on: "ids", or text
	// because the request, the family or the engine allows no ids ("text"), the ids are not verified
	// with the engine ("unverified"), or the engine has refused ids ("refused").
	PromptSent(form string)
	// Retried counts a leg that is sent again.
	Retried(leg schedule.LegKind)
	// FirstToken records the time from the request's head to its first token.
	FirstToken(endpoint string, took time.Duration)
	// Streamed counts a stream that has ended.
	Streamed(endpoint string, res *relay.Result)
	admission.Observer
	// AdmissionRefused counts a request that was refused because it may not wait, has waited too long
	// or cannot meet its target.
	AdmissionRefused(class, tenant string, reason front.Reason)
	// StreamSuspended counts a stream of a class that was suspended for a request of a higher class.
	StreamSuspended(class, tenant string)
	// StreamResumed counts the end of a suspension by outcome: "resumed", "client_gone", "deadline", or
	// "failed" (no engine continued the stream).
	StreamResumed(class, outcome string, took time.Duration)
	// Cached records the cached tokens that the runner predicted and those that the engine
	// reported; actual is -1 if the engine reported none.
	Cached(id worker.ID, promptTokens, predicted, actual int)
}

// Recorder records every choice. recording.Recorder implements it. seqs are borrowed and stand for
// blockSize tokens each. exact says that they are keys of the event index and not of the
// approximate index. RecordChoice runs on the request path and must not block.
type Recorder interface {
	RecordChoice(q *schedule.Query, c schedule.Choice, seqs []blockhash.Seq, blockSize int, exact bool)
}

// Options configure a Runner. All but Recorder, Completions, Transfers, SideChannel, RequestLog and Log are
// required.
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
	Sessions  session.Options
	Migration config.Migration
	// Completions reports the end of KV transfers to families that wait for it (CompletionWaiter).
	// Without it decode follows prefill's response alone.
	Completions Completions
	// Transfers reports the results of KV transfers if engines report them. Without it the runner
	// relies on the engines' HTTP responses. TransferStall is how long a watched transfer may go
	// without a report or a response before the runner gives it up; 0 means no limit.
	Transfers     *kvtransfer.Watcher
	TransferStall time.Duration
	// Selector reads the headers by which requests name workers. It may be nil.
	Selector WorkerSelector
	// SideChannel renews the leases of handles between the legs and releases abandoned handles.
	// Without it the engines' own timeouts free the blocks.
	SideChannel *sidechannel.Manager
	// RequestLog receives an entry for each request. It may be nil.
	RequestLog *requestlog.Log
	// PoolWaiters bounds the number of requests that wait for a healthy worker; 0 means no limit.
	PoolWaiters int
	// Admission says which requests wait while no rank can start them soon, and in what order.
	// AdmissionBytes bounds the bodies of those that wait.
	Admission      config.Admission
	AdmissionBytes int64
	Log            *slog.Logger
}

// Completions reports the end of transfers by the ids that the legs carry. Its methods run on the
// request path.
type Completions interface {
	// Expect registers a wait for count completions of id. The runner calls it before it sends the
	// leg that causes them.
	Expect(id string, count int) Expectation
}

// Expectation is one wait for completions.
type Expectation interface {
	// Done is closed when all completions have arrived.
	Done() <-chan struct{}
	// Cancel ends the wait. The runner calls it exactly once, also after Done.
	Cancel()
}

// Runner runs requests. It is the front's Handler, safe for concurrent use.
type Runner struct {
	current              atomic.Pointer[settings]
	requests             objpool.Pool[request]
	concurrentPrefills   objpool.Pool[concurrentPrefill]
	peerInfos            peerInfoCache
	idRefusals           idRefusals
	notificationBreakers notify.Breakers
	fallbacks            fallbackTracker
	poolSummaries        poolSummaries
	nextTokenizer        atomic.Uint32 // rotates over the workers that tokenize
	leased               atomic.Int64  // see LeasedHandles
	waiting              atomic.Int64  // see Waiting
	downMonitors         *sweeper.Sweeper[abort.DownMonitor]
	answerDeadlines      *sweeper.Sweeper[abort.Deadline]
	admission            *admission.Controller
	undecided            undecided
	kvClaims             kvClaims
	migratable           migratableStreams
	stored               storedResponses
	probes               abort.Probes
	sessions             *session.Table
}

// Waiting returns the number of requests that wait for a healthy worker.
func (r *Runner) Waiting() int64 { return r.waiting.Load() }

// Admission returns the queue of requests that wait for a rank.
func (r *Runner) Admission() *admission.Controller { return r.admission }

func (r *Runner) countRefusal(class, tenant string, reason front.Reason) {
	r.options().Observer.AdmissionRefused(class, tenant, reason)
}

// LeasedHandles returns the number of handles whose blocks a prefill engine keeps because decode has not
// answered yet.
func (r *Runner) LeasedHandles() int64 { return r.leased.Load() }

type modelPD struct {
	pd     config.PD
	family family.Family // nil: no disaggregation for this model
	traits family.Traits
}

// NewRunner returns a Runner. It fails on an unknown family and on invalid pinning rules.
func NewRunner(opt Options) (*Runner, error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	r := &Runner{downMonitors: abort.NewDownMonitors(), answerDeadlines: abort.NewDeadlines(), probes: abort.NewProbes(opt.Fleet), sessions: session.NewTable(opt.Sessions)}
	s, err := newSettings(r, opt)
	if err != nil {
		return nil, err
	}
	r.current.Store(s)
	queue := admission.Settings{Classes: []admission.Class{{Name: config.DefaultClassName}}}
	if s.admission != nil {
		queue = s.admission.queue
	}
	r.admission = admission.NewController(queue, opt.Observer)
	opt.Scheduler.SetOnCapacity(r.admission.Wake)
	r.requests.New, r.concurrentPrefills.New = func() *request { return new(request) }, r.newConcurrentPrefill
	if w := opt.Transfers; w != nil {
		opt.Scheduler.SetTransferRate(func(from, to *worker.Rank) float64 { return w.RatesFrom(from).NSPerToken(int(to.Slot)) / 1e6 })
	}
	return r, nil
}

func newModelPD(pd config.PD) (modelPD, error) {
	f, err := family.New(&pd)
	if err != nil || f == nil {
		return modelPD{pd: pd}, err
	}
	return modelPD{pd: pd, family: f, traits: f.Traits()}, nil
}

// ServeInference implements front.Handler.
func (r *Runner) ServeInference(x front.Exchange) {
	req := x.Request()
	if req.Endpoint.Kind == front.StoredResponse {
		r.serveStored(x)
		return
	}
	if req.Endpoint.Kind == front.SessionFinish {
		r.finishSession(x)
		return
	}
	q := r.requests.Get()
	q.r, q.settings, q.x, q.req, q.id = r, r.current.Load(), x, req, req.RequestID
	defer q.recycle()
	q.derived = x.Budget().Count()

	q.stream = req.Doc.Bool(jsonscan.KeyStream)
	q.beginEntry()
	q.maxTokens = reqbody.MaxTokens(&req.Doc, req.Endpoint.Kind)
	q.applyHints()
	if !q.selectWorkers() || !q.resolvePool() {
		return
	}
	if !q.readAdmission() || !q.applySteering() || !q.routeToStored() {
		return
	}
	q.beginTurn()
	if q.refuseEarly() {
		return
	}
	q.settings.Fleet.CreditRequest(q.pool)
	began := q.entryTime()
	q.resolvePrompt()
	q.dropTooSmall()
	q.observePrompt()
	q.entry.SetTokenized(began, q.prompt.Count)
	if x.ClientGone() {
		q.refuse(front.ClientGone, "the client closed the connection before a worker was chosen", 0)
		return
	}
	if q.checkContextLength() || !q.reserveQuota() {
		return
	}
	if by, answered := q.checkPrefillOnly(); answered {
		return
	} else if by != "" {
		if q.prefillOnly = true; q.awaitAdmission() {
			q.runPrefillOnly(by)
		}
		return
	}
	if !q.filterRequest() {
		return
	}
	q.planPrefilled()
	if reason := q.plan.Reason; reason != "" {
		q.noteFallback(reason, "one rank does the whole request")
		if q.planHeader = "local; reason=" + reason; q.plan.noPrefillWorker {
			q.recordFallback(reason, q.unreadyPrefill())
		}
	}
	q.setEntryPlan()
	if (q.class == nil || !q.waitsForAdmission()) && !q.admitDecode() {
		return
	}
	x.MarkDispatched()
	if !q.awaitAdmission() {
		return
	}
	if q.plan.Family == nil {
		q.runWhole()
	} else {
		q.runDisaggregated()
	}
}

// refuse answers with one of the router's errors and ends the explain record.
func (q *request) refuse(reason front.Reason, message string, retryAfter time.Duration) {
	q.refuseParam(reason, "", message, retryAfter)
}

// refuseParam is refuse for an error in one member of the request. If the caller's deadline has
// passed, it answers with the deadline error instead.
func (q *request) refuseParam(reason front.Reason, param, message string, retryAfter time.Duration) {
	if (reason.Status() >= 500 || reason == front.ClientGone) && q.pastDeadline() {
		reason, retryAfter = front.Deadline, 0
		message = q.timeOver() + ": " + message
	}
	q.recordAbortedUsage(reason)
	q.x.Error(reason, param, message, retryAfter)
	q.endExplain(schedule.Outcome{
		Status: reason.Status(), Reason: string(reason), CachedTokens: -1, Total: time.Since(q.req.Received),
	})
}

// endExplain ends the explain record and counts the outcome. For a request that continues a stream it does nothing,
// because the stream ends the record.
func (q *request) endExplain(out schedule.Outcome) {
	if q.resumption == nil {
		if q.modelObserver != nil {
			q.modelObserver.Ended(out, q.prompt.Count, q.traceID())
		}
		q.settings.Scheduler.EndRecord(q.req.RequestID, out)
		finishEntry(q.entry, &out, out.OutputTokens, 0, q.responseBytes)
	}
}

// noteFallback counts and logs a departure from the plan, and adds it to the explain record.
func (q *request) noteFallback(kind, detail string) {
	q.fallbackKind, q.fallbackDetail = kind, detail
	q.settings.Observer.FallbackUsed(kind)
	q.entry.SetFallback(kind)
	q.settings.Scheduler.AddNote(q.req.RequestID, kind+": "+detail)
	q.x.Log().Info("plan changed", "kind", kind, "detail", detail)
}
