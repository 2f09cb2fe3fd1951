package relay

import (
	"bytes"
	"sync/atomic"
)

// Transcript is the Rewriter of a stream that may go on with another engine. It
// keeps what the stream has told, as token ids, holds the event back by which an
// engine says that it has failed, and makes the events of a second engine go on
// where those of the first ended. The client is shown neither the seam nor, where
// it did not ask for them, the ids.
//
// The ids are the engine's own where it tells them (see Form); else the text is
// kept, for somebody to make ids of it (TextOnly). One Transcript serves one stream;
// of each id of the prompt its bits are kept, of one of the output 4 bytes, and of the text what the stream's
// end repeats of it. Its fields are for the relaying goroutine.
type Transcript struct {
	Format APIFormat
	// ShowIDs: the client sees token ids: it asked for them, or the endpoint always
	// tells them.
	ShowIDs bool
	// Records: the client is a part of this program, and gets a record (Record) in the
	// place of an event that tells ids and nothing else. With ShowIDs only, and a Prompt
	// that is known.
	Records bool
	// NoText: the stream has ids and no text.
	NoText bool
	// TextOnly: the engine tells no ids; Text is what has been told.
	TextOnly bool
	// KeepText: Text is what has been told though ids are known, of all engines.
	KeepText bool
	// Scores: the client sees log-probabilities, and so every token, with text or without.
	// TopLogprobs is how many alternatives it asked for of each, in a chat.
	Logprobs bool
	// SumsCached: the next engine's cached_tokens is the sum of what it found of each prompt
	// that it was given (SGLang's), not what it found of the first (vLLM's).
	SumsCached bool

	holdsFailure       bool // an event that tells of a failure is held back
	promptSeen         bool // the prompt's ids have come
	doneSent           bool // [DONE] is out
	switches           int16
	migrationRequested atomic.Bool

	TopLogprobs int32
	// Choices is how many the stream has [1]. Several are told apart where ids are asked
	// for, on chat completions and completions; they go on by one request, which has a
	// prompt for each that is open, in Open's order. Limit, set before, is how many tokens
	// one may have in all: with one that stops before it for its length, by the request's
	// limit, another round follows.
	Choices int32
	Limit   int32
	// Deltas: a NativeFormat stream holds what is new, or (false) all so far; nil: not
	// known, until its second event shows it.
	Deltas *bool

	Prompt      PackedIDs // known beforehand, or told by the first event
	ChoiceState           // of the first choice

	formatter formatter // of a Form that is not OpenAI's
	template  idTemplate
	extras    *transcriptExtras // nil: none of it
}

// eventHead is what all events of the stream begin with: id, object, created and model; "": not
// known yet.
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

// setEventHead keeps what begin gives where plain does not have it.
func (t *Transcript) setEventHead(head string) {
	if head != "" || t.extras != nil {
		t.ensureExtras().head = head
	}
}

// transcriptExtras is what few streams have: text that is kept, several choices, another engine, a failure,
// a reason to stay, or events that another Rewriter has made.
type transcriptExtras struct {
	blocker      string
	failure      []byte
	pre          Rewriter
	head         string   // see begin
	next         Rewriter // of another engine's events
	text         []byte
	eventEnds    []uint32
	otherChoices []ChoiceState  // of the other choices
	requested    []*ChoiceState // those that the present engine was asked for, where it is not the first
	preOut       []byte         // what before made of an event
	past         int            // ids that forget has dropped
	forgot       bool           // forget was called
}

// memorySpent is why a stream is stuck whose transcript there is no memory for.
const memorySpent = "memory"

// kept is the memory of what is kept for another engine, in bytes.
func (t *Transcript) kept() int {
	n := len(t.Prompt.packed) + 4*cap(t.Out)
	if extras := t.extras; extras != nil {
		n += cap(extras.text) + 4*cap(extras.eventEnds)
		for i := range extras.otherChoices {
			n += 4 * cap(extras.otherChoices[i].Out)
		}
	}
	return n
}

// forgets says whether forget has been called.
func (t *Transcript) forgets() bool { return t.extras != nil && t.extras.forgot }

// forget drops what is kept for another engine, which no longer can go on, and keeps no more
// text. It is called again to drop the ids that have come since. Those of a stream that has
// moved stay, and those of SGLang's /generate, whose events are read by them.
func (t *Transcript) forget() {
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
		if q.Out, q.Delivered = q.Out[:0], 0; 4*cap(q.Out) > unbudgetedPartial {
			q.Out = nil
		}
	}
}

// Blocked says why no other engine can go on, "" when one can.
func (t *Transcript) Blocked() string {
	if t.extras == nil {
		return ""
	}
	return t.extras.blocker
}

// Block says that no other engine can go on, and why.
func (t *Transcript) Block(why string) { t.ensureExtras().blocker = why }

// FailureEvent is the event by which the engine said that it failed, nil for none.
// From it on nothing of that engine is passed.
func (t *Transcript) FailureEvent() []byte {
	if t.extras == nil {
		return nil
	}
	return t.extras.failure
}

// SetPreRewriter sets who makes of the engine's events those that the client's endpoint has; nil for
// nobody.
func (t *Transcript) SetPreRewriter(r Rewriter) {
	if r != nil || t.extras != nil {
		t.ensureExtras().pre = r
	}
}

// resumed makes another engine's events the stream's own; nil while the first is read.
func (t *Transcript) resumed() Rewriter {
	if t.extras == nil {
		return nil
	}
	return t.extras.next
}

// ensureExtras gives it, made where there was none.
func (t *Transcript) ensureExtras() *transcriptExtras {
	if t.extras == nil {
		t.extras = new(transcriptExtras)
	}
	return t.extras
}

// Text is what has been told, the insides of JSON strings, where it is kept.
func (t *Transcript) Text() []byte {
	if t.extras == nil {
		return nil
	}
	return t.extras.text
}

// EventEnds says where each event's part of Text ends, TextOnly.
func (t *Transcript) EventEnds() []uint32 {
	if t.extras == nil {
		return nil
	}
	return t.extras.eventEnds
}

// keepText adds to Text; false where that gets too long.
func (t *Transcript) keepText(text []byte) bool {
	extras := t.ensureExtras()
	if t.forgets() {
		return false
	}
	if len(extras.text)+len(text) > maxText {
		t.blockOnce("too_long")
		return false
	}
	extras.text = append(extras.text, text...)
	return true
}

// requestedChoices are the choices that the present engine was asked for; nil of the first.
func (t *Transcript) requestedChoices() []*ChoiceState {
	if t.extras == nil {
		return nil
	}
	return t.extras.requested
}

// RequestMigration asks the stream to leave its engine as soon as it stands where it can; see
// Carry. It may be called from any goroutine.
func (t *Transcript) RequestMigration() { t.migrationRequested.Store(true) }

// canMigrate says whether nothing is half told, and something is left to tell.
func (t *Transcript) canMigrate() bool {
	return t.FailureEvent() == nil && t.Blocked() == "" && t.firstEventSent() && !t.doneSent && !t.finished() && t.all(t.allDelivered)
}

// AddDelivered adds ids that the client has been told, for a stream that is not relayed by
// this package.
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
	if t.FailureEvent() != nil || t.Records && event[0] == idRecordMark { // no line of an event's
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
	data := EventData(event)
	if bytes.Equal(data, done) {
		if t.needsRound() {
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
	case t.resumed() != nil && n.choices == 0 && t.needsRound():
		return dst // its usage is not the last
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

// appendShown appends what a client who sees ids gets of an event that tells these and nothing
// else.
func (t *Transcript) appendShown(dst, event []byte, ids []uint32) []byte {
	if t.Records && t.Blocked() == "" {
		return appendIDRecord(dst, ids)
	}
	return append(dst, event...)
}

// MigrationBlocker says in one word why no other engine can go on now, "" when one can.
func (t *Transcript) MigrationBlocker() string {
	switch native, _ := t.formatter.(*nativeStream); {
	case t.Blocked() != "":
		return t.Blocked()
	case !t.firstEventSent():
		return "no_beginning"
	case !t.all(t.resumable):
		return "half_character"
	case t.Prompt.Len() == 0:
		return "no_ids"
	case native != nil && native.modeUndetermined():
		return "unreadable"
	}
	return ""
}

// firstEventSent says that the client has the beginning that only the first engine can tell, where
// the stream has one: what comes behind it repeats it.
func (t *Transcript) firstEventSent() bool {
	switch own := t.getFormatter().(type) {
	case *messagesStream:
		return own.started
	case *responsesStream:
		return own.response != nil
	}
	return true
}

// resumable says whether what a choice has told ends where another engine can begin: what
// it makes again must not have been shown, be it by number or with its log-probability.
func (t *Transcript) resumable(q *ChoiceState) bool {
	return q.Finished || !q.PartialRune && (!t.ShowIDs && !t.Logprobs || q.Delivered == len(q.Out) || t.TextOnly && t.resumed() == nil)
}

func (t *Transcript) blockOnce(why string) {
	if t.Blocked() == "" {
		t.Block(why)
	}
}

// SwitchEngine makes what follows the events of another engine, that was given the prompt
// and the tokens told as a prompt.
func (t *Transcript) SwitchEngine() {
	extras := t.ensureExtras()
	extras.requested = t.Unfinished()
	for _, q := range t.requestedChoices() {
		q.Out, q.engineOrigin = q.Out[:q.Delivered], q.offset
	}
	t.switches++
	extras.failure = nil
	extras.next = t.getFormatter().nextEngine()
}

// getFormatter is who knows the form's events.
func (t *Transcript) getFormatter() formatter {
	if t.formatter == nil {
		t.formatter = t.newFormatter()
	}
	return t.formatter
}

// splicePoint is where the stream passes to another engine.
func (t *Transcript) splicePoint() *SplicePoint {
	s := &SplicePoint{Prompt: t.Prompt.Len(), PriorTokens: t.Delivered, ShowIDs: t.ShowIDs, choices: t.requestedChoices()}
	if head := t.eventHead(); head != "" {
		s.Head = []byte(head)
	}
	for _, q := range t.requestedChoices() {
		s.started = append(s.started, q.started)
	}
	if t.Choices > 1 {
		s.totalTokens = t.totalTokens
		if t.SumsCached {
			s.cachedPrompts = len(t.requestedChoices())
		}
	}
	return s
}

// AppendEnd appends what ends a stream whose finish reason is out: the usage, where
// the client asked for it, and the last event.
func (t *Transcript) AppendEnd(dst []byte, usage bool) []byte {
	return t.getFormatter().appendEnd(dst, usage)
}

// openAIFormatter is the speaker of chat completions and completions.
type openAIFormatter struct{ t *Transcript }

func (o openAIFormatter) event(dst, event []byte) []byte { return o.t.event(dst, event) }

func (o openAIFormatter) nextEngine() Rewriter {
	t := o.t
	return &Conversion{Chat: t.Format == ChatFormat, Choices: len(t.requestedChoices()), TopLogprobs: int(t.TopLogprobs), Cached: -1, Splice: t.splicePoint()}
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
