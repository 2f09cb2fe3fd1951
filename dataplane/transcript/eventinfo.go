package transcript

import (
	"bytes"

	"sluice/dataplane/apiformat"
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
	w := jsonscan.Cursor{Data: data}
	var id, created, model []byte
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "id":
			id = w.Raw()
		case "created":
			created = w.Raw()
		case "model":
			model = w.Raw()
		case "object":
			n.failed = n.failed || string(w.Word()) == "error" // vLLM up to 0.10.0
		case "code":
			n.failedCode = max(w.Number(), 0)
		case "error":
			if !w.Null() {
				n.failed = true
				code := jsonscan.Cursor{Data: jsonscan.MemberOf(data[w.Pos:], "code")}
				n.failedCode = max(code.Unsigned(), 0)
			}
			w.Skip()
		case "prompt_token_ids":
			t.promptIDs(&w, base, &n)
		case "usage":
			n.hasOther = n.hasOther || !w.Null()
			w.Skip()
		case "choices":
			if !w.Enter('[') {
				continue
			}
			for w.Element() {
				n.choices++
				t.choice(&w, base, &n)
			}
		default:
			w.Skip()
		}
	}
	if w.Bad {
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
		begun := apiformat.AppendHead(append(scratch[:0], "data: "...), false, object, id, created, model)
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
func (t *Transcript) addIDs(q *apiformat.ChoiceState, text []byte, ids int) {
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
func (t *Transcript) promptIDs(w *jsonscan.Cursor, base int, n *eventInfo) {
	raw := w.Raw()
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
func (t *Transcript) hide(w *jsonscan.Cursor, base, size int, n *eventInfo) {
	if n.nhidden == len(n.hidden) {
		t.blockOnce("unreadable")
		return
	}
	n.hidden[n.nhidden] = byteRange{base + w.Pos - size, base + w.Pos}
	n.nhidden++
}

func (t *Transcript) choice(w *jsonscan.Cursor, base int, n *eventInfo) {
	if !w.Enter('{') {
		return
	}
	index, ended := 0, false
	var ids, finish, scores []byte
	n.text = nil
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "index":
			n.indexAt = base + w.At()
			index = max(w.Number(), 0)
		case "finish_reason":
			ended = !w.Null()
			finish = w.Word()
		case "text":
			n.text = w.Text()
			n.textAt = base + w.Pos - 1 - len(n.text)
		case "delta":
			t.delta(w, base, n)
		case "token_ids":
			raw := w.Raw()
			if len(raw) == 0 || raw[0] != '[' {
				continue
			}
			ids = raw
			n.idsAt, n.idsTo = base+w.Pos-len(raw), base+w.Pos
			t.hide(w, base, len(raw), n)
		case "prompt_token_ids":
			had := n.nhidden
			t.promptIDs(w, base, n)
			n.hasOther = n.hasOther || n.nhidden > had
		case "logprobs":
			if !w.Null() {
				n.hasOther = true
				scores = w.Raw()
				continue
			}
			w.Skip()
		default:
			w.Skip()
		}
	}
	q := t.engineChoice(index)
	if q == nil {
		t.blockOnce("multiple_choices")
		q = &t.ChoiceState
	}
	q.Started = true
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
		q.AddLogprobs(scores)
	}
	if !w.Bad {
		t.addIDs(q, n.text, n.ids)
	}
}

func (t *Transcript) delta(w *jsonscan.Cursor, base int, n *eventInfo) {
	if !w.Enter('{') {
		return
	}
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "content":
			n.text = w.Text()
			n.textAt = base + w.Pos - 1 - len(n.text)
		case "reasoning", "reasoning_content":
			if len(w.Text()) > 0 {
				t.blockOnce("reasoning")
			}
		case "tool_calls", "function_call":
			if w.Peek() == '[' && !w.HasElements() {
				continue
			}
			if !w.Null() {
				t.blockOnce("tools")
			}
			w.Skip()
		default:
			w.Skip()
		}
	}
}
