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

// resumption is the Party of a request that is the rest of a stream: it runs as any
// request does, by the same plans and with the same retries, and what it gets is the
// stream's.
type resumption struct {
	front.ClientGoneNotifier
	stream   *streamState
	resp     *upstream.Response
	call     *upstream.Call
	rewriter relay.Rewriter
	refusal  string
}

// RespondError implements front.Party.
func (t *resumption) RespondError(_ front.Reason, _, message string, _ time.Duration) {
	t.refusal = message
}

// Respond implements front.Party: an answer that is whole is no stream.
func (t *resumption) Respond(status int, _ []byte) {
	t.refusal = "an engine answered " + statusClass(status) + " in the place of a stream"
}

// Relay implements front.Party; the runner hands taking its stream itself.
func (t *resumption) Relay(resp *upstream.Response, call *upstream.Call, hooks front.RelayHooks) {
	call.Cancel()
	resp.Release()
}

// maxResumeTokens bounds the ids that another engine is given: of several choices each is a prompt.
const maxResumeTokens = 1 << 20

// resume has another engine, none of those that failed, go on with the open choices of the
// stream, held to a grammar by a member of the request or not; nil when none did.
func (c *migrationState) resume(client front.ClientGoneNotifier, open []*relay.ChoiceState, failed []*worker.Rank, cause relay.Cause, grammar []byte) *resumption {
	s := c.stream
	opt := s.r.current.Load()
	q := s.r.requests.Get()
	q.r, q.settings, q.id, q.model, q.stream = s.r, opt, s.requestID, c.model, true
	defer q.recycle()
	t := &resumption{ClientGoneNotifier: client}
	q.resumption, q.attemptsBefore, q.legDeadline = t, int(c.attempt), c.deadline.time()
	q.steering = c.getExtra().steering

	mayWait := cause != relay.Cancelled // else its engine is well, and the stream stays there
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
		c.Limit = int32(min(o.Delivered+remaining, math.MaxInt32)) // the same for all
		if i > 0 {
			q.otherChoiceTokens += o.Delivered // the client's prompt, which all begin with, is computed once
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

// resumeCandidates are the ready ranks that may go on with the stream, the failed one among them.
// Where there are none and waits says so, they are waited for: for timeouts.pool_wait, and
// while the client is there.
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

// filterRanks are the ranks that the request's headers leave.
func filterRanks(s *steering, ranks []*worker.Rank) []*worker.Rank {
	if len(ranks) == 0 {
		return ranks
	}
	return s.filter(ranks, make([]bool, len(s.workers)))
}

// prefersHandover says whether a stream that moves is prefilled on a prefill worker again:
// where decode workers cannot prefill, where the two are weighed for every request,
// and where the decode worker that is the best choice would have to compute so much
// that it held up those it decodes. Else it is booked for all of it.
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
