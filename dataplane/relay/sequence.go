package relay

// ChoiceState is what one choice of a stream has told.
type ChoiceState struct {
	Out []uint32 // token ids, of all engines so far
	// Told is how many of Out the client has the text of. What is behind them is
	// half a character, or a token without text, that an engine has not shown yet;
	// the next engine makes it again.
	Delivered int
	// Half: the text that the client saw last ends with the sign for half a
	// character; what another engine would make of the rest cannot be known.
	PartialRune bool
	// Finished: the finish reason is out; only usage and the last event were to
	// come.
	Finished bool

	started bool  // an event of it has come: the client has its role
	index   int32 // of the choice, as the client sees it
	// Of completions with log-probabilities: where in the text the next token begins,
	// in characters, and where the one did from which its engine counts.
	offset, engineOrigin int32
}

// Choice gives what choice i has told; nil where the stream has no such choice.
func (t *Transcript) Choice(i int) *ChoiceState {
	switch {
	case i == 0:
		return &t.ChoiceState
	case i >= int(t.Choices):
		return nil
	}
	extras := t.ensureExtras()
	for len(extras.otherChoices) < int(t.Choices)-1 {
		extras.otherChoices = append(extras.otherChoices, ChoiceState{index: int32(len(extras.otherChoices) + 1)})
	}
	return &extras.otherChoices[i-1]
}

// Unfinished gives the choices that have not finished, in their order. It is the order in
// which the next engine is asked for them.
func (t *Transcript) Unfinished() (open []*ChoiceState) {
	for i := range max(int(t.Choices), 1) {
		if q := t.Choice(i); !q.Finished {
			open = append(open, q)
		}
	}
	return open
}

// engineChoice is the choice that the present engine calls i.
func (t *Transcript) engineChoice(i int) *ChoiceState {
	asks := t.requestedChoices()
	if asks == nil {
		return t.Choice(i)
	}
	if i < len(asks) {
		return asks[i]
	}
	return nil
}

// all says whether f holds for all choices.
func (t *Transcript) all(f func(q *ChoiceState) bool) bool {
	for i := range max(int(t.Choices), 1) {
		if !f(t.Choice(i)) {
			return false
		}
	}
	return true
}

func (t *Transcript) finished() bool {
	return t.all(func(q *ChoiceState) bool { return q.Finished })
}

// allDelivered says whether the client has the text of all that the engine has told.
func (t *Transcript) allDelivered(q *ChoiceState) bool {
	return q.Finished || !q.PartialRune && (t.TextOnly && t.resumed() == nil || q.Delivered == len(q.Out))
}

// needsRound says whether choices are left to be asked for again when the present engine
// has done what it was asked: several go on by one request, which has one limit for all,
// the least that one of them has left.
func (t *Transcript) needsRound() bool { return t.Choices > 1 && t.resumed() != nil && !t.finished() }

// totalTokens is the length of all choices.
func (t *Transcript) totalTokens() (n int) {
	for i := range max(int(t.Choices), 1) {
		n += len(t.Choice(i).Out)
	}
	return n
}

// heardIDs is how many ids the stream's first choice has told, with those that were dropped.
func (t *Transcript) heardIDs() int {
	n := len(t.Out)
	if t.extras != nil {
		n += t.extras.past
	}
	return n
}

// addLogprobs takes in the log-probabilities of completions.
func (q *ChoiceState) addLogprobs(raw []byte) {
	if end := nextTextOffset(raw); end >= 0 {
		q.offset = q.engineOrigin + int32(end)
	}
}

// nextTextOffset is where the text goes on, by the text_offset of a completions logprobs
// object, behind its last token, counted as engines do: in characters of the tokens'
// spellings; -1 where it says nothing, as SGLang's, which tells -1 for each.
func nextTextOffset(logprobs []byte) int {
	last := -1
	if w := (jsonWalker{b: memberOf(logprobs, "text_offset")}); w.enter('[') {
		for w.element() {
			last = w.number()
		}
	}
	if last < 0 {
		return -1
	}
	var token []byte
	if w := (jsonWalker{b: memberOf(logprobs, "tokens")}); w.enter('[') {
		for w.element() {
			token = w.text()
		}
	}
	return last + countRunes(token)
}

// countRunes counts those of the inside of a JSON string.
func countRunes(quoted []byte) (n int) {
	for ; len(quoted) > 0; n++ {
		_, size := nextRune(quoted)
		quoted = quoted[size:]
	}
	return n
}

// appendShiftedOffsets appends a completions logprobs object whose text_offset counts from origin.
func appendShiftedOffsets(dst, logprobs []byte, origin int) []byte {
	if origin == 0 || !isObject(logprobs) {
		return append(dst, orNull(logprobs)...)
	}
	w := jsonWalker{b: logprobs}
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
			dst = w.appendShifted(dst, origin)
		}
		dst = append(dst, ']')
	}
	return closeObject(dst, from)
}
