package relay

import (
	"bytes"
	"strconv"
)

// messagesStream is Anthropic's /v1/messages of one text: message_start,
// content_block_start, content_block_delta …, content_block_stop, message_delta,
// message_stop. No engine tells ids there, so the text is kept.
type messagesStream struct {
	t     *Transcript
	begun bool   // message_start is out
	usage []byte // of message_start, raw: what it says of the prompt stays true
	block int    // index of the block that is open, or of the next
	open  bool
}

func (m *messagesStream) event(dst, event []byte) []byte {
	t := m.t
	data := DataOf(event)
	if t.next() != nil {
		return t.follow(dst, event, data)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	w := walker{b: data}
	var kind, delta, block, message, failure []byte
	index := 0
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		switch string(key) {
		case "type":
			kind = w.word()
		case "index":
			index = max(w.number(), 0)
		case "delta":
			delta = w.raw()
		case "content_block":
			block = w.raw()
		case "message":
			message = w.raw()
		case "error":
			failure = w.raw()
		default:
			w.skip()
		}
	}
	if w.bad {
		t.stuck("unreadable")
		return append(dst, event...)
	}
	switch string(kind) {
	case "message_start":
		m.begun = true
		m.usage = bytes.Clone(memberOf(message, "usage"))
	case "content_block_start":
		m.block, m.open = index, true
		t.onlyText(memberOf(block, "type"), `"text"`)
	case "content_block_delta":
		t.onlyText(memberOf(delta, "type"), `"text_delta"`)
		text := walker{b: memberOf(delta, "text")}
		if told := text.text(); len(told) > 0 {
			t.keep(told)
		}
	case "content_block_stop":
		m.block, m.open = index+1, false
	case "message_delta":
		t.Finished = true
	case "message_stop":
		t.ended = true
	case "error":
		return t.broke(dst, event, AnthropicStatus(memberOf(failure, "type")))
	}
	return append(dst, event...)
}

// onlyText says that a part of the answer that is no text keeps the stream from
// moving.
func (t *Transcript) onlyText(kind []byte, want string) {
	switch string(kind) {
	case want:
	case `"thinking"`, `"thinking_delta"`, `"signature_delta"`, `"redacted_thinking"`, `"reasoning"`:
		t.stuck("reasoning")
	default:
		t.stuck("tools")
	}
}

// AnthropicStatus is the status that the type of an error (raw) stands for, 500 for
// those that speak of the engine.
func AnthropicStatus(kind []byte) int {
	switch string(kind) {
	case `"invalid_request_error"`, `"authentication_error"`, `"billing_error"`, `"permission_error"`, `"not_found_error"`, `"request_too_large"`:
		return 400
	}
	return 500
}

// follow takes in an event of the engine that goes on, which was asked for
// completions.
func (t *Transcript) follow(dst, event, data []byte) []byte {
	if bytes.Equal(data, done) {
		dst = t.next().Event(dst, event)
		t.ended = true
		return dst
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...) // a comment
	}
	n, ok := t.note(event, data)
	switch {
	case !ok:
		t.stuck("unreadable")
		return dst
	case n.failed:
		if t.rare().failed = bytes.Clone(event); n.failedCode >= 400 && n.failedCode < 500 && n.failedCode != 429 {
			t.stuck("refused")
		}
		return dst
	}
	return t.next().Event(dst, event)
}

func (m *messagesStream) turn() Rewriter { return &messagesNext{m: m} }

func (m *messagesStream) end(dst []byte, _ bool) []byte {
	if next, ok := m.t.next().(*messagesNext); ok && !next.closed {
		dst = next.close(dst)
	}
	return append(dst, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
}

// messagesNext makes of completions events those of the stream.
type messagesNext struct {
	m      *messagesStream
	finish []byte // raw
	stop   []byte
	closed bool // message_delta is out
}

// Event implements Rewriter.
func (n *messagesNext) Event(dst, event []byte) []byte {
	m := n.m
	data := DataOf(event)
	if bytes.Equal(data, done) {
		return m.end(dst, true)
	}
	text, finish, stop := completionOf(data)
	if len(text) > 0 {
		if !m.open {
			m.open = true
			dst = n.named(dst, "content_block_start")
			dst = append(dst, ",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n"...)
		}
		dst = n.named(dst, "content_block_delta")
		dst = append(append(append(dst, `,"delta":{"type":"text_delta","text":"`...), text...), "\"}}\n\n"...)
	}
	if finish != nil {
		n.finish, n.stop = bytes.Clone(finish), bytes.Clone(stop)
	}
	return dst
}

// named begins an event about the present block.
func (n *messagesNext) named(dst []byte, kind string) []byte {
	dst = append(append(dst, "event: "...), kind...)
	dst = append(append(dst, "\ndata: {\"type\":\""...), kind...)
	return strconv.AppendInt(append(dst, `","index":`...), int64(n.m.block), 10)
}

// close ends the block and tells reason and usage.
func (n *messagesNext) close(dst []byte) []byte {
	n.closed = true
	m, t := n.m, n.m.t
	if m.open {
		dst = append(n.named(dst, "content_block_stop"), "}\n\n"...)
		m.open = false
	}
	reason, sequence := "end_turn", []byte("null")
	switch {
	case string(n.finish) == `"length"`:
		reason = "max_tokens"
	case len(n.stop) > 0 && n.stop[0] == '"':
		reason, sequence = "stop_sequence", n.stop
	}
	dst = append(append(dst, "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\""...), reason...)
	dst = append(append(dst, `","stop_sequence":`...), sequence...)
	dst = append(dst, `},"usage":`...)
	from := len(dst)
	w := walker{b: m.usage}
	w.enter('{')
	for key, more := w.member(); more; key, more = w.member() {
		value := w.raw()
		if string(key) != "output_tokens" {
			dst = append(appendKey(dst, from, key), value...)
		}
	}
	dst = appendKey(dst, from, []byte("output_tokens"))
	dst = strconv.AppendInt(dst, int64(len(t.Out)), 10)
	return append(dst, "}}\n\n"...)
}

// completionOf reads the one choice of a completions event, all raw: its text (the
// inside of a string), and, where it ends, why and at which stop.
func completionOf(data []byte) (text, finish, stop []byte) {
	w := walker{b: memberOf(data, "choices")}
	if !w.enter('[') || !w.element() {
		return nil, nil, nil
	}
	var ch choice
	ch.read(&w, func(key, value []byte) {
		if string(key) == "matched_stop" && value != nil { // SGLang's word
			stop = value
		}
	})
	if ch.stop != nil {
		stop = ch.stop
	}
	return ch.text, ch.finish, stop
}
