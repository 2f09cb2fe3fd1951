package relay

import (
	"bytes"
	"errors"
	"io"
	"math"
	"sync/atomic"
	"time"

	"sluice/dataplane/loop"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
)

// Protocol is the event protocol of a stream; it decides what an error event
// looks like and what a good end is.
type Protocol uint8

// The protocols.
const (
	OpenAI    Protocol = iota // data: {…}, ends with data: [DONE]
	Anthropic                 // event: …, no [DONE]
	Responses                 // event: …, no [DONE]
	Opaque                    // not an event stream: bytes pass, nothing is scanned
)

// Options of one stream.
type Options struct {
	// Protocol of the events. A response whose Content-Type is not
	// text/event-stream is passed on as Opaque whatever stands here.
	Protocol     Protocol
	WriteTimeout time.Duration // one flush to the client [30s]
	IdleTimeout  time.Duration // between two reads from the engine; 0: none
	// Choices is how many the client asked for, of which OpenAI's streams tell each one's
	// end; 0: as many as are told of.
	Choices int
	// Rewrite, when set, changes the events of a stream on their way; a body
	// that is no event stream passes as it is.
	Rewrite Rewriter
	// Carry, when it has a Transcript, takes the place of Rewrite and lets a chunked event stream
	// go on from another engine when its own fails.
	Carry Carry
	// Convert, when set, makes what the client gets of what it would get: the last that
	// is done to the stream before it is written.
	Convert Converter
	// By, when set, is when the client's time is over: what it has not taken by then is
	// not waited for. The engine's leg has a deadline of its own.
	By time.Time
	// Drains, when set, says of a stream whose engine was cut whether what had come from
	// it by then is still to be passed on.
	Drains func() bool
	// Ends, when set, says whether the router ends: a stream whose call is cut then is
	// Drained.
	Ends *atomic.Bool
	// Loops, when set, drive the stream instead of the calling goroutine, where both
	// connections have descriptors of their own and the body is chunked. The ClientConn
	// is a Resumer then.
	Loops *loop.Loops
	// Budget, when set, counts what is held of events that have not come whole. Where it
	// is spent the stream ends as MemorySpent.
	Budget *membudget.Budget
}

// Converter makes other bytes of a stream's. It belongs to one stream, and is called by
// one goroutine at a time.
type Converter interface {
	// Convert takes the next bytes, cut anywhere, framing included, and gives what goes
	// out in their place, in the same framing: memory that stays as it is until the next
	// call. An error ends the stream.
	Convert(p []byte) (out []byte, err error)
	// End gives the last bytes of a chunked stream whose engine has failed, wherever it
	// was: half an event was not shown.
	End(cause Cause) []byte
}

// ClientConn is the client's connection as relay needs it.
type ClientConn interface {
	// A Write that fails for its deadline ends the stream: its client has stopped.
	io.Writer
	SetWriteDeadline(time.Time) error
}

// FirstTold is a ClientConn that wants to know when the first event with content has been read.
type FirstTold interface {
	// FirstToken is called once, on the relaying goroutine, before the event is passed on.
	FirstToken()
}

// StoredTold is a ClientConn that wants to know the id of the response that a stream of
// Responses is about.
type StoredTold interface {
	// Stored is called at most once, on the relaying goroutine, before the event with the
	// id is passed on. It must not block.
	Stored(id string)
}

// DoneTold is a ClientConn that wants to know when the stream's own last event has been read,
// behind which the engine may keep its response open for a while.
type DoneTold interface {
	// Done is called at most once, on the relaying goroutine, before the event is passed on.
	// failed: the engine said before that it failed. It must not block.
	Done(usage Usage, failed bool)
}

// A ClientConn that is a loop.Sink takes bytes from a loop by Put; behind one that said
// it was full, a Write of nothing waits until it takes some again.

// Descriptor is what a ClientConn has besides when a loop may write to it.
type Descriptor interface {
	// Descriptor gives a non-blocking descriptor to which bytes may be written as
	// they are; it stays open until the stream has ended. Not ok: Write has more to
	// do.
	Descriptor() (fd int, ok bool)
}

// Resumer is what a ClientConn must have besides for Options.Loops.
type Resumer interface {
	// Resume starts a goroutine for the rest of a stream that a loop had taken: f
	// relays to the end, as Begin does.
	Resume(f func() (res Result, ended bool))
}

// Patient is a ClientConn whose Write waits itself for a client that is slow, below what
// changes the bytes: such a write can not be gone on with above it. The deadline that it
// is told is when it looks at its client (Patience), and SetWriteDeadline, which comes every
// now and then as writes do, looks as well.
type Patient interface{ Patient() }

// Framer is what a ClientConn has besides that may put framing around a body which has
// none, or another.
type Framer interface{ Frames() bool }

// Leaver is what a ClientConn has besides that knows when its client has left: a call that
// is cut then ends the stream as ClientGone.
type Leaver interface{ Left() bool }

// Ender is what a ClientConn has besides when it wants to know that a stream's last bytes
// are about to be written. It is called by who writes them, and must not wait; more bytes
// may follow all the same, and another call.
type Ender interface{ Ending() }

const (
	// A stream reads into a small buffer while events trickle, and into a
	// large one while data flows.
	smallRead = 4 << 10
	largeRead = 32 << 10
	// calmReads small reads in a row bring the small buffer back.
	calmReads = 16
	// maxSlack is how much shorter than meant a flush's deadline may be: within it
	// the timer set for an earlier flush is left as it is.
	maxSlack = time.Second
	// heardBits: that bytes come is noted (upstream.Response.Heard) once in 1<<heardBits
	// ns, about a second, where at most a memory access is spent on each event.
	heardBits = 30
	// lastGrace is how long an engine may keep its response open behind the stream's own last
	// event. Then the client's stream is ended, and the connection to the engine closed.
	lastGrace = time.Second
	// overtime is what each write may take behind Options.By: time for the last word.
	overtime = 50 * time.Millisecond
)

// stream is one relay under way. There are thousands: it just fills a size class of 288
// bytes, and what few of them have (rare, edit) stands elsewhere.
type stream struct {
	dst    ClientConn
	resp   *upstream.Response
	chunks upstream.Chunks
	broken error // of the engine's framing, behind the good bytes of the last read
	scan   scanner
	edit   *editor // nil until it is needed

	*terms
	rare *rare

	armed   instant // when the write deadline was last set
	armedBy instant // to what

	// What Result says, and scan does not.
	err        error
	bytes      int64
	firstByte  instant
	firstToken instant
	lastByte   instant // before the first: when the stream was lent
	cause      Cause
	reusable   bool
	told       uint8 // toldStored, toldDone: what the client's connection has been told

	calm     uint8
	in       int32 // the descriptor that is lent
	patient  bool  // dst is Patient
	chunked  bool
	scanning bool
	leaving  bool // for another engine, though this one is well
	deaf     bool // the client took something not: no last word either
	lent     bool // resp is, to a loop, or was

	counted uint16 // of terms.budget, in KiB
}

const (
	toldStored = 1 << iota // StoredTold
	toldDone               // DoneTold
)

// terms are what nearly all streams have in common of their Options.
type terms struct {
	loops        *loop.Loops
	budget       *membudget.Budget
	ends         *atomic.Bool
	writeTimeout time.Duration
	idleTimeout  time.Duration
}

// lastTerms are those of the stream that had others than the one before.
var lastTerms atomic.Pointer[terms]

// share gives memory that has these terms, and is not changed.
func (t terms) share() *terms {
	if last := lastTerms.Load(); last != nil && *last == t {
		return last
	}
	lastTerms.Store(&t)
	return &t
}

// rare is what most streams have none of. It is made once and not changed. Of movable streams
// there are thousands: it fills a size class of 64 bytes.
type rare struct {
	carry   Carry
	convert Converter
	by      instant
	drains  func() bool
}

// noneRare is that of most streams.
var noneRare rare

// instant is a time counted from the package's start, in ns; 0 for never.
type instant int64

var epoch = time.Now()

// at is 0 at no time a stream can see: epoch is past by then.
func at(t time.Time) instant { return instant(t.Sub(epoch)) }

func (i instant) never() bool { return i == 0 }

// time is the zero Time for never.
func (i instant) time() time.Time {
	if i == 0 {
		return time.Time{}
	}
	return epoch.Add(time.Duration(i))
}

// Stream passes resp's body to dst until it ends, one way or the other. The
// head has been written by the caller, with the framing of resp (chunked,
// Content-Length or until close). When the engine dies inside an event stream of no told
// length behind a whole event, and half of one is not shown, the client gets an error event in
// its Protocol and a proper end; elsewhere Reusable is false and the caller must close, so
// that an HTTP/1.1 client misses the last chunk, and by a reset where the body ends with the
// connection.
// Stream does not Release resp. It leaves dst without a write deadline.
func Stream(dst ClientConn, resp *upstream.Response, opt Options) Result {
	opt.Loops = nil
	res, _ := Begin(dst, resp, opt)
	return res
}

// Begin is Stream that may leave the rest to a loop: then it is not ended, and dst and
// resp are the loop's until Options.Go is called.
func Begin(dst ClientConn, resp *upstream.Response, opt Options) (res Result, ended bool) {
	if opt.WriteTimeout <= 0 {
		opt.WriteTimeout = 30 * time.Second
	}
	s := &stream{
		dst: dst, resp: resp, rare: &noneRare,
		terms:    terms{opt.Loops, opt.Budget, opt.Ends, opt.WriteTimeout, opt.IdleTimeout}.share(),
		chunked:  resp.ContentLength == upstream.LengthChunked,
		scanning: opt.Protocol != Opaque && IsEventStream(resp.Header("Content-Type")),
	}
	_, s.patient = dst.(Patient)
	s.scan.protocol, s.scan.thins = opt.Protocol, true
	s.scan.usage = noUsage
	s.scan.finishes.expect(opt.Choices)
	if t := opt.Carry.Transcript; t != nil && !(s.scanning && s.chunked) {
		opt.Rewrite, opt.Carry = t, Carry{} // ids are taken out all the same
	}
	if opt.Carry.Transcript != nil || opt.Convert != nil || opt.Drains != nil || !opt.By.IsZero() {
		s.rare = &rare{carry: opt.Carry, convert: opt.Convert, drains: opt.Drains}
		if !opt.By.IsZero() {
			s.rare.by = at(opt.By)
		}
	}
	switch {
	case opt.Carry.Transcript != nil:
		s.edit = &editor{rewriter: opt.Carry.Transcript}
		opt.Carry.Transcript.holds, s.edit.events.most = true, maxCarried
		s.scan.records = opt.Carry.Transcript.Records
	case opt.Rewrite != nil && s.scanning:
		s.edit = &editor{rewriter: opt.Rewrite}
		if roomy, ok := opt.Rewrite.(Roomy); ok {
			s.edit.events.most = int32(min(roomy.MaxEvent(), math.MaxInt32))
		}
	case !s.scanning && opt.Protocol != Opaque:
		s.edit = &editor{held: &held{follows: true, veil: veil{guess: true, refusal: resp.Status >= 400}}}
	}
	return s.drive()
}

// drive relays until the stream's end, or until a loop has taken it.
func (s *stream) drive() (res Result, ended bool) {
	whole := false
	defer func() {
		if !whole { // it panics
			s.uncountParts()
		}
	}()
	for s.run() {
		if !s.carryOn() {
			res = s.finish()
			whole = true
			return res, true
		}
	}
	whole = true
	return Result{}, false
}

// finish tells the end.
func (s *stream) finish() Result {
	if s.err != nil && !s.deaf {
		if end, whole := s.goodEnd(); end != nil {
			if whole && s.cause != ClientGone || s.keptOpen() {
				// Nothing of the answer is missing: an engine that drops the connection behind
				// it has not failed its client, whose own failure may still come.
				s.end(Completed, nil)
			}
			s.ending()
			s.reusable = len(end) == 0 || s.writeAt(end, time.Now()) == nil
		}
	}
	if !s.armed.never() {
		_ = s.dst.SetWriteDeadline(time.Time{})
	}
	if s.scan.failed && s.cause == Completed {
		s.end(EngineErred, s.scan.toldError())
	}
	res := Result{
		Cause: s.cause, Err: s.err, Bytes: s.bytes, Events: s.scan.events, Unscanned: int64(s.scan.tooBig),
		FirstByte: s.firstByte.time(), FirstToken: s.firstToken.time(),
		Finish: s.scan.finish, Usage: s.usage(), EngineErr: s.scan.failed, Reusable: s.reusable,
	}
	if !s.firstByte.never() {
		res.LastByte = s.lastByte.time()
	}
	s.scan.drop()
	s.edit.end()
	s.uncountParts()
	return res
}

// usage is what the engine said of usage.
func (s *stream) usage() Usage {
	u := s.scan.usage
	if s.scan.records && u.Completion >= 0 { // records tell ids, and no counts
		u.Completion = max(u.Completion, s.rare.carry.Transcript.heardIDs())
	}
	return u
}

// keptOpen says whether all that is wrong with the stream is that its engine did not end the
// body behind the last event.
func (s *stream) keptOpen() bool { return s.scan.ended && s.cause == EngineStalled }

var eventStreamType = []byte("text/event-stream")

// IsEventStream says whether a Content-Type is that of server-sent events.
func IsEventStream(contentType []byte) bool {
	n := len(eventStreamType)
	return len(contentType) >= n && bytes.EqualFold(contentType[:n], eventStreamType) &&
		(len(contentType) == n || contentType[n] == ';' || contentType[n] == ' ')
}

// run relays until the body's end or a failure; false when a loop has taken it.
func (s *stream) run() (ended bool) {
	if lent, over := s.lend(); lent || over {
		return over
	}
	size := smallRead
	if s.resp.Buffered() > smallRead {
		size = largeRead
	}
	buf := membudget.Default.Get(size)
	defer func() { membudget.Default.Put(buf) }()
	for {
		if s.idleTimeout > 0 {
			// Counted from here, not from the last read: a slow client's flush
			// lies between, and is not the engine's silence.
			_ = s.resp.SetReadDeadline(time.Now().Add(s.idleTimeout))
		}
		n, err := s.resp.ReadRaw(buf.B)
		if n > 0 && s.pass(buf.B[:n], time.Now()) {
			return true
		}
		if err != nil {
			s.readEnded(err)
			return true
		}
		if lent, over := s.lend(); lent || over {
			return over
		}
		buf = s.fit(buf, n)
	}
}

// fit changes the buffer's size to what comes.
func (s *stream) fit(buf *membudget.Buffer, n int) *membudget.Buffer {
	size := len(buf.B)
	switch {
	case size == smallRead && n == smallRead:
		size = largeRead
	case size == largeRead && n >= smallRead/2:
		s.calm = 0
		return buf
	case size == largeRead:
		if s.calm++; s.calm < calmReads {
			return buf
		}
		size = smallRead
	default:
		return buf
	}
	s.calm = 0
	membudget.Default.Put(buf)
	return membudget.Default.Get(size)
}

// pass looks at what one read brought and writes it on; true when the stream
// has ended.
func (s *stream) pass(p []byte, t time.Time) (ended bool) {
	out := s.look(p, t)
	over := s.isOver()
	if over || !s.chunked && s.resp.Ended() {
		s.ending()
	}
	if len(out) > 0 && s.writeAt(out, t) != nil {
		return true
	}
	s.edit.passed()
	if over {
		s.settle()
		return true
	}
	if s.scan.ended && !s.lent {
		s.resp.EndBy(t.Add(lastGrace)) // the first time it bounds the response, later nothing
	}
	s.leaving = s.mayLeave()
	return s.leaving
}

// look looks at what one read brought and gives what goes to the client of it.
func (s *stream) look(p []byte, t time.Time) (out []byte) {
	before := s.lastByte
	s.lastByte = at(t)
	switch {
	case s.firstByte.never():
		s.firstByte = s.lastByte
		if s.lent {
			s.resp.Began()
		}
		s.resp.Heard(true)
	case s.lastByte>>heardBits != before>>heardBits:
		s.resp.Heard(false)
	}
	switch {
	case s.edit.on():
		p, s.broken = s.rewrite(p)
	case s.chunked:
		p, s.broken = s.unchunk(p)
	default:
		if s.scanning {
			s.scan.feed(p)
		}
		if !s.passes() {
			p = s.guard(p, upstream.Chunks{}, s.resp.Ended())
		}
	}
	if !s.countParts() && s.broken == nil {
		s.broken = errPartsSpent
	}
	if s.scan.token && s.firstToken.never() {
		s.firstToken = s.lastByte
		if told, ok := s.dst.(FirstTold); ok {
			told.FirstToken()
		}
	}
	if s.told&toldStored == 0 && s.scan.storedID() != "" {
		s.told |= toldStored
		if told, ok := s.dst.(StoredTold); ok {
			told.Stored(s.scan.storedID())
		}
	}
	if s.scan.ended && s.told&toldDone == 0 {
		s.told |= toldDone
		if told, ok := s.dst.(DoneTold); ok {
			told.Done(s.usage(), s.scan.failed)
		}
	}
	return s.converted(p)
}

// converted is what goes to the client of p.
func (s *stream) converted(p []byte) []byte {
	convert := s.rare.convert
	if convert == nil || len(p) == 0 {
		return p
	}
	out, err := convert.Convert(p)
	if err != nil && s.broken == nil {
		s.broken = err
	}
	return out
}

// ending tells the client's connection that the stream ends.
func (s *stream) ending() {
	if e, ok := s.dst.(Ender); ok {
		e.Ending()
	}
}

// isOver says whether nothing more of the engine is to be read.
func (s *stream) isOver() bool {
	return s.failedByEvent() || s.broken != nil || s.chunked && s.chunks.Done()
}

func (s *stream) failedByEvent() bool {
	t := s.rare.carry.Transcript
	return t != nil && t.Failed() != nil
}

// settle notes how a stream that is over has ended.
func (s *stream) settle() {
	switch {
	case s.failedByEvent():
	case s.broken == errPartsSpent:
		s.end(MemorySpent, s.broken)
	case s.broken == errBrokeOff:
		s.end(EngineEnded, s.broken)
	case s.broken != nil:
		s.end(EngineBroke, s.broken)
	default:
		s.reusable = true
	}
}

// unchunk follows the chunk framing and feeds the payload to the scan. It gives
// the part of p that belongs to the body and is well framed.
func (s *stream) unchunk(p []byte) (good []byte, err error) {
	before := s.chunks
	if good, err = s.readChunks(p); !s.passes() {
		good = s.guard(good, before, err == nil && s.chunks.Done())
	}
	return s.holdSize(good), err
}

func (s *stream) readChunks(p []byte) (good []byte, err error) {
	at := 0
	for at < len(p) {
		before := s.chunks
		n, payload, err := s.chunks.Next(p[at:])
		at += n
		if s.scanning && len(payload) > 0 {
			s.scan.feed(payload)
		}
		if err != nil {
			return p[:at], err
		}
		if s.chunks.Last() && s.brokeOff() {
			s.chunks = before
			return p[:at-n], errBrokeOff
		}
		if s.chunks.Done() {
			if at == len(p) {
				s.resp.Finish() // else bytes nobody asked for follow: not to be kept
			}
			return p[:at], nil
		}
	}
	return p, nil
}

// errBrokeOff is that of an engine, or of somebody before it, that failed and ended its
// framing well.
var errBrokeOff = errors.New(failures[EngineEnded].message)

// brokeOff says whether an event stream that ends as its framing says is not whole. Of an
// edited one half an event does not go out.
func (s *stream) brokeOff() bool {
	return s.scanning && s.resp.Status < 300 && !s.scan.whole(!s.edit.on())
}

func (s *stream) end(cause Cause, err error) {
	s.cause, s.err = cause, err
}

// readEnded takes in why nothing more comes from the engine.
func (s *stream) readEnded(err error) {
	switch {
	case err == io.EOF:
		// Of an event stream without framing only the protocol's own last event tells a
		// good end.
		if s.reusable = s.resp.ContentLength >= 0 || !s.scanning || s.scan.ended; !s.reusable {
			s.end(EngineClosed, io.ErrUnexpectedEOF)
		} else if s.edit.holding() {
			s.reusable = s.write(s.guard(nil, upstream.Chunks{}, true)) == nil // the body's end is its own
		}
	case errors.Is(err, upstream.ErrCut) && s.ends != nil && s.ends.Load():
		s.end(Drained, err)
	case errors.Is(err, upstream.ErrCut) && s.clientLeft():
		s.end(ClientGone, err)
	case errors.Is(err, upstream.ErrCut):
		s.end(Cut, err)
	case errors.Is(err, upstream.ErrFrozen), errors.Is(err, upstream.ErrTimeout) && s.scan.ended:
		s.end(EngineStalled, err)
	case errors.Is(err, upstream.ErrTimeout) && (s.late(time.Now()) || s.resp.Late()):
		s.end(Deadline, err)
	case errors.Is(err, upstream.ErrTimeout):
		s.end(EngineStalled, err)
	default:
		s.end(EngineClosed, err)
	}
}

// clientLeft says whether the client has gone, as far as its connection knows; it may have
// closed its own direction alone, and still read.
func (s *stream) clientLeft() bool {
	l, ok := s.dst.(Leaver)
	return ok && l.Left()
}

// atEvent says whether what is out ends with a whole event.
func (s *stream) atEvent() bool { return s.edit.holding() || s.scan.between() }
