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
// kept, for somebody to make ids of it (ByText). One Transcript serves one stream;
// of each id of the prompt its bits are kept, of one of the output 4 bytes, and of the text what the stream's
// end repeats of it. Its fields are for the relaying goroutine.
type Transcript struct {
	Form Form
	// ShowIDs: the client sees token ids: it asked for them, or the endpoint always
	// tells them.
	ShowIDs bool
	// Records: the client is a part of this program, and gets a record (Record) in the
	// place of an event that tells ids and nothing else. With ShowIDs only, and a Prompt
	// that is known.
	Records bool
	// NoText: the stream has ids and no text.
	NoText bool
	// ByText: the engine tells no ids; Text is what has been told.
	ByText bool
	// KeepText: Text is what has been told though ids are known, of all engines.
	KeepText bool
	// Scores: the client sees log-probabilities, and so every token, with text or without.
	// TopLogprobs is how many alternatives it asked for of each, in a chat.
	Scores bool
	// SumsCached: the next engine's cached_tokens is the sum of what it found of each prompt
	// that it was given (SGLang's), not what it found of the first (vLLM's).
	SumsCached bool

	holds    bool // an event that tells of a failure is held back
	prompted bool // the prompt's ids have come
	ended    bool // [DONE] is out
	turns    int16
	asked    atomic.Bool

	TopLogprobs int32
	// Choices is how many the stream has [1]. Several are told apart where ids are asked
	// for, on chat completions and completions; they go on by one request, which has a
	// prompt for each that is open, in Open's order. Limit, set before, is how many tokens
	// one may have in all: with one that stops before it for its length, by the request's
	// limit, another round follows.
	Choices int32
	Limit   int32
	// Deltas: a NativeForm stream holds what is new, or (false) all so far; nil: not
	// known, until its second event shows it.
	Deltas *bool

	Prompt   IDs // known beforehand, or told by the first event
	Sequence     // of the first choice

	own   speaker // of a Form that is not OpenAI's
	plain idTemplate
	few   *few // nil: none of it
}

// begin is what all events of the stream begin with: id, object, created and model; "": not
// known yet.
func (t *Transcript) begin() string {
	var room [2 * maxTemplate]byte
	return string(t.appendBegin(room[:0]))
}

func (t *Transcript) appendBegin(b []byte) []byte {
	if t.plain.head > 0 {
		at := len(b)
		b = t.plain.appendBefore(b)
		return append(b[:at], b[at+len("data: "):][:t.plain.head]...)
	}
	if t.few == nil {
		return b
	}
	return append(b, t.few.head...)
}

// setHead keeps what begin gives where plain does not have it.
func (t *Transcript) setHead(head string) {
	if head != "" || t.few != nil {
		t.rare().head = head
	}
}

// few is what few streams have: text that is kept, several choices, another engine, a failure,
// a reason to stay, or events that another Rewriter has made.
type few struct {
	stuck  string
	failed []byte
	before Rewriter
	head   string   // see begin
	next   Rewriter // of another engine's events
	text   []byte
	cuts   []uint32
	more   []Sequence  // of the other choices
	asks   []*Sequence // those that the present engine was asked for, where it is not the first
	room   []byte      // what before made of an event
	past   int         // ids that forget has dropped
	forgot bool        // forget was called
}

// memorySpent is why a stream is stuck whose transcript there is no memory for.
const memorySpent = "memory"

// kept is the memory of what is kept for another engine, in bytes.
func (t *Transcript) kept() int {
	n := len(t.Prompt.packed) + 4*cap(t.Out)
	if few := t.few; few != nil {
		n += cap(few.text) + 4*cap(few.cuts)
		for i := range few.more {
			n += 4 * cap(few.more[i].Out)
		}
	}
	return n
}

// forgets says whether forget has been called.
func (t *Transcript) forgets() bool { return t.few != nil && t.few.forgot }

// forget drops what is kept for another engine, which no longer can go on, and keeps no more
// text. It is called again to drop the ids that have come since. Those of a stream that has
// moved stay, and those of SGLang's /generate, whose events are read by them.
func (t *Transcript) forget() {
	t.stuck(memorySpent)
	few := t.rare()
	few.forgot, few.text, few.cuts = true, nil, nil
	if _, native := t.speak().(*nativeStream); native || t.next() != nil {
		return
	}
	t.Prompt, t.prompted = IDs{}, true
	for i := range max(int(t.Choices), 1) {
		q := t.Of(i)
		few.past += len(q.Out)
		if q.Out, q.Told = q.Out[:0], 0; 4*cap(q.Out) > uncountedParts {
			q.Out = nil
		}
	}
}

// Stuck says why no other engine can go on, "" when one can.
func (t *Transcript) Stuck() string {
	if t.few == nil {
		return ""
	}
	return t.few.stuck
}

// Stick says that no other engine can go on, and why.
func (t *Transcript) Stick(why string) { t.rare().stuck = why }

// Failed is the event by which the engine said that it failed, nil for none.
// From it on nothing of that engine is passed.
func (t *Transcript) Failed() []byte {
	if t.few == nil {
		return nil
	}
	return t.few.failed
}

// Before sets who makes of the engine's events those that the client's endpoint has; nil for
// nobody.
func (t *Transcript) Before(r Rewriter) {
	if r != nil || t.few != nil {
		t.rare().before = r
	}
}

// next makes another engine's events the stream's own; nil while the first is read.
func (t *Transcript) next() Rewriter {
	if t.few == nil {
		return nil
	}
	return t.few.next
}

// rare gives it, made where there was none.
func (t *Transcript) rare() *few {
	if t.few == nil {
		t.few = new(few)
	}
	return t.few
}

// Text is what has been told, the insides of JSON strings, where it is kept.
func (t *Transcript) Text() []byte {
	if t.few == nil {
		return nil
	}
	return t.few.text
}

// Cuts says where each event's part of Text ends, ByText.
func (t *Transcript) Cuts() []uint32 {
	if t.few == nil {
		return nil
	}
	return t.few.cuts
}

// keepText adds to Text; false where that gets too long.
func (t *Transcript) keepText(text []byte) bool {
	few := t.rare()
	if t.forgets() {
		return false
	}
	if len(few.text)+len(text) > maxText {
		t.stuck("too_long")
		return false
	}
	few.text = append(few.text, text...)
	return true
}

// asks are the choices that the present engine was asked for; nil of the first.
func (t *Transcript) asks() []*Sequence {
	if t.few == nil {
		return nil
	}
	return t.few.asks
}

// AskMove asks the stream to leave its engine as soon as it stands where it can; see
// Carry. It may be called from any goroutine.
func (t *Transcript) AskMove() { t.asked.Store(true) }

// leaves says whether nothing is half told, and something is left to tell.
func (t *Transcript) leaves() bool {
	return t.Failed() == nil && t.Stuck() == "" && t.begun() && !t.ended && !t.finished() && t.every(t.whole)
}

// Tell adds ids that the client has been told, for a stream that is not relayed by
// this package.
func (t *Transcript) Tell(ids ...uint32) {
	t.Out = append(t.Out, ids...)
	t.Told = len(t.Out)
}

// Event implements Rewriter.
func (t *Transcript) Event(dst, event []byte) []byte {
	few := t.few
	if few == nil || few.before == nil {
		return t.event(dst, event)
	}
	few.room = few.before.Event(few.room[:0], event)
	for rest := few.room; len(rest) > 0; {
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
	if t.Failed() != nil || t.Records && event[0] == recordMark { // no line of an event's
		return dst
	}
	if _, openAI := t.speak().(openAIStream); !openAI {
		return t.own.event(dst, event)
	}
	if t.next() == nil && !t.ByText && t.Choices < 2 {
		had := len(t.Out)
		if from, to, ok := t.plain.match(event, t); ok {
			if t.ShowIDs {
				return t.show(dst, event, t.Out[had:])
			}
			dst = append(append(dst, event[:from]...), "null"...)
			return append(dst, event[to:]...)
		}
	}
	data := DataOf(event)
	if bytes.Equal(data, done) {
		if t.unfinished() {
			return dst
		}
		t.ended = true
		return append(dst, event...)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	n, ok := t.note(event, data)
	switch {
	case !ok:
		t.stuck("unreadable")
		return append(dst, event...)
	case n.failed:
		return t.broke(dst, event, n.failedCode)
	case t.next() != nil && n.choices == 0 && t.unfinished():
		return dst // its usage is not the last
	case t.next() != nil:
		return t.next().Event(dst, event)
	case t.ByText:
		return append(dst, event...)
	}
	if !n.news && n.choices == 1 && n.ids > 0 && len(n.text) > 0 && n.textAt < n.idsAt {
		var room [2 * maxTemplate]byte
		head := t.appendBegin(room[:0])
		t.plain.learn(event, n.textAt, n.textAt+len(n.text), n.idsAt, n.idsTo)
		if t.plain.hasHead(head) {
			t.setHead("")
		} else {
			t.setHead(string(head))
		}
	}
	if t.ShowIDs {
		return append(dst, event...)
	}
	at := 0
	for _, s := range n.spans[:n.nspans] {
		dst = append(append(dst, event[at:s.from]...), "null"...)
		at = s.to
	}
	return append(dst, event[at:]...)
}

// show appends what a client who sees ids gets of an event that tells these and nothing
// else.
func (t *Transcript) show(dst, event []byte, ids []uint32) []byte {
	if t.Records && t.Stuck() == "" {
		return appendRecord(dst, ids)
	}
	return append(dst, event...)
}

// Why says in one word why no other engine can go on now, "" when one can.
func (t *Transcript) Why() string {
	switch native, _ := t.own.(*nativeStream); {
	case t.Stuck() != "":
		return t.Stuck()
	case !t.begun():
		return "no_beginning"
	case !t.every(t.resumable):
		return "half_character"
	case t.Prompt.Len() == 0:
		return "no_ids"
	case native != nil && native.unsure():
		return "unreadable"
	}
	return ""
}

// begun says that the client has the beginning that only the first engine can tell, where
// the stream has one: what comes behind it repeats it.
func (t *Transcript) begun() bool {
	switch own := t.speak().(type) {
	case *messagesStream:
		return own.begun
	case *responsesStream:
		return own.response != nil
	}
	return true
}

// resumable says whether what a choice has told ends where another engine can begin: what
// it makes again must not have been shown, be it by number or with its log-probability.
func (t *Transcript) resumable(q *Sequence) bool {
	return q.Finished || !q.Half && (!t.ShowIDs && !t.Scores || q.Told == len(q.Out) || t.ByText && t.next() == nil)
}

func (t *Transcript) stuck(why string) {
	if t.Stuck() == "" {
		t.Stick(why)
	}
}

// Turn makes what follows the events of another engine, that was given the prompt
// and the tokens told as a prompt.
func (t *Transcript) Turn() {
	few := t.rare()
	few.asks = t.Open()
	for _, q := range t.asks() {
		q.Out, q.origin = q.Out[:q.Told], q.offset
	}
	t.turns++
	few.failed = nil
	few.next = t.speak().turn()
}

// speak is who knows the form's events.
func (t *Transcript) speak() speaker {
	if t.own == nil {
		t.own = t.speaker()
	}
	return t.own
}

// seam is where the stream passes to another engine.
func (t *Transcript) seam() *Seam {
	s := &Seam{Prompt: t.Prompt.Len(), Tokens: t.Told, ShowIDs: t.ShowIDs, of: t.asks()}
	if head := t.begin(); head != "" {
		s.Head = []byte(head)
	}
	for _, q := range t.asks() {
		s.begun = append(s.begun, q.begun)
	}
	if t.Choices > 1 {
		s.all = t.tokens
		if t.SumsCached {
			s.sums = len(t.asks())
		}
	}
	return s
}

// AppendEnd appends what ends a stream whose finish reason is out: the usage, where
// the client asked for it, and the last event.
func (t *Transcript) AppendEnd(dst []byte, usage bool) []byte {
	return t.speak().end(dst, usage)
}

// openAIStream is the speaker of chat completions and completions.
type openAIStream struct{ t *Transcript }

func (o openAIStream) event(dst, event []byte) []byte { return o.t.event(dst, event) }

func (o openAIStream) turn() Rewriter {
	t := o.t
	return &Conversion{Chat: t.Form == ChatForm, Choices: len(t.asks()), TopLogprobs: int(t.TopLogprobs), Cached: -1, Seam: t.seam()}
}

func (o openAIStream) end(dst []byte, usage bool) []byte {
	t := o.t
	if head := t.begin(); usage && head != "" {
		dst = append(append(dst, "data: "...), head...)
		dst = t.appendUsage(append(dst, `,"choices":[],"usage":`...))
		dst = append(dst, "}\n\n"...)
	}
	return append(dst, "data: [DONE]\n\n"...)
}
