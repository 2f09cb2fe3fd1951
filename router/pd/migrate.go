package pd

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/blockhash"
	"sluice/router/pd/reqbody"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// migrationState holds what the router needs to continue a request's stream on another engine when
// the current engine fails or is drained. It keeps the resume request, because the request's
// scratch memory and the client's body are no longer available by then. The Transcript holds the
// generated tokens.
//
// Thousands of streams have one, so it fits a size class of 256 bytes. The resume request stays
// packed until the stream migrates, and data that few streams need is in migrationExtra.
type migrationState struct {
	relay.Transcript
	stream        *streamState
	packed        string // body and sampling of the resumeTemplate, then the header fields
	model         string
	salt          blockhash.Salt
	deadline      compactTime     // of the decode leg, on every engine
	extra         *migrationExtra // nil if the stream needs none of it
	maxTokens     int32           // the client's max_tokens; 0 if the client set no limit
	bodyLen       int32           // length of the body in packed, in bytes
	samplingLen   int32           // length of the sampling members in packed, in bytes
	minTokens     int32
	suspects      int32
	attempt       int32
	moves         int32 // number of migrations away from failed engines
	kind          front.Kind
	unconstrained bool
}

// migrationExtra holds the migration data that only few streams have.
type migrationExtra struct {
	steering steering
	failed   []*worker.Rank
	choice   *choiceGrammar
}

// pack stores the resume template and the header fields in c.
func (c *migrationState) pack(a *resumeTemplate, fields []upstream.Field) {
	size := len(a.body) + len(a.sampling)
	for i := range fields {
		size += 2 + len(fields[i].Name) + len(fields[i].Value)
	}
	packed := append(append(make([]byte, 0, size), a.body...), a.sampling...)
	for i := range fields {
		f := &fields[i]
		packed = binary.AppendUvarint(binary.AppendUvarint(packed, uint64(len(f.Name))), uint64(len(f.Value)))
		packed = append(append(packed, f.Name...), f.Value...)
	}
	c.packed = unsafeString(packed)
	c.bodyLen, c.samplingLen, c.minTokens, c.unconstrained = int32(len(a.body)), int32(len(a.sampling)), int32(a.minTokens), a.unconstrained
	c.Logprobs, c.TopLogprobs, c.Choices = a.logprobs, int32(min(a.topLogprobs, math.MaxInt32)), int32(a.choices)
	c.KeepText = a.choice != nil
}

// template returns the resume template that pack stored.
func (c *migrationState) template() resumeTemplate {
	samplingEnd := c.bodyLen + c.samplingLen
	return resumeTemplate{
		body: []byte(c.packed[:c.bodyLen]), sampling: []byte(c.packed[c.bodyLen:samplingEnd]), minTokens: int(c.minTokens), choices: int(c.Choices),
		logprobs: c.Logprobs, topLogprobs: int(c.TopLogprobs), choice: c.getExtra().choice, unconstrained: c.unconstrained,
	}
}

// fields returns the header fields that pack stored.
func (c *migrationState) fields() (all []upstream.Field) {
	text := c.packed[c.bodyLen+c.samplingLen:]
	raw := []byte(text)
	for at := 0; at < len(text); {
		n, used := binary.Uvarint(raw[at:])
		at += used
		v, used := binary.Uvarint(raw[at:])
		at += used
		all = append(all, upstream.Field{Name: text[at : at+int(n)], Value: text[at+int(n) : at+int(n+v)]})
		at += int(n + v)
	}
	return all
}

// getExtra returns the extra data, or the zero value if there is none.
func (c *migrationState) getExtra() migrationExtra {
	if c.extra == nil {
		return migrationExtra{}
	}
	return *c.extra
}

// setFailed sets the ranks that must not continue the stream.
func (c *migrationState) setFailed(failed []*worker.Rank) {
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
	m := &q.settings.Migration
	kind := q.x.Endpoint.Kind
	switch clientIDs := q.clientWantsIDs() || kind == front.Generate || kind == front.NativeGenerate; {
	case m.Max == 0 || !q.stream || !q.x.Endpoint.Disaggregable:
		q.unmigratable = "off"
	case m.Tokens != "auto" && !clientIDs:
		q.unmigratable = "tokens"
	case q.pd.ReasoningParser && (kind == front.Chat || kind == front.Messages || kind == front.ResponsesAPI):
		q.unmigratable = "reasoning"
	case len(q.plan.Decode) < 2 && len(q.plan.Whole) < 2 && q.pool.Members[worker.Decode] < 2 && q.pool.Members[worker.Aggregated] < 2:
		q.unmigratable = "alone"
	case kind == front.Generate && !q.x.Doc.Has(jsonscan.KeySamplingMaxTokens):
		q.unmigratable = "no_max_tokens" // without it, the limit that an engine applies depends on the release
	default:
		q.template, q.unmigratable = newResumeTemplate(&q.x.Doc, kind, m, q.returnsTokenIDs)
		if q.unmigratable == "" && kind != front.Chat && kind != front.Completions && !q.hasExactPrompt() {
			q.unmigratable = "no_prompt_ids"
		}
	}
}

// clientWantsIDs reports whether the client itself asked for token ids.
func (q *request) clientWantsIDs() bool {
	return q.returnsTokenIDs || q.x.Doc.Bool(jsonscan.KeyReturnTokenIDs)
}

// hasExactPrompt reports whether the router knows the prompt's token ids exactly as the engine
// does.
func (q *request) hasExactPrompt() bool {
	switch q.prompt.Source {
	case tokenize.FromRequest, tokenize.FromEngine, tokenize.FromCache:
		return len(q.prompt.Tokens) > 0 && len(q.prompt.Tokens) == q.prompt.Count
	}
	return false
}

// needsTokenIDs reports whether the leg for rank must ask the engine for token ids so that its
// stream can migrate. It sets q.legUnmigratable to the reason if the stream cannot migrate.
func (q *request) needsTokenIDs(rank *worker.Rank) bool {
	if q.resumption != nil {
		return false // the resume request asks for them
	}
	q.checkMigratable()
	q.legUnmigratable = q.unmigratable
	mode := tokenIDModeOf(rank, q.x.Endpoint.Kind)
	switch {
	case q.legUnmigratable != "":
	case q.handover.Trial:
		q.legUnmigratable = "trial"
	case mode == idsNever && q.template.choices > 1:
		q.legUnmigratable = "multiple_choices" // only token ids carry the choice they belong to
	case mode == idsNever && q.template.logprobs:
		q.legUnmigratable = "logprobs" // retokenized text may not give the tokens that the engine scored
	case mode == idsNever && (!q.hasExactPrompt() || !canRetokenize(rank)):
		q.legUnmigratable = "engine"
	}
	return q.legUnmigratable == "" && mode == idsOnRequest
}

// tokenIDMode says how an engine reports the token ids of a stream.
type tokenIDMode uint8

const (
	idsNever     tokenIDMode = iota // the stream has text only
	idsOnRequest                    // with return_token_ids
	idsAlways
)

// tokenIDModeOf returns how a rank's engine reports token ids on streams of a kind. This was read
// in vLLM 0.8.5 … 0.32 and SGLang 0.5.10 … 0.5.23. SGLang's chat reports ids only in non-streaming
// responses. TensorRT-LLM reports ids instead of text.
func tokenIDModeOf(r *worker.Rank, kind front.Kind) tokenIDMode {
	engine := r.Worker.Info().Engine
	switch kind {
	case front.Generate, front.NativeGenerate:
		return idsAlways
	case front.Chat:
		if engine == "vllm" && r.VersionAtLeast(0, 10, 2) {
			return idsOnRequest
		}
	case front.Completions:
		if engine == "vllm" && r.VersionAtLeast(0, 10, 2) || engine == "sglang" && r.VersionAtLeast(0, 5, 19) {
			return idsOnRequest
		}
	}
	return idsNever
}

// repeatsFirstEvent reports whether the router must have the stream's first event before it sends
// anything to the client, because later events repeat its content.
func (q *request) repeatsFirstEvent() bool {
	return q.legUnmigratable == "" && q.unmigratable == "" && q.migrationChecked && (q.x.Endpoint.Kind == front.Messages || q.x.Endpoint.Kind == front.ResponsesAPI)
}

// migrationFormats maps the endpoints whose streams can migrate to their formats.
var migrationFormats = map[front.Kind]relay.APIFormat{
	front.Chat: relay.ChatFormat, front.Completions: relay.CompletionsFormat, front.Generate: relay.GenerateFormat,
	front.NativeGenerate: relay.NativeFormat, front.Messages: relay.MessagesFormat, front.ResponsesAPI: relay.ResponsesFormat,
}

// newMigrationState returns the migration state of a stream, or nil if the stream cannot migrate.
// It sets the X-Sluice-Migration response header accordingly.
func (q *request) newMigrationState(s *streamState, resp *upstream.Response) *migrationState {
	kind := q.x.Endpoint.Kind
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
	ready := "ready"
	if q.template.unconstrained {
		ready = "ready; unconstrained"
	}
	q.x.SetHeader("X-Sluice-Migration", ready)
	c := &migrationState{
		stream: s, kind: kind, model: q.pool.Model, salt: q.salt, maxTokens: int32(min(q.maxTokens, math.MaxInt32)),
		suspects: int32(q.suspects), attempt: int32(q.attempt), deadline: toCompactTime(q.earlierDeadline(q.decodeDeadline(s.began.time()))),
	}
	c.pack(&q.template, q.x.AppendPassedHops(q.x.ForwardFields(q.fields[:0])))
	c.Format = migrationFormats[kind]
	c.ShowIDs = clientIDs || kind == front.Generate || kind == front.NativeGenerate
	c.NoText = kind == front.Generate && string(reqbody.Member(&q.x.Doc, "output_mode")) != `"text"`
	c.TextOnly = !q.handover.WantTokenIDs && !c.ShowIDs
	c.Deltas = s.rank.Worker.Info().Deltas
	if q.hasExactPrompt() {
		c.Prompt = relay.PackIDs(q.prompt.Tokens)
	}
	if a := q.answerRewriter(); a != nil {
		c.SetPreRewriter(a.Events(&q.handover))
	}
	if g := &q.steering; len(q.excluded) > 0 || q.template.choice != nil || g.isSet() {
		c.extra = &migrationExtra{
			steering: steering{session: g.session, workers: slices.Clone(g.workers), ranks: slices.Clone(g.ranks), allowed: slices.Clone(g.allowed), labels: slices.Clone(g.labels)},
			failed:   slices.Clone(q.excluded), choice: q.template.choice,
		}
	}
	return c
}

// NextEngine implements front.StreamHandler. The relay calls it only for streams that have a
// Transcript.
func (s *streamState) NextEngine(b relay.Interruption, client front.ClientGoneNotifier) (*upstream.Response, *upstream.Call) {
	c := s.migration
	opt := s.r.options()
	draining := b.Cause == relay.Cancelled // the engine is healthy
	continued := b.Cause == relay.Completed && b.Event == nil
	switch {
	case continued:
		s.endHealthyLeg("ok")
	case !draining:
		c.suspects++
	}
	reason := c.MigrationBlocker()
	switch {
	case reason != "":
	case !draining && !continued && (int(c.moves) >= opt.Migration.Max || int(c.suspects) > opt.Migration.Max):
		reason = "limit"
	case time.Now().After(c.deadline.time()):
		reason = "deadline"
	case c.TextOnly:
		if reason = c.retokenize(client); reason == "retokenized" {
			c.Block(reason) // final: the text already sent does not change
		}
	}
	open := c.Unfinished()
	if reason == "" && c.maxTokens > 0 && slices.ContainsFunc(open, func(q *relay.ChoiceState) bool { return q.Delivered >= int(c.maxTokens) }) {
		reason = "spent"
	}
	var grammar []byte
	if reason == "" {
		if grammar, reason = c.remainingGrammar(); reason != "" {
			c.Block(reason)
		}
	}
	if reason != "" {
		s.addNote("not migrated: " + reason)
		opt.Observer.Migrated(reason)
		return nil, nil
	}
	from, failed := s.rank, c.getExtra().failed
	switch {
	case continued:
	case draining:
		failed = append(failed, from)
	default:
		failed = append(failed, from)
		s.endFailedLeg(b)
	}
	t := c.resume(client, open, failed, b.Cause, grammar)
	if t == nil {
		if !client.ClientGone() {
			opt.Observer.Migrated("failed")
		}
		return nil, nil
	}
	c.TextOnly = false
	c.SetPreRewriter(t.rewriter)
	c.SumsCached = t.stream.rank.Worker.Info().Engine == "sglang"
	if continued {
		s.adoptLeg(t.stream)
		return t.resp, t.call
	}
	outcome, cause := "done", b.Cause.String()
	if draining {
		s.endHealthyLeg("moved")
		outcome, cause = "drained", "drain"
	} else {
		c.setFailed(failed)
		c.moves++
	}
	s.adoptLeg(t.stream)
	opt.Observer.Migrated(outcome)
	suffix, generated := "", 0
	for _, q := range open {
		generated += q.Delivered
	}
	if c.unconstrained {
		suffix = ", without the grammar"
	}
	s.addNote(fmt.Sprintf("migrated: %s (%s) after %d tokens, %s goes on%s", from.ID, cause, generated, s.rank.ID, suffix))
	opt.Log.Warn("stream migrated", "request_id", s.requestID, "from", from.ID.String(), "to", s.rank.ID.String(), "tokens", generated, "cause", cause, "unconstrained", c.unconstrained, "err", b.Err)
	return t.resp, t.call
}

// remainingGrammar returns the request member that makes the next engine follow the rest of the
// grammar, or nil if the request has no grammar. reason is "structured" if the text sent so far is
// not a prefix of any text that the grammar allows.
func (c *migrationState) remainingGrammar() (member []byte, reason string) {
	tmpl := c.template()
	if tmpl.choice == nil {
		return nil, ""
	}
	text := jsonscan.Unquote(make([]byte, 0, len(c.Text())), append(append([]byte{'"'}, c.Text()...), '"'))
	member, ok := tmpl.appendRemainingGrammar(nil, text)
	switch {
	case ok:
		return member, ""
	case c.stream.r.options().Migration.Structured == structuredUnconstrained:
		return nil, "" // the failed engine did not follow the grammar
	}
	return nil, "structured"
}

// addNote adds a note to the request's explain record.
func (s *streamState) addNote(text string) { s.r.options().Scheduler.AddNote(s.requestID, text) }

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
	s.r.options().Fleet.ReportStatus(s.rank, 200)
	s.endLeg(outcome)
}

func (s *streamState) endLeg(outcome string) {
	s.release()
	s.kv.on(kvDropped)
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
// silence is no failure.
func (s *streamState) reportFailure(b relay.Interruption) {
	switch {
	case b.Event != nil:
		s.r.options().Fleet.ReportStatus(s.rank, 500)
	case b.Cause.EngineFailed():
		s.r.options().Fleet.ReportFailure(s.rank, b.Err)
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
	s.r.migratable.relocate(s)
	s.reservation.PrefillDone()
	s.kv = to.kv
	s.kv.on(kvDecoded) // the first event of the new leg has arrived
}
