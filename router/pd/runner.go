package pd

import (
	"log/slog"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/objpool"
	"sluice/dataplane/relay"
	"sluice/router/blockhash"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/schedule"
	"sluice/router/sweeper"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Observer counts what the runner does. Its methods run on the request path: they must
// neither block nor allocate.
type Observer interface {
	// LegStarted and LegEnded enclose one engine call. outcome is "ok", a front.Reason, or
	// the class of the engine's status ("4xx", "5xx").
	LegStarted(leg schedule.LegKind, id worker.ID)
	LegEnded(leg schedule.LegKind, id worker.ID, outcome string, took time.Duration)
	// FallbackUsed counts a departure from the plan ("incomplete_handle",
	// "plain_decode", "no_fact", "stale_fact", "declined", "not_completed",
	// "silent_prefill", "transfer_lost", "endpoint", "lease_expired", "batch_prompt",
	// "many_choices", "no_output", "abandoned_handle", …).
	FallbackUsed(kind string)
	// Migrated counts an engine that failed in the middle of a stream, by what followed:
	// "done" (another engine continues the stream), "failed" (no engine did), "limit", or
	// the reason why the stream could not migrate.
	Migrated(outcome string)
	// Planned counts a decision between prefill on another rank ("remote") and on the decode
	// rank ("local"), where reason is one of schedule's constants, and a "prefill_only"
	// request, where reason is "header" or "max_tokens".
	Planned(plan, reason string)
	// Retried counts a leg that runs again.
	Retried(leg schedule.LegKind)
	// FirstToken has the time from the request's head to its first token.
	FirstToken(endpoint string, took time.Duration)
	// Streamed counts a stream that has ended.
	Streamed(endpoint string, res *relay.Result)
	// Cached compares the cached tokens that the runner predicted with those that the engine
	// reported; actual is -1 when the engine reported none.
	Cached(id worker.ID, promptTokens, predicted, actual int)
}

// Recorder records every choice; recording.Recorder is one. seqs, of blockSize tokens each,
// are borrowed. exact says that they are keys of the event index and not of the approximate
// one. RecordChoice runs on the request path and must return at once.
type Recorder interface {
	RecordChoice(q *schedule.Query, c schedule.Choice, seqs []blockhash.Seq, blockSize int, exact bool)
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
	// Completions reports KV transfers that have ended, to families that wait for them
	// (CompletionWaiter). Without it decode follows prefill's answer alone.
	Completions Completions
	// Transfers reports the results of KV transfers, where engines report them. Without it
	// the runner has the engines' HTTP answers alone. TransferStall is how long a watched
	// transfer may go without a report or an answer before the runner gives it up; 0: for
	// ever.
	Transfers     *kvtransfer.Watcher
	TransferStall time.Duration
	// Selector reads the headers by which requests name workers; nil: none do.
	Selector WorkerSelector
	// SideChannel renews leases of handles between the legs and releases abandoned ones.
	// Without it the engines' own time-outs free the blocks.
	SideChannel *sidechannel.Manager
	// PoolWaiters bounds how many requests wait for a healthy worker at once; 0: no bound.
	PoolWaiters int
	Log         *slog.Logger
}

// Completions reports transfers by the ids that the legs gave the engines. Its methods run
// on the request path.
type Completions interface {
	// Expect registers interest in count completions of id, before the leg that
	// causes them is sent.
	Expect(id string, count int) Expectation
}

// Expectation is one wait for completions.
type Expectation interface {
	// Done is closed when all completions have come.
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
	notificationBreakers notificationBreakers
	fallbacks            fallbackTracker
	poolSummaries        poolSummaries
	nextTokenizer        atomic.Uint32 // rotates the workers that tokenize
	pinned               atomic.Int64  // see Pinned
	waiting              atomic.Int64  // see Waiting
	downMonitors         *sweeper.Sweeper[engineDownMonitor]
	answerDeadlines      *sweeper.Sweeper[answerDeadline]
	migratable           migratableStreams
	stored               storedResponses
	probes               engineProbes
}

// Waiting is the number of requests that wait for a healthy worker.
func (r *Runner) Waiting() int64 { return r.waiting.Load() }

// Pinned is the number of handles for which a prefill engine keeps blocks: those whose
// decode has not answered yet.
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
	r := &Runner{downMonitors: newDownMonitors(), answerDeadlines: newAnswerDeadlines()}
	s, err := newSettings(opt)
	if err != nil {
		return nil, err
	}
	r.current.Store(s)
	r.requests.New, r.concurrentPrefills.New = func() *request { return new(request) }, r.newConcurrentPrefill
	if w := opt.Transfers; w != nil {
		opt.Scheduler.SetTransferRate(func(from, to *worker.Rank) float64 { return w.RatesFrom(from).NSPerToken(int(to.Slot)) / 1e6 })
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
	if c, ok := f.(configurableFamily); ok {
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
	q.r, q.settings, q.x, q.id = r, r.current.Load(), x, x.RequestID
	defer q.recycle()
	q.derived = x.Budget().Count()

	q.stream = x.Doc.Bool(jsonscan.KeyStream)
	q.maxTokens = requestedTokens(&x.Doc, x.Endpoint.Kind)
	q.applyHints()
	if !q.selectWorkers() || !q.resolvePool() {
		return
	}
	if !q.applySteering() || !q.routeToStored() {
		return
	}
	q.settings.Fleet.CreditRequest(q.pool)
	q.resolvePrompt()
	if x.ClientGone() {
		q.refuse(front.ClientGone, "the client closed the connection before a worker was chosen", 0)
		return
	}
	if !q.reserveQuota() {
		return
	}
	if by, answered := q.checkPrefillOnly(); answered {
		return
	} else if by != "" {
		q.runPrefillOnly(by)
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
	if !q.admitDecode() {
		return
	}
	x.MarkDispatched()
	if q.plan.Family == nil {
		q.runWhole()
	} else {
		q.runDisaggregated()
	}
}

// setPinned counts the request's handle in Pinned, or no longer.
func (q *request) setPinned(on bool) {
	if q.pinned == on {
		return
	}
	q.pinned = on
	if on {
		q.r.pinned.Add(1)
	} else {
		q.r.pinned.Add(-1)
	}
}

// requestedTokens is the client's limit on the output, 0 when it set none.
func requestedTokens(doc *jsonscan.Doc, kind front.Kind) int {
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

// refuseParam is refuse for a reason that concerns one member of the request. When the
// caller's deadline has passed the reason is the deadline.
func (q *request) refuseParam(reason front.Reason, param, message string, retryAfter time.Duration) {
	if (reason.Status() >= 500 || reason == front.ClientGone) && q.pastDeadline() {
		reason, retryAfter = front.Deadline, 0
		message = "the request's time is over: " + message
	}
	q.recordAbortedUsage(reason)
	q.x.Error(reason, param, message, retryAfter)
	q.endExplain(schedule.Outcome{
		Status: reason.Status(), Reason: string(reason), CachedTokens: -1, Total: time.Since(q.x.Received),
	})
}

// endExplain ends the explain record. A request that continues a stream leaves that to the
// stream.
func (q *request) endExplain(out schedule.Outcome) {
	if q.resumption == nil {
		q.settings.Scheduler.EndRecord(q.x.RequestID, out)
	}
}

// noteFallback counts and logs a departure from the plan, and adds it to the explain record.
func (q *request) noteFallback(kind, detail string) {
	q.fallbackKind, q.fallbackDetail = kind, detail
	q.settings.Observer.FallbackUsed(kind)
	q.settings.Scheduler.AddNote(q.x.RequestID, kind+": "+detail)
	q.x.Log().Info("plan changed", "kind", kind, "detail", detail)
}
