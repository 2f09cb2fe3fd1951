package relay

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

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
	spans      [4]span // what is not for the client
	nspans     int
}

// note reads one event.
func (t *Transcript) note(event, data []byte) (n noted, ok bool) {
	base := cap(event) - cap(data) // data is a part of event
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
			n.failed = n.failed || string(w.word()) == "error" // vLLM up to 0.10.0
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
			t.promptIDs(&w, base, &n)
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
	if n.choices > 0 && t.plain.head == 0 && (t.few == nil || t.few.head == "") {
		object := "text_completion"
		if t.Form == ChatForm {
			object = "chat.completion.chunk"
		}
		var room [2 * maxTemplate]byte
		begun := appendHead(append(room[:0], "data: "...), false, object, id, created, model)
		if !t.plain.learnHead(begun) {
			t.setHead(string(begun[len("data: "):]))
		}
	}
	if n.choices > 0 && !t.prompted && t.Prompt.Len() == 0 {
		t.stuck("no_ids")
	}
	return n, true
}

// told counts in an event's ids of a choice, and whether its text shows all of them.
func (t *Transcript) told(q *Sequence, text []byte, ids int) {
	switch {
	case t.NoText:
		q.Told = len(q.Out)
		return
	case len(text) == 0:
		return
	case t.ByText && t.next() == nil:
		t.keep(text)
		return
	case ids == 0:
		t.stuck("no_ids")
	default:
		if q.Half = endsInHalf(text); !q.Half {
			q.Told = len(q.Out)
		}
	}
	if t.KeepText {
		t.keepText(text)
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
func (t *Transcript) promptIDs(w *walker, base int, n *noted) {
	raw := w.raw()
	if len(raw) == 0 || raw[0] != '[' {
		return
	}
	switch {
	case t.prompted || t.next() != nil || t.Records && t.Prompt.Len() > 0:
	case t.Prompt.are(raw): // as nearly always where they are known beforehand
		t.prompted = true
	default:
		ids, err := jsonscan.TokenIDs(make([]uint32, 0, bytes.Count(raw, comma)+1), raw)
		if err != nil || len(ids) == 0 {
			t.stuck("no_ids")
			return
		}
		t.Prompt, t.prompted = PackIDs(ids), true
	}
	t.mark(w, base, len(raw), n)
}

var comma = []byte{','}

// mark notes that the value of size bytes before w is not for the client.
func (t *Transcript) mark(w *walker, base, size int, n *noted) {
	if n.nspans == len(n.spans) {
		t.stuck("unreadable")
		return
	}
	n.spans[n.nspans] = span{base + w.i - size, base + w.i}
	n.nspans++
}

func (t *Transcript) choice(w *walker, base int, n *noted) {
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
			t.mark(w, base, len(raw), n)
		case "prompt_token_ids":
			had := n.nspans
			t.promptIDs(w, base, n)
			n.news = n.news || n.nspans > had
		case "logprobs":
			if !w.null() {
				n.news = true
				scores = w.raw()
				continue
			}
			w.skip()
		default:
			w.skip()
		}
	}
	q := t.heard(index)
	if q == nil {
		t.stuck("many_choices")
		q = &t.Sequence
	}
	q.begun = true
	had := len(q.Out)
	if ids != nil {
		var err error
		if q.Out, err = jsonscan.TokenIDs(q.Out, ids); err != nil {
			t.stuck("no_ids")
		}
	}
	n.ids = len(q.Out) - had
	if ended {
		n.news = true
		// A limit that is not the choice's own but that of the one with the least left.
		q.Finished = !(t.Choices > 1 && t.next() != nil && string(finish) == "length" && len(q.Out) < int(t.Limit))
	}
	if scores != nil && t.Scores && t.Form == CompletionsForm {
		q.scored(scores)
	}
	if !w.bad {
		t.told(q, n.text, n.ids)
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
