package relay

import (
	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
	"sluice/dataplane/upstream"
)

// Migration lets a stream continue on another engine when its own has failed in the middle: closed
// or reset the connection, stopped sending, or sent an error event.
type Migration struct {
	// Transcript is the stream's Rewriter.
	Transcript *transcript.Transcript
	// IncludeUsage: the client asked for the usage at the end.
	IncludeUsage bool
	Next         Migrator
}

// Migrator finds another engine for a stream.
type Migrator interface {
	// NextEngine returns the response of another engine: a chunked event stream that continues
	// after the tokens of the Transcript. It returns nil if there is none; the stream then ends as
	// it would without a Migration. It is called on the relaying goroutine and may block. The
	// caller releases the previous response when it returns another.
	NextEngine(b Interruption) *upstream.Response
}

// migration returns the stream's Migration; nil: none.
func (s *stream) migration() *Migration {
	if s.extras.migration.Transcript == nil {
		return nil
	}
	return &s.extras.migration
}

// Interruption is how an engine failed in the middle of a stream, or that the stream should leave
// it (Transcript.RequestMigration). In the latter case the stream stays where it is when NextEngine
// returns nil.
type Interruption struct {
	// Cause is EngineStalled or one for which EngineFailed is true; Completed with Event; Cancelled
	// if the stream should leave the engine; Completed alone if the engine has done what was
	// requested and some of several choices are unfinished (Transcript.Limit).
	Cause Cause
	Err   error
	Event []byte // the engine's error event, borrowed
	// Leave ends the engine's work on the stream while NextEngine goes on. The stream can then not stay:
	// if NextEngine returns nil, it ends with an error. It is nil unless Cause is Cancelled, and may be
	// called once.
	Leave func()
}

// migrate finds another engine when the present one has failed. It returns whether the stream
// continues there.
func (s *stream) migrate() bool {
	c := s.migration()
	if c == nil || c.Transcript.DoneSent() {
		return false
	}
	t := c.Transcript
	if s.migrating {
		return s.migrateOnRequest()
	}
	b := Interruption{Cause: s.cause, Err: s.err, Event: t.FailureEvent()}
	switch {
	case t.FailureEvent() == nil && s.err == nil && (s.chunks.Done() || t.RoundDone()) && t.NeedsRound():
		return s.resumeChoices(b)
	case t.FailureEvent() == nil && (s.err == nil || !s.cause.EngineFailed() && s.cause != EngineStalled):
		return false
	case t.AllFinished() && !t.Forgotten():
		// The answer is complete and its missing end is known.
		s.finishWith(t.AppendEnd(nil, c.IncludeUsage))
		return false
	}
	resp := c.Next.NextEngine(b)
	if resp == nil {
		if t.FailureEvent() != nil {
			s.finishWith(appendEngineFailure(nil, t, s.scan.protocol, s.nextSequenceNumber()))
		}
		return false
	}
	s.switchEngine(resp)
	return true
}

// maxExtraRounds is how many engines may be asked beyond one per choice. Each round finishes a
// choice, unless it ends inside a character.
const maxExtraRounds = 8

// resumeChoices continues the unfinished choices on another engine. The stream ends with an error
// event if no engine accepts them.
func (s *stream) resumeChoices(b Interruption) bool {
	c := s.migration()
	if t := c.Transcript; t.Switches() < int(t.Choices)+maxExtraRounds {
		if resp := c.Next.NextEngine(b); resp != nil {
			s.switchEngine(resp)
			return true
		}
	}
	s.finishWith(sse.Failure{Message: "no engine continues the unfinished choices", Code: 502}.AppendEvent(nil, s.scan.protocol, s.nextSequenceNumber()))
	return false
}

// migrateOnRequest moves the stream from a healthy engine to another one. If there is none, the
// stream stays.
func (s *stream) migrateOnRequest() bool {
	s.migrating = false
	if resp := s.extras.migration.Next.NextEngine(Interruption{Cause: Cancelled, Leave: s.leaveEngine}); resp != nil {
		s.switchEngine(resp)
	}
	return true
}

// leaveEngine makes a detached engine connection end, so that the engine notices at once. The caller
// cancels the engine's call too.
func (s *stream) leaveEngine() {
	if s.detached {
		s.shutdownEngine()
	}
}

// switchEngine begins to read the response of another engine.
func (s *stream) switchEngine(resp *upstream.Response) {
	maxEvent := s.editor.events.MaxEvent
	s.editor.events.Release()
	s.editor.events = sse.Framer{MaxEvent: maxEvent}
	s.resp, s.chunks, s.detached = resp, upstream.Chunks{}, false
	s.cause, s.err, s.reusable = Completed, nil, false
	s.extras.migration.Transcript.SwitchEngine()
}

// shouldMigrate reports whether the stream was asked to leave its engine and is where it can: after
// a whole event, with nothing half sent, and not at its end.
func (s *stream) shouldMigrate() bool {
	c := s.migration()
	return c != nil && c.Transcript.MigrationRequested() && !s.chunks.Done() && s.editor.events.AtBoundary() && c.Transcript.AcceptMigration()
}

// finishWith ends the stream with events and the last chunk.
func (s *stream) finishWith(events []byte) {
	s.cause, s.err = Completed, nil
	s.scan.feed(events)
	s.redactEvents(events)
	s.reusable = s.write(append(sse.AppendChunk(nil, events), sse.LastChunk...)) == nil
}

// appendEngineFailure appends the end of a stream that no other engine continues: the engine's own error
// event, if it is of the client's protocol.
func appendEngineFailure(dst []byte, t *transcript.Transcript, p sse.Protocol, number int64) []byte {
	if p == sse.OpenAI {
		return append(append(dst, t.FailureEvent()...), "data: [DONE]\n\n"...)
	}
	if t.Switches() == 0 {
		return append(dst, t.FailureEvent()...)
	}
	return failures[EngineClosed].AppendEvent(dst, p, number)
}
