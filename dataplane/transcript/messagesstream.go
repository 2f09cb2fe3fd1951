package transcript

import (
	"bytes"
	"sluice/dataplane/apiformat"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"strconv"
)

// messagesStream is Anthropic's /v1/messages with one text block: message_start,
// content_block_start, content_block_delta …, content_block_stop, message_delta, message_stop. No
// engine returns ids there, so the text is kept.
type messagesStream struct {
	t       *Transcript
	started bool   // message_start has been sent
	usage   []byte // of message_start, raw; its prompt counts stay valid
	block   int    // index of the open or next block
	open    bool
}

func (m *messagesStream) event(dst, event []byte) []byte {
	t := m.t
	data := sse.EventData(event)
	if t.resumed() != nil {
		return t.resumedEvent(dst, event, data)
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...)
	}
	w := jsonscan.Cursor{Data: data}
	var kind, delta, block, message, failure []byte
	index := 0
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		switch string(key) {
		case "type":
			kind = w.Word()
		case "index":
			index = max(w.Number(), 0)
		case "delta":
			delta = w.Raw()
		case "content_block":
			block = w.Raw()
		case "message":
			message = w.Raw()
		case "error":
			failure = w.Raw()
		default:
			w.Skip()
		}
	}
	if w.Bad {
		t.blockOnce("unreadable")
		return append(dst, event...)
	}
	switch string(kind) {
	case "message_start":
		m.started = true
		m.usage = bytes.Clone(jsonscan.MemberOf(message, "usage"))
	case "content_block_start":
		m.block, m.open = index, true
		t.blockUnlessText(jsonscan.MemberOf(block, "type"), `"text"`)
	case "content_block_delta":
		t.blockUnlessText(jsonscan.MemberOf(delta, "type"), `"text_delta"`)
		text := jsonscan.Cursor{Data: jsonscan.MemberOf(delta, "text")}
		if sent := text.Text(); len(sent) > 0 {
			t.appendSent(sent)
		}
	case "content_block_stop":
		m.block, m.open = index+1, false
	case "message_delta":
		t.Finished = true
	case "message_stop":
		t.doneSent = true
	case "error":
		return t.engineFailed(dst, event, sse.AnthropicStatus(jsonscan.MemberOf(failure, "type")))
	}
	return append(dst, event...)
}

// blockUnlessText prevents a migration when the answer has a part that is not text.
func (t *Transcript) blockUnlessText(kind []byte, want string) {
	switch string(kind) {
	case want:
	case `"thinking"`, `"thinking_delta"`, `"signature_delta"`, `"redacted_thinking"`, `"reasoning"`:
		t.blockOnce("reasoning")
	default:
		t.blockOnce("tools")
	}
}

// resumedEvent handles an event of the engine that continues the stream, which was asked for
// completions.
func (t *Transcript) resumedEvent(dst, event, data []byte) []byte {
	if bytes.Equal(data, sse.DoneData) {
		dst = t.resumed().Event(dst, event)
		t.doneSent = true
		return dst
	}
	if len(data) == 0 || data[0] != '{' {
		return append(dst, event...) // a comment
	}
	n, ok := t.readEvent(event, data)
	switch {
	case !ok:
		t.blockOnce("unreadable")
		return dst
	case n.failed:
		if t.ensureExtras().failure = bytes.Clone(event); n.failedCode >= 400 && n.failedCode < 500 && n.failedCode != 429 {
			t.blockOnce("refused")
		}
		return dst
	}
	return t.resumed().Event(dst, event)
}

func (m *messagesStream) nextEngine() sse.Rewriter { return &messagesResumed{first: m} }

func (m *messagesStream) appendEnd(dst []byte, _ bool) []byte {
	if next, ok := m.t.resumed().(*messagesResumed); ok && !next.messageEnded {
		dst = next.appendEnd(dst)
	}
	return append(dst, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
}

// messagesResumed converts completions events into events of the stream.
type messagesResumed struct {
	first        *messagesStream
	finish       []byte // raw
	stop         []byte
	messageEnded bool // message_delta has been sent
}

// Event implements Rewriter.
func (n *messagesResumed) Event(dst, event []byte) []byte {
	m := n.first
	data := sse.EventData(event)
	if bytes.Equal(data, sse.DoneData) {
		return m.appendEnd(dst, true)
	}
	text, finish, stop := parseCompletion(data)
	if len(text) > 0 {
		if !m.open {
			m.open = true
			dst = n.appendEventHead(dst, "content_block_start")
			dst = append(dst, ",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n"...)
		}
		dst = n.appendEventHead(dst, "content_block_delta")
		dst = append(append(append(dst, `,"delta":{"type":"text_delta","text":"`...), text...), "\"}}\n\n"...)
	}
	if finish != nil {
		n.finish, n.stop = bytes.Clone(finish), bytes.Clone(stop)
	}
	return dst
}

// appendEventHead begins an event about the present block.
func (n *messagesResumed) appendEventHead(dst []byte, kind string) []byte {
	dst = append(append(dst, "event: "...), kind...)
	dst = append(append(dst, "\ndata: {\"type\":\""...), kind...)
	return strconv.AppendInt(append(dst, `","index":`...), int64(n.first.block), 10)
}

// appendEnd ends the block and sends the stop reason and the usage.
func (n *messagesResumed) appendEnd(dst []byte) []byte {
	n.messageEnded = true
	m, t := n.first, n.first.t
	if m.open {
		dst = append(n.appendEventHead(dst, "content_block_stop"), "}\n\n"...)
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
	w := jsonscan.Cursor{Data: m.usage}
	w.Enter('{')
	for key, more := w.Member(); more; key, more = w.Member() {
		value := w.Raw()
		if string(key) != "output_tokens" {
			dst = append(apiformat.AppendKey(dst, from, key), value...)
		}
	}
	dst = apiformat.AppendKey(dst, from, []byte("output_tokens"))
	dst = strconv.AppendInt(dst, int64(len(t.Out)), 10)
	return append(dst, "}}\n\n"...)
}

// parseCompletion reads the one choice of a completions event, raw: its text (the inside of a
// string) and, at its end, the finish reason and stop sequence.
func parseCompletion(data []byte) (text, finish, stop []byte) {
	w := jsonscan.Cursor{Data: jsonscan.MemberOf(data, "choices")}
	if !w.Enter('[') || !w.Element() {
		return nil, nil, nil
	}
	var ch apiformat.Choice
	ch.Read(&w, func(key, value []byte) {
		if string(key) == "matched_stop" && value != nil { // SGLang's name
			stop = value
		}
	})
	if ch.Stop != nil {
		stop = ch.Stop
	}
	return ch.Text, ch.Finish, stop
}
