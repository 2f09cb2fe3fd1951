package relay

import (
	"bytes"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/redact"
	"sluice/dataplane/sse"
	"sluice/dataplane/transcript"
)

// streamScanner finds in a stream's events what the router needs: usage, finish reasons, errors,
// the first token and the end.
type streamScanner struct {
	sse.Framer
	events    int64
	tooBig    int32
	truncator truncator
	finish    string // after an error event its type and code
	usage     Usage

	template transcript.EventTemplate // of OpenAI's token events
	native   nativeScan
	finishes finishTracker

	protocol       sse.Protocol
	mayHaveRecords bool // there may be id records between events
	token          bool // content was seen
	failed         bool // an error event was seen
	ended          bool // the protocol's own last event was seen
	engineMessage  bool // an error event names a part of a handle
	private        bool // an event has a private member, or was not scanned
	truncating     bool // the present event is beyond the bound; truncator writes partial
}

// feed takes the next payload bytes, without chunk framing.
func (s *streamScanner) feed(p []byte) {
	s.Normalize(p)
	for len(p) > 0 {
		if s.ended && s.protocol == sse.OpenAI {
			blankBehind(p)
			return
		}
		if s.mayHaveRecords && s.AtBoundary() {
			if _, n := transcript.ParseIDRecord(p); n > 0 {
				p = p[n:]
				s.events++
				s.token = true
				continue
			}
		}
		n, event, tooBig := s.Next(p)
		if s.KeepsOversized && (s.Oversized || tooBig) {
			s.private = s.private || tooBig
			event, tooBig = s.truncated(p[:n], tooBig)
		}
		p = p[n:]
		if tooBig {
			s.events++
			s.tooBig++
			s.private, s.finishes.unscanned = true, true
		}
		if event != nil {
			s.event(event)
			s.Release()
		}
	}
}

// blankBehind replaces what an engine sends after [DONE] by empty lines, which changes no framing.
// It is not part of the answer and no client gets it.
func blankBehind(p []byte) {
	for i, c := range p {
		if c != '\r' {
			p[i] = '\n'
		}
	}
}

// tokenEvent reports whether ev is a token event like the ones before it: one line of data, which
// matches the stream's template.
func (s *streamScanner) tokenEvent(ev []byte) bool {
	const prefix, end = "data: ", "\n\n"
	n := len(ev) - len(end)
	return n > len(prefix) && string(ev[:len(prefix)]) == prefix && string(ev[n:]) == end &&
		s.template.Matches(ev[len(prefix):n])
}

// event scans one event. Of its lines "event:" and "data:" count.
func (s *streamScanner) event(ev []byte) {
	if s.token && s.protocol == sse.OpenAI && s.tokenEvent(ev) {
		s.events++
		s.finishes.unscanned = false
		return
	}
	var name, data []byte
	var more bool // there are several data lines
	for len(ev) > 0 {
		line := ev
		if i := bytes.IndexByte(ev, '\n'); i >= 0 {
			line, ev = ev[:i], ev[i+1:]
		} else {
			ev = nil
		}
		if n := len(line); n > 0 && line[n-1] == '\r' {
			line = line[:n-1]
		}
		switch {
		case bytes.HasPrefix(line, sse.DataPrefix):
			if data != nil {
				more = true
				break
			}
			data = sse.FieldValue(line[len(sse.DataPrefix):])
		case bytes.HasPrefix(line, sse.EventPrefix):
			name = sse.FieldValue(line[len(sse.EventPrefix):])
		case len(line) > redact.ShortestPrivateName:
			s.private = s.private || redact.MayNamePrivate(line)
		}
	}
	if len(name) >= redact.ShortestPrivateName && string(name) != "content_block_delta" {
		s.private = s.private || redact.MayNamePrivate(name)
	}
	if data == nil {
		return // a comment, or empty
	}
	s.events++
	if more {
		// No engine sends several data lines. Joining them is not worth a buffer.
		s.tooBig++
		s.private, s.finishes.unscanned = true, true
		return
	}
	switch s.protocol {
	case sse.OpenAI:
		s.openAI(data)
	case sse.Anthropic:
		s.anthropic(name, data)
	case sse.Responses:
		s.responses(name, data)
	}
}

// openAI scans the data of one event of chat completions, completions, /inference/v1/generate or
// SGLang's /generate.
func (s *streamScanner) openAI(data []byte) {
	if bytes.Equal(data, sse.DoneData) {
		s.ended = true
		return
	}
	if s.token && (s.template.Matches(data) || s.native.counts(data, &s.usage)) {
		s.finishes.unscanned = false
		return
	}
	w := eventWalker{Cursor: jsonscan.Cursor{Data: data}, counts: [3]int{-1, -1, -1}}
	if !w.Enter('{') {
		s.private = s.private || redact.MayNamePrivate(data)
		return
	}
	w.hasOther = redact.MayHoldPrivateValue(data)
	s.private = s.private || w.hasOther
	index, native, finished := 0, false, false
	answer, detail, message := false, false, false // members of an answer, and of a bare error
	choices, usage := false, false                 // the event has such
	var object, kind, code []byte
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "choices":
			answer = true
			if !w.Enter('[') {
				continue
			}
			for w.Element() {
				choices = true
				s.choice(&w)
			}
		case "usage":
			usage = !w.Null()
			w.hasOther = w.hasOther || usage
			readUsage(&w.Cursor, &s.usage)
		case "error":
			if !w.Null() {
				s.failed, w.hasOther = true, true
			}
			s.readErrorMember(&w.Cursor)
		case "detail": // FastAPI's {"detail":…}
			detail = detail || !w.Null()
			w.Skip()
		case "message", "msg":
			message = message || w.Peek() == '"'
			w.Skip()
		case "text": // SGLang's /generate
			answer = true
			w.textAt = s.textOrIDs(&w.Cursor)
		case "output_ids":
			answer = true
			w.idsAt = s.textOrIDs(&w.Cursor)
		case "meta_info":
			native = true
			finished = s.metaInfo(&w)
		case "index": // of SGLang's /generate
			index = w.Number()
		case "object": // vLLM up to 0.10.0: {"object":"error","message":…}
			if object = w.Word(); string(object) == "error" {
				s.failed, w.hasOther = true, true
			}
		case "type":
			kind = w.Raw()
		case "code":
			code = w.Raw()
		default:
			w.Skip()
		}
	}
	switch {
	case native:
		s.finishes.add(index, finished)
	case usage && !choices:
		s.finishes.usageSent()
	}
	s.private = s.private || w.Bad
	if (detail || message) && !answer && !native && object == nil {
		s.failed, w.hasOther = s.failed || detail, true
		s.onErrorEvent(data)
	}
	if string(object) == "error" {
		s.setError(kind, code)
	}
	if s.failed {
		s.onErrorEvent(data)
	}
	if w.to > 0 && !w.hasOther && !w.Bad {
		s.template.Learn(data, w.from, w.to)
	}
	if w.idsAt.Kind == jsonscan.Array && w.to == 0 && !w.hasOther && !w.Bad {
		s.native.learn(&w)
	}
}

// textOrIDs reads the text or the ids of an event of SGLang's /generate, or the ids of a choice,
// and returns where they lie.
func (s *streamScanner) textOrIDs(w *jsonscan.Cursor) jsonscan.Value {
	kind := jsonscan.Number
	switch w.Peek() {
	case '[':
		kind = jsonscan.Array
	case '"':
		kind = jsonscan.String
	}
	from := w.Pos
	if kind == jsonscan.Array {
		s.token = w.HasElements() || s.token
	} else if len(w.Text()) > 0 {
		s.token = true
	}
	return jsonscan.Value{Start: from, End: w.Pos, Kind: kind}
}

// metaInfo reads usage and finish reason of SGLang's /generate. It returns whether there is a
// finish reason.
func (s *streamScanner) metaInfo(w *eventWalker) (finished bool) {
	if !w.Enter('{') {
		return false
	}
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "prompt_tokens":
			w.counts[0] = w.At()
			readCount(&w.Cursor, &s.usage.Prompt)
		case "completion_tokens":
			w.counts[1] = w.At()
			readCount(&w.Cursor, &s.usage.Completion)
		case "cached_tokens":
			w.counts[2] = w.At()
			readCount(&w.Cursor, &s.usage.Cached)
		case "finish_reason":
			if !w.Enter('{') {
				continue
			}
			w.hasOther = true
			for key, ok := w.Member(); ok; key, ok = w.Member() {
				if string(key) != "type" {
					w.Skip()
				} else if reason := w.Word(); len(reason) > 0 {
					s.finish, finished = reasonName(reason), true
					s.failed = s.failed || s.finish == "abort"
				}
			}
		default:
			w.Skip()
		}
	}
	return finished
}

func (s *streamScanner) choice(w *eventWalker) {
	if !w.Enter('{') {
		return
	}
	index, finished := 0, false
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "finish_reason":
			if reason := w.Word(); len(reason) > 0 {
				s.finish, w.hasOther, finished = reasonName(reason), true, true
			}
		case "index":
			index = w.Number()
		case "delta":
			s.delta(w)
		case "text":
			s.content(w)
		case "token_ids":
			w.idsAt = s.textOrIDs(&w.Cursor)
		default:
			w.Skip()
		}
	}
	s.finishes.add(index, finished)
}

// delta looks for content. A role alone, "" and null are not content.
func (s *streamScanner) delta(w *eventWalker) {
	if !w.Enter('{') {
		return
	}
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "content", "reasoning", "reasoning_content", "refusal":
			s.content(w)
		case "tool_calls":
			if w.HasElements() {
				s.token = true
			}
		case "function_call":
			s.token = s.token || !w.Null()
			w.Skip()
		default:
			w.Skip()
		}
	}
}

// content reads a string, which is content unless it is empty.
func (s *streamScanner) content(w *eventWalker) {
	if text := w.Text(); len(text) > 0 {
		s.token = true
		w.to = w.Pos - 1
		w.from = w.to - len(text)
	}
}

// anthropic scans one event of /v1/messages.
func (s *streamScanner) anthropic(name, data []byte) {
	s.finishes.unscanned = false
	s.private = s.private || redact.MayHoldPrivateValue(data)
	if string(name) == "content_block_delta" && s.token {
		return
	}
	w := jsonscan.Cursor{Data: data}
	if !w.Enter('{') {
		s.private = s.private || redact.MayNamePrivate(data)
		return
	}
	detail := false
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "detail":
			detail = detail || !w.Null()
			w.Skip()
		case "type":
			if t := w.Word(); len(name) == 0 {
				name = t
			}
		case "usage":
			readUsage(&w, &s.usage)
		case "error":
			s.readErrorMember(&w)
		case "message", "delta":
			s.messagePart(&w)
		default:
			w.Skip()
		}
	}
	switch string(name) {
	case "content_block_delta":
		s.token = true
	case "error":
		s.failed, s.ended = true, true
		s.onErrorEvent(data)
	case "message_stop":
		s.ended = true
	case "":
		s.onBareError(detail, data)
	}
}

// messagePart reads the message of message_start or the delta of message_delta.
func (s *streamScanner) messagePart(w *jsonscan.Cursor) {
	if !w.Enter('{') {
		return
	}
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "usage":
			readUsage(w, &s.usage)
		case "stop_reason":
			if reason := w.Word(); len(reason) > 0 {
				s.finish = reasonName(reason)
			}
		default:
			w.Skip()
		}
	}
}

// maxStoredID bounds the id of a response. Those of engines have 37 bytes.
const maxStoredID = 128

var deltaSuffix = []byte(".delta")

// storedID returns the id of the response that a stream of Responses is about; "": not known yet.
// It is stored in template, which such a stream does not use otherwise.
func (s *streamScanner) storedID() string {
	if s.protocol != sse.Responses {
		return ""
	}
	return s.template.IDAndTime
}

// responses scans one event of /v1/responses.
func (s *streamScanner) responses(name, data []byte) {
	s.finishes.unscanned = false
	s.private = s.private || redact.MayHoldPrivateValue(data)
	if s.token && bytes.HasSuffix(name, deltaSuffix) {
		return
	}
	w := jsonscan.Cursor{Data: data}
	if !w.Enter('{') {
		s.private = s.private || redact.MayNamePrivate(data)
		return
	}
	detail := false
	var status, code []byte
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "detail":
			detail = detail || !w.Null()
			w.Skip()
		case "type":
			if t := w.Word(); len(name) == 0 {
				name = t
			}
		case "code":
			code = w.Raw()
		case "error":
			s.readErrorMember(&w)
		case "response":
			if !w.Enter('{') {
				continue
			}
			for key, ok := w.Member(); ok; key, ok = w.Member() {
				switch string(key) {
				case "id":
					if id := w.Word(); s.template.IDAndTime == "" && len(id) <= maxStoredID {
						s.template.IDAndTime = string(id)
					}
				case "status":
					status = w.Word()
				case "error":
					s.readErrorMember(&w)
				case "usage":
					readUsage(&w, &s.usage)
				default:
					w.Skip()
				}
			}
		default:
			w.Skip()
		}
	}
	switch {
	case bytes.HasSuffix(name, deltaSuffix):
		s.token = true
	case string(name) == "error":
		s.failed, s.ended = true, true
		if code != nil {
			s.setError(nil, code)
		}
		s.onErrorEvent(data)
	case string(name) == "response.failed":
		s.failed, s.ended = true, true
		s.onErrorEvent(data)
		if s.finish == "" {
			s.finish = "failed"
		}
	case len(name) == 0:
		s.onBareError(detail, data)
	case string(name) == "response.completed", string(name) == "response.incomplete", string(name) == "response.cancelled":
		s.ended = true
		if len(status) > 0 {
			s.finish = reasonName(status)
		}
	}
}

// reasonName returns a finish reason as a string. Known ones allocate nothing.
func reasonName(b []byte) string {
	switch string(b) {
	case "stop":
		return "stop"
	case "length":
		return "length"
	case "tool_calls":
		return "tool_calls"
	case "abort":
		return "abort"
	case "error":
		return "error"
	case "repetition":
		return "repetition"
	case "content_filter":
		return "content_filter"
	case "end_turn":
		return "end_turn"
	case "max_tokens":
		return "max_tokens"
	case "tool_use":
		return "tool_use"
	case "completed":
		return "completed"
	case "incomplete":
		return "incomplete"
	}
	return string(b[:min(len(b), 64)])
}
