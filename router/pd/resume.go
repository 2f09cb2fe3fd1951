package pd

import (
	"context"
	"math"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// resumption is the front.Responder of an internal request that continues an interrupted stream.
// That request runs like any other, with the same plans and retries, and its response becomes the
// rest of the stream.
type resumption struct {
	front.ClientGoneNotifier
	stream   *streamState
	resp     *upstream.Response
	call     *upstream.Call
	rewriter relay.Rewriter
	refusal  string
}

// RespondError implements front.Responder.
func (t *resumption) RespondError(_ front.Reason, _, message string, _ time.Duration) {
	t.refusal = message
}

// Respond implements front.Responder. A complete response cannot continue a stream.
func (t *resumption) Respond(status int, _ []byte) {
	t.refusal = "an engine answered " + statusClass(status) + " in the place of a stream"
}

// Relay implements front.Responder and discards the response. The runner stores a stream in the
// resumption directly and does not call Relay for it.
func (t *resumption) Relay(resp *upstream.Response, call *upstream.Call, hooks front.RelayHooks) {
	call.Cancel()
	resp.Release()
}

// maxResumeTokens bounds the token ids of a resume request. Each of several choices is a prompt of
// its own.
const maxResumeTokens = 1 << 20

// resume runs a request that continues the open choices of the stream on an engine that is not in
// failed. grammar is a request member that constrains the output, or nil. resume returns nil if no
// engine continues the stream.
func (c *migrationState) resume(client front.ClientGoneNotifier, open []*relay.ChoiceState, failed []*worker.Rank, cause relay.Cause, grammar []byte) *resumption {
	s := c.stream
	opt := s.r.current.Load()
	q := s.r.requests.Get()
	q.r, q.settings, q.id, q.model, q.stream = s.r, opt, s.requestID, c.model, true
	defer q.recycle()
	t := &resumption{ClientGoneNotifier: client}
	q.resumption, q.attemptsBefore, q.legDeadline = t, int(c.attempt), c.deadline.time()
	q.steering = c.getExtra().steering

	mayWait := cause != relay.Cancelled // on a drain the current engine still works, so the stream can stay there
	length := minModelLen(c.resumeCandidates(opt, client, mayWait))
	conts := make([]Continuation, len(open))
	maxTokens, minTokens, total := 0, 0, 0
	for i, o := range open {
		cont := &conts[i]
		*cont = Continuation{PromptLen: c.Prompt.Len(), MaxOutput: int(c.maxTokens), MinOutput: int(c.minTokens)}
		var buf []uint32
		if i == 0 {
			buf = q.prompt.Tokens[:0]
		}
		cont.Tokens = append(c.Prompt.Append(buf), o.Out[:o.Delivered]...)
		remaining, required, ok := cont.Remaining(c.kind, length)
		if !ok {
			s.addNote("not migrated: the model's length, which bounds an answer without max_tokens, is not known, or reached")
			return nil
		}
		c.Limit = int32(min(o.Delivered+remaining, math.MaxInt32)) // equal for all choices
		if i > 0 {
			q.otherChoiceTokens += o.Delivered // all choices begin with the client's prompt, which is computed once
		}
		if maxTokens == 0 || remaining < maxTokens {
			maxTokens = remaining
		}
		minTokens = max(minTokens, required)
		if total += len(cont.Tokens); total > maxResumeTokens && len(open) > 1 {
			s.addNote("not migrated: too_long")
			return nil
		}
	}
	q.prompt.Tokens, q.prompt.Count = conts[0].Tokens, len(conts[0].Tokens)
	q.maxTokens = maxTokens
	var err error
	tmpl := c.template()
	q.x, err = front.NewExchange(&front.InProcessRequest{
		Endpoint: front.EndpointOf(tmpl.endpoint(c.kind)), RequestID: s.requestID, Body: tmpl.complete(c.kind, conts, min(minTokens, maxTokens), maxTokens, grammar),
		Fields: c.fields(), Received: time.Now(), Responder: t, Log: opt.Log,
	})
	if err != nil {
		s.addNote("not migrated: " + err.Error())
		return nil
	}
	if q.applyView(opt.Fleet.View()); q.pool != nil && q.missingRole() != "" && mayWait {
		q.awaitPlan(time.Now().Add(opt.Timeouts.PoolWait))
	}
	if q.missingRole() != "" || q.plan.Unservable {
		s.addNote("not migrated: no other worker can take the stream")
		return nil
	}
	q.plan.Prefill = filterRanks(&q.steering, q.plan.Prefill)
	q.plan.Decode = filterRanks(&q.steering, q.plan.Decode)
	q.plan.Whole = filterRanks(&q.steering, q.plan.Whole)
	for i, r := range failed {
		q.exclude(r, failure{down: cause.EngineFailed() && i == len(failed)-1}.exclusionReason())
	}
	q.suspects = max(int(c.suspects)-opt.Migration.Max+1, 0)
	q.salt = c.salt
	q.lookUpOverlap(time.Now())
	if !q.filterRequest() {
		return nil
	}
	if q.plan.Family != nil && !q.prefersHandover() {
		q.plan.usePlainDecode("")
	}
	if q.plan.Family == nil {
		q.runWhole()
	} else {
		q.runDisaggregated()
	}
	client.OnClientGone(nil)
	c.attempt += int32(max(q.attempt, 1))
	if t.stream == nil {
		if t.refusal != "" {
			s.addNote("not migrated: " + t.refusal)
		}
		return nil
	}
	return t
}

// resumeCandidates returns the ready ranks that may continue the stream, including the failed one.
// If there are none and mayWait is true, it waits for one up to timeouts.pool_wait or until the
// client disconnects.
func (c *migrationState) resumeCandidates(opt *settings, client front.ClientGoneNotifier, mayWait bool) (ranks []*worker.Rank) {
	r := c.stream.r
	collect := func(v *fleet.View) bool {
		pool, ok := v.Pool(c.model)
		if !ok {
			return !mayWait
		}
		ranks = wholeRanks(pool)
		if m := opt.pdOf(c.model); disaggregated(pool, m) {
			ranks = decodeRanks(pool, m.traits)
		}
		return len(ranks) > 0
	}
	if collect(opt.Fleet.View()) || !mayWait {
		return ranks
	}
	n := r.waiting.Add(1)
	defer r.waiting.Add(-1)
	if opt.PoolWaiters > 0 && n > int64(opt.PoolWaiters) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), opt.Timeouts.PoolWait)
	defer cancel()
	client.OnClientGone(cancel)
	defer client.OnClientGone(nil)
	opt.Fleet.Wait(ctx, collect)
	return ranks
}

// filterRanks returns the ranks that the request's headers allow.
func filterRanks(s *steering, ranks []*worker.Rank) []*worker.Rank {
	if len(ranks) == 0 {
		return ranks
	}
	return s.filter(ranks, make([]bool, len(s.workers)))
}

// prefersHandover reports whether a migrating stream runs prefill on a prefill worker again. It
// does so if decode workers cannot prefill, if the scheduler chooses both legs jointly, or if the
// best decode rank would have to compute so many tokens that it delayed the requests it decodes.
// Otherwise the best decode rank stays reserved for the whole request.
func (q *request) prefersHandover() bool {
	if q.plan.Traits.NoPlainDecode || !q.pd.PlainDecode || q.choosesJointly() {
		return true
	}
	choice, ok := q.choose(schedule.WholeLeg, q.plan.Decode)
	if !ok {
		return false
	}
	if len(q.plan.Prefill) > 0 && q.prompt.Count-choice.CachedTokens >= q.settings.Migration.HandoverTokens {
		choice.Reservation.Release()
		return true
	}
	q.reservedDecode = choice
	return false
}
