package relay

import (
	"bytes"
	"strconv"
	"time"

	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

var failures = map[Cause]sse.Failure{
	EngineClosed:     {Message: "the engine closed the connection before the end of the stream", Code: 502},
	ClientGone:       {Message: "the client closed its side of the connection, which ends the request", Code: 499},
	Cancelled:        {Message: "the router ended the stream: another part of this request failed", Code: 502},
	Drained:          {Message: "the router is shutting down; send the request again", Code: 503},
	EngineStalled:    {Message: "the engine sent nothing for too long", Code: 504},
	Deadline:         {Message: "the request's deadline has passed", Code: 504},
	EngineMalformed:  {Message: "the engine sent a malformed stream", Code: 502},
	BudgetExhausted:  {Message: "the memory budget (limits.memory_budget) is exhausted; send the request again", Code: 503},
	EngineIncomplete: {Message: "the engine ended the stream before the end of the answer", Code: 502},
}

// nextSequenceNumber returns the sequence_number of the next event of Responses. Engines count from
// 0, so it is the number of events, unless the events of another engine have been renumbered.
func (s *stream) nextSequenceNumber() int64 {
	if c := s.migration(); c != nil {
		if n, ok := c.Transcript.NextSequenceNumber(); ok {
			return n
		}
	}
	return s.scan.events
}

// properEnd returns the bytes, framing included, with which an event stream whose engine has failed
// still ends as its protocol requires. It returns nil if that is impossible: the client has part of
// an event, the rest of a chunk would be too long, or the response has a Content-Length. properEnd
// itself writes the rest of a chunk that has begun.
//
// complete: the answer was complete by its protocol's proof, and no error event is sent.
func (s *stream) properEnd() (end []byte, complete bool) {
	f, known := failures[s.cause]
	if !known || !s.chunked && (!s.scanning || !s.mayAppend()) {
		return nil, false
	}
	complete = (s.scan.ended || s.keptOpen()) && !s.scan.failed
	if s.err == errTooBig {
		f.Message = s.err.Error()
	}
	if convert := s.extras.convert; convert != nil {
		return convert.End(s.cause), complete
	}
	chunks := &s.chunks
	if s.editor.holdsPartial() { // held bytes have not been sent
		chunks = &s.editor.partial.chunks
	}
	ending, last := chunks.InTrailers()
	missing, ok := chunks.Boundary()
	switch {
	case !s.chunked:
		if !s.editor.rewrites() && !s.atEventBoundary() {
			return nil, false
		}
		return s.appendMissingEvents(make([]byte, 0, 512), f), complete
	case s.editor.rewrites():
		// The client has whole events in chunks of the relay's own.
		if missing = ""; last && s.scan.complete(false) {
			return []byte(sse.LastChunk), !s.scan.failed
		}
	case last: // incomplete has looked at it
		return []byte(ending), s.scanning && !s.scan.failed
	case !s.scanning || !s.atEventBoundary():
		return nil, false
	case !ok:
		if missing = "\r\n"; !s.padChunk(chunks.Remaining()) {
			return nil, false
		}
	}
	out := append(make([]byte, 0, 512), missing...)
	if event := s.appendMissingEvents(nil, f); len(event) > 0 {
		out = strconv.AppendInt(out, int64(len(event)), 16)
		out = append(out, "\r\n"...)
		out = append(out, event...)
		out = append(out, "\r\n"...)
	}
	return append(out, sse.LastChunk...), complete
}

// maxPadding bounds the padding of a chunk. A longer chunk is not completed.
const maxPadding = 64 << 10

// padding is the inside of a comment.
var padding = bytes.Repeat([]byte{' '}, 4<<10)

// padChunk completes a chunk of which n bytes are missing after whole events: by a comment, or by
// empty lines where a comment does not fit.
func (s *stream) padChunk(n int64) (ok bool) {
	if n <= 0 || n > maxPadding {
		return false
	}
	const head, tail = ":", "\n\n"
	s.dst.BeforeEnd()
	if n < int64(len(head+tail)) {
		return s.writeAt([]byte(tail[:n]), time.Now()) == nil
	}
	err := s.writeAt([]byte(head), time.Now())
	for n -= int64(len(head + tail)); n > 0 && err == nil; {
		part := padding[:min(n, int64(len(padding)))]
		n -= int64(len(part))
		err = s.writeAt(part, time.Now())
	}
	return err == nil && s.writeAt([]byte(tail), time.Now()) == nil
}

// appendMissingEvents appends the events that the client still needs.
func (s *stream) appendMissingEvents(dst []byte, f sse.Failure) []byte {
	switch {
	case s.scan.ended: // the client has the whole answer
		return dst
	case (s.scan.failed || s.keptOpen()) && s.scan.protocol == sse.OpenAI:
		return append(dst, "data: [DONE]\n\n"...)
	}
	return f.AppendEvent(dst, s.scan.protocol, s.nextSequenceNumber())
}

// mayAppend reports whether events may follow the body: it ends with the connection, or dst frames
// it.
func (s *stream) mayAppend() bool {
	return s.dst.Reframes() || s.resp.ContentLength == upstream.LengthToClose
}
