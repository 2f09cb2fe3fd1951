package relay

import (
	"errors"
	"io"
	"math"
	"sync/atomic"
	"time"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/membudget"
	"sluice/dataplane/monotime"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
)

// Options are those of one stream.
type Options struct {
	// Protocol of the events. A response whose Content-Type is not text/event-stream is relayed as
	// Opaque in any case.
	Protocol     sse.Protocol
	WriteTimeout time.Duration // bound of one flush to the client [30s]
	IdleTimeout  time.Duration // bound between two reads from the engine; 0: none
	// Choices is how many choices the client asked for; 0: unknown. OpenAI's streams report the end
	// of each, and such a stream is complete when all have ended.
	Choices int
	// EndsWithChoices: Choices is exact, and the answer of an OpenAI stream is complete when all
	// have ended and, with Usage, the usage has been sent. The engine then has a second for [DONE].
	EndsWithChoices bool
	Usage           bool // the client asked for the usage at the end
	// Rewrite, when set, changes the events of an event stream. Other bodies are not rewritten.
	Rewrite sse.Rewriter
	// Migration, when it has a Transcript, replaces Rewrite and lets a chunked event stream
	// continue on another engine when its own fails.
	Migration Migration
	// Convert, when set, is the last transformation before the stream is written to the client.
	Convert Converter
	// ClientDeadline, when set, ends the waiting for a slow client. The engine's leg has a deadline
	// of its own.
	ClientDeadline time.Time
	// Intervals, when set, counts the times between the stream's events.
	Intervals *Intervals
	// DrainOnCancel, when set, reports whether bytes that had arrived before the call was cancelled
	// are still passed on.
	DrainOnCancel func() bool
	// ShuttingDown, when set, reports whether the router shuts down. A cancelled stream then ends
	// as Drained.
	ShuttingDown *atomic.Bool
	// Loops, when set, drive the stream instead of the calling goroutine, where both connections
	// have descriptors of their own and the body is chunked.
	Loops *eventloop.Loops
	// Budget, when set, counts the memory of partial events. When it is exhausted the stream ends
	// as BudgetExhausted.
	Budget *membudget.Budget
}

// Converter transforms the bytes of one stream. It is called by one goroutine at a time.
type Converter interface {
	// Convert returns what the client gets in place of p, in the same chunk framing. p may be cut
	// anywhere and includes its framing. The result stays valid until the next call. An error ends
	// the stream.
	Convert(p []byte) (out []byte, err error)
	// End returns the last bytes of a chunked stream whose engine has failed with cause. It is
	// correct at any point: a partial event has not been shown to the client.
	End(cause Cause) []byte
}

// ClientConn is the client's side of a stream. Its methods are called by one goroutine or loop
// thread at a time, the one that relays, and those that notify must not block.
type ClientConn interface {
	// Write passes bytes on to the client, in the framing of the response. A Write that fails
	// for its deadline ends the stream as ClientStalled. A Write of nothing waits until a Sink
	// that was full accepts bytes again.
	io.Writer
	// SetWriteDeadline bounds the next writes. Where DetectsStalls, it also samples the client's
	// progress, and is called every now and then as writes are made.
	SetWriteDeadline(time.Time) error
	// DetectsStalls reports whether Write itself waits for a slow client, and uses the deadline
	// as the time of its next look at the client (StallCheckInterval). This is needed where
	// Write changes the bytes, because such a write cannot be repeated from outside.
	DetectsStalls() bool
	// Reframes reports whether Write puts framing around the body, so that a body that ends with
	// the engine's connection may be followed by an error event.
	Reframes() bool
	// ClientGone reports whether the client has disconnected. A cancelled stream then ends as
	// ClientGone.
	ClientGone() bool

	// FirstToken is called once, before the first event with content is passed on.
	FirstToken()
	// ResponseID is called at most once in a stream of Responses, before the event with the
	// response's id is passed on.
	ResponseID(id string)
	// Done is called at most once, before the stream's own last event is passed on. The engine
	// may keep its response open for a while after it. failed: the engine has sent an error event.
	Done(usage Usage, failed bool)
	// BeforeEnd is called before the last bytes of the stream are written. More bytes may follow
	// all the same, and another call.
	BeforeEnd()

	// LoopOutput returns where an event loop may write the stream: a Sink, or a non-blocking
	// descriptor that stays open until the stream has ended and takes the bytes as they are. Not
	// ok: bytes must pass through Write, and the stream stays on its goroutine.
	LoopOutput() (fd int, sink eventloop.Sink, ok bool)
	// Resume starts a goroutine for the rest of a stream that a loop has detached. f relays to
	// the end and returns what Start does. It is only called where Options.Loops is set.
	Resume(f func() (res Result, ended bool))
}

const (
	// A stream reads into a small buffer while events trickle, and into a large one while data
	// flows.
	smallRead = 4 << 10
	largeRead = 32 << 10
	// After smallReadsToShrink consecutive small reads the small buffer is used again.
	smallReadsToShrink = 16
	// maxDeadlineSlack is how much shorter than configured the deadline of a flush may be. Within
	// it the deadline set for an earlier flush stays, which saves a timer update.
	maxDeadlineSlack = time.Second
	// progressBits: progress is recorded (upstream.Response.NoteProgress) once in 1<<progressBits
	// ns, about a second, so that an event costs at most a memory access.
	progressBits = 30
	// lastGrace is how long an engine may keep its response open after the stream's own last event,
	// or in OpenAI's protocols after the last event before [DONE]. Then the client's stream ends and
	// the connection to the engine is closed.
	lastGrace = time.Second
	// finalWriteTime bounds each write after Options.ClientDeadline: time for the last events.
	finalWriteTime = 50 * time.Millisecond
)

// stream is one running relay. There are thousands, so it stays within a size class of 320 bytes.
// State that few streams need is in editor and streamExtras.
type stream struct {
	dst    ClientConn
	resp   *upstream.Response
	chunks upstream.Chunks
	broken error // an error of the engine's framing, after the well-framed bytes of the last read
	scan   streamScanner
	editor *editor // nil until needed

	*streamSettings
	extras *streamExtras

	deadlineSetAt monotime.Time // when the write deadline was last set
	deadline      monotime.Time // the write deadline that was set

	// The fields of Result that scan does not have.
	err        error
	bytes      int64
	firstByte  monotime.Time
	firstToken monotime.Time
	lastByte   monotime.Time // before the first byte: when the stream was attached to a loop
	cause      Cause
	reusable   bool
	notified   uint8 // notifiedStored, notifiedDone: notifications that dst has had

	intervals *Intervals    // nil: not counted
	lastEvent monotime.Time // of the last read with events, from the first token on; for intervals

	smallReads        uint8
	engineFD          int32 // the descriptor that a loop uses
	detectsStalls     bool  // dst.DetectsStalls()
	chunked           bool
	scanning          bool
	migrating         bool // leaves a healthy engine on request
	clientFailedWrite bool // a write to the client failed: no final events are written either
	detached          bool // resp is or was detached to a loop

	budgetKiB uint16 // of streamSettings.budget, in KiB
}

const (
	notifiedStored = 1 << iota // ResponseID was called
	notifiedDone               // Done was called
)

// streamSettings are the options that nearly all streams have in common.
type streamSettings struct {
	loops        *eventloop.Loops
	budget       *membudget.Budget
	shuttingDown *atomic.Bool
	writeTimeout time.Duration
	idleTimeout  time.Duration
}

// lastSettings are the settings of the last stream whose settings differed from those before it.
var lastSettings atomic.Pointer[streamSettings]

// share returns memory with these settings that is not modified.
func (t streamSettings) share() *streamSettings {
	if last := lastSettings.Load(); last != nil && *last == t {
		return last
	}
	lastSettings.Store(&t)
	return &t
}

// streamExtras are options that most streams do not have. It is written once. Thousands of
// migratable streams have one, so it fills a size class of 64 bytes.
type streamExtras struct {
	migration      Migration
	convert        Converter
	clientDeadline monotime.Time
	drainOnCancel  func() bool
}

// noExtras is shared by the streams without extras.
var noExtras streamExtras

// Stream passes the body of resp to dst until it ends. The caller has written the response head,
// with the framing of resp (chunked, Content-Length or until close).
//
// When the engine dies inside an event stream without a declared length, the client gets an error
// event in its Protocol after the last whole event, and a proper end. Otherwise Reusable is false
// and the caller must close the client's connection so that an HTTP/1.1 client misses the last
// chunk; with a reset where the connection's end ends the body.
//
// Stream does not Release resp. It leaves dst without a write deadline.
func Stream(dst ClientConn, resp *upstream.Response, opt Options) Result {
	opt.Loops = nil
	res, _ := Start(dst, resp, opt)
	return res
}

// Start is Stream, except that it may hand the rest of the stream to a loop. Then ended is false,
// and dst and resp belong to the loop until dst.Resume is called.
func Start(dst ClientConn, resp *upstream.Response, opt Options) (res Result, ended bool) {
	if opt.WriteTimeout <= 0 {
		opt.WriteTimeout = 30 * time.Second
	}
	s := &stream{
		dst: dst, resp: resp, extras: &noExtras, intervals: opt.Intervals,
		streamSettings: streamSettings{opt.Loops, opt.Budget, opt.ShuttingDown, opt.WriteTimeout, opt.IdleTimeout}.share(),
		chunked:        resp.ContentLength == upstream.LengthChunked,
		scanning:       opt.Protocol != sse.Opaque && sse.IsEventStream(resp.Header("Content-Type")),
	}
	s.detectsStalls = dst.DetectsStalls()
	s.scan.protocol, s.scan.KeepsOversized = opt.Protocol, true
	s.scan.usage = noUsage
	s.scan.finishes.expect(opt.Choices)
	switch {
	case !opt.EndsWithChoices || opt.Convert != nil: // a Converter needs [DONE]
	case opt.Usage:
		s.scan.finishes.end = endAfterUsage
	default:
		s.scan.finishes.end = endAfterFinish
	}
	if t := opt.Migration.Transcript; t != nil && !(s.scanning && s.chunked) {
		opt.Rewrite, opt.Migration = t, Migration{} // ids are removed all the same
	}
	if opt.Migration.Transcript != nil || opt.Convert != nil || opt.DrainOnCancel != nil || !opt.ClientDeadline.IsZero() {
		s.extras = &streamExtras{migration: opt.Migration, convert: opt.Convert, drainOnCancel: opt.DrainOnCancel}
		if !opt.ClientDeadline.IsZero() {
			s.extras.clientDeadline = monotime.Of(opt.ClientDeadline)
		}
	}
	switch {
	case opt.Migration.Transcript != nil:
		s.editor = &editor{rewriter: opt.Migration.Transcript}
		opt.Migration.Transcript.HoldFailure()
		s.editor.events.MaxEvent = sse.MaxLargeEvent
		s.scan.mayHaveRecords = opt.Migration.Transcript.Records
	case opt.Rewrite != nil && s.scanning:
		s.editor = &editor{rewriter: opt.Rewrite}
		if large, ok := opt.Rewrite.(sse.LargeEventRewriter); ok {
			s.editor.events.MaxEvent = int32(min(large.MaxEvent(), math.MaxInt32))
		}
	case !s.scanning && opt.Protocol != sse.Opaque:
		s.editor = &editor{partial: &partialEvent{streaming: true, redactor: redact.Redactor{DetectFormat: true, IsRefusal: resp.Status >= 400}}}
	}
	return s.relay()
}

// relay relays until the stream ends (true), or until it is attached to a loop (false).
func (s *stream) relay() (res Result, ended bool) {
	whole := false
	defer func() {
		if !whole { // a panic
			s.releasePartialBudget()
		}
	}()
	for s.run() {
		if !s.migrate() {
			res = s.finish()
			whole = true
			return res, true
		}
	}
	whole = true
	return Result{}, false
}

// finish writes the end of the stream and returns its result.
func (s *stream) finish() Result {
	if s.err != nil && !s.clientFailedWrite {
		if end, whole := s.properEnd(); end != nil {
			if whole && s.cause != ClientGone || s.keptOpen() {
				// The answer is complete. An engine that drops the connection after it has not
				// failed its client. The client's own failure may still come.
				s.setCause(Completed, nil)
			}
			s.dst.BeforeEnd()
			s.reusable = len(end) == 0 || s.writeAt(end, time.Now()) == nil
		}
	}
	if !s.deadlineSetAt.IsZero() {
		_ = s.dst.SetWriteDeadline(time.Time{})
	}
	if s.scan.failed && s.cause == Completed {
		s.setCause(EngineReportedError, s.scan.engineError())
	}
	res := Result{
		Cause: s.cause, Err: s.err, Bytes: s.bytes, Events: s.scan.events, Unscanned: int64(s.scan.tooBig),
		FirstByte: s.firstByte.Time(), FirstToken: s.firstToken.Time(),
		Finish: s.scan.finish, Usage: s.usage(), SawErrorEvent: s.scan.failed, Reusable: s.reusable,
	}
	if !s.firstByte.IsZero() {
		res.LastByte = s.lastByte.Time()
	}
	s.scan.Release()
	s.editor.release()
	s.releasePartialBudget()
	return res
}

// usage returns the usage that the engine reported.
func (s *stream) usage() Usage {
	u := s.scan.usage
	if s.scan.mayHaveRecords && u.Completion >= 0 { // records carry ids, no counts
		u.Completion = max(u.Completion, s.extras.migration.Transcript.IDsReceived())
	}
	return u
}

// keptOpen reports whether the stream is complete and its engine merely did not end the body.
func (s *stream) keptOpen() bool { return s.scan.answered() && s.cause == EngineStalled }

// run relays until the body ends or fails (true), or until the stream is attached to a loop
// (false).
func (s *stream) run() (ended bool) {
	if attached, over := s.attachToLoop(); attached || over {
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
			// The time counts from here, not from the last read: a slow flush to the client in
			// between is not the engine's silence.
			_ = s.resp.SetReadDeadline(time.Now().Add(s.idleTimeout))
		}
		n, err := s.resp.ReadRaw(buf.B)
		if n > 0 && s.forward(buf.B[:n], time.Now()) {
			return true
		}
		if err != nil {
			s.readEnded(err)
			return true
		}
		if attached, over := s.attachToLoop(); attached || over {
			return over
		}
		buf = s.resizeBuffer(buf, n)
	}
}

// resizeBuffer adapts the size of buf to n, the size of the last read.
func (s *stream) resizeBuffer(buf *membudget.Buffer, n int) *membudget.Buffer {
	size := len(buf.B)
	switch {
	case size == smallRead && n == smallRead:
		size = largeRead
	case size == largeRead && n >= smallRead/2:
		s.smallReads = 0
		return buf
	case size == largeRead:
		if s.smallReads++; s.smallReads < smallReadsToShrink {
			return buf
		}
		size = smallRead
	default:
		return buf
	}
	s.smallReads = 0
	membudget.Default.Put(buf)
	return membudget.Default.Get(size)
}

// forward processes the bytes of one read and writes the result to the client. It returns whether
// the stream has ended.
func (s *stream) forward(p []byte, t time.Time) (ended bool) {
	out := s.process(p, t)
	over := s.engineDone()
	if over || !s.chunked && s.resp.BodyDone() {
		s.dst.BeforeEnd()
	}
	if len(out) > 0 && s.writeAt(out, t) != nil {
		return true
	}
	s.editor.releaseSent()
	if over {
		s.recordEnd()
		return true
	}
	if s.scan.answered() && !s.detached {
		s.resp.SetDeadline(t.Add(lastGrace)) // bounds the response; later calls change nothing
	}
	s.migrating = s.shouldMigrate()
	return s.migrating
}

// process scans the bytes of one read and returns what the client gets.
func (s *stream) process(p []byte, t time.Time) (out []byte) {
	before, events := s.lastByte, s.scan.events
	s.lastByte = monotime.Of(t)
	switch {
	case s.firstByte.IsZero():
		s.firstByte = s.lastByte
		if s.detached {
			s.resp.NoteBodyStarted()
		}
		s.resp.NoteProgress(true)
	case s.lastByte>>progressBits != before>>progressBits:
		s.resp.NoteProgress(false)
	}
	switch {
	case s.editor.rewrites():
		p, s.broken = s.rewrite(p)
	case s.chunked:
		p, s.broken = s.readChunked(p)
	default:
		if s.scanning {
			s.scan.feed(p)
		}
		if !s.passesUnchanged() {
			p = s.holdPartialEvent(p, upstream.Chunks{}, s.resp.BodyDone())
		}
	}
	if !s.acquirePartialBudget() && s.broken == nil {
		s.broken = errPartialBudget
	}
	if s.scan.token && s.firstToken.IsZero() {
		s.firstToken = s.lastByte
		s.dst.FirstToken()
	}
	if s.intervals != nil && s.scan.token && s.scan.events > events {
		s.countIntervals(s.scan.events - events)
	}
	if s.notified&notifiedStored == 0 && s.scan.storedID() != "" {
		s.notified |= notifiedStored
		s.dst.ResponseID(s.scan.storedID())
	}
	if s.scan.ended && s.notified&notifiedDone == 0 {
		s.notified |= notifiedDone
		s.dst.Done(s.usage(), s.scan.failed)
	}
	return s.convert(p)
}

// convert returns what the client gets of p.
func (s *stream) convert(p []byte) []byte {
	conv := s.extras.convert
	if conv == nil || len(p) == 0 {
		return p
	}
	out, err := conv.Convert(p)
	if err != nil && s.broken == nil {
		s.broken = err
	}
	return out
}

// engineDone reports whether nothing more is read from the engine.
func (s *stream) engineDone() bool {
	return s.failedByEvent() || s.broken != nil || s.chunked && s.chunks.Done() || s.roundDone()
}

func (s *stream) roundDone() bool {
	t := s.extras.migration.Transcript
	return t != nil && t.RoundDone()
}

func (s *stream) failedByEvent() bool {
	t := s.extras.migration.Transcript
	return t != nil && t.FailureEvent() != nil
}

// recordEnd sets the cause of a stream that has ended.
func (s *stream) recordEnd() {
	switch {
	case s.failedByEvent():
	case s.broken == errPartialBudget:
		s.setCause(BudgetExhausted, s.broken)
	case s.broken == errIncomplete:
		s.setCause(EngineIncomplete, s.broken)
	case s.broken != nil:
		s.setCause(EngineMalformed, s.broken)
	default:
		s.reusable = true
	}
}

// readChunked follows the chunk framing and feeds the payload to the scan. It returns the part of p
// that belongs to the body and is well framed.
func (s *stream) readChunked(p []byte) (good []byte, err error) {
	before := s.chunks
	if good, err = s.readChunks(p); !s.passesUnchanged() {
		good = s.holdPartialEvent(good, before, err == nil && s.chunks.Done())
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
		if s.chunks.Last() && s.incomplete() {
			s.chunks = before
			return p[:at-n], errIncomplete
		}
		if s.chunks.Done() {
			if at == len(p) {
				s.resp.MarkBodyDone() // otherwise bytes that nobody asked for follow, and the connection is not reused
			}
			return p[:at], nil
		}
	}
	return p, nil
}

// errIncomplete: the engine, or a proxy before it, ended its framing properly before the answer was
// complete.
var errIncomplete = errors.New(failures[EngineIncomplete].Message)

// incomplete reports whether an event stream whose framing has ended lacks part of its answer. Of a
// rewritten stream the client does not get a partial event.
func (s *stream) incomplete() bool {
	return s.scanning && s.resp.Status < 300 && !s.scan.complete(!s.editor.rewrites())
}

func (s *stream) setCause(cause Cause, err error) {
	s.cause, s.err = cause, err
}

// readEnded sets the cause of the end of the engine's body.
func (s *stream) readEnded(err error) {
	switch {
	case err == io.EOF:
		// Without framing, only the protocol's own last event proves that an event stream is
		// complete.
		if s.reusable = s.resp.ContentLength >= 0 || !s.scanning || s.scan.ended; !s.reusable {
			s.setCause(EngineClosed, io.ErrUnexpectedEOF)
		} else if s.editor.holdsPartial() {
			s.reusable = s.write(s.holdPartialEvent(nil, upstream.Chunks{}, true)) == nil // the end of the body ends its last event
		}
	case errors.Is(err, upstream.ErrCancelled) && s.shuttingDown != nil && s.shuttingDown.Load():
		s.setCause(Drained, err)
	case errors.Is(err, upstream.ErrCancelled) && s.dst.ClientGone():
		s.setCause(ClientGone, err)
	case errors.Is(err, upstream.ErrCancelled) && s.pastClientDeadline(time.Now()):
		s.setCause(Deadline, err)
	case errors.Is(err, upstream.ErrCancelled):
		s.setCause(Cancelled, err)
	case errors.Is(err, upstream.ErrFrozen), errors.Is(err, upstream.ErrTimeout) && s.scan.answered():
		s.setCause(EngineStalled, err)
	case errors.Is(err, upstream.ErrTimeout) && (s.pastClientDeadline(time.Now()) || s.resp.PastDeadline()):
		s.setCause(Deadline, err)
	case errors.Is(err, upstream.ErrTimeout):
		s.setCause(EngineStalled, err)
	default:
		s.setCause(EngineClosed, err)
	}
}

// atEventBoundary reports whether the client has got whole events only.
func (s *stream) atEventBoundary() bool { return s.editor.holdsPartial() || s.scan.AtBoundary() }
