package relay

// Sequence is what one choice of a stream has told.
type Sequence struct {
	Out []uint32 // token ids, of all engines so far
	// Told is how many of Out the client has the text of. What is behind them is
	// half a character, or a token without text, that an engine has not shown yet;
	// the next engine makes it again.
	Told int
	// Half: the text that the client saw last ends with the sign for half a
	// character; what another engine would make of the rest cannot be known.
	Half bool
	// Finished: the finish reason is out; only usage and the last event were to
	// come.
	Finished bool

	begun bool  // an event of it has come: the client has its role
	index int32 // of the choice, as the client sees it
	// Of completions with log-probabilities: where in the text the next token begins,
	// in characters, and where the one did from which its engine counts.
	offset, origin int32
}

// Of gives what choice i has told; nil where the stream has no such choice.
func (t *Transcript) Of(i int) *Sequence {
	switch {
	case i == 0:
		return &t.Sequence
	case i >= int(t.Choices):
		return nil
	}
	few := t.rare()
	for len(few.more) < int(t.Choices)-1 {
		few.more = append(few.more, Sequence{index: int32(len(few.more) + 1)})
	}
	return &few.more[i-1]
}

// Open gives the choices that have not finished, in their order. It is the order in
// which the next engine is asked for them.
func (t *Transcript) Open() (open []*Sequence) {
	for i := range max(int(t.Choices), 1) {
		if q := t.Of(i); !q.Finished {
			open = append(open, q)
		}
	}
	return open
}

// heard is the choice that the present engine calls i.
func (t *Transcript) heard(i int) *Sequence {
	asks := t.asks()
	if asks == nil {
		return t.Of(i)
	}
	if i < len(asks) {
		return asks[i]
	}
	return nil
}

// every says whether f holds for all choices.
func (t *Transcript) every(f func(q *Sequence) bool) bool {
	for i := range max(int(t.Choices), 1) {
		if !f(t.Of(i)) {
			return false
		}
	}
	return true
}

func (t *Transcript) finished() bool {
	return t.every(func(q *Sequence) bool { return q.Finished })
}

// whole says whether the client has the text of all that the engine has told.
func (t *Transcript) whole(q *Sequence) bool {
	return q.Finished || !q.Half && (t.ByText && t.next() == nil || q.Told == len(q.Out))
}

// unfinished says whether choices are left to be asked for again when the present engine
// has done what it was asked: several go on by one request, which has one limit for all,
// the least that one of them has left.
func (t *Transcript) unfinished() bool { return t.Choices > 1 && t.next() != nil && !t.finished() }

// tokens is the length of all choices.
func (t *Transcript) tokens() (n int) {
	for i := range max(int(t.Choices), 1) {
		n += len(t.Of(i).Out)
	}
	return n
}

// heardIDs is how many ids the stream's first choice has told, with those that were dropped.
func (t *Transcript) heardIDs() int {
	n := len(t.Out)
	if t.few != nil {
		n += t.few.past
	}
	return n
}

// scored takes in the log-probabilities of completions.
func (q *Sequence) scored(raw []byte) {
	if end := offsetBehind(raw); end >= 0 {
		q.offset = q.origin + int32(end)
	}
}

// offsetBehind is where the text goes on, by the text_offset of a completions logprobs
// object, behind its last token, counted as engines do: in characters of the tokens'
// spellings; -1 where it says nothing, as SGLang's, which tells -1 for each.
func offsetBehind(logprobs []byte) int {
	last := -1
	if w := (walker{b: memberOf(logprobs, "text_offset")}); w.enter('[') {
		for w.element() {
			last = w.number()
		}
	}
	if last < 0 {
		return -1
	}
	var token []byte
	if w := (walker{b: memberOf(logprobs, "tokens")}); w.enter('[') {
		for w.element() {
			token = w.text()
		}
	}
	return last + characters(token)
}

// characters counts those of the inside of a JSON string.
func characters(quoted []byte) (n int) {
	for ; len(quoted) > 0; n++ {
		_, size := nextRune(quoted)
		quoted = quoted[size:]
	}
	return n
}

// appendMoved appends a completions logprobs object whose text_offset counts from origin.
func appendMoved(dst, logprobs []byte, origin int) []byte {
	if origin == 0 || !isObject(logprobs) {
		return append(dst, orNull(logprobs)...)
	}
	w := walker{b: logprobs}
	w.enter('{')
	from := len(dst)
	for key, more := w.member(); more; key, more = w.member() {
		dst = appendKey(dst, from, key)
		if string(key) != "text_offset" || w.peek() != '[' {
			dst = append(dst, w.raw()...)
			continue
		}
		w.enter('[')
		dst = append(dst, '[')
		for i := 0; w.element(); i++ {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = w.shifted(dst, origin)
		}
		dst = append(dst, ']')
	}
	return closeObject(dst, from)
}
