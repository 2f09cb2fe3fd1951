package apiformat

import (
	"bytes"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"strconv"
)

// Conversion converts the response to a completions request with token ids into the response of the
// endpoint that the client called. If prefill generated the first token, Conversion puts it before
// the decode engine's tokens and subtracts it from the prompt in the usage, because it was part of
// the decode engine's prompt.
//
// A Conversion is the Rewriter of one stream or converts one whole body, not both. Members of an
// event that it does not know pass unchanged.
type Conversion struct {
	// Chat: the client called /v1/chat/completions; otherwise /v1/completions.
	Chat bool
	// Choices is the number of choices of the request [1].
	Choices int
	// First is the token before the engine's first; nil: none.
	First *FirstToken
	// TopLogprobs is how many alternatives of each token a chat response shows.
	TopLogprobs int
	// Cached replaces the engine's cached_tokens unless it is negative. Only the prefill engine
	// knows the number of cached prompt tokens.
	Cached int
	// Splice makes a stream continue one that another engine began.
	Splice *SplicePoint

	head      []byte       // `{"id":…,"object":…,"created":…,"model":…`, the same in every event
	started   []bool       // choices whose first event has been sent
	unstarted int          // choices whose first event has not been sent
	doneSent  bool         // [DONE] has been sent
	origin    int          // the offset that the engine calls 0 in text_offset: after the first token
	choice    *ChoiceState // the choice of the present event; nil if it has not exactly one
}

// FirstToken is the token that prefill generated.
type FirstToken struct {
	ID       uint32
	Text     []byte // the inside of a JSON string, escapes as the engine wrote them
	Logprobs []byte // the completions answer's logprobs object; nil or null: none
	IDs      bool   // the client asked for token ids
}

// SplicePoint is where a stream passes from one engine to the next. The next engine gets the tokens
// sent so far as part of its prompt.
type SplicePoint struct {
	// Head is the beginning of all events, up to the model; nil: nothing has been sent and the
	// stream begins here.
	Head        []byte
	Prompt      int  // tokens of the client's prompt
	PriorTokens int  // tokens sent before; usage counts them as output
	ShowIDs     bool // the client asked for token ids

	Choices       []*ChoiceState // the choices requested from the engine, in its order; nil: the first
	Started       []bool         // of these, the ones whose first event has been sent
	TotalTokens   func() int     // tokens of all choices, if there are several
	CachedPrompts int            // the number of prompts whose cached tokens are summed in cached_tokens; 0: it is of one prompt
}

// sequence returns the stream's choice for the engine's choice i; nil: none.
func (s *SplicePoint) sequence(i int) *ChoiceState {
	if s == nil || i >= len(s.Choices) {
		return nil
	}
	return s.Choices[i]
}

// MaxChoiceIndex bounds the index of a choice, so that an invalid index costs no memory.
const MaxChoiceIndex = 1 << 12

// Event implements Rewriter.
func (c *Conversion) Event(dst, event []byte) []byte {
	data := sse.EventData(event)
	if bytes.Equal(data, sse.DoneData) {
		if c.doneSent {
			return dst
		}
		c.doneSent = true
		return append(dst, event...)
	}
	mark := len(dst)
	dst, ok := c.chunk(dst, data)
	if !ok { // a comment, an error, or unknown data: passed unchanged
		return append(dst[:mark], event...)
	}
	return dst
}

// chunk converts the data of one event. If ok is false the event passes unchanged.
func (c *Conversion) chunk(dst, data []byte) (_ []byte, ok bool) {
	w := jsonscan.Cursor{Data: data}
	if len(data) == 0 || w.Peek() != '{' {
		return dst, false
	}
	if c.head == nil && c.Splice != nil && c.Splice.Head != nil {
		c.head, c.started, c.unstarted = c.Splice.Head, []bool{true}, 0
		if c.Splice.TotalTokens != nil {
			c.started = c.Splice.Started
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
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "id", "created", "model":
			w.Skip()
		case "object":
			if string(w.Word()) == "error" {
				return dst, false
			}
		case "error":
			if !w.Null() {
				return dst, false
			}
			w.Skip()
		case "choices":
			dst = append(dst, `,"choices":[`...)
			dst, seen, sent = c.choices(dst, &w)
			dst = append(dst, ']')
		case "usage":
			dst = append(dst, `,"usage":`...)
			dst = c.Usage(dst, &w)
		case "kv_transfer_params", "ec_transfer_params", "disaggregated_params":
			w.Skip()
		default:
			dst = appendMember(dst, key, w.Raw())
		}
	}
	if w.Bad {
		return dst, false
	}
	if seen > 0 && sent == 0 {
		// The event has no text and no finish reason, so it is dropped, with its usage: an event
		// without choices would look like the last one.
		return dst[:mark], true
	}
	return append(dst, "}\n\n"...), true
}

// Usage appends the usage object at w as the client's request requires it.
func (c *Conversion) Usage(dst []byte, w *jsonscan.Cursor) []byte {
	if w.Peek() != '{' {
		return append(dst, w.Raw()...)
	}
	several, output := c.Splice != nil && c.Splice.TotalTokens != nil, 0
	if several {
		// The engine counts its prompts, but not the choices that had finished.
		if output = c.Splice.TotalTokens(); c.choice != nil {
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
	w.Enter('{')
	from := len(dst)
	for key, more := w.Member(); more; key, more = w.Member() {
		dst = AppendKey(dst, from, key)
		if several {
			if n, ok := usageCount(key, c.Splice.Prompt, output); ok {
				w.Skip()
				dst = appendInt(dst, n)
				continue
			}
		}
		switch string(key) {
		case "prompt_tokens":
			dst = AppendShifted(dst, w, -prior)
		case "completion_tokens":
			dst = AppendShifted(dst, w, prior)
		case "prompt_tokens_details":
			dst = c.promptTokensDetails(dst, w)
		default:
			dst = append(dst, w.Raw()...)
		}
	}
	return CloseObject(dst, from)
}

// usageCount returns the value of a usage member for these token counts.
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

// promptTokensDetails appends prompt_tokens_details with the cached tokens that prefill reported.
func (c *Conversion) promptTokensDetails(dst []byte, w *jsonscan.Cursor) []byte {
	if w.Peek() != '{' {
		return append(dst, w.Raw()...)
	}
	w.Enter('{')
	from := len(dst)
	for key, more := w.Member(); more; key, more = w.Member() {
		dst = AppendKey(dst, from, key)
		value := w.Raw()
		if c.Cached >= 0 && string(key) == "cached_tokens" {
			dst = strconv.AppendInt(dst, int64(c.Cached), 10)
			continue
		}
		if c.Splice != nil && string(key) == "cached_tokens" {
			// Tokens sent by the previous engine count as output, not as cached prompt. The client
			// has one prompt: of a sum over several prompts, which all begin with it, the mean is
			// reported.
			cached := jsonscan.Cursor{Data: value}
			dst = strconv.AppendInt(dst, int64(min(max(cached.Unsigned(), 0)/max(c.Splice.CachedPrompts, 1), c.Splice.Prompt)), 10)
			continue
		}
		dst = append(dst, value...)
	}
	return CloseObject(dst, from)
}

// AppendShifted appends the integer at w plus by. Another value is appended unchanged.
func AppendShifted(dst []byte, w *jsonscan.Cursor, by int) []byte {
	raw := w.Raw()
	value := jsonscan.Cursor{Data: raw}
	if n := value.Unsigned(); n >= 0 && value.Pos == len(raw) {
		return strconv.AppendInt(dst, int64(max(n+by, 0)), 10)
	}
	return append(dst, raw...)
}

// AppendKey appends a key after a comma, or after the brace of the object that begins at from.
func AppendKey(dst []byte, from int, key []byte) []byte {
	open := byte(',')
	if len(dst) == from {
		open = '{'
	}
	dst = append(append(dst, open, '"'), key...)
	return append(dst, '"', ':')
}

// CloseObject ends the object that AppendKey began at from; it may be empty.
func CloseObject(dst []byte, from int) []byte {
	if len(dst) == from {
		dst = append(dst, '{')
	}
	return append(dst, '}')
}

func appendMember(dst, key, value []byte) []byte {
	dst = append(append(dst, ',', '"'), key...)
	return append(append(dst, '"', ':'), value...)
}
