package relay

import (
	"bytes"
	"strconv"

	"sluice/dataplane/jsonscan"
)

// nativeStream is SGLang's /generate: {"text","output_ids","meta_info"} with all text
// and ids so far in each event, or, with --incremental-streaming-output, what is new
// (0.5.10 … 0.5.23). Which of the two follows from meta_info.completion_tokens, which
// counts all ids. The ids are the client's to see.
type nativeStream struct {
	t     *Transcript
	mode  nativeMode
	heard int    // events with ids
	id    []byte // meta_info.id, raw
	text  []byte // told so far, the inside of a JSON string; of a cumulative stream only
	none  bool   // no text at all comes (--skip-tokenizer-init)
	fresh []uint32

	around  nativeShape
	countAt int // where completion_tokens stands in the event read last, -1 nowhere

	// What the event read last says.
	said struct {
		text     []byte
		texted   bool
		ids      []byte
		passed   int  // around.Match has passed over so many of them, and
		taken    bool // the rest is in fresh
		total    int  // completion_tokens, -1 unknown
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

// unsure says whether it is not known in which mode the client reads on.
func (s *nativeStream) unsure() bool { return s.heard > 0 && s.mode == modeUnknown }

func (s *nativeStream) event(dst, event []byte) []byte {
	t := s.t
	data := DataOf(event)
	if bytes.Equal(data, done) {
		t.ended = true
		return append(dst, event...)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	if !s.read(data) {
		t.stuck("unreadable")
		return append(dst, event...)
	}
	if s.said.failed {
		return t.broke(dst, event, s.said.code)
	}
	t.Finished = t.Finished || s.said.finished
	if s.said.many {
		t.stuck("many_choices")
	}
	if n, ok := t.next().(*nativeNext); ok {
		return n.event(dst, data)
	}
	if s.id == nil {
		s.id = bytes.Clone(memberOf(memberOf(data, "meta_info"), "id"))
	}
	grew := s.take(&s.mode, len(t.Out))
	s.none = !s.said.texted
	switch {
	case s.none:
	case s.mode == incremental:
		grew = grew && len(s.said.text) > 0
	default: // its first event is its whole text in either mode
		grew = grew && len(s.said.text) > len(s.text)
		s.text = append(s.text[:0], s.said.text...)
	}
	s.told(grew)
	if s.said.taken {
		return t.show(dst, event, s.fresh)
	}
	return append(dst, event...)
}

// told says that the client has all ids, when their text has come too.
func (s *nativeStream) told(grew bool) {
	if !grew {
		return
	}
	if s.t.Half = endsInHalf(s.said.text); !s.t.Half {
		s.t.Told = len(s.t.Out)
	}
}

// take adds the new ids of an event to Out, had of which are this engine's; grew:
// there are some. It finds mode out.
func (s *nativeStream) take(mode *nativeMode, had int) (grew bool) {
	t := s.t
	if len(s.said.ids) == 0 || s.said.ids[0] != '[' {
		return false
	}
	if passed := s.said.passed; !s.said.taken || passed > had {
		var err error
		s.said.passed = 0
		if s.fresh, err = jsonscan.TokenIDs(s.fresh[:0], s.said.ids); err != nil {
			t.stuck("no_ids")
			return false
		}
	}
	n := s.said.passed + len(s.fresh)
	if n > 0 {
		s.heard++
	}
	switch {
	case had == 0 && (s.said.total == n || s.said.total < 0):
	case s.said.total == n && *mode != incremental && had > 0:
		*mode = cumulative
	case s.said.total == had+n && *mode != cumulative:
		if n > 0 {
			*mode = incremental
		}
	default:
		t.stuck("unreadable")
		return false
	}
	if *mode == cumulative {
		if n < had {
			t.stuck("unreadable")
			return false
		}
		s.fresh = s.fresh[had-s.said.passed:]
	}
	s.around.Repeats = *mode == cumulative
	t.Out = append(t.Out, s.fresh...)
	return len(s.fresh) > 0
}

// read finds what an event says.
func (s *nativeStream) read(data []byte) bool {
	s.said.text, s.said.ids, s.said.texted = nil, nil, false
	s.said.total, s.said.failed, s.said.code, s.said.finished, s.said.many = -1, false, 0, false, false
	if s.said.passed, s.said.taken = 0, false; s.plain(data) {
		return true
	}
	var text, ids jsonscan.Value
	s.countAt = -1
	plain := true
	w := walker{b: data}
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "text":
			s.said.texted = w.peek() == '"'
			if s.said.text = w.text(); s.said.texted {
				text = jsonscan.Value{Start: w.i - len(s.said.text) - 2, End: w.i, Kind: jsonscan.String}
			}
		case "output_ids":
			if s.said.ids = w.raw(); len(s.said.ids) > 0 && s.said.ids[0] == '[' {
				ids = jsonscan.Value{Start: w.i - len(s.said.ids), End: w.i, Kind: jsonscan.Array}
			}
		case "index":
			plain = false
			s.said.many = w.number() > 0
		case "error":
			if s.said.failed = !w.null(); s.said.failed {
				s.said.code = codeOf(data[w.i:])
			}
			w.skip()
		case "meta_info":
			s.meta(&w)
		default:
			w.skip()
		}
	}
	if plain && !w.bad && !s.said.failed && !s.said.finished {
		s.around.learn(data, text, ids, s.countAt)
	}
	return !w.bad
}

// plain reads an event that is of the shape of the last one walked, by which it has
// neither finished nor failed.
func (s *nativeStream) plain(data []byte) bool {
	var ok bool
	if s.fresh, s.said.passed, ok = s.around.Match(s.fresh[:0], data); !ok {
		return false
	}
	a := &s.around
	s.said.taken, s.said.ids, s.said.total = true, a.Raw(data, a.ids), a.number(data, a.count)
	if text := a.Raw(data, a.text); text != nil {
		s.said.texted, s.said.text = true, text[1:len(text)-1]
	}
	return true
}

func (s *nativeStream) meta(w *walker) {
	if !w.enter('{') {
		return
	}
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "completion_tokens":
			s.countAt = w.at()
			s.said.total = w.number()
		case "finish_reason":
			raw := w.raw()
			if len(raw) == 0 || raw[0] != '{' {
				continue
			}
			s.said.finished = true
			if kind := (walker{b: memberOf(raw, "type")}); string(kind.word()) != "abort" {
				continue
			}
			// With a status it is the engine's failure, a lost transfer's too;
			// without one somebody asked for it.
			status := walker{b: memberOf(raw, "status_code")}
			if code := status.digits(); code > 0 {
				s.said.failed, s.said.code = true, code
			}
		default:
			w.skip()
		}
	}
}

func (s *nativeStream) turn() Rewriter {
	return &nativeNext{s: s, seam: *s.t.seam(), before: len(s.text)}
}

func (s *nativeStream) end(dst []byte, _ bool) []byte { return append(dst, "data: [DONE]\n\n"...) }

// nativeNext makes the events of a second engine those of the first's stream, in the
// mode in which that one was.
type nativeNext struct {
	s      *nativeStream
	seam   Seam
	mode   nativeMode // of the second engine
	before int        // bytes of the first's text in s.text
	seen   int        // of the second's
}

// Event implements Rewriter; the speaker has read the event by then.
func (n *nativeNext) Event(dst, event []byte) []byte { return n.event(dst, DataOf(event)) }

func (n *nativeNext) event(dst, data []byte) []byte {
	s, t := n.s, n.s.t
	had := len(t.Out)
	grew := s.take(&n.mode, had-n.seam.Tokens)
	if t.Stuck() == "unreadable" {
		return dst
	}
	if s.mode == modeUnknown { // nothing was told before
		s.mode = n.mode
	}
	text := s.said.text
	if n.mode == cumulative {
		text = text[min(n.seen, len(text)):]
	}
	n.seen += len(text)
	if s.said.texted && len(text) == 0 {
		grew = false
	}
	if s.mode != incremental {
		s.text = append(s.text, text...)
	}
	mark := len(dst)
	dst = append(dst, "data: "...)
	from := len(dst)
	w := walker{b: data}
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		dst = appendKey(dst, from, key)
		switch string(key) {
		case "text":
			if w.skip(); s.mode != incremental {
				text = s.text
			}
			dst = append(append(append(dst, '"'), text...), '"')
		case "output_ids":
			w.skip()
			ids := t.Out
			if s.mode == incremental {
				ids = t.Out[had:]
			}
			dst = jsonscan.AppendTokenIDs(dst, ids)
		case "meta_info":
			dst = n.meta(dst, &w)
		default:
			dst = append(dst, w.raw()...)
		}
	}
	if w.bad {
		t.stuck("unreadable")
		return dst[:mark]
	}
	s.told(grew)
	return append(closeObject(dst, from), "\n\n"...)
}

func (n *nativeNext) meta(dst []byte, w *walker) []byte {
	if w.peek() != '{' {
		return append(dst, w.raw()...)
	}
	w.enter('{')
	from := len(dst)
	for key, more := w.member(); more; key, more = w.member() {
		dst = appendKey(dst, from, key)
		switch string(key) {
		case "id":
			id := w.raw()
			if n.s.id != nil {
				id = n.s.id
			}
			dst = append(dst, id...)
		case "prompt_tokens":
			dst = w.shifted(dst, -n.seam.Tokens)
		case "completion_tokens":
			dst = w.shifted(dst, n.seam.Tokens)
		case "cached_tokens":
			cached := walker{b: w.raw()}
			dst = strconv.AppendInt(dst, int64(min(max(cached.digits(), 0), n.seam.Prompt)), 10)
		case "finish_reason":
			dst = n.reason(dst, w)
		default:
			dst = append(dst, w.raw()...)
		}
	}
	return closeObject(dst, from)
}

// reason appends a finish reason; "length" counts the tokens.
func (n *nativeNext) reason(dst []byte, w *walker) []byte {
	if w.peek() != '{' {
		return append(dst, w.raw()...)
	}
	w.enter('{')
	from := len(dst)
	for key, more := w.member(); more; key, more = w.member() {
		dst = appendKey(dst, from, key)
		if string(key) == "length" {
			dst = w.shifted(dst, n.seam.Tokens)
			continue
		}
		dst = append(dst, w.raw()...)
	}
	return closeObject(dst, from)
}
