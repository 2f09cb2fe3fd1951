package pd

import (
	"context"
	"time"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/pd/migration"
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
	rewriter sse.Rewriter
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

// resume runs a request that continues the open choices of the stream on an engine that is not in
// failed. grammar is a request member that constrains the output, or nil. If pause is not nil, the stream
// leaves its engine and waits in the admission queue first. resume returns nil if no engine continues the
// stream.
func (s *streamState) resume(client front.ClientGoneNotifier, open []*apiformat.ChoiceState, failed []*worker.Rank, cause relay.Cause, grammar []byte, pause *suspension) *resumption {
	c, opt := s.migration, s.settings
	q := s.settings.r.requests.Get()
	q.r, q.settings, q.id, q.model, q.stream = opt.r, opt, s.requestID, c.model, true
	defer q.recycle()
	t := &resumption{ClientGoneNotifier: client}
	q.entry = s.entry
	q.resumption, q.attemptsBefore, q.legDeadline = t, int(c.attempt), c.deadline.Time()
	q.steering = c.getExtra().steering

	mayWait := cause != relay.Cancelled // on a drain the current engine still works, so the stream can stay there
	next, reason := c.Resume(open, migration.MinModelLen(s.resumeCandidates(client, mayWait)), grammar, q.prompt.Tokens[:0])
	if reason != "" {
		s.addNote("not migrated: " + reason)
		return nil
	}
	q.prompt.Tokens, q.prompt.Blocks, q.prompt.Count = next.Tokens, q.prompt.Blocks[:0], len(next.Tokens)
	q.maxTokens, q.otherChoiceTokens = next.MaxTokens, next.OtherTokens
	var err error
	q.x, err = front.NewExchange(&front.InProcessRequest{
		Endpoint: front.EndpointOf(next.Path), RequestID: s.requestID, Body: next.Body,
		Fields: c.Fields(), Received: time.Now(), Responder: t, Log: opt.Log,
	})
	if err != nil {
		s.addNote("not migrated: " + err.Error())
		return nil
	}
	q.req = q.x.Request()
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
	q.suspects = max(int(c.suspects)-opt.Migration.MaxAttempts+1, 0)
	q.salt = c.salt
	q.lookUpOverlap(time.Now())
	if !q.filterRequest() {
		return nil
	}
	switch {
	case pause != nil:
		if !q.awaitResumption(s, pause) {
			return nil
		}
	case q.plan.Family != nil && !q.prefersHandover():
		q.plan.useDecodeOnly("")
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
	if pause == nil {
		s.entry.AddMigration()
	}
	return t
}

// resumeCandidates returns the ready ranks that may continue the stream, including the failed one.
// If there are none and mayWait is true, it waits for one up to timeouts.pool_wait or until the
// client disconnects.
func (s *streamState) resumeCandidates(client front.ClientGoneNotifier, mayWait bool) (ranks []*worker.Rank) {
	r, opt, model := s.settings.r, s.settings, s.migration.model
	collect := func(v *fleet.View) bool {
		pool, ok := v.Pool(model)
		if !ok {
			return !mayWait
		}
		ranks = wholeRanks(pool)
		if m := opt.pdOf(model); disaggregated(pool, m) {
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
	if q.plan.Traits.NoDecodeOnly || !q.pd.DecodeOnlyFallback || q.choosesJointly() {
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
