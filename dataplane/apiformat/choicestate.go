package apiformat

import "sluice/dataplane/jsonscan"

// ChoiceState is the state of one choice of a stream.
type ChoiceState struct {
	Out []uint32 // token ids, of all engines so far
	// Delivered is how many of Out the client has the text of. The others are a partial character,
	// or tokens without text, which the engine has not shown yet. The next engine generates them
	// again.
	Delivered int
	// PartialRune: the text that the client saw last ends with U+FFFD for a partial character. How
	// another engine would complete it cannot be known.
	PartialRune bool
	// Finished: the finish reason has been sent. Only usage and the last event can follow.
	Finished bool

	Started bool  // an event of the choice has come: the client has its role
	Index   int32 // as the client sees it
	// Of completions with log-probabilities: the text offset of the next token, in characters, and
	// that of the token from which the engine counts.
	Offset, EngineOrigin int32
}

// AddLogprobs records the text offsets of completions log-probabilities.
func (q *ChoiceState) AddLogprobs(raw []byte) {
	if end := nextTextOffset(raw); end >= 0 {
		q.Offset = q.EngineOrigin + int32(end)
	}
}

// nextTextOffset returns the text offset after the last token of a completions logprobs object, in
// characters of the tokens' spellings, as engines count; -1 if it has none, as SGLang's, where each
// offset is -1.
func nextTextOffset(logprobs []byte) int {
	last := -1
	if w := (jsonscan.Cursor{Data: jsonscan.MemberOf(logprobs, "text_offset")}); w.Enter('[') {
		for w.Element() {
			last = w.Number()
		}
	}
	if last < 0 {
		return -1
	}
	var token []byte
	if w := (jsonscan.Cursor{Data: jsonscan.MemberOf(logprobs, "tokens")}); w.Enter('[') {
		for w.Element() {
			token = w.Text()
		}
	}
	return last + countRunes(token)
}

// countRunes returns the number of characters of the inside of a JSON string.
func countRunes(quoted []byte) (n int) {
	for ; len(quoted) > 0; n++ {
		_, size := nextRune(quoted)
		quoted = quoted[size:]
	}
	return n
}

// appendShiftedOffsets appends a completions logprobs object whose text_offset counts from origin.
func appendShiftedOffsets(dst, logprobs []byte, origin int) []byte {
	if origin == 0 || !IsObject(logprobs) {
		return append(dst, OrNull(logprobs)...)
	}
	w := jsonscan.Cursor{Data: logprobs}
	w.Enter('{')
	from := len(dst)
	for key, more := w.Member(); more; key, more = w.Member() {
		dst = AppendKey(dst, from, key)
		if string(key) != "text_offset" || w.Peek() != '[' {
			dst = append(dst, w.Raw()...)
			continue
		}
		w.Enter('[')
		dst = append(dst, '[')
		for i := 0; w.Element(); i++ {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = AppendShifted(dst, &w, origin)
		}
		dst = append(dst, ']')
	}
	return CloseObject(dst, from)
}
