package pd

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"

	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/kvtransfer"
	"sluice/router/pd/abort"
	"sluice/router/pd/reqbody"
	"sluice/router/requestlog"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// streamState is what a relayed stream needs after its request has returned to the pool. Thousands
// exist at a time; it stays within a size class of 288 bytes.
type streamState struct {
	legRecord
	requestID      string
	endpoint       *front.Endpoint
	client         [16]byte        // its address, zero if unknown; 16 bytes where a netip.Addr has 24
	principal      front.Principal // nil if the router requires no keys
	received       monotime.Time
	tokens         int32 // number of prompt tokens
	reservedTokens int32 // quota tokens reserved from the client's key
	// prefillCached is the number of tokens that the engine of a prefill leg found cached, -1 if
	// unknown. Without a prefill leg the runner learns from the decode engine's report.
	prefillCached int32
	prefilled     bool
	migrated      bool                // another engine continues it
	background    bool                // a background response: reservedTokens includes its output
	unstored      bool                // the client declined to have the response stored
	encodedBy     *tokenize.InProcess // of encodedPrompt
	concurrent    *concurrentPrefill  // the prefill leg, which may still run
	keys          []blockhash.Seq     // of the approximate index; nil for ranks with KV events

	kv       abort.KV             // state of prefill's blocks until the first token
	transfer *kvtransfer.Transfer // watch over the hand-over
	prefill  *worker.Rank

	endedTransfer *schedule.Transfer  // the result of the hand-over of an earlier leg
	unmigratable  string              // why the stream cannot migrate
	migration     *streamMigration    // nil if it cannot migrate
	trace         *requestlog.TraceID // the request's trace id; nil if it has none
	turn          session.Turn        // of its session
	indexedWorker *worker.Worker      // the worker under which Runner.migratable lists the stream
}

// relay passes the stream to the front, which relays it after the handler has returned.
func (q *request) relay(l *decodeLeg, resp *upstream.Response) {
	s := &streamState{
		legRecord: l.takeForStream(resp.Status), requestID: q.req.RequestID, endpoint: q.req.Endpoint, client: q.req.ClientIP.As16(),
		principal: q.req.Principal, received: monotime.Of(q.req.Received),
		tokens: int32(q.prompt.Count), reservedTokens: int32(q.reservedTokens),
		trace: q.sharedTraceID(), prefilled: q.usesPrefill(), prefillCached: int32(q.handover.PrefillCached), concurrent: q.concurrent,
		kv: q.prefillLeg.takeKVForStream(q.abortRule(abort.PhaseStream).Reclaim, q.closeGrace()),
	}
	if q.concurrent != nil {
		q.concurrent.retain()
	}
	s.background, s.unstored = q.backgroundTokens > 0, q.declinesStore()
	s.encodedBy = q.encodedPrompt().model
	q.quotaCommitted = true
	q.reservations.detach()
	if q.prefillLeg.transfer != nil {
		s.transfer, s.prefill, q.prefillLeg.transfer = q.prefillLeg.transfer, q.handover.Prefill, nil
	}
	if !s.prefilled {
		s.keys = slices.Clone(q.approxKeys(s.rank)) // the next request overwrites q.keys
	}
	if t := q.resumption; t != nil {
		t.stream, t.resp, t.call = s, resp, l.call
		if a := q.answerRewriter(); a != nil && isEventStream(resp) {
			t.rewriter = a.Events(&q.handover)
		}
		return
	}
	if q.req.Endpoint.Kind == front.ResponsesAPI && resp.Status == 200 && !isEventStream(resp) {
		if seen, err := resp.Peek(); err == nil {
			q.rememberResponse(seen, s.rank)
		}
	}
	hooks := front.RelayHooks{Handler: s, ClientDeadline: q.deadline}
	if s.model != nil {
		hooks.Intervals = s.model.Intervals()
	}
	if s.entry != nil {
		s.entry.Intervals.Next, hooks.Intervals = hooks.Intervals, &s.entry.Intervals
	}
	s.turn, q.turn = q.turn, session.Turn{}
	if q.answerLease != nil {
		hooks.Handler, q.answerLease = leasedStreamState{s, q.answerLease}, nil
	}
	hooks.Choices, hooks.EndsWithChoices = reqbody.Choices(q.req.Endpoint.Kind, &q.req.Doc)
	hooks.Usage = reqbody.WantsUsage(&q.req.Doc)
	if c := q.newMigration(s, resp); c != nil {
		s.migration = c
		q.r.migratable.add(s)
		hooks.Transcript = &c.Transcript
	} else if a := q.answerRewriter(); a != nil && isEventStream(resp) {
		hooks.Rewrite = a.Events(&q.handover)
	}
	q.x.Relay(resp, l.call, hooks)
}

// leasedStreamState is a streamState that also owns the memory of prefill's answer.
type leasedStreamState struct {
	*streamState
	answerLease *membudget.Lease
}

// Ended implements front.StreamHandler.
func (l leasedStreamState) Ended(res relay.Result) {
	defer l.answerLease.Release()
	l.streamState.Ended(res)
}

// FirstToken implements front.StreamHandler. The prefill work is done at the first token.
func (s *streamState) FirstToken() {
	s.concurrent.completeHandover()
	s.kv.On(abort.Decoded)
	s.reservation.PrefillDone()
	took := s.received.Since()
	s.settings.Observer.FirstToken(s.endpoint.Path, took)
	if s.model != nil {
		s.model.FirstToken(took, s.traceOf())
	}
}

// Done implements front.Doner. The engine has finished the work, even if it ends its response
// later.
func (s *streamState) Done(usage relay.Usage, failed bool) {
	if !failed {
		s.reservation.Report(s.requestID, usage.Cached, max(usage.Completion, 0))
	}
	s.release()
}

// Ended implements front.StreamHandler.
func (s *streamState) Ended(res relay.Result) {
	opt := s.settings
	s.settings.r.migratable.remove(s)
	if cached := res.Usage.Cached; res.Cause == relay.Completed {
		s.reservation.Report(s.requestID, cached, max(res.Usage.Completion, 0))
	}
	s.release()
	switch {
	case res.SawErrorEvent || res.Cause.EngineFailed():
		s.kv.On(abort.Dropped) // no effect after the first token
	case res.Cause != relay.Completed && res.FirstByte.IsZero():
		s.kv.GiveUp()
	default:
		s.kv.On(abort.Decoded)
	}
	s.commitQuota(&res)
	s.reportResult(&res)
	if s.unmigratable != "" && (res.SawErrorEvent || res.Cause.EngineFailed() || res.Cause == relay.EngineStalled) {
		s.addNote("not migrated: " + s.unmigratable)
		opt.Observer.Migrated(s.unmigratable)
	}
	outcome := "ok"
	if b := s.concurrent; b != nil {
		if res.Cause != relay.Completed {
			b.call.Cancel() // prefill would wait for a decode that has ended
		} else {
			b.cancelSoon()
		}
		if !s.migrated {
			s.prefillCached = int32(b.cachedTokens())
		}
	}
	switch {
	case res.Cause == relay.Cancelled && s.concurrent.hasFailed():
		outcome = "prefill_failed"
	case res.Cause != relay.Completed:
		outcome = res.Cause.String()
	}
	s.complete(outcome)
	opt.Observer.Streamed(s.endpoint.Path, &res)
	out := schedule.Outcome{
		Status: int(s.status), CachedTokens: res.Usage.Cached, PromptTokens: max(res.Usage.Prompt, 0),
		OutputTokens: max(res.Usage.Completion, 0), Total: s.received.Since(),
	}
	if outcome != "ok" {
		out.Reason = outcome
	}
	switch {
	case s.transfer != nil:
		out.Transfer = s.finishTransfer()
	case s.endedTransfer != nil:
		out.Transfer = *s.endedTransfer
	}
	if !res.FirstToken.IsZero() {
		out.TTFT = res.FirstToken.Sub(s.received.Time())
	}
	if res.Cause == relay.Completed && !s.migrated {
		encodedPrompt{s.encodedBy, int(s.tokens)}.compareCounts(s.settings, s.endpoint.Kind, &res.Usage, s.rank, int(s.predicted), !s.prefilled)
	}
	if s.prefilled {
		out.CachedTokens = int(s.prefillCached)
	} else if res.Cause == relay.Completed && s.tokens > 0 && !s.migrated {
		s.settings.r.learnCached(s.rank, s.keys, int(s.tokens), int(s.predicted), res.Usage.Cached, out.Total)
	}
	s.settings.r.endTurn(&s.turn, session.Result{
		OK: s.status == 200 && !res.FirstToken.IsZero(), Cached: out.CachedTokens, Prompt: out.PromptTokens, Output: out.OutputTokens,
	})
	if s.model != nil {
		s.model.Ended(out, int(s.tokens), s.traceOf())
	}
	opt.Scheduler.EndRecord(s.requestID, out)
	finishEntry(s.entry, &out, res.Usage.Completion, res.Events, res.Bytes)
	if outcome != "ok" {
		s.logEnd(res.Cause, outcome, res.Err)
	}
}

// logEnd logs that the stream ended early.
func (s *streamState) logEnd(cause relay.Cause, outcome string, err error) {
	level := slog.LevelWarn
	if cause == relay.ClientGone || cause == relay.Drained || cause == relay.Deadline {
		level = slog.LevelInfo // disconnects, deadlines and restarts are normal; failures of engines are not
	}
	args := append(make([]any, 0, 12), "request", s.requestID)
	if s.client != [16]byte{} {
		args = append(args, "client", netip.AddrFrom16(s.client).Unmap())
	}
	args = append(args, "endpoint", s.endpoint.Path)
	if s.principal != nil {
		args = append(args, "key", s.principal.Name())
	}
	args = append(args, "rank", s.rank.ID.String(), "cause", outcome)
	if err != nil {
		args = append(args, "error", err)
	}
	s.settings.Log.Log(context.Background(), level, "stream ended early", args...)
}

// finishTransfer closes the watch over the stream's hand-over and returns its result.
func (s *streamState) finishTransfer() schedule.Transfer {
	return s.settings.r.finishTransfer(s.transfer, s.model, s.requestID, s.prefill, s.rank, int(s.tokens-s.predicted))
}

// commitQuota charges the client's key for the stream instead of the reserved tokens: the usage
// that the engine reported, else the router's count of the prompt and one token per event.
func (s *streamState) commitQuota(res *relay.Result) {
	if s.principal == nil {
		return
	}
	if s.status != 200 {
		s.principal.Commit(int(s.reservedTokens), 0)
		return
	}
	prompt, output := res.Usage.Prompt, res.Usage.Completion
	if s.background && (res.Cause != relay.Completed || output <= 0) {
		s.principal.Commit(int(s.reservedTokens), int(s.reservedTokens)) // the engine computes it to its end
		return
	}
	if prompt < 0 {
		prompt = int(max(s.tokens, s.reservedTokens))
	}
	if output < 0 {
		output = int(min(res.Events, 1<<30))
	}
	s.principal.Commit(int(s.reservedTokens), prompt+output)
}

// reportResult reports the engine's success or failure to the fleet. An error event before the
// first token may be the request's fault, so it counts as neither.
func (s *streamState) reportResult(res *relay.Result) {
	fleet := s.settings.Fleet
	switch {
	case s.completed || s.status != 200: // already reported
	case res.Cause.EngineFailed():
		fleet.ReportFailure(s.rank, res.Err)
	case res.SawErrorEvent && !res.FirstToken.IsZero():
		fleet.ReportStatus(s.rank, 500)
	case res.SawErrorEvent:
	case res.Cause == relay.Completed, !res.FirstToken.IsZero() && (res.Cause == relay.ClientGone || res.Cause == relay.ClientStalled || res.Cause == relay.Deadline):
		fleet.ReportStatus(s.rank, 200)
	}
}
