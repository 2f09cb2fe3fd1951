package engineapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/fieldrules"
	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/pd"
	"sluice/router/worker"
)

// Options configures an Engine. Runner and Fleet are required.
type Options struct {
	Runner *pd.Runner
	Fleet  *fleet.Fleet
	// Authenticator checks the keys of the socket's callers, as it does for the front; nil: no
	// key is required. UnixWithoutKey: callers over a Unix socket need no key.
	Authenticator  front.Authenticator
	UnixWithoutKey bool
	// HTTP enables POST /v1/engine/generate.
	HTTP bool
	// VLLM selects the API used for vLLM workers: completions, generate or auto.
	VLLM string
	// Hosts are the hosts that a caller's prefill_result and bootstrap_info may name.
	Hosts []string
	// Live returns the options that a reload may change; nil: the zero value. Each request calls
	// it when it needs one of them.
	Live func() LiveOptions
	Log  *slog.Logger
	// Loops, if set, drive the socket's streams. The caller closes them after the socket.
	Loops *eventloop.Loops
}

// LiveOptions are the options that a reload may change.
type LiveOptions struct {
	// MediaHosts are the hosts from which engines may fetch media that callers name by URL.
	MediaHosts fieldrules.MediaHosts
	// PoolWait is how long a request waits for the first worker of its model.
	PoolWait time.Duration
	// StreamIdle is the maximum time without data from an engine within a stream.
	StreamIdle time.Duration
	// MaxDepth is the maximum nesting of a request's arrays and objects.
	MaxDepth int
}

// Engine presents the router as an engine. It is the front's Handler, in front of the Runner,
// and the handler of the framed socket.
type Engine struct {
	opt   Options
	hosts allowedHosts
	ids   requestIDs

	requests, refused atomic.Uint64
}

// New returns an Engine.
func New(opt Options) (*Engine, error) {
	if opt.Runner == nil || opt.Fleet == nil {
		return nil, errors.New("engineapi: cannot create an engine without Runner and Fleet")
	}
	switch opt.VLLM {
	case "":
		opt.VLLM = "auto"
	case "auto", "completions", "generate":
	default:
		return nil, fmt.Errorf("engineapi: unknown API %q of vLLM; want auto, completions or generate", opt.VLLM)
	}
	if opt.Live == nil {
		opt.Live = func() LiveOptions { return LiveOptions{} }
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	h, err := newHosts(opt.Hosts)
	if err != nil {
		return nil, err
	}
	e := &Engine{opt: opt, hosts: h}
	e.ids.init()
	return e, nil
}

// Counts returns the number of requests received and of those rejected for their content.
func (e *Engine) Counts() (requests, refused uint64) { return e.requests.Load(), e.refused.Load() }

// AwaitWorkers waits until at least least workers of any role are ready, or ctx ends. It
// returns the number of ready workers.
func (e *Engine) AwaitWorkers(ctx context.Context, least int) (ready int) {
	count := func(v *fleet.View) int {
		n := 0
		for _, w := range v.Workers {
			if s, _ := w.State(); s == worker.Ready {
				n++
			}
		}
		return n
	}
	v, _ := e.opt.Fleet.Wait(ctx, func(v *fleet.View) bool { return count(v) >= least })
	return count(v)
}

// preparedRequest is a request that is ready for the Runner: the body for an engine's API and
// the other inputs of the Runner. It borrows nothing from the memory from which the request was
// parsed.
type preparedRequest struct {
	r               *request // nil after the body was written
	hints           *pd.Hints
	pool            modelPool
	body            []byte
	mem             membudget.Lease // contains body; released when the Runner has answered
	context         callContext
	responseHeaders []upstream.Field
	began           time.Time
	poolWait        time.Duration // time spent waiting for the model's first worker
	deadline        time.Time

	prompt          int    // number of prompt tokens
	eos, stops      []byte // eos_token_ids and stop_token_ids, raw
	reportsDecision bool   // the first item describes the choice
}

// deadlinePassed returns whether the request's deadline has passed.
func (p *preparedRequest) deadlinePassed() bool {
	return !p.deadline.IsZero() && !time.Now().Before(p.deadline)
}

// prepare checks a request and writes the engine's body. Its error is a *FieldError for an
// invalid field, a *modelDenied if principal does not permit the model, and errBudgetExhausted if
// allocate has no memory for the request. The end of ctx ends the wait for a first worker.
func (e *Engine) prepare(ctx context.Context, body []byte, principal front.Principal, allocate allocator) (*preparedRequest, error) {
	e.requests.Add(1)
	p := &preparedRequest{r: new(request), began: time.Now()}
	err := e.fill(ctx, p, body, principal, allocate)
	if err != nil {
		p.mem.Release()
		e.refused.Add(1)
		return nil, err
	}
	r := p.r
	p.r, p.hints, p.prompt, p.reportsDecision = nil, &r.hints, len(r.tokens), r.reportsDecision
	p.eos, p.stops = bytes.Clone(r.vals[fEOS]), bytes.Clone(r.vals[fStopIDs])
	return p, nil
}

func (e *Engine) fill(ctx context.Context, p *preparedRequest, body []byte, principal front.Principal, allocate allocator) error {
	r := p.r
	if err := r.parse(body); err != nil {
		return err
	}
	if err := allowsModels(principal, r); err != nil {
		return err
	}
	if err := p.context.read(r.vals[fContext]); err != nil {
		return err
	}
	if p.context.timeout > 0 {
		p.deadline = p.began.Add(p.context.timeout)
		r.hints.Deadline = p.deadline
	}
	if err := e.hosts.check(r); err != nil {
		return err
	}
	if err := e.checkMedia(r); err != nil {
		return err
	}
	if err := p.steeringHeaders(); err != nil {
		return err
	}
	if err := e.checkLegRoles(r); err != nil {
		return err
	}
	var err error
	if p.pool, err = e.awaitPool(ctx, p, principal); err != nil {
		return err
	}
	if maxTokens := p.pool.longestKnown; maxTokens > 0 && len(r.tokens) > maxTokens {
		return &FieldError{Field: "token_ids", Got: strconv.Itoa(len(r.tokens)) + " ids", Want: "fewer than " + strconv.Itoa(maxTokens) + ", the model's maximum length"}
	}
	if err := r.media(p.pool.blockSize); err != nil {
		return err
	}
	var ok bool
	if p.mem, ok = allocate(r.maxBodySize(len(body))); !ok {
		return errBudgetExhausted
	}
	p.body, err = r.appendBody(p.mem.Bytes()[:0], p.pool)
	return err
}

// awaitPool determines the properties of the model's workers and waits for a first worker if
// there is none. If every worker has reported its models and none serves this one, awaitPool
// returns a FieldError. If some worker has not reported them, the Runner rejects the request,
// whatever its body.
func (e *Engine) awaitPool(ctx context.Context, p *preparedRequest, principal front.Principal) (modelPool, error) {
	model := p.r.model
	if lora := p.r.text(fLoRA); lora != "" {
		if _, ok := e.opt.Fleet.View().Pool(lora); ok {
			model = lora
		}
	}
	found, ok, err := e.poolOf(model)
	if leave, allowed := e.mayWait(!ok && err == nil); allowed {
		defer leave()
		p.r.hints.WaitingSince = p.began
		by := p.began.Add(e.opt.Live().PoolWait)
		if !p.deadline.IsZero() && p.deadline.Before(by) {
			by = p.deadline
		}
		ctx, cancel := context.WithDeadline(ctx, by)
		defer cancel()
		e.opt.Fleet.Wait(ctx, func(v *fleet.View) bool {
			_, known := v.Pool(model)
			return known || v.AllModelsKnown()
		})
		p.poolWait = time.Since(p.began)
		found, ok, err = e.poolOf(model)
	}
	if err != nil {
		return found, &FieldError{Field: "model", Got: err.Error()}
	}
	view := e.opt.Fleet.View()
	if !ok && view.AllModelsKnown() {
		return found, unknownModel(p.r.model, front.AllowedModels(principal, view.Models))
	}
	if lora := p.r.text(fLoRA); lora != "" && lora != model && found.dialect != native && view.AllModelsKnown() { // these engines select the adapter by the model's name
		return found, &FieldError{Field: "routing.lora_name", Got: strconv.Quote(truncate(lora, 100)), Want: "an adapter that is served here: " + strings.Join(front.AllowedModels(principal, view.Models), ", ")}
	}
	if !ok && !p.r.has(fMaxTokens) {
		p.r.vals[fMaxTokens] = []byte("1") // so that the body can be written
	}
	return found, nil
}

// mayWait returns whether a request whose model has no worker may wait for one; leave ends the
// wait. With too many waiting requests the Runner rejects the request.
func (e *Engine) mayWait(without bool) (leave func(), allowed bool) {
	if !without || e.opt.Fleet.View().AllModelsKnown() {
		return nil, false
	}
	return e.opt.Runner.AddWaiter()
}

// unknownModel returns the error for an unknown model; it lists the known ones.
func unknownModel(model string, known []string) *FieldError {
	err := &FieldError{Field: "model", Got: strconv.Quote(truncate(model, 100)), Want: "a model that is served here; there is none"}
	if model == "" {
		err.Got = "nothing"
	}
	if len(known) > 0 {
		err.Want = "one that is served here: " + strings.Join(known, ", ")
	}
	return err
}

// steeringHeaders translates the routing section into the headers that any client could send.
func (p *preparedRequest) steeringHeaders() error {
	r := p.r
	say := func(name, value, field string) {
		if value == "" {
			return
		}
		p.responseHeaders = append(p.responseHeaders, upstream.Field{Name: name, Value: value})
		if r.hints.FieldNames == nil {
			r.hints.FieldNames = make(map[string]string)
		}
		r.hints.FieldNames[name] = field
	}
	pin := func(f, rank field) string {
		if !r.has(f) {
			return ""
		}
		id := string(r.vals[f])
		if id[0] == '"' {
			id = id[1 : len(id)-1]
		}
		if rank != none && r.has(rank) {
			id += "/" + string(r.vals[rank])
		}
		return id
	}
	pins, pinned := "", ""
	for _, f := range [...]struct{ worker, rank field }{{fInstance, fRank}, {fDecodeWorker, fRank}, {fPrefillWorker, fPrefillRank}} {
		one := pin(f.worker, f.rank)
		if one == "" {
			continue
		}
		if pins != "" {
			pins, pinned = pins+","+one, "routing"
			continue
		}
		pins, pinned = one, rules[f.worker].in+rules[f.worker].name
	}
	if r.has(fRank) && !r.has(fInstance) && !r.has(fDecodeWorker) {
		return &FieldError{Field: "routing.dp_rank", Got: "a rank without a worker", Want: "the worker that it is of beside it, as backend_instance_id or decode_worker_id"}
	}
	if r.has(fPrefillRank) && !r.has(fPrefillWorker) {
		return &FieldError{Field: "routing.prefill_dp_rank", Got: "a rank without a worker", Want: "the worker that it is of beside it, as prefill_worker_id"}
	}
	say("X-Sluice-Worker", pins, pinned)
	if r.has(fAllowed) {
		say("X-Sluice-Allowed-Workers", joinIDs(r.vals[fAllowed]), "routing.allowed_worker_ids")
	}
	labels, err := r.labels()
	if err != nil {
		return err
	}
	say("X-Sluice-Require-Labels", labels, "routing.routing_constraints.labels")
	say("X-Sluice-Session", r.text(fSession), "routing.session_id")
	if r.isTrue(fPrefillOnly) {
		say("X-Sluice-Prefill-Only", "true", "routing.prefill_only")
	}
	return nil
}

// checkLegRoles rejects a request that names a worker for a leg that the worker's role does not
// serve. The Runner would otherwise apply the name to the other leg.
func (e *Engine) checkLegRoles(r *request) error {
	for _, k := range [...]struct {
		f    field
		not  worker.Role
		want string
	}{
		{fPrefillWorker, worker.Decode, "a worker that prefill runs on"},
		{fDecodeWorker, worker.Prefill, "a worker that decode runs on"},
	} {
		if !r.has(k.f) {
			continue
		}
		for _, w := range e.opt.Fleet.View().Workers {
			if w.Spec.Role == k.not && w.Spec.ID == strings.Trim(string(r.vals[k.f]), `"`) {
				return &FieldError{Field: rules[k.f].in + rules[k.f].name, Got: fmt.Sprintf("%q, a %s worker", w.Spec.ID, k.not), Want: k.want}
			}
		}
	}
	return nil
}

// converter creates the converter of a stream when its answer begins; responseHeader returns the Runner's
// response headers.
func (e *Engine) converter(p *preparedRequest, responseHeader func(string) string) converter {
	c := converter{
		dialect: p.pool.dialect, usage: noUsage, prompt: p.prompt, eos: p.eos, stops: p.stops,
	}
	id := responseHeader("X-Sluice-Worker")
	if c.dialect == native {
		if d := e.deltasOf(id); d != nil {
			c.deltas, c.formKnown = *d, true
		}
	}
	if p.reportsDecision {
		for _, h := range [...]struct{ header, name string }{
			{"X-Sluice-Worker", "worker_id"}, {"X-Sluice-Rank", "dp_rank"}, {"X-Sluice-Prefill-Worker", "prefill_worker_id"},
			{"X-Sluice-Cached-Tokens", "overlap_tokens"}, {"X-Sluice-Plan", "plan"}, {"X-Sluice-Queue-Time", "queued"}, {"X-Sluice-Migration", "migration"},
		} {
			v := responseHeader(h.header)
			if v == "" && h.name == "queued" {
				v = p.poolWait.Round(time.Millisecond).String()
			}
			if v != "" {
				c.firstComments = append(c.firstComments, h.name+": "+v)
			}
		}
		c.firstComments = append(c.firstComments, "answered_after_ms: "+strconv.FormatInt(time.Since(p.began).Milliseconds(), 10))
	}
	return c
}
