package transcript

import (
	"bytes"
	"sluice/dataplane/apiformat"
	"sluice/dataplane/sse"
	"sync/atomic"
)

// Transcript is the Rewriter of a stream that may continue on another engine. It records what the
// client has got as token ids, holds back the error event of an engine that fails, and makes the
// events of a second engine continue those of the first. The client notices no splice, and sees no
// ids unless it asked for them.
//
// The ids are the engine's own where it returns them (see APIFormat). Otherwise the text is kept,
// to be tokenized when needed (TextOnly). A prompt id takes its bits, an output id 4 bytes, and of
// the text only what the end of the stream repeats is kept.
//
// A Transcript serves one stream. Except for RequestMigration it is used by the relaying goroutine
// only.
type Transcript struct {
	Format APIFormat
	// ShowIDs: the client sees token ids, because it asked for them or the endpoint always returns
	// them.
	ShowIDs bool
	// Records: the client is a part of this program and gets an id record (ParseIDRecord) in place
	// of an event that has only ids. It requires ShowIDs and a known Prompt.
	Records bool
	// NoText: the stream has ids and no text.
	NoText bool
	// TextOnly: the engine returns no ids; Text is what has been sent.
	TextOnly bool
	// KeepText: Text is kept although ids are known, over all engines.
	KeepText bool
	// Logprobs: the client sees log-probabilities, and so every token, with text or without.
	// TopLogprobs is the number of alternatives of each token in a chat.
	Logprobs bool
	// SumsCached: the next engine's cached_tokens is the sum over all prompts of its request
	// (SGLang), not that of the first prompt (vLLM).
	SumsCached bool

	holdsFailure       bool // error events are held back
	promptSeen         bool // the prompt's ids have come
	doneSent           bool // [DONE] has been sent
	switches           int16
	migrationRequested atomic.Bool

	TopLogprobs int32
	// Choices is the number of choices of the stream [1]. Several are distinguished by ids, on chat
	// completions and completions. They continue by one request with a prompt for each unfinished
	// choice, in the order of Unfinished. Limit, set by the caller, is the token limit of one
	// choice: when a choice stops before it because of the request's limit, another round follows.
	Choices int32
	Limit   int32
	// Deltas: a NativeFormat stream holds what is new, or (false) all so far; nil: not
	// known, until its second event shows it.
	Deltas *bool

	Prompt                PackedIDs // known beforehand, or from the first event
	apiformat.ChoiceState           // of the first choice

	formatter formatter // of an APIFormat that is not OpenAI's
	template  idTemplate
	extras    *transcriptExtras // nil: all zero
}

// eventHead returns the beginning of all events: id, object, created and model; "": not known yet.
func (t *Transcript) eventHead() string {
	var scratch [2 * maxTemplate]byte
	return string(t.appendEventHead(scratch[:0]))
}

func (t *Transcript) appendEventHead(b []byte) []byte {
	if t.template.headLen > 0 {
		at := len(b)
		b = t.template.appendBefore(b)
		return append(b[:at], b[at+len("data: "):][:t.template.headLen]...)
	}
	if t.extras == nil {
		return b
	}
	return append(b, t.extras.head...)
}

// setEventHead keeps the head where the template does not have it.
func (t *Transcript) setEventHead(head string) {
	if head != "" || t.extras != nil {
		t.ensureExtras().head = head
	}
}

// transcriptExtras is state that few streams have: kept text, several choices, another engine, a
// failure, a reason not to migrate, or the events of another Rewriter.
type transcriptExtras struct {
	blocker      string
	failure      []byte
	pre          sse.Rewriter
	head         string       // see setEventHead
	next         sse.Rewriter // rewrites another engine's events
	text         []byte
	eventEnds    []uint32
	otherChoices []apiformat.ChoiceState  // of the other choices
	requested    []*apiformat.ChoiceState // the choices requested from the present engine, if it is not the first
	preOut       []byte                   // the output of pre for an event
	past         int                      // number of ids that Forget has dropped
	forgot       bool                     // Forget was called
	roundDone    bool                     // the present engine has done what was requested; see NeedsRound
}

// memorySpent is the blocker of a stream for whose transcript there is no memory.
const memorySpent = "memory"

// KeptBytes returns the memory that is kept for another engine, in bytes.
func (t *Transcript) KeptBytes() int {
	n := len(t.Prompt.packed) + 4*cap(t.Out)
	if extras := t.extras; extras != nil {
		n += cap(extras.text) + 4*cap(extras.eventEnds)
		for i := range extras.otherChoices {
			n += 4 * cap(extras.otherChoices[i].Out)
		}
	}
	return n
}

// maxIdleIDs is the memory of output ids, in bytes, that a stream without migration may keep for reuse.
const maxIdleIDs = 8 << 10

// Forgotten reports whether Forget has been called.
func (t *Transcript) Forgotten() bool { return t.extras != nil && t.extras.forgot }

// Forget drops what is kept for another engine, so that the stream can no longer migrate, and keeps
// no more text. It is called again to drop ids that have come since. It keeps the ids of a stream
// that has migrated, and of SGLang's /generate, whose events are read by means of them.
func (t *Transcript) Forget() {
	t.blockOnce(memorySpent)
	extras := t.ensureExtras()
	extras.forgot, extras.text, extras.eventEnds = true, nil, nil
	if _, native := t.getFormatter().(*nativeStream); native || t.resumed() != nil {
		return
	}
	t.Prompt, t.promptSeen = PackedIDs{}, true
	for i := range max(int(t.Choices), 1) {
		q := t.Choice(i)
		extras.past += len(q.Out)
		if q.Out, q.Delivered = q.Out[:0], 0; 4*cap(q.Out) > maxIdleIDs {
			q.Out = nil
		}
	}
}

// Blocked returns why no other engine can continue the stream; "": one can.
func (t *Transcript) Blocked() string {
	if t.extras == nil {
		return ""
	}
	return t.extras.blocker
}

// Block prevents migrations, for the reason why.
func (t *Transcript) Block(why string) { t.ensureExtras().blocker = why }

// HoldFailure makes the Transcript hold back the error event of an engine that fails; see
// FailureEvent.
func (t *Transcript) HoldFailure() { t.holdsFailure = true }

// DoneSent reports whether the client has got the last event of the stream.
func (t *Transcript) DoneSent() bool { return t.doneSent }

// FailureEvent returns the error event of the engine; nil: none. Nothing after it is passed on.
func (t *Transcript) FailureEvent() []byte {
	if t.extras == nil {
		return nil
	}
	return t.extras.failure
}

// SetPreRewriter sets a Rewriter that converts the engine's events to those of the client's
// endpoint first; nil: none.
func (t *Transcript) SetPreRewriter(r sse.Rewriter) {
	if r != nil || t.extras != nil {
		t.ensureExtras().pre = r
	}
}

// resumed returns the Rewriter of another engine's events; nil while the first engine is read.
func (t *Transcript) resumed() sse.Rewriter {
	if t.extras == nil {
		return nil
	}
	return t.extras.next
}

// ensureExtras returns extras and creates them if there are none.
func (t *Transcript) ensureExtras() *transcriptExtras {
	if t.extras == nil {
		t.extras = new(transcriptExtras)
	}
	return t.extras
}

// Text returns the text that has been sent, the insides of JSON strings, if it is kept.
func (t *Transcript) Text() []byte {
	if t.extras == nil {
		return nil
	}
	return t.extras.text
}

// EventEnds returns where each event's part of Text ends. Only with TextOnly.
func (t *Transcript) EventEnds() []uint32 {
	if t.extras == nil {
		return nil
	}
	return t.extras.eventEnds
}

// keepText appends to Text. It returns false if that becomes too long.
func (t *Transcript) keepText(text []byte) bool {
	extras := t.ensureExtras()
	if t.Forgotten() {
		return false
	}
	if len(extras.text)+len(text) > maxText {
		t.blockOnce("too_long")
		return false
	}
	extras.text = append(extras.text, text...)
	return true
}

// requestedChoices returns the choices requested from the present engine; nil: from the first.
func (t *Transcript) requestedChoices() []*apiformat.ChoiceState {
	if t.extras == nil {
		return nil
	}
	return t.extras.requested
}

// RequestMigration asks the stream to leave its engine at the next point where it can; see
// Migration. It may be called from any goroutine.
func (t *Transcript) RequestMigration() { t.migrationRequested.Store(true) }

// MigrationRequested reports whether RequestMigration has been called since the last accepted
// migration.
func (t *Transcript) MigrationRequested() bool { return t.migrationRequested.Load() }

// AcceptMigration reports whether the stream must leave its engine now: a migration is requested,
// nothing is partially sent and something remains to be sent. It then clears the request.
func (t *Transcript) AcceptMigration() bool {
	return t.canMigrate() && t.migrationRequested.CompareAndSwap(true, false)
}

// canMigrate reports whether nothing is partially sent and something remains to be sent.
func (t *Transcript) canMigrate() bool {
	return t.FailureEvent() == nil && t.Blocked() == "" && t.firstEventSent() && !t.doneSent && !t.AllFinished() && t.all(t.allDelivered)
}

// AddDelivered records ids that the client has got, for a stream that this package does not relay.
func (t *Transcript) AddDelivered(ids ...uint32) {
	t.Out = append(t.Out, ids...)
	t.Delivered = len(t.Out)
}

// Event implements Rewriter.
func (t *Transcript) Event(dst, event []byte) []byte {
	extras := t.extras
	if extras == nil || extras.pre == nil {
		return t.event(dst, event)
	}
	extras.preOut = extras.pre.Event(extras.preOut[:0], event)
	for rest := extras.preOut; len(rest) > 0; {
		n := len(rest)
		if i := bytes.Index(rest, eventEnd); i >= 0 {
			n = i + len(eventEnd)
		}
		dst = t.event(dst, rest[:n:n])
		rest = rest[n:]
	}
	return dst
}

var eventEnd = []byte("\n\n")

func (t *Transcript) event(dst, event []byte) []byte {
	if t.FailureEvent() != nil || t.Records && event[0] == idRecordMark { // a record is not a line of an event
		return dst
	}
	if _, openAI := t.getFormatter().(openAIFormatter); !openAI {
		return t.formatter.event(dst, event)
	}
	if t.resumed() == nil && !t.TextOnly && t.Choices < 2 {
		had := len(t.Out)
		if from, to, ok := t.template.match(event, t); ok {
			if t.ShowIDs {
				return t.appendShown(dst, event, t.Out[had:])
			}
			dst = append(append(dst, event[:from]...), "null"...)
			return append(dst, event[to:]...)
		}
	}
	data := sse.EventData(event)
	if bytes.Equal(data, sse.DoneData) {
		if t.NeedsRound() {
			t.extras.roundDone = true
			return dst
		}
		t.doneSent = true
		return append(dst, event...)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	n, ok := t.readEvent(event, data)
	switch {
	case !ok:
		t.blockOnce("unreadable")
		return append(dst, event...)
	case n.failed:
		return t.engineFailed(dst, event, n.failedCode)
	case t.resumed() != nil && n.choices == 0 && t.NeedsRound():
		return dst // its usage is not the final one
	case t.resumed() != nil:
		return t.resumed().Event(dst, event)
	case t.TextOnly:
		return append(dst, event...)
	}
	if !n.hasOther && n.choices == 1 && n.ids > 0 && len(n.text) > 0 && n.textAt < n.idsAt {
		var scratch [2 * maxTemplate]byte
		head := t.appendEventHead(scratch[:0])
		t.template.learn(event, n.textAt, n.textAt+len(n.text), n.idsAt, n.idsTo)
		if t.template.startsWith(head) {
			t.setEventHead("")
		} else {
			t.setEventHead(string(head))
		}
	}
	if t.ShowIDs {
		return append(dst, event...)
	}
	at := 0
	for _, s := range n.hidden[:n.nhidden] {
		dst = append(append(dst, event[at:s.from]...), "null"...)
		at = s.to
	}
	return append(dst, event[at:]...)
}

// appendShown appends what a client that sees ids gets of an event that has only ids.
func (t *Transcript) appendShown(dst, event []byte, ids []uint32) []byte {
	if t.Records && t.Blocked() == "" {
		return appendIDRecord(dst, ids)
	}
	return append(dst, event...)
}

// MigrationBlocker returns in one word why no other engine can continue the stream now; "": one
// can.
func (t *Transcript) MigrationBlocker() string {
	switch native, _ := t.formatter.(*nativeStream); {
	case t.Blocked() != "":
		return t.Blocked()
	case !t.firstEventSent():
		return "incomplete_start"
	case !t.all(t.resumable):
		return "incomplete_character"
	case t.Prompt.Len() == 0:
		return "no_ids"
	case native != nil && native.modeUndetermined():
		return "unreadable"
	}
	return ""
}

// firstEventSent reports whether the client has the beginning of the stream, which only the first
// engine can produce and which later events repeat.
func (t *Transcript) firstEventSent() bool {
	switch own := t.getFormatter().(type) {
	case *messagesStream:
		return own.started
	case *responsesStream:
		return own.response != nil
	}
	return true
}

// resumable reports whether a choice ends where another engine can continue. What that engine
// generates again must not have been shown, neither as ids nor with log-probabilities.
func (t *Transcript) resumable(q *apiformat.ChoiceState) bool {
	return q.Finished || !q.PartialRune && (!t.ShowIDs && !t.Logprobs || q.Delivered == len(q.Out) || t.TextOnly && t.resumed() == nil)
}

func (t *Transcript) blockOnce(why string) {
	if t.Blocked() == "" {
		t.Block(why)
	}
}

// SwitchEngine makes the following events those of another engine, which got the prompt and the
// tokens sent so far as its prompt.
func (t *Transcript) SwitchEngine() {
	extras := t.ensureExtras()
	extras.requested = t.Unfinished()
	for _, q := range t.requestedChoices() {
		q.Out, q.EngineOrigin = q.Out[:q.Delivered], q.Offset
	}
	t.switches++
	extras.failure, extras.roundDone = nil, false
	extras.next = t.getFormatter().nextEngine()
}

// Switches returns how often SwitchEngine was called.
func (t *Transcript) Switches() int { return int(t.switches) }

// IDAndTime returns the id and the time of the stream, concatenated, as its template has learned
// them; "": not known.
func (t *Transcript) IDAndTime() string { return t.template.IDAndTime }

// NextSequenceNumber returns the sequence_number of the next event of a Responses stream. ok is false
// for a stream of another format.
func (t *Transcript) NextSequenceNumber() (n int64, ok bool) {
	r, ok := t.getFormatter().(*responsesStream)
	if !ok {
		return 0, false
	}
	return int64(r.seq), true
}

// getFormatter returns the formatter of the format.
func (t *Transcript) getFormatter() formatter {
	if t.formatter == nil {
		t.formatter = t.newFormatter()
	}
	return t.formatter
}

// splicePoint returns where the stream passes to another engine.
func (t *Transcript) splicePoint() *apiformat.SplicePoint {
	s := &apiformat.SplicePoint{Prompt: t.Prompt.Len(), PriorTokens: t.Delivered, ShowIDs: t.ShowIDs, Choices: t.requestedChoices()}
	if head := t.eventHead(); head != "" {
		s.Head = []byte(head)
	}
	for _, q := range t.requestedChoices() {
		s.Started = append(s.Started, q.Started)
	}
	if t.Choices > 1 {
		s.TotalTokens = t.totalTokens
		if t.SumsCached {
			s.CachedPrompts = len(t.requestedChoices())
		}
	}
	return s
}

// AppendEnd appends the end of a stream whose finish reason has been sent: the usage if the client
// asked for it, and the last event.
func (t *Transcript) AppendEnd(dst []byte, usage bool) []byte {
	return t.getFormatter().appendEnd(dst, usage)
}

// openAIFormatter formats chat completions and completions.
type openAIFormatter struct{ t *Transcript }

func (o openAIFormatter) event(dst, event []byte) []byte { return o.t.event(dst, event) }

func (o openAIFormatter) nextEngine() sse.Rewriter {
	t := o.t
	return &apiformat.Conversion{Chat: t.Format == ChatFormat, Choices: len(t.requestedChoices()), TopLogprobs: int(t.TopLogprobs), Cached: -1, Splice: t.splicePoint()}
}

func (o openAIFormatter) appendEnd(dst []byte, usage bool) []byte {
	t := o.t
	if head := t.eventHead(); usage && head != "" {
		dst = append(append(dst, "data: "...), head...)
		dst = t.appendUsage(append(dst, `,"choices":[],"usage":`...))
		dst = append(dst, "}\n\n"...)
	}
	return append(dst, "data: [DONE]\n\n"...)
}
