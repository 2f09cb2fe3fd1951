package relay

import (
	"bytes"
	"strconv"
)

// Conversion makes of a completions answer, which a prompt sent as token ids
// gets, the answer of the endpoint that the client asked. It puts the first
// token, where prefill made it, before what decode makes, and takes it out of
// the usage again: decode was given it as a part of the prompt.
//
// It is the Rewriter of one stream, or the converter of one whole answer, not
// both. Members of a chunk that it does not know are passed on as they are.
type Conversion struct {
	// Chat: the client asked /v1/chat/completions. Otherwise completions stay
	// completions.
	Chat bool
	// Choices is how many choices the request has [1].
	Choices int
	// First is the token before the engine's first; nil: none.
	First *FirstToken
	// TopLogprobs is how many alternatives of a token the client asked for; a
	// chat answer shows so many.
	TopLogprobs int
	// Cached takes the place of the engine's cached_tokens; below 0 that stays.
	// The prefill engine knows what the decode engine can not.
	Cached int
	// Seam makes the answer, a stream, go on with one that another engine began.
	Splice *SplicePoint

	head      []byte       // `{"id":…,"object":…,"created":…,"model":…`, the same in every event
	started   []bool       // choices whose first event is out
	unstarted int          // choices whose first event is not
	doneSent  bool         // [DONE] is out
	origin    int          // where text_offset begins that the engine calls 0: behind the first token
	choice    *ChoiceState // of the one choice that the event at hand tells of, nil where it has not one
}

// FirstToken is what prefill generated.
type FirstToken struct {
	ID       uint32
	Text     []byte // the inside of a JSON string, escapes as the engine wrote them
	Logprobs []byte // the completions answer's logprobs object; nil or null: none
	IDs      bool   // the client asked for token ids
}

// SplicePoint is where a stream passes from one engine to the next, which was given what
// had been told as a part of its prompt.
type SplicePoint struct {
	// Head is the beginning of all events, up to the model; nil: nothing was told,
	// and the stream begins here.
	Head        []byte
	Prompt      int  // tokens of the client's prompt
	PriorTokens int  // told before; usage counts them as output
	ShowIDs     bool // the client asked for token ids

	choices       []*ChoiceState // the choices that the engine was asked for, in its order; nil: the first
	started       []bool         // of them, those whose first event is out
	totalTokens   func() int     // tokens of all choices, where there are several
	cachedPrompts int            // of how many prompts cached_tokens is the sum; 0: it is of one
}

// sequence is what the engine's choice i belongs to, nil where nothing.
func (s *SplicePoint) sequence(i int) *ChoiceState {
	if s == nil || i >= len(s.choices) {
		return nil
	}
	return s.choices[i]
}

// maxChoiceIndex bounds the index of a choice, so that an engine's nonsense costs
// nothing.
const maxChoiceIndex = 1 << 12

// Event implements Rewriter.
func (c *Conversion) Event(dst, event []byte) []byte {
	data := EventData(event)
	if bytes.Equal(data, done) {
		if c.doneSent {
			return dst
		}
		c.doneSent = true
		return append(dst, event...)
	}
	mark := len(dst)
	dst, ok := c.chunk(dst, data)
	if !ok { // a comment, an error, or what can't be followed: the client's to see
		return append(dst[:mark], event...)
	}
	return dst
}

// chunk converts the data of one event; ok is false when it is to pass as it is.
func (c *Conversion) chunk(dst, data []byte) (_ []byte, ok bool) {
	w := jsonWalker{b: data}
	if len(data) == 0 || w.peek() != '{' {
		return dst, false
	}
	if c.head == nil && c.Splice != nil && c.Splice.Head != nil {
		c.head, c.started, c.unstarted = c.Splice.Head, []bool{true}, 0
		if c.Splice.totalTokens != nil {
			c.started = c.Splice.started
			for _, begun := range c.started {
				if !begun {
					c.unstarted++
				}
			}
		}
	}
	if c.head == nil || c.unstarted > 0 {
		if dst, ok = c.appendOpenings(dst, data); !ok {
			return dst, false
		}
	}
	mark := len(dst)
	c.choice = nil
	dst = append(append(dst, "data: "...), c.head...)
	seen, sent := 0, 0
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "id", "created", "model":
			w.skip()
		case "object":
			if string(w.word()) == "error" {
				return dst, false
			}
		case "error":
			if !w.null() {
				return dst, false
			}
			w.skip()
		case "choices":
			dst = append(dst, `,"choices":[`...)
			dst, seen, sent = c.choices(dst, &w)
			dst = append(dst, ']')
		case "usage":
			dst = append(dst, `,"usage":`...)
			dst = c.usage(dst, &w)
		case "kv_transfer_params", "ec_transfer_params", "disaggregated_params":
			w.skip()
		default:
			dst = appendMember(dst, key, w.raw())
		}
	}
	if w.bad {
		return dst, false
	}
	if seen > 0 && sent == 0 {
		// No text, no end: nothing to tell. A usage so far goes with it, because
		// without choices it would look like the last one.
		return dst[:mark], true
	}
	return append(dst, "}\n\n"...), true
}

// usage appends the usage object at w as the client's request has it.
func (c *Conversion) usage(dst []byte, w *jsonWalker) []byte {
	if w.peek() != '{' {
		return append(dst, w.raw()...)
	}
	several, output := c.Splice != nil && c.Splice.totalTokens != nil, 0
	if several {
		// The engine counts several prompts, and not the choices that had finished.
		if output = c.Splice.totalTokens(); c.choice != nil {
			output = len(c.choice.Out)
		}
	}
	prior := 0
	if c.First != nil {
		prior = 1
	}
	if c.Splice != nil {
		prior += c.Splice.PriorTokens
	}
	w.enter('{')
	from := len(dst)
	for key, more := w.member(); more; key, more = w.member() {
		dst = appendKey(dst, from, key)
		if several {
			if n, ok := usageCount(key, c.Splice.Prompt, output); ok {
				w.skip()
				dst = appendInt(dst, n)
				continue
			}
		}
		switch string(key) {
		case "prompt_tokens":
			dst = w.appendShifted(dst, -prior)
		case "completion_tokens":
			dst = w.appendShifted(dst, prior)
		case "prompt_tokens_details":
			dst = c.promptTokensDetails(dst, w)
		default:
			dst = append(dst, w.raw()...)
		}
	}
	return closeObject(dst, from)
}

// usageCount is what a member of the usage says of so many tokens of prompt and output.
func usageCount(key []byte, prompt, output int) (n int, ok bool) {
	switch string(key) {
	case "prompt_tokens":
		return prompt, true
	case "completion_tokens":
		return output, true
	case "total_tokens":
		return prompt + output, true
	}
	return 0, false
}

// promptTokensDetails appends prompt_tokens_details with the cached tokens that prefill told.
func (c *Conversion) promptTokensDetails(dst []byte, w *jsonWalker) []byte {
	if w.peek() != '{' {
		return append(dst, w.raw()...)
	}
	w.enter('{')
	from := len(dst)
	for key, more := w.member(); more; key, more = w.member() {
		dst = appendKey(dst, from, key)
		value := w.raw()
		if c.Cached >= 0 && string(key) == "cached_tokens" {
			dst = strconv.AppendInt(dst, int64(c.Cached), 10)
			continue
		}
		if c.Splice != nil && string(key) == "cached_tokens" {
			// What was told counts as output, not as prompt that was found. The client has one
			// prompt: of a sum over several, which all begin with it, the mean is told.
			cached := jsonWalker{b: value}
			dst = strconv.AppendInt(dst, int64(min(max(cached.unsigned(), 0)/max(c.Splice.cachedPrompts, 1), c.Splice.Prompt)), 10)
			continue
		}
		dst = append(dst, value...)
	}
	return closeObject(dst, from)
}

// raw gives the value w stands at, as it is written, and moves behind it.
func (w *jsonWalker) raw() []byte {
	w.peek()
	from := w.i
	w.skip()
	return w.b[from:w.i]
}

// appendShifted appends the integer at w plus by; what is none is appended as it is.
func (w *jsonWalker) appendShifted(dst []byte, by int) []byte {
	raw := w.raw()
	value := jsonWalker{b: raw}
	if n := value.unsigned(); n >= 0 && value.i == len(raw) {
		return strconv.AppendInt(dst, int64(max(n+by, 0)), 10)
	}
	return append(dst, raw...)
}

// unsigned reads a plain non-negative integer, -1 when there is none.
func (w *jsonWalker) unsigned() int {
	n, from := 0, w.i
	for ; w.i < len(w.b) && w.i-from < 18; w.i++ {
		d := w.b[w.i] - '0'
		if d > 9 {
			break
		}
		n = n*10 + int(d)
	}
	if w.i == from {
		return -1
	}
	return n
}

// appendKey appends a key behind a comma, or behind the brace of the object that
// begins at from.
func appendKey(dst []byte, from int, key []byte) []byte {
	open := byte(',')
	if len(dst) == from {
		open = '{'
	}
	dst = append(append(dst, open, '"'), key...)
	return append(dst, '"', ':')
}

// closeObject ends the object whose members appendKey began at from; there may be none.
func closeObject(dst []byte, from int) []byte {
	if len(dst) == from {
		dst = append(dst, '{')
	}
	return append(dst, '}')
}

func appendMember(dst, key, value []byte) []byte {
	dst = append(append(dst, ',', '"'), key...)
	return append(append(dst, '"', ':'), value...)
}
