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
	// Next gives the answer of another engine, a chunked event stream of
	// completions behind Transcript.Told tokens; nil when there is none, and the
	// stream ends as it would without a Carry. It is called on the relaying
	// goroutine and may block; the response before is its caller's to release when
	// it gives another.
	Next func(b Break) *upstream.Response
}

// Break is how an engine failed in the middle of a stream.
type Break struct {
	Cause Cause // EngineClosed or EngineStalled; Completed with Event
	Err   error
	Event []byte // the engine's own word that it failed, borrowed
}

// maxCarried bounds an event of a stream with a Carry: its first holds the ids of
// the prompt.
const maxCarried = 8 << 20

// carryOn looks for another engine when the present one has failed; true when the
// stream goes on from it.
func (s *stream) carryOn() bool {
	c := s.opt.Carry
	if c == nil || c.Transcript.ended {
		return false
	}
	t := c.Transcript
	b := Break{Cause: s.res.Cause, Err: s.res.Err, Event: t.Failed}
	switch {
	case t.Failed == nil && (s.res.Err == nil || s.res.Cause != EngineClosed && s.res.Cause != EngineStalled):
		return false
	case t.Finished:
		// The answer is whole; what is missing is known.
		s.closeWell(t.AppendEnd(nil, c.Usage))
		return false
	}
	resp := c.Next(b)
	if resp == nil {
		if t.Failed != nil {
			s.closeWell(append(t.Failed, "data: [DONE]\n\n"...))
		}
		return false
	}
	most := s.edit.events.most
	s.edit.events.drop()
	s.edit.events = framer{most: most}
	s.resp, s.chunks = resp, upstream.Chunks{}
	s.res.Cause, s.res.Err = Completed, nil
	t.Turn()
	return true
}

// closeWell ends the stream with events, and the body.
func (s *stream) closeWell(events []byte) {
	s.res.Cause, s.res.Err = Completed, nil
	s.scan.feed(events)
	s.res.Reusable = s.write(append(appendChunk(nil, events), lastChunk...)) == nil
}
