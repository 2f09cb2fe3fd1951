package disagg

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
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// carried is a request whose stream is to go on from another engine when its own
// fails, or is to be left: what that engine must be asked, kept because the request's
// scratch and the client's bytes are gone by then. The Transcript has the tokens.
//
// There are thousands: it just fills a size class of 256 bytes. What is asked lies packed
// until a stream moves, which few do, and what few have stands elsewhere.
type carried struct {
	relay.Transcript
	s        *streamEnd
	kept     string // body and sampling of what is asked, then its fields
	model    string
	salt     blockhash.Salt
	deadline moment // of the leg, wherever it runs
	rest     *rest  // nil: none of it
	most     int32  // tokens the client wants at most; 0: it said nothing
	body     int32  // bytes of kept
	sampling int32  // likewise
	least    int32
	suspects int32
	attempt  int32
	moves    int32 // away from engines that failed
	kind     front.Kind
	loose    bool
}

// rest is what few streams have that are carried.
type rest struct {
	steering steering
	failed   []*worker.Rank
	oneOf    *oneOf
}

// keep packs what is asked.
func (c *carried) keep(a *asked, fields []upstream.Field) {
	size := len(a.body) + len(a.sampling)
	for i := range fields {
		size += 2 + len(fields[i].Name) + len(fields[i].Value)
	}
	kept := append(append(make([]byte, 0, size), a.body...), a.sampling...)
	for i := range fields {
		f := &fields[i]
		kept = binary.AppendUvarint(binary.AppendUvarint(kept, uint64(len(f.Name))), uint64(len(f.Value)))
		kept = append(append(kept, f.Name...), f.Value...)
	}
	c.kept = borrow(kept)
	c.body, c.sampling, c.least, c.loose = int32(len(a.body)), int32(len(a.sampling)), int32(a.least), a.loose
	c.Scores, c.TopLogprobs, c.Choices = a.scored, int32(min(a.alternatives, math.MaxInt32)), int32(a.choices)
	c.KeepText = a.oneOf != nil
}

// asked is what keep packed.
func (c *carried) asked() asked {
	sampling := c.body + c.sampling
	return asked{
		body: []byte(c.kept[:c.body]), sampling: []byte(c.kept[c.body:sampling]), least: int(c.least), choices: int(c.Choices),
		scored: c.Scores, alternatives: int(c.TopLogprobs), oneOf: c.few().oneOf, loose: c.loose,
	}
}

// fields are those that keep packed.
func (c *carried) fields() (all []upstream.Field) {
	text := c.kept[c.body+c.sampling:]
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

// few is what few streams have, of one that has it or not.
func (c *carried) few() rest {
	if c.rest == nil {
		return rest{}
	}
	return *c.rest
}

// fail adds to the engines that are not to go on with the stream.
func (c *carried) fail(failed []*worker.Rank) {
	if c.rest == nil {
		c.rest = new(rest)
	}
	c.rest.failed = failed
}

// movability looks once whether the request's stream could go on elsewhere.
func (q *request) movability() {
	if q.looked {
		return
	}
	q.looked = true
	m := &q.r.opt().Migration
	kind := q.x.Endpoint.Kind
	switch own := q.ownIDs() || kind == front.Generate || kind == front.NativeGenerate; {
	case m.Max == 0 || !q.stream || !q.x.Endpoint.Disaggregable:
		q.unmovable = "off"
	case m.Tokens != "auto" && !own:
		q.unmovable = "tokens"
	case q.pd.ReasoningParser && (kind == front.Chat || kind == front.Messages || kind == front.ResponsesAPI):
		q.unmovable = "reasoning"
	case len(q.plan.Decode) < 2 && len(q.plan.Whole) < 2 && q.pool.Members[worker.Decode] < 2 && q.pool.Members[worker.Aggregated] < 2:
		q.unmovable = "alone"
	case kind == front.Generate && !q.x.Doc.Has(jsonscan.KeySamplingMaxTokens):
		q.unmovable = "no_max_tokens" // what an engine takes then differs by release
	default:
		q.movable, q.unmovable = movable(&q.x.Doc, kind, m, q.tells)
		if q.unmovable == "" && kind != front.Chat && kind != front.Completions && !q.knowsPrompt() {
			q.unmovable = "no_prompt_ids"
		}
	}
}

// ownIDs says whether the client has asked for token ids by itself.
func (q *request) ownIDs() bool { return q.tells || q.x.Doc.Bool(jsonscan.KeyReturnTokenIDs) }

// knowsPrompt says whether the prompt's ids are known as an engine knows them.
func (q *request) knowsPrompt() bool {
	switch q.prompt.Source {
	case tokenize.FromRequest, tokenize.FromEngine, tokenize.FromCache:
		return len(q.prompt.Tokens) > 0 && len(q.prompt.Tokens) == q.prompt.Count
	}
	return false
}

// asksIDs says whether the leg for rank is to ask the engine for token ids, so that
// its stream can be carried; why says what keeps it from being carried at all.
func (q *request) asksIDs(rank *worker.Rank) bool {
	if q.taking != nil {
		return false // its body asks
	}
	q.movability()
	q.why = q.unmovable
	tells := tellsIDs(rank, q.x.Endpoint.Kind)
	switch {
	case q.why != "":
	case q.pair.Trial:
		q.why = "trial"
	case tells == never && q.movable.choices > 1:
		q.why = "many_choices" // whose token is whose is told by ids alone
	case tells == never && q.movable.scored:
		q.why = "logprobs" // ids made of the text may not be the tokens that were scored
	case tells == never && (!q.knowsPrompt() || !retokenizes(rank)):
		q.why = "engine"
	}
	return q.why == "" && tells == whenAsked
}

// telling is how a stream tells the ids of its tokens.
type telling uint8

const (
	never     telling = iota // text alone
	whenAsked                // by return_token_ids
	always
)

// tellsIDs says how a rank's engine is known to tell ids on a kind of stream. Read in
// vLLM 0.8.5 … 0.32 and SGLang 0.5.10 … 0.5.23, whose chat does so only in whole
// answers; TensorRT-LLM tells ids in the place of text.
func tellsIDs(r *worker.Rank, kind front.Kind) telling {
	engine := r.Worker.Info().Engine
	switch kind {
	case front.Generate, front.NativeGenerate:
		return always
	case front.Chat:
		if engine == "vllm" && atLeast(r, 0, 10, 2) {
			return whenAsked
		}
	case front.Completions:
		if engine == "vllm" && atLeast(r, 0, 10, 2) || engine == "sglang" && atLeast(r, 0, 5, 19) {
			return whenAsked
		}
	}
	return never
}

// firstByText says whether the stream is one whose first event must be there before
// the client gets anything: what follows repeats it.
func (q *request) firstByText() bool {
	return q.why == "" && q.unmovable == "" && q.looked && (q.x.Endpoint.Kind == front.Messages || q.x.Endpoint.Kind == front.ResponsesAPI)
}

// forms are the streams that can be carried.
var forms = map[front.Kind]relay.Form{
	front.Chat: relay.ChatForm, front.Completions: relay.CompletionsForm, front.Generate: relay.GenerateForm,
	front.NativeGenerate: relay.NativeForm, front.Messages: relay.MessagesForm, front.ResponsesAPI: relay.ResponsesForm,
}

// carry makes the stream's carried, nil where it cannot be, and says so in a
// header.
func (q *request) carry(s *streamEnd, resp *upstream.Response) *carried {
	kind := q.x.Endpoint.Kind
	own := q.ownIDs()
	switch {
	case q.unmovable == "off":
		return nil
	case q.why == "engine" && own:
		q.why = "" // the client asked for itself; what comes will show
	}
	if q.why == "" && (resp.Status != 200 || resp.ContentLength != upstream.LengthChunked) {
		q.why = "endpoint"
	}
	if q.why != "" {
		s.immovable = q.why
		q.x.SetHeader("X-Sluice-Migration", "no; "+q.why)
		return nil
	}
	ready := "ready"
	if q.movable.loose {
		ready = "ready; unconstrained"
	}
	q.x.SetHeader("X-Sluice-Migration", ready)
	c := &carried{
		s: s, kind: kind, model: q.pool.Model, salt: q.salted, most: int32(min(q.maxTokens, math.MaxInt32)),
		suspects: int32(q.suspects), attempt: int32(q.attempt), deadline: momentOf(q.orDeadline(q.decodeBy(s.began.time()))),
	}
	c.keep(&q.movable, q.x.ForwardFields(q.fields[:0]))
	c.Form = forms[kind]
	c.ShowIDs = own || kind == front.Generate || kind == front.NativeGenerate
	c.NoText = kind == front.Generate && string(findMember(&q.x.Doc, "output_mode")) != `"text"`
	c.ByText = !q.pair.IDs && !c.ShowIDs
	c.Deltas = s.rank.Worker.Info().Deltas
	if q.knowsPrompt() {
		c.Prompt = relay.PackIDs(q.prompt.Tokens)
	}
	if a := q.answerer(); a != nil {
		c.Before(a.Events(&q.pair))
	}
	if g := &q.steering; len(q.excluded) > 0 || q.movable.oneOf != nil || g.says() {
		c.rest = &rest{
			steering: steering{session: g.session, workers: slices.Clone(g.workers), ranks: slices.Clone(g.ranks), allowed: slices.Clone(g.allowed), labels: slices.Clone(g.labels)},
			failed:   slices.Clone(q.excluded), oneOf: q.movable.oneOf,
		}
	}
	return c
}

// wantsEndUsage says whether the client asked for usage at the stream's end.
func wantsEndUsage(doc *jsonscan.Doc) bool {
	raw := doc.Raw(jsonscan.KeyStreamOptions)
	v, ok, _ := jsonscan.Find(raw, "include_usage")
	return ok && v.Kind == jsonscan.Bool && raw[v.Start] == 't'
}

// Next implements front.Relayed; only a stream that is carried has a Transcript.
func (s *streamEnd) Next(b relay.Break, client front.Leaver) (*upstream.Response, *upstream.Call) {
	c := s.carried
	opt := s.r.opt()
	leaves := b.Cause == relay.Cut // its engine is well
	again := b.Cause == relay.Completed && b.Event == nil
	switch {
	case again:
		s.leaveLeg("ok")
	case !leaves:
		c.suspects++
	}
	why := c.Why()
	switch {
	case why != "":
	case !leaves && !again && (int(c.moves) >= opt.Migration.Max || int(c.suspects) > opt.Migration.Max):
		why = "limit"
	case time.Now().After(c.deadline.time()):
		why = "deadline"
	case c.ByText:
		if why = c.retokenize(client); why == "retokenized" {
			c.Stick(why) // and stays so: what was told does not change
		}
	}
	open := c.Open()
	if why == "" && c.most > 0 && slices.ContainsFunc(open, func(q *relay.Sequence) bool { return q.Told >= int(c.most) }) {
		why = "spent"
	}
	var grammar []byte
	if why == "" {
		if grammar, why = c.grammar(); why != "" {
			c.Stick(why)
		}
	}
	if why != "" {
		s.note("not migrated: " + why)
		opt.Observer.Migrated(why)
		return nil, nil
	}
	from, failed := s.rank, c.few().failed
	switch {
	case again:
	case leaves:
		failed = append(failed, from)
	default:
		failed = append(failed, from)
		s.breakLeg(b)
	}
	t := c.take(client, open, failed, b.Cause, grammar)
	if t == nil {
		if !client.Gone() {
			opt.Observer.Migrated("failed")
		}
		return nil, nil
	}
	c.ByText = false
	c.Before(t.rewriter)
	c.SumsCached = t.s.rank.Worker.Info().Engine == "sglang"
	if again {
		s.moveTo(t.s)
		return t.resp, t.call
	}
	outcome, cause := "done", b.Cause.String()
	if leaves {
		s.leaveLeg("moved")
		outcome, cause = "drained", "drain"
	} else {
		c.fail(failed)
		c.moves++
	}
	s.moveTo(t.s)
	opt.Observer.Migrated(outcome)
	loose, told := "", 0
	for _, q := range open {
		told += q.Told
	}
	if c.loose {
		loose = ", without the grammar"
	}
	s.note(fmt.Sprintf("migrated: %s (%s) after %d tokens, %s goes on%s", from.ID, cause, told, s.rank.ID, loose))
	opt.Log.Warn("stream migrated", "request_id", s.requestID, "from", from.ID.String(), "to", s.rank.ID.String(), "tokens", told, "cause", cause, "unconstrained", c.loose, "err", b.Err)
	return t.resp, t.call
}

// grammar is the member of the next engine's request that holds it to what is left of the
// grammar, nil where there is none; why says that the client's text is no beginning of
// what it allows.
func (c *carried) grammar() (member []byte, why string) {
	asked := c.asked()
	if asked.oneOf == nil {
		return nil, ""
	}
	told := jsonscan.Unquote(make([]byte, 0, len(c.Text())), append(append([]byte{'"'}, c.Text()...), '"'))
	member, ok := asked.left(nil, told)
	switch {
	case ok:
		return member, ""
	case c.s.r.opt().Migration.Structured == structuredLoose:
		return nil, "" // the engine that failed did not keep to it
	}
	return nil, "structured"
}

// note adds a note to the request's explain record.
func (s *streamEnd) note(text string) { s.r.opt().Scheduler.Note(s.requestID, text) }

// breakLeg closes the books of a leg whose engine failed, of a stream that may go
// on.
func (s *streamEnd) breakLeg(b relay.Break) {
	s.blame(b)
	outcome := b.Cause.String()
	if b.Event != nil {
		outcome = relay.EngineErred.String()
	}
	s.closeLeg(outcome)
}

// leaveLeg closes the books of a leg that goes on elsewhere though its engine is
// well.
func (s *streamEnd) leaveLeg(outcome string) {
	s.r.opt().Fleet.Answered(s.rank, 200)
	s.closeLeg(outcome)
}

func (s *streamEnd) closeLeg(outcome string) {
	s.reservation.Release()
	s.given.Reclaimed()
	if s.beside != nil {
		s.beside.call.Cut()
		s.beside = nil
	}
	if s.wait != nil {
		told := s.handedOver()
		s.transfer, s.wait = &told, nil
	}
	s.r.opt().Observer.LegEnded(s.leg, s.rank.ID, outcome, s.began.since())
	s.closed = true
}

// blame tells the fleet of an engine that failed in the middle of a stream. That
// it was silent for long is no sign of ill health.
func (s *streamEnd) blame(b relay.Break) {
	switch {
	case b.Event != nil:
		s.r.opt().Fleet.Answered(s.rank, 500)
	case b.Cause.EngineFailed():
		s.r.opt().Fleet.Failed(s.rank, b.Err)
	}
}

// moveTo opens the books of the leg that goes on.
func (s *streamEnd) moveTo(to *streamEnd) {
	s.leg, s.rank, s.reservation, s.began, s.closed = to.leg, to.rank, to.reservation, to.began, false
	s.beside, s.wait, s.prefill = to.beside, to.wait, to.prefill
	s.moved = true
	s.keys = nil // the prompt is another, and so is what was found of it
	s.r.movers.move(s)
	s.reservation.PrefillDone()
}
