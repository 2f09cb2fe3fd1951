package relay

import "sluice/dataplane/upstream"

// Migration lets a stream go on from another engine when its own has failed in the
// middle: closed or reset the connection, fallen silent, or said in an event that
// it failed.
type Migration struct {
	// Transcript is the stream's Rewriter.
	Transcript *Transcript
	// Usage: the client asked for the usage at the end.
	IncludeUsage bool
	Next         Migrator
}

// Migrator finds another engine for a stream.
type Migrator interface {
	// Next gives the answer of another engine, a chunked event stream of
	// completions behind Transcript.Told tokens; nil when there is none, and the
	// stream ends as it would without a Carry. It is called on the relaying
	// goroutine and may block; the response before is its caller's to release when
	// it gives another.
	NextEngine(b Interruption) *upstream.Response
}

// migration is the stream's Carry, nil where it has none.
func (s *stream) migration() *Migration {
	if s.extras.migration.Transcript == nil {
		return nil
	}
	return &s.extras.migration
}

// Interruption is how an engine failed in the middle of a stream, or that it is to be left
// (Transcript.RequestMigration): then the stream stays where it is when Next gives nil.
type Interruption struct {
	// Cause is EngineStalled or one of EngineFailed; Completed with Event; Cut: it is to be left;
	// Completed alone: it has done what it was asked, and some of several choices are left
	// (Transcript.Limit).
	Cause Cause
	Err   error
	Event []byte // the engine's own word that it failed, borrowed
}

// maxMigratableEvent bounds an event of a stream with a Carry: its first holds the ids of
// the prompt.
const maxMigratableEvent = 8 << 20

// migrate looks for another engine when the present one has failed; true when the
// stream goes on from it.
func (s *stream) migrate() bool {
	c := s.migration()
	if c == nil || c.Transcript.doneSent {
		return false
	}
	t := c.Transcript
	if s.migrating {
		return s.migrateOnRequest()
	}
	b := Interruption{Cause: s.cause, Err: s.err, Event: t.FailureEvent()}
	switch {
	case t.FailureEvent() == nil && s.err == nil && s.chunks.Done() && t.needsRound():
		return s.resumeChoices(b)
	case t.FailureEvent() == nil && (s.err == nil || !s.cause.EngineFailed() && s.cause != EngineStalled):
		return false
	case t.finished() && !t.forgets():
		// The answer is whole; what is missing is known.
		s.finishWith(t.AppendEnd(nil, c.IncludeUsage))
		return false
	}
	resp := c.Next.NextEngine(b)
	if resp == nil {
		if t.FailureEvent() != nil {
			s.finishWith(t.appendFailure(nil, s.scan.protocol, s.nextSequenceNumber()))
		}
		return false
	}
	s.switchEngine(resp)
	return true
}

// maxExtraRounds is how many engines may be asked beyond one for each choice: each round but
// those that end in half a character finishes one.
const maxExtraRounds = 8

// resumeChoices has the choices that are left go on; their stream ends with an error where
// nobody takes them.
func (s *stream) resumeChoices(b Interruption) bool {
	c := s.migration()
	if t := c.Transcript; int(t.switches) < int(t.Choices)+maxExtraRounds {
		if resp := c.Next.NextEngine(b); resp != nil {
			s.switchEngine(resp)
			return true
		}
	}
	s.finishWith(streamFailure{"no engine goes on with the choices that are left", 502}.appendEvent(nil, s.scan.protocol, s.nextSequenceNumber()))
	return false
}

// migrateOnRequest has the stream go on from another engine although its own is well; where
// there is none it goes on as it did.
func (s *stream) migrateOnRequest() bool {
	s.migrating = false
	if resp := s.extras.migration.Next.NextEngine(Interruption{Cause: Cancelled}); resp != nil {
		s.switchEngine(resp)
	}
	return true
}

// switchEngine begins to read another engine's answer.
func (s *stream) switchEngine(resp *upstream.Response) {
	maxEvent := s.editor.events.maxEvent
	s.editor.events.release()
	s.editor.events = eventFramer{maxEvent: maxEvent}
	s.resp, s.chunks, s.detached = resp, upstream.Chunks{}, false
	s.cause, s.err, s.reusable = Completed, nil, false
	s.extras.migration.Transcript.SwitchEngine()
}

// shouldMigrate says whether the stream is asked to leave its engine, and stands where it
// can: behind a whole event, with nothing half told, and not at its end.
func (s *stream) shouldMigrate() bool {
	c := s.migration()
	return c != nil && c.Transcript.migrationRequested.Load() && !s.chunks.Done() && s.editor.events.atBoundary() && c.Transcript.canMigrate() && c.Transcript.migrationRequested.CompareAndSwap(true, false)
}

// finishWith ends the stream with events, and the body.
func (s *stream) finishWith(events []byte) {
	s.cause, s.err = Completed, nil
	s.scan.feed(events)
	s.redactEvents(events)
	s.reusable = s.write(append(AppendChunk(nil, events), lastChunk...)) == nil
}
