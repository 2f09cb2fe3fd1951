package relay

import (
	"bytes"
	"strconv"
	"sync/atomic"

	"sluice/dataplane/jsonscan"
)

// Transcript is the Rewriter of a stream that may go on with another engine. It
// keeps what the stream has told, as token ids, holds the event back by which an
// engine says that it has failed, and makes the events of a second engine go on
// where those of the first ended. The client is shown neither the seam nor, where
// it did not ask for them, the ids.
//
// The ids are the engine's own where it tells them (see Form); else the text is
// kept, for somebody to make ids of it (ByText). One Transcript serves one stream of
// one choice; 4 bytes are kept for each id of prompt and output, and of the text what
// the stream's end repeats of it. Its fields are for the relaying goroutine.
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
	// Deltas: a NativeForm stream holds what is new, or (false) all so far; nil: not
	// known, until its second event shows it.
	Deltas *bool
	// ByText: the engine tells no ids; Text has what has been told, the insides of
	// JSON strings, and Cuts where each event's part of it ends.
	ByText bool
	Text   []byte
	Cuts   []uint32
	// Before, when set, makes of the engine's events those that the client's
	// endpoint has.
	Before Rewriter

	Prompt []uint32 // known beforehand, or told by the first event
	Out    []uint32 // of all engines so far
	// Told is how many of Out the client has the text of. What is behind them is
	// half a character, or a token without text, that an engine has not shown yet;
	// the next engine makes it again.
	Told int
	// Half: the text that the client saw last ends with the sign for half a
	// character; what another engine would make of the rest cannot be known.
	Half bool
	// Stuck says why no other engine can go on, "" when one can.
	Stuck string
	// Finished: the finish reason is out; only usage and the last event were to
	// come.
	Finished bool
	// Failed is the event by which the engine said that it failed, nil for none.
	// From it on nothing of that engine is passed.
	Failed []byte

	holds    bool // an event that tells of a failure is held back
	prompted bool // the prompt's ids have come
	ended    bool // [DONE] is out
	asked    atomic.Bool
	head     []byte // what all events begin with: id, object, created and model
	next     Rewriter
	own      speaker // of a Form that is not OpenAI's
	room     []byte
	plain    idTemplate
	spans    [4]span
	nspans   int
}

// span is a value in an event that is not for the client.
type span struct{ from, to int }

// noted is what one event says.
type noted struct {
	ids        int // how many came
	text       []byte
	textAt     int // where it begins in the event
	idsAt      int // likewise, of the last token_ids
	idsTo      int // where they end
	indexAt    int // where a choice's index begins, 0: nowhere
	news       bool
	choices    int
	failed     bool
	failedCode int
}

// AskMove asks the stream to leave its engine as soon as it stands where it can; see
// Carry. It may be called from any goroutine.
func (t *Transcript) AskMove() { t.asked.Store(true) }

// leaves says whether nothing is half told, and something is left to tell.
func (t *Transcript) leaves() bool {
	return t.Failed == nil && t.Stuck == "" && t.begun() && !t.Half && !t.Finished && !t.ended && (t.ByText && t.next == nil || t.Told == len(t.Out))
}

// Tell adds ids that the client has been told, for a stream that is not relayed by
// this package.
func (t *Transcript) Tell(ids ...uint32) {
	t.Out = append(t.Out, ids...)
	t.Told = len(t.Out)
}

// Event implements Rewriter.
func (t *Transcript) Event(dst, event []byte) []byte {
	if t.Before == nil {
		return t.event(dst, event)
	}
	t.room = t.Before.Event(t.room[:0], event)
	for rest := t.room; len(rest) > 0; {
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
	if t.Failed != nil || t.Records && event[0] == recordMark { // no line of an event's
		return dst
	}
	if _, openAI := t.speak().(openAIStream); !openAI {
		return t.own.event(dst, event)
	}
	if t.next == nil && !t.ByText {
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
	case t.next != nil:
		return t.next.Event(dst, event)
	case t.ByText:
		return append(dst, event...)
	}
	if !n.news && n.choices == 1 && n.ids > 0 && len(n.text) > 0 && n.textAt < n.idsAt {
		t.plain.learn(event, n.textAt, n.textAt+len(n.text), n.idsAt, n.idsTo)
	}
	if t.ShowIDs {
		return append(dst, event...)
	}
	at := 0
	for _, s := range t.spans[:t.nspans] {
		dst = append(append(dst, event[at:s.from]...), "null"...)
		at = s.to
	}
	return append(dst, event[at:]...)
}

// show appends what a client who sees ids gets of an event that tells these and nothing
// else.
func (t *Transcript) show(dst, event []byte, ids []uint32) []byte {
	if t.Records && t.Stuck == "" {
		return appendRecord(dst, ids)
	}
	return append(dst, event...)
}

// Why says in one word why no other engine can go on now, "" when one can.
func (t *Transcript) Why() string {
	switch native, _ := t.own.(*nativeStream); {
	case t.Stuck != "":
		return t.Stuck
	case !t.begun():
		return "no_beginning"
	case t.Half || t.ShowIDs && t.Told < len(t.Out):
		return "half_character"
	case len(t.Prompt) == 0:
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

func (t *Transcript) stuck(why string) {
	if t.Stuck == "" {
		t.Stuck = why
	}
}

// note reads one event.
func (t *Transcript) note(event, data []byte) (n noted, ok bool) {
	base := cap(event) - cap(data) // data is a part of event
	t.nspans = 0
	w := walker{b: data}
	var id, created, model []byte
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "id":
			id = w.raw()
		case "created":
			created = w.raw()
		case "model":
			model = w.raw()
		case "object":
			n.failed = n.failed || string(w.text()) == "error" // vLLM up to 0.10.0
		case "code":
			n.failedCode = max(w.number(), 0)
		case "error":
			if !w.null() {
				n.failed = true
				code := walker{b: memberOf(data[w.i:], "code")}
				n.failedCode = max(code.digits(), 0)
			}
			w.skip()
		case "prompt_token_ids":
			t.promptIDs(&w, base)
		case "usage":
			n.news = n.news || !w.null()
			w.skip()
		case "choices":
			if !w.enter('[') {
				continue
			}
			for w.element() {
				n.choices++
				t.choice(&w, base, &n)
			}
		default:
			w.skip()
		}
	}
	if w.bad {
		return n, false
	}
	if n.failed {
		return n, true
	}
	if t.head == nil && n.choices > 0 {
		object := "text_completion"
		if t.Form == ChatForm {
			object = "chat.completion.chunk"
		}
		t.head = appendHead(nil, false, object, id, created, model)
	}
	if n.choices == 0 {
		return n, true
	}
	if !t.prompted && len(t.Prompt) == 0 {
		t.stuck("no_ids")
	}
	t.told(n.text, n.ids)
	return n, true
}

// told counts in an event's ids, and whether its text shows all of them.
func (t *Transcript) told(text []byte, ids int) {
	switch {
	case t.NoText:
		t.Told = len(t.Out)
	case len(text) == 0:
	case t.ByText && t.next == nil:
		t.keep(text)
	case ids == 0:
		t.stuck("no_ids")
	default:
		if t.Half = endsInHalf(text); !t.Half {
			t.Told = len(t.Out)
		}
	}
}

// endsInHalf says whether the inside of a JSON string ends with the sign that
// stands for half a character.
func endsInHalf(text []byte) bool {
	return bytes.HasSuffix(text, replacement) || bytes.HasSuffix(text, replacementLower) || bytes.HasSuffix(text, replacementUpper)
}

var (
	replacement      = []byte("\ufffd")
	replacementLower = []byte(`\ufffd`)
	replacementUpper = []byte(`\uFFFD`)
)

// promptIDs takes the prompt's ids in, once, and marks them as not the client's.
func (t *Transcript) promptIDs(w *walker, base int) {
	raw := w.raw()
	if len(raw) == 0 || raw[0] != '[' {
		return
	}
	if !t.prompted && t.next == nil && !(t.Records && len(t.Prompt) > 0) {
		ids, err := jsonscan.TokenIDs(make([]uint32, 0, bytes.Count(raw, comma)+1), raw)
		if err != nil || len(ids) == 0 {
			t.stuck("no_ids")
			return
		}
		t.Prompt, t.prompted = ids, true
	}
	t.mark(w, base, len(raw))
}

var comma = []byte{','}

// mark notes that the value of size bytes before w is not for the client.
func (t *Transcript) mark(w *walker, base, size int) {
	if t.nspans == len(t.spans) {
		t.stuck("unreadable")
		return
	}
	t.spans[t.nspans] = span{base + w.i - size, base + w.i}
	t.nspans++
}

func (t *Transcript) choice(w *walker, base int, n *noted) {
	if !w.enter('{') {
		return
	}
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "index":
			n.indexAt = base + w.at()
			if w.number() > 0 {
				t.stuck("many_choices")
			}
		case "finish_reason":
			if !w.null() {
				t.Finished, n.news = true, true
			}
			w.skip()
		case "text":
			n.text = w.text()
			n.textAt = base + w.i - 1 - len(n.text)
		case "delta":
			t.delta(w, base, n)
		case "token_ids":
			raw := w.raw()
			if len(raw) == 0 || raw[0] != '[' {
				continue
			}
			had := len(t.Out)
			var err error
			if t.Out, err = jsonscan.TokenIDs(t.Out, raw); err != nil {
				t.stuck("no_ids")
			}
			n.ids = len(t.Out) - had
			n.idsAt, n.idsTo = base+w.i-len(raw), base+w.i
			t.mark(w, base, len(raw))
		case "prompt_token_ids":
			had := t.nspans
			t.promptIDs(w, base)
			n.news = n.news || t.nspans > had
		case "logprobs":
			if !w.null() {
				n.news = true
			}
			w.skip()
		default:
			w.skip()
		}
	}
}

func (t *Transcript) delta(w *walker, base int, n *noted) {
	if !w.enter('{') {
		return
	}
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "content":
			n.text = w.text()
			n.textAt = base + w.i - 1 - len(n.text)
		case "reasoning", "reasoning_content":
			if len(w.text()) > 0 {
				t.stuck("reasoning")
			}
		case "tool_calls", "function_call":
			if w.peek() == '[' && !w.hasElements() {
				continue
			}
			if !w.null() {
				t.stuck("tools")
			}
			w.skip()
		default:
			w.skip()
		}
	}
}

// Turn makes what follows the events of another engine, that was given the prompt
// and the tokens told as a prompt.
func (t *Transcript) Turn() {
	t.Out = t.Out[:t.Told]
	t.Failed = nil
	t.next = t.speak().turn()
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
	return &Seam{Head: t.head, Prompt: len(t.Prompt), Tokens: t.Told, ShowIDs: t.ShowIDs}
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
	return &Conversion{Chat: o.t.Form == ChatForm, Choices: 1, Cached: -1, Seam: o.t.seam()}
}

func (o openAIStream) end(dst []byte, usage bool) []byte {
	t := o.t
	if usage && t.head != nil {
		dst = append(append(dst, "data: "...), t.head...)
		dst = append(dst, `,"choices":[],"usage":{"prompt_tokens":`...)
		dst = strconv.AppendInt(dst, int64(len(t.Prompt)), 10)
		dst = append(dst, `,"total_tokens":`...)
		dst = strconv.AppendInt(dst, int64(len(t.Prompt)+len(t.Out)), 10)
		dst = append(dst, `,"completion_tokens":`...)
		dst = strconv.AppendInt(dst, int64(len(t.Out)), 10)
		dst = append(dst, "}}\n\n"...)
	}
	return append(dst, "data: [DONE]\n\n"...)
}
