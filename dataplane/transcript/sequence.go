package transcript

import "sluice/dataplane/apiformat"

// Choice returns the state of choice i; nil if the stream has no such choice.
func (t *Transcript) Choice(i int) *apiformat.ChoiceState {
	switch {
	case i == 0:
		return &t.ChoiceState
	case i >= int(t.Choices):
		return nil
	}
	extras := t.ensureExtras()
	for len(extras.otherChoices) < int(t.Choices)-1 {
		extras.otherChoices = append(extras.otherChoices, apiformat.ChoiceState{Index: int32(len(extras.otherChoices) + 1)})
	}
	return &extras.otherChoices[i-1]
}

// Unfinished returns the unfinished choices in order. The next engine is asked for them in this
// order.
func (t *Transcript) Unfinished() (open []*apiformat.ChoiceState) {
	for i := range max(int(t.Choices), 1) {
		if q := t.Choice(i); !q.Finished {
			open = append(open, q)
		}
	}
	return open
}

// engineChoice returns the choice that the present engine calls i.
func (t *Transcript) engineChoice(i int) *apiformat.ChoiceState {
	asks := t.requestedChoices()
	if asks == nil {
		return t.Choice(i)
	}
	if i < len(asks) {
		return asks[i]
	}
	return nil
}

// all reports whether f is true for all choices.
func (t *Transcript) all(f func(q *apiformat.ChoiceState) bool) bool {
	for i := range max(int(t.Choices), 1) {
		if !f(t.Choice(i)) {
			return false
		}
	}
	return true
}

// AllFinished reports whether all choices are finished.
func (t *Transcript) AllFinished() bool {
	return t.all(func(q *apiformat.ChoiceState) bool { return q.Finished })
}

// allDelivered reports whether the client has the text of all of the engine's tokens.
func (t *Transcript) allDelivered(q *apiformat.ChoiceState) bool {
	return q.Finished || !q.PartialRune && (t.TextOnly && t.resumed() == nil || q.Delivered == len(q.Out))
}

// NeedsRound reports whether choices must be requested again after the present engine has completed
// its request. Several choices continue by one request, which has one token limit for all: the
// smallest remaining limit of any of them.
func (t *Transcript) NeedsRound() bool {
	return t.Choices > 1 && t.resumed() != nil && !t.AllFinished()
}

// RoundDone reports whether the present engine has sent [DONE] and a further round follows. Nothing
// more is read from it, because an engine may keep its response open.
func (t *Transcript) RoundDone() bool { return t.extras != nil && t.extras.roundDone }

// totalTokens returns the number of tokens of all choices.
func (t *Transcript) totalTokens() (n int) {
	for i := range max(int(t.Choices), 1) {
		n += len(t.Choice(i).Out)
	}
	return n
}

// IDsReceived returns how many ids the first choice has had, including dropped ones.
func (t *Transcript) IDsReceived() int {
	n := len(t.Out)
	if t.extras != nil {
		n += t.extras.past
	}
	return n
}
