package relay

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// byteRange is a value in an event that is hidden from the client.
type byteRange struct{ from, to int }

// eventInfo is the content of one event.
type eventInfo struct {
	ids        int // number of ids
	text       []byte
	textAt     int // where the text begins in the event
	idsAt      int // the same of the last token_ids
	idsTo      int // where they end
	indexAt    int // where a choice's index begins; 0: none
	hasOther   bool
	choices    int
	failed     bool
	failedCode int
	hidden     [4]byteRange // hidden from the client
	nhidden    int
}

// readEvent reads one event.
func (t *Transcript) readEvent(event, data []byte) (n eventInfo, ok bool) {
	base := cap(event) - cap(data) // data is part of event
	w := jsonWalker{b: data}
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
			n.failed = n.failed || string(w.word()) == "error" // vLLM up to 0.10.0
		case "code":
			n.failedCode = max(w.number(), 0)
		case "error":
			if !w.null() {
				n.failed = true
				code := jsonWalker{b: memberOf(data[w.i:], "code")}
				n.failedCode = max(code.unsigned(), 0)
			}
			w.skip()
		case "prompt_token_ids":
			t.promptIDs(&w, base, &n)
		case "usage":
			n.hasOther = n.hasOther || !w.null()
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
	if n.choices > 0 && t.template.headLen == 0 && (t.extras == nil || t.extras.head == "") {
		object := "text_completion"
		if t.Format == ChatFormat {
			object = "chat.completion.chunk"
		}
		var scratch [2 * maxTemplate]byte
		begun := appendHead(append(scratch[:0], "data: "...), false, object, id, created, model)
		if !t.template.learnHead(begun) {
			t.setEventHead(string(begun[len("data: "):]))
		}
	}
	if n.choices > 0 && !t.promptSeen && t.Prompt.Len() == 0 {
		t.blockOnce("no_ids")
	}
	return n, true
}

// addIDs counts the ids of a choice in an event, and records whether its text covers all of them.
func (t *Transcript) addIDs(q *ChoiceState, text []byte, ids int) {
	switch {
	case t.NoText:
		q.Delivered = len(q.Out)
		return
	case len(text) == 0:
		return
	case t.TextOnly && t.resumed() == nil:
		t.appendSent(text)
		return
	case ids == 0:
		t.blockOnce("no_ids")
	default:
		if q.PartialRune = endsInPartialRune(text); !q.PartialRune {
			q.Delivered = len(q.Out)
		}
	}
	if t.KeepText {
		t.keepText(text)
	}
}

// endsInPartialRune reports whether the inside of a JSON string ends with U+FFFD, which stands for
// a partial character.
func endsInPartialRune(text []byte) bool {
	return bytes.HasSuffix(text, replacement) || bytes.HasSuffix(text, replacementLower) || bytes.HasSuffix(text, replacementUpper)
}

var (
	replacement      = []byte("\ufffd")
	replacementLower = []byte(`\ufffd`)
	replacementUpper = []byte(`\uFFFD`)
)

// promptIDs reads the prompt's ids, once, and hides them from the client.
func (t *Transcript) promptIDs(w *jsonWalker, base int, n *eventInfo) {
	raw := w.raw()
	if len(raw) == 0 || raw[0] != '[' {
		return
	}
	switch {
	case t.promptSeen || t.resumed() != nil || t.Records && t.Prompt.Len() > 0:
	case t.Prompt.equal(raw): // the usual case when they are known beforehand
		t.promptSeen = true
	default:
		ids, err := jsonscan.TokenIDs(make([]uint32, 0, bytes.Count(raw, comma)+1), raw)
		if err != nil || len(ids) == 0 {
			t.blockOnce("no_ids")
			return
		}
		t.Prompt, t.promptSeen = PackIDs(ids), true
	}
	t.hide(w, base, len(raw), n)
}

var comma = []byte{','}

// hide hides the value of size bytes before w from the client.
func (t *Transcript) hide(w *jsonWalker, base, size int, n *eventInfo) {
	if n.nhidden == len(n.hidden) {
		t.blockOnce("unreadable")
		return
	}
	n.hidden[n.nhidden] = byteRange{base + w.i - size, base + w.i}
	n.nhidden++
}

func (t *Transcript) choice(w *jsonWalker, base int, n *eventInfo) {
	if !w.enter('{') {
		return
	}
	index, ended := 0, false
	var ids, finish, scores []byte
	n.text = nil
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "index":
			n.indexAt = base + w.at()
			index = max(w.number(), 0)
		case "finish_reason":
			ended = !w.null()
			finish = w.word()
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
			ids = raw
			n.idsAt, n.idsTo = base+w.i-len(raw), base+w.i
			t.hide(w, base, len(raw), n)
		case "prompt_token_ids":
			had := n.nhidden
			t.promptIDs(w, base, n)
			n.hasOther = n.hasOther || n.nhidden > had
		case "logprobs":
			if !w.null() {
				n.hasOther = true
				scores = w.raw()
				continue
			}
			w.skip()
		default:
			w.skip()
		}
	}
	q := t.engineChoice(index)
	if q == nil {
		t.blockOnce("multiple_choices")
		q = &t.ChoiceState
	}
	q.started = true
	had := len(q.Out)
	if ids != nil {
		var err error
		if q.Out, err = jsonscan.TokenIDs(q.Out, ids); err != nil {
			t.blockOnce("no_ids")
		}
	}
	n.ids = len(q.Out) - had
	if ended {
		n.hasOther = true
		// The limit is not that of the choice, but of the choice with the fewest tokens left.
		q.Finished = !(t.Choices > 1 && t.resumed() != nil && string(finish) == "length" && len(q.Out) < int(t.Limit))
	}
	if scores != nil && t.Logprobs && t.Format == CompletionsFormat {
		q.addLogprobs(scores)
	}
	if !w.bad {
		t.addIDs(q, n.text, n.ids)
	}
}

func (t *Transcript) delta(w *jsonWalker, base int, n *eventInfo) {
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
				t.blockOnce("reasoning")
			}
		case "tool_calls", "function_call":
			if w.peek() == '[' && !w.hasElements() {
				continue
			}
			if !w.null() {
				t.blockOnce("tools")
			}
			w.skip()
		default:
			w.skip()
		}
	}
}
