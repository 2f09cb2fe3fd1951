package relay

import "sluice/dataplane/upstream"

// Carry lets a stream go on from another engine when its own has failed in the
// middle: closed or reset the connection, fallen silent, or said in an event that
// it failed.
type Carry struct {
	// Transcript is the stream's Rewriter.
	Transcript *Transcript
	// Usage: the client asked for the usage at the end.
	Usage bool
	Next  Mover
}

// Mover finds another engine for a stream.
type Mover interface {
	// Next gives the answer of another engine, a chunked event stream of
	// completions behind Transcript.Told tokens; nil when there is none, and the
	// stream ends as it would without a Carry. It is called on the relaying
	// goroutine and may block; the response before is its caller's to release when
	// it gives another.
	Next(b Break) *upstream.Response
}

// carry is the stream's Carry, nil where it has none.
func (s *stream) carry() *Carry {
	if s.rare.carry.Transcript == nil {
		return nil
	}
	return &s.rare.carry
}

// Break is how an engine failed in the middle of a stream, or that it is to be left
// (Transcript.AskMove): then the stream stays where it is when Next gives nil.
type Break struct {
	// Cause is EngineStalled or one of EngineFailed; Completed with Event; Cut: it is to be left;
	// Completed alone: it has done what it was asked, and some of several choices are left
	// (Transcript.Limit).
	Cause Cause
	Err   error
	Event []byte // the engine's own word that it failed, borrowed
}

// maxCarried bounds an event of a stream with a Carry: its first holds the ids of
// the prompt.
const maxCarried = 8 << 20

// carryOn looks for another engine when the present one has failed; true when the
// stream goes on from it.
func (s *stream) carryOn() bool {
	c := s.carry()
	if c == nil || c.Transcript.ended {
		return false
	}
	t := c.Transcript
	if s.leaving {
		return s.leave()
	}
	b := Break{Cause: s.cause, Err: s.err, Event: t.Failed()}
	switch {
	case t.Failed() == nil && s.err == nil && s.chunks.Done() && t.unfinished():
		return s.goRound(b)
	case t.Failed() == nil && (s.err == nil || !s.cause.EngineFailed() && s.cause != EngineStalled):
		return false
	case t.finished() && !t.forgets():
		// The answer is whole; what is missing is known.
		s.closeWell(t.AppendEnd(nil, c.Usage))
		return false
	}
	resp := c.Next.Next(b)
	if resp == nil {
		if t.Failed() != nil {
			s.closeWell(t.appendFailure(nil, s.scan.protocol, s.number()))
		}
		return false
	}
	s.turn(resp)
	return true
}

// moreTurns is how many engines may be asked beyond one for each choice: each round but
// those that end in half a character finishes one.
const moreTurns = 8

// goRound has the choices that are left go on; their stream ends with an error where
// nobody takes them.
func (s *stream) goRound(b Break) bool {
	c := s.carry()
	if t := c.Transcript; int(t.turns) < int(t.Choices)+moreTurns {
		if resp := c.Next.Next(b); resp != nil {
			s.turn(resp)
			return true
		}
	}
	s.closeWell(failure{"no engine goes on with the choices that are left", 502}.appendEvent(nil, s.scan.protocol, s.number()))
	return false
}

// leave has the stream go on from another engine although its own is well; where
// there is none it goes on as it did.
func (s *stream) leave() bool {
	s.leaving = false
	if resp := s.rare.carry.Next.Next(Break{Cause: Cut}); resp != nil {
		s.turn(resp)
	}
	return true
}

// turn begins to read another engine's answer.
func (s *stream) turn(resp *upstream.Response) {
	most := s.edit.events.most
	s.edit.events.drop()
	s.edit.events = framer{most: most}
	s.resp, s.chunks, s.lent = resp, upstream.Chunks{}, false
	s.cause, s.err, s.reusable = Completed, nil, false
	s.rare.carry.Transcript.Turn()
}

// mayLeave says whether the stream is asked to leave its engine, and stands where it
// can: behind a whole event, with nothing half told, and not at its end.
func (s *stream) mayLeave() bool {
	c := s.carry()
	return c != nil && c.Transcript.asked.Load() && !s.chunks.Done() && s.edit.events.between() && c.Transcript.leaves() && c.Transcript.asked.CompareAndSwap(true, false)
}

// closeWell ends the stream with events, and the body.
func (s *stream) closeWell(events []byte) {
	s.cause, s.err = Completed, nil
	s.scan.feed(events)
	s.veilNew(events)
	s.reusable = s.write(append(AppendChunk(nil, events), lastChunk...)) == nil
}
