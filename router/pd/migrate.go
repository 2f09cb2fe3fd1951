package pd

import (
	"fmt"
	"math"
	"slices"
	"time"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/front"
	"sluice/dataplane/monotime"
	"sluice/dataplane/relay"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/pd/abort"
	"sluice/router/pd/migration"
	"sluice/router/pd/reqbody"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// streamMigration is what the runner needs to continue a stream on another engine when the current
// engine fails or is drained. Thousands of streams have one, so it fits a size class of 256 bytes, and
// data that few streams need is in migrationExtra.
type streamMigration struct {
	migration.State
	model    string
	salt     blockhash.Salt
	deadline monotime.Time   // of the decode leg, on every engine
	extra    *migrationExtra // nil if the stream needs none of it
	attempt  int32
	suspects int16
	moves    int16 // number of migrations away from failed engines
}

// migrationExtra holds the migration data that only few streams have.
type migrationExtra struct {
	steering steering
	failed   []*worker.Rank
	// preemptible is what preemption needs of the stream; nil if it is never suspended.
	preemptible *preemptible
}

// saturatingInc returns n + 1, or n if that is the largest value.
func saturatingInc(n int16) int16 {
	if n == math.MaxInt16 {
		return n
	}
	return n + 1
}

// getExtra returns the extra data, or the zero value if there is none.
func (c *streamMigration) getExtra() migrationExtra {
	if c.extra == nil {
		return migrationExtra{}
	}
	return *c.extra
}

// setFailed sets the ranks that must not continue the stream.
func (c *streamMigration) setFailed(failed []*worker.Rank) {
	if c.extra == nil {
		c.extra = new(migrationExtra)
	}
	c.extra.failed = failed
}

// checkMigratable determines once per request whether another engine could continue its stream. It
// sets q.unmigratable to the reason if none could.
func (q *request) checkMigratable() {
	if q.migrationChecked {
		return
	}
	q.migrationChecked = true
	r := q.migrationRequest()
	q.template, q.unmigratable = migration.Check(&r, &q.settings.Migration)
}

// migrationRequest returns what package migration reads of the request.
func (q *request) migrationRequest() migration.Request {
	return migration.Request{
		Doc: &q.req.Doc, Kind: q.req.Endpoint.Kind, Migratable: q.stream && q.req.Endpoint.Disaggregable,
		ReturnsTokenIDs: q.returnsTokenIDs, ExactPrompt: q.hasExactPrompt(), ReasoningParser: q.pd.ReasoningParser,
		Alone: !q.isPreemptible() && len(q.plan.Decode) < 2 && len(q.plan.Whole) < 2 && !q.pool.MayGrow(worker.Decode) && !q.pool.MayGrow(worker.Aggregated),
	}
}

// clientWantsIDs reports whether the client itself asked for token ids.
func (q *request) clientWantsIDs() bool {
	r := migration.Request{Doc: &q.req.Doc, ReturnsTokenIDs: q.returnsTokenIDs}
	return r.WantsIDs()
}

// hasExactPrompt reports whether the router knows the prompt's token ids exactly as the engine
// does.
func (q *request) hasExactPrompt() bool {
	switch q.prompt.Source {
	case tokenize.FromRequest, tokenize.FromEngine, tokenize.FromCache:
		return len(q.prompt.Tokens) > 0 && len(q.prompt.Tokens) == q.prompt.Count
	case tokenize.FromNative:
		return q.prompt.Verified && len(q.prompt.Tokens) > 0 && len(q.prompt.Tokens) == q.prompt.Count
	}
	return false
}

// needsTokenIDs reports whether the leg for rank must ask the engine for token ids so that its
// stream can migrate. It sets q.legUnmigratable to the reason if the stream cannot migrate.
func (q *request) needsTokenIDs(rank *worker.Rank) (needs bool) {
	if q.resumption != nil {
		return false // the resume request asks for them
	}
	q.checkMigratable()
	switch {
	case q.unmigratable != "":
		q.legUnmigratable = q.unmigratable
	case q.handover.Trial:
		q.legUnmigratable = "trial"
	default:
		needs, q.legUnmigratable = migration.CheckEngine(rank, q.req.Endpoint.Kind, &q.template, q.hasExactPrompt())
	}
	return needs
}

// repeatsFirstEvent reports whether the router must have the stream's first event before it sends
// anything to the client, because later events repeat its content.
func (q *request) repeatsFirstEvent() bool {
	return q.legUnmigratable == "" && q.unmigratable == "" && q.migrationChecked && (q.req.Endpoint.Kind == front.Messages || q.req.Endpoint.Kind == front.ResponsesAPI)
}

// newMigration returns the migration state of a stream, or nil if the stream cannot migrate. It sets
// the X-Sluice-Migration response header accordingly.
func (q *request) newMigration(s *streamState, resp *upstream.Response) *streamMigration {
	kind := q.req.Endpoint.Kind
	clientIDs := q.clientWantsIDs()
	switch {
	case q.unmigratable == "off":
		return nil
	case q.legUnmigratable == "engine" && clientIDs:
		q.legUnmigratable = "" // the client asked for ids itself; the stream shows whether they arrive
	}
	if q.legUnmigratable == "" && (resp.Status != 200 || resp.ContentLength != upstream.LengthChunked) {
		q.legUnmigratable = "endpoint"
	}
	if q.legUnmigratable != "" {
		s.unmigratable = q.legUnmigratable
		q.x.SetHeader("X-Sluice-Migration", "no; "+q.legUnmigratable)
		return nil
	}
	c := &streamMigration{
		model: q.pool.Model, salt: q.salt,
		suspects: int16(q.suspects), attempt: int32(q.attempt), deadline: monotime.Of(q.earlierDeadline(q.decodeDeadline(s.began.Time()))),
	}
	c.Init(&q.template, kind, q.maxTokens, front.AppendPassedHops(q.x.ForwardFields(q.fields[:0]), q.x))
	ready := "ready"
	if c.Unconstrained() {
		ready = "ready; unconstrained"
	}
	q.x.SetHeader("X-Sluice-Migration", ready)
	c.ShowIDs = clientIDs || kind == front.Generate || kind == front.NativeGenerate
	c.NoText = kind == front.Generate && string(reqbody.Member(&q.req.Doc, "output_mode")) != `"text"`
	c.TextOnly = !q.handover.WantTokenIDs && !c.ShowIDs
	c.Deltas = s.rank.Worker.Info().Deltas
	if q.hasExactPrompt() {
		c.Prompt = transcript.PackIDs(q.prompt.Tokens)
	}
	if a := q.answerRewriter(); a != nil {
		c.SetPreRewriter(a.Events(&q.handover))
	}
	if g := &q.steering; len(q.excluded) > 0 || g.isSet() {
		c.extra = &migrationExtra{
			steering: steering{session: g.session, workers: slices.Clone(g.workers), ranks: slices.Clone(g.ranks), allowed: slices.Clone(g.allowed), labels: slices.Clone(g.labels)},
			failed:   slices.Clone(q.excluded),
		}
	}
	if q.isPreemptible() {
		if c.extra == nil {
			c.extra = new(migrationExtra)
		}
		c.extra.preemptible = q.newPreemptible()
	}
	return c
}

// NextEngine implements front.StreamHandler. The relay calls it only for streams that have a
// Transcript. A migration belongs to the client's request, so it reads the configuration that the
// request read, not one that was loaded since. The fleet is not configuration: its members, their
// states and limits are those of the present.
func (s *streamState) NextEngine(b relay.Interruption, client front.ClientGoneNotifier) (*upstream.Response, *upstream.Call) {
	c := s.migration
	draining := b.Cause == relay.Cancelled // the engine is healthy
	var pause *suspension
	if draining {
		stays := false
		if pause, stays = s.beginSuspension(b.Leave); stays {
			return nil, nil
		}
	}
	continued := b.Cause == relay.Completed && b.Event == nil
	switch {
	case continued:
		s.endHealthyLeg("ok")
	case !draining:
		c.suspects = saturatingInc(c.suspects)
	}
	open, grammar, reason := s.planMigration(draining || continued, pause != nil, client)
	switch {
	case reason != "" && pause != nil:
		s.addNote("not suspended: " + reason)
		return nil, nil
	case reason != "":
		s.addNote("not migrated: " + reason)
		s.settings.Observer.Migrated(reason)
		return nil, nil
	}
	from, failed := s.rank, c.getExtra().failed
	switch {
	case continued, pause != nil:
	case draining:
		failed = append(failed, from)
	default:
		failed = append(failed, from)
		s.endFailedLeg(b)
	}
	t := s.resume(client, open, failed, b.Cause, grammar, pause)
	if pause != nil {
		pause.end(s, t != nil, client.ClientGone())
	}
	if t == nil {
		if pause == nil && !client.ClientGone() {
			s.settings.Observer.Migrated("failed")
		}
		return nil, nil
	}
	c.TextOnly = false
	c.SetPreRewriter(t.rewriter)
	c.SumsCached = t.stream.rank.Worker.Info().Engine == "sglang"
	switch {
	case continued:
		s.adoptLeg(t.stream)
	case pause != nil:
		s.adoptLeg(t.stream)
		pause.log(s, open)
	case draining:
		s.endHealthyLeg("moved")
		s.adoptLeg(t.stream)
		s.reportMigration("drained", "drain", from, open, b.Err)
	default:
		c.setFailed(failed)
		c.moves = saturatingInc(c.moves)
		s.adoptLeg(t.stream)
		s.reportMigration("done", b.Cause.String(), from, open, b.Err)
	}
	return t.resp, t.call
}

// planMigration returns the choices that another engine must continue and the request member for the
// rest of their grammar (nil: none), or the reason why the stream cannot continue elsewhere. The
// number of attempts is limited unless the engine is healthy.
func (s *streamState) planMigration(healthy, suspending bool, client front.ClientGoneNotifier) (open []*apiformat.ChoiceState, grammar []byte, reason string) {
	c, limit := s.migration, s.settings.Migration.MaxAttempts
	reason = c.MigrationBlocker()
	switch {
	case reason != "":
	case !healthy && (int(c.moves) >= limit || int(c.suspects) > limit):
		reason = "limit"
	case time.Now().After(c.deadline.Time()):
		reason = "deadline"
	case c.TextOnly:
		if reason = s.retokenize(client, suspending); reason == "retokenized" {
			c.Block(reason) // final: the text already sent does not change
		}
	}
	open = c.Unfinished()
	if reason == "" && c.Spent(open) {
		reason = "spent"
	}
	if reason == "" {
		if grammar, reason = c.RemainingGrammar(s.settings.Migration.Structured); reason != "" {
			c.Block(reason)
		}
	}
	return open, grammar, reason
}

// reportMigration counts and logs a migration to the present rank. open are the choices that were
// unfinished when the stream left from.
func (s *streamState) reportMigration(outcome, cause string, from *worker.Rank, open []*apiformat.ChoiceState, err error) {
	s.settings.Observer.Migrated(outcome)
	suffix, generated := "", 0
	for _, q := range open {
		generated += q.Delivered
	}
	unconstrained := s.migration.Unconstrained()
	if unconstrained {
		suffix = ", without the grammar"
	}
	s.addNote(fmt.Sprintf("migrated: %s (%s) after %d tokens, %s continues the stream%s", from.ID, cause, generated, s.rank.ID, suffix))
	s.settings.Log.Warn("stream migrated", "request", s.requestID, "previous_rank", from.ID.String(), "rank", s.rank.ID.String(), "tokens", generated, "cause", cause, "unconstrained", unconstrained, "error", err)
}

// addNote adds a note to the request's explain record.
func (s *streamState) addNote(text string) { s.settings.Scheduler.AddNote(s.requestID, text) }

// endFailedLeg reports the failure of the leg's engine and ends the leg. The stream may continue on
// another engine.
func (s *streamState) endFailedLeg(b relay.Interruption) {
	s.reportFailure(b)
	outcome := b.Cause.String()
	if b.Event != nil {
		outcome = relay.EngineReportedError.String()
	}
	s.endLeg(outcome)
}

// endHealthyLeg ends a leg whose stream continues on another engine although its own engine is
// healthy.
func (s *streamState) endHealthyLeg(outcome string) {
	s.settings.Fleet.ReportStatus(s.rank, 200)
	s.endLeg(outcome)
}

func (s *streamState) endLeg(outcome string) {
	s.release()
	s.kv.On(abort.Dropped)
	if s.concurrent != nil {
		s.concurrent.call.Cancel()
		s.concurrent = nil
	}
	if s.transfer != nil {
		transfer := s.finishTransfer()
		s.endedTransfer, s.transfer = &transfer, nil
	}
	s.complete(outcome)
}

// reportFailure reports to the fleet an engine that failed in the middle of a stream. A long
// silence is not a failure.
func (s *streamState) reportFailure(b relay.Interruption) {
	switch {
	case b.Event != nil:
		s.settings.Fleet.ReportStatus(s.rank, 500)
	case b.Cause.EngineFailed():
		s.settings.Fleet.ReportFailure(s.rank, b.Err)
	}
}

// adoptLeg makes the leg of to the stream's current leg.
func (s *streamState) adoptLeg(to *streamState) {
	predicted := s.predicted
	s.legRecord = to.legRecord
	s.predicted = predicted // for the client's own prompt
	s.concurrent, s.transfer, s.prefill = to.concurrent, to.transfer, to.prefill
	s.migrated = true
	s.keys = nil // they describe the client's prompt; the resume prompt is longer
	s.settings.r.migratable.relocate(s)
	s.reservation.PrefillDone()
	s.kv = to.kv
	s.kv.On(abort.Decoded) // the first event of the new leg has arrived
}
