package transcript

import (
	"bytes"
	"strconv"

	"sluice/dataplane/apiformat"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// nativeStream is SGLang's /generate: {"text","output_ids","meta_info"}. Each event has all text
// and ids so far, or with --incremental-streaming-output only new ones (0.5.10 … 0.5.23).
// meta_info.completion_tokens, which counts all ids, shows which of the two. The client sees the
// ids.
type nativeStream struct {
	t        *Transcript
	mode     nativeMode
	idEvents int    // events with ids
	id       []byte // meta_info.id, raw
	text     []byte // sent so far, the inside of a JSON string; only of a cumulative stream
	noText   bool   // there is no text at all (--skip-tokenizer-init)
	newIDs   []uint32

	shape   NativeShape
	countAt int // position of completion_tokens in the last event; -1: none

	// The content of the last event.
	current struct {
		text     []byte
		texted   bool
		ids      []byte
		passed   int  // the number of ids that shape.Match has skipped
		taken    bool // the remaining ids are in fresh
		total    int  // completion_tokens; -1: unknown
		failed   bool
		code     int
		finished bool
		many     bool
	}
}

type nativeMode uint8

const (
	modeUnknown nativeMode = iota
	cumulative
	incremental
)

func newNativeStream(t *Transcript) *nativeStream {
	s := &nativeStream{t: t}
	if t.Deltas != nil {
		if s.mode = cumulative; *t.Deltas {
			s.mode = incremental
		}
	}
	return s
}

// modeUndetermined reports whether the mode in which the client reads is still unknown.
func (s *nativeStream) modeUndetermined() bool { return s.idEvents > 0 && s.mode == modeUnknown }

func (s *nativeStream) event(dst, event []byte) []byte {
	t := s.t
	data := sse.EventData(event)
	if bytes.Equal(data, sse.DoneData) {
		t.doneSent = true
		return append(dst, event...)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	if !s.read(data) {
		t.blockOnce("unreadable")
		return append(dst, event...)
	}
	if s.current.failed {
		return t.engineFailed(dst, event, s.current.code)
	}
	t.Finished = t.Finished || s.current.finished
	if s.current.many {
		t.blockOnce("multiple_choices")
	}
	if n, ok := t.resumed().(*nativeResumed); ok {
		return n.event(dst, data)
	}
	if s.id == nil {
		s.id = bytes.Clone(jsonscan.MemberOf(jsonscan.MemberOf(data, "meta_info"), "id"))
	}
	grew := s.addIDs(&s.mode, len(t.Out))
	s.noText = !s.current.texted
	switch {
	case s.noText:
	case s.mode == incremental:
		grew = grew && len(s.current.text) > 0
	default: // its first event is its whole text in either mode
		grew = grew && len(s.current.text) > len(s.text)
		s.text = append(s.text[:0], s.current.text...)
	}
	s.markDelivered(grew)
	if s.current.taken {
		return t.appendShown(dst, event, s.newIDs)
	}
	return append(dst, event...)
}

// markDelivered records that the client has all ids, if their text has come too.
func (s *nativeStream) markDelivered(grew bool) {
	if !grew {
		return
	}
	if s.t.PartialRune = endsInPartialRune(s.current.text); !s.t.PartialRune {
		s.t.Delivered = len(s.t.Out)
	}
}

// addIDs appends the new ids of an event to Out, of which had are this engine's, and determines
// mode. grew: there are new ones.
func (s *nativeStream) addIDs(mode *nativeMode, had int) (grew bool) {
	t := s.t
	if len(s.current.ids) == 0 || s.current.ids[0] != '[' {
		return false
	}
	if skipped := s.current.passed; !s.current.taken || skipped > had {
		var err error
		s.current.passed = 0
		if s.newIDs, err = jsonscan.TokenIDs(s.newIDs[:0], s.current.ids); err != nil {
			t.blockOnce("no_ids")
			return false
		}
	}
	n := s.current.passed + len(s.newIDs)
	if n > 0 {
		s.idEvents++
	}
	switch {
	case had == 0 && (s.current.total == n || s.current.total < 0):
	case s.current.total == n && *mode != incremental && had > 0:
		*mode = cumulative
	case s.current.total == had+n && *mode != cumulative:
		if n > 0 {
			*mode = incremental
		}
	default:
		t.blockOnce("unreadable")
		return false
	}
	if *mode == cumulative {
		if n < had {
			t.blockOnce("unreadable")
			return false
		}
		s.newIDs = s.newIDs[had-s.current.passed:]
	}
	s.shape.Cumulative = *mode == cumulative
	t.Out = append(t.Out, s.newIDs...)
	return len(s.newIDs) > 0
}

// read reads an event.
func (s *nativeStream) read(data []byte) bool {
	s.current.text, s.current.ids, s.current.texted = nil, nil, false
	s.current.total, s.current.failed, s.current.code, s.current.finished, s.current.many = -1, false, 0, false, false
	if s.current.passed, s.current.taken = 0, false; s.matchShape(data) {
		return true
	}
	var text, ids jsonscan.Value
	s.countAt = -1
	plain := true
	w := jsonscan.Cursor{Data: data}
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "text":
			s.current.texted = w.Peek() == '"'
			if s.current.text = w.Text(); s.current.texted {
				text = jsonscan.Value{Start: w.Pos - len(s.current.text) - 2, End: w.Pos, Kind: jsonscan.String}
			}
		case "output_ids":
			if s.current.ids = w.Raw(); len(s.current.ids) > 0 && s.current.ids[0] == '[' {
				ids = jsonscan.Value{Start: w.Pos - len(s.current.ids), End: w.Pos, Kind: jsonscan.Array}
			}
		case "index":
			plain = false
			s.current.many = w.Number() > 0
		case "error":
			if s.current.failed = !w.Null(); s.current.failed {
				s.current.code = codeOf(data[w.Pos:])
			}
			w.Skip()
		case "meta_info":
			s.meta(&w)
		default:
			w.Skip()
		}
	}
	if plain && !w.Bad && !s.current.failed && !s.current.finished {
		s.shape.LearnEvent(data, text, ids, s.countAt)
	}
	return !w.Bad
}

// matchShape reads an event of the same shape as the last one walked. Such an event has no finish
// reason and no error.
func (s *nativeStream) matchShape(data []byte) bool {
	var ok bool
	if s.newIDs, s.current.passed, ok = s.shape.Match(s.newIDs[:0], data); !ok {
		return false
	}
	a := &s.shape
	s.current.taken, s.current.ids, s.current.total = true, a.Raw(data, a.ids), a.Number(data, a.count)
	if text := a.Raw(data, a.text); text != nil {
		s.current.texted, s.current.text = true, text[1:len(text)-1]
	}
	return true
}

func (s *nativeStream) meta(w *jsonscan.Cursor) {
	if !w.Enter('{') {
		return
	}
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "completion_tokens":
			s.countAt = w.At()
			s.current.total = w.Number()
		case "finish_reason":
			raw := w.Raw()
			if len(raw) == 0 || raw[0] != '{' {
				continue
			}
			s.current.finished = true
			if kind := (jsonscan.Cursor{Data: jsonscan.MemberOf(raw, "type")}); string(kind.Word()) != "abort" {
				continue
			}
			// With a status code the engine failed, also because of a lost transfer. Without one
			// the request was aborted on demand.
			status := jsonscan.Cursor{Data: jsonscan.MemberOf(raw, "status_code")}
			if code := status.Unsigned(); code > 0 {
				s.current.failed, s.current.code = true, code
			}
		default:
			w.Skip()
		}
	}
}

func (s *nativeStream) nextEngine() sse.Rewriter {
	return &nativeResumed{first: s, splice: *s.t.splicePoint(), before: len(s.text)}
}

func (s *nativeStream) appendEnd(dst []byte, _ bool) []byte {
	return append(dst, "data: [DONE]\n\n"...)
}

// nativeResumed turns the events of a second engine into those of the stream, in the mode of the
// first engine.
type nativeResumed struct {
	first  *nativeStream
	splice apiformat.SplicePoint
	mode   nativeMode // of the second engine
	before int        // bytes of the first engine's text in s.text
	seen   int        // bytes of the second engine's text
}

// Event implements Rewriter. The formatter has read the event by then.
func (n *nativeResumed) Event(dst, event []byte) []byte { return n.event(dst, sse.EventData(event)) }

func (n *nativeResumed) event(dst, data []byte) []byte {
	s, t := n.first, n.first.t
	had := len(t.Out)
	grew := s.addIDs(&n.mode, had-n.splice.PriorTokens)
	if t.Blocked() == "unreadable" {
		return dst
	}
	if s.mode == modeUnknown { // nothing was sent before
		s.mode = n.mode
	}
	text := s.current.text
	if n.mode == cumulative {
		text = text[min(n.seen, len(text)):]
	}
	n.seen += len(text)
	if s.current.texted && len(text) == 0 {
		grew = false
	}
	if s.mode != incremental {
		s.text = append(s.text, text...)
	}
	mark := len(dst)
	dst = append(dst, "data: "...)
	from := len(dst)
	w := jsonscan.Cursor{Data: data}
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		dst = apiformat.AppendKey(dst, from, key)
		switch string(key) {
		case "text":
			if w.Skip(); s.mode != incremental {
				text = s.text
			}
			dst = append(append(append(dst, '"'), text...), '"')
		case "output_ids":
			w.Skip()
			ids := t.Out
			if s.mode == incremental {
				ids = t.Out[had:]
			}
			dst = jsonscan.AppendTokenIDs(dst, ids)
		case "meta_info":
			dst = n.meta(dst, &w)
		default:
			dst = append(dst, w.Raw()...)
		}
	}
	if w.Bad {
		t.blockOnce("unreadable")
		return dst[:mark]
	}
	s.markDelivered(grew)
	return append(apiformat.CloseObject(dst, from), "\n\n"...)
}

func (n *nativeResumed) meta(dst []byte, w *jsonscan.Cursor) []byte {
	if w.Peek() != '{' {
		return append(dst, w.Raw()...)
	}
	w.Enter('{')
	from := len(dst)
	for key, more := w.Member(); more; key, more = w.Member() {
		dst = apiformat.AppendKey(dst, from, key)
		switch string(key) {
		case "id":
			id := w.Raw()
			if n.first.id != nil {
				id = n.first.id
			}
			dst = append(dst, id...)
		case "prompt_tokens":
			dst = apiformat.AppendShifted(dst, w, -n.splice.PriorTokens)
		case "completion_tokens":
			dst = apiformat.AppendShifted(dst, w, n.splice.PriorTokens)
		case "cached_tokens":
			cached := jsonscan.Cursor{Data: w.Raw()}
			dst = strconv.AppendInt(dst, int64(min(max(cached.Unsigned(), 0), n.splice.Prompt)), 10)
		case "finish_reason":
			dst = n.reason(dst, w)
		default:
			dst = append(dst, w.Raw()...)
		}
	}
	return apiformat.CloseObject(dst, from)
}

// reason appends a finish reason; "length" has the token count.
func (n *nativeResumed) reason(dst []byte, w *jsonscan.Cursor) []byte {
	if w.Peek() != '{' {
		return append(dst, w.Raw()...)
	}
	w.Enter('{')
	from := len(dst)
	for key, more := w.Member(); more; key, more = w.Member() {
		dst = apiformat.AppendKey(dst, from, key)
		if string(key) == "length" {
			dst = apiformat.AppendShifted(dst, w, n.splice.PriorTokens)
			continue
		}
		dst = append(dst, w.Raw()...)
	}
	return apiformat.CloseObject(dst, from)
}
