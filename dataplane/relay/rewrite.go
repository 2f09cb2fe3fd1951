package relay

import (
	"bytes"
	"errors"
	"strconv"

	"sluice/dataplane/reuse"
)

// Rewriter changes the events of one stream on their way to the client: cuts
// members that are no client's business, or gives them another shape. Its
// methods are called on the relaying goroutine, one at a time.
type Rewriter interface {
	// Event appends to dst what the client gets in place of one event, whose
	// bytes, the empty line included, it borrows; nothing appended drops it.
	// Comments and "data: [DONE]" are events too.
	Event(dst, event []byte) []byte
}

// Roomy is a Rewriter of events that may be longer than 64 KiB.
type Roomy interface {
	// MaxEvent is how many bytes an event may have; in the place of a longer one the
	// client gets an error.
	MaxEvent() int
}

// editor runs a Rewriter. It takes the engine's chunk framing off, collects
// whole events, and puts what becomes of them in chunks of its own.
type editor struct {
	rewriter Rewriter
	events   framer
	room     *room // from an event until it was passed on; else nil
	held     *held // without a rewriter
}

// room is where a chunk's head and payload to go out are laid. It is lent to one event
// after the other: between two of them a stream has none.
type room struct{ b []byte }

var rooms = reuse.Pool[room]{New: func() *room { return &room{make([]byte, 0, 1<<10)} }}

// laid is what was laid out behind from.
func (e *editor) laid(from int) []byte {
	out := e.room.b[from:]
	if len(out) == 0 {
		e.passed()
	}
	return out
}

// mostRoom is kept of one.
const mostRoom = 32 << 10

// passed lets go of what was laid out: it has gone.
func (e *editor) passed() {
	if e == nil {
		return
	}
	if e.held != nil {
		e.held.passed()
	}
	if e.room == nil {
		return
	}
	if cap(e.room.b) <= mostRoom {
		rooms.Put(e.room)
	}
	e.room = nil
}

// on says whether events are changed: most streams' pass as they come.
func (e *editor) on() bool { return e != nil && e.rewriter != nil }

// holding says whether bytes are held back that pass as they come.
func (e *editor) holding() bool {
	return e != nil && e.held != nil && e.held.buf != nil
}

func (e *editor) end() {
	if e == nil {
		return
	}
	e.events.drop()
	e.held.drop()
	e.passed()
}

// feed rewrites the events that p completes.
func (e *editor) feed(p []byte) error {
	for len(p) > 0 {
		n, event, tooBig := e.events.next(p)
		p = p[n:]
		if tooBig {
			return errTooBig
		}
		if event != nil {
			e.room.b = e.rewriter.Event(e.room.b, event)
			e.events.drop()
		}
	}
	return nil
}

// errTooBig ends a stream with an event that is too long to be rewritten, and must not pass
// as it is: what follows would have a gap before it.
var errTooBig = errors.New("an event of the engine is too long to be passed on")

// rewrite gives what goes to the client for one read of the engine's body.
func (s *stream) rewrite(p []byte) (out []byte, broken error) {
	e := s.edit
	if e.room == nil {
		e.room = rooms.Get()
	}
	r := e.room
	r.b = append(r.b[:0], chunkHead[:]...)
	done := false
	if !s.chunked {
		s.scan.feed(p)
		broken = e.feed(p)
		s.veilEdited()
		return e.laid(ChunkHead), broken
	}
	carry := s.carry()
	before := s.chunks
	for at := 0; at < len(p) && !done; {
		before = s.chunks
		n, payload, err := s.chunks.Next(p[at:])
		at += n
		if len(payload) > 0 {
			if carry == nil {
				s.scan.feed(payload)
			}
			if tooBig := e.feed(payload); tooBig != nil {
				broken = tooBig
				break
			}
		}
		if err != nil {
			broken = err
			break
		}
		if done = s.chunks.Done(); done && at == len(p) {
			s.resp.Finish()
		}
	}
	if carry != nil {
		// Looked at as the client gets it: as one stream. What both learn of it, its id and
		// its time, is kept once.
		if s.scan.plain.own == "" {
			s.scan.plain.own = carry.Transcript.plain.own
		}
		s.scan.feed(r.b[ChunkHead:])
		done = done && carry.Transcript.Failed() == nil && !carry.Transcript.unfinished()
	}
	if done && s.brokeOff() {
		s.chunks, done, broken = before, false, errBrokeOff
	}
	s.veilEdited()
	var from int
	if r.b, from = FrameChunk(r.b); done {
		r.b = append(r.b, lastChunk...)
	}
	return e.laid(from), broken
}

// veilEdited blanks what is private in the events that go out, where the scan has seen
// such. Records between them are the program's own, and so is who reads them.
func (s *stream) veilEdited() {
	if !s.scan.records {
		s.veilNew(s.edit.room.b[ChunkHead:])
	}
	s.scan.private, s.scan.telling = false, false
}

// veilNew blanks what is private in events that the scan has seen and nobody else.
func (s *stream) veilNew(events []byte) {
	if s.scan.private {
		v := veil{events: true, telling: s.scan.telling}
		v.feed(events)
	}
}

// ChunkHead is the room that FrameChunk needs: a chunk's length and the end of its line.
const ChunkHead = 16 + len("\r\n")

var chunkHead [ChunkHead]byte

// FrameChunk makes a chunk of what b has behind its first ChunkHead bytes, where it is,
// and gives where that begins; of nothing it makes none.
func FrameChunk(b []byte) (framed []byte, from int) {
	n := len(b) - ChunkHead
	if n == 0 {
		return b, ChunkHead
	}
	var digits [16]byte
	size := strconv.AppendUint(digits[:0], uint64(n), 16)
	from = ChunkHead - len(size) - len("\r\n")
	copy(b[from:], size)
	copy(b[ChunkHead-2:], "\r\n")
	return append(b, "\r\n"...), from
}

// AppendChunk appends payload as one chunk of transfer coding chunked; it must not be
// empty.
func AppendChunk(dst, payload []byte) []byte {
	dst = strconv.AppendInt(dst, int64(len(payload)), 16)
	dst = append(dst, "\r\n"...)
	dst = append(dst, payload...)
	return append(dst, "\r\n"...)
}

// DataOf gives the data of an event that has one line of it, nil for others.
func DataOf(event []byte) []byte {
	var data []byte
	for len(event) > 0 {
		line := event
		if i := bytes.IndexByte(event, '\n'); i >= 0 {
			line, event = event[:i], event[i+1:]
		} else {
			event = nil
		}
		line = bytes.TrimSuffix(line, []byte{'\r'})
		if !bytes.HasPrefix(line, dataPrefix) {
			continue
		}
		if data != nil {
			return nil
		}
		data = fieldValue(line[len(dataPrefix):])
	}
	return data
}
