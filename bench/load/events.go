package load

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// eventScan parses a server-sent event stream: it counts the events with a token and
// finds the usage, an error and the end. It buffers only the current line.
type eventScan struct {
	line   []byte
	tail   []byte // the last payload, for error messages
	events int
	tokens int // events with content
	done   bool
	failed bool

	prompt, output, cached int

	answer *output // collects the answer, if not nil
}

// output is the text of an answer, and its token ids if the engine sent them.
type output struct {
	text []byte
	ids  []uint32
}

// collect adds the content of an event of any endpoint.
func (out *output) collect(data []byte) {
	var ev struct {
		Choices []struct {
			Text  string
			Delta struct{ Content string }
			IDs   []uint32 `json:"token_ids"`
		}
	}
	if json.Unmarshal(data, &ev) != nil {
		return
	}
	for _, c := range ev.Choices {
		out.text = append(append(out.text, c.Text...), c.Delta.Content...)
		out.ids = append(out.ids, c.IDs...)
	}
}

const maxLine = 1 << 20

func (s *eventScan) feed(p []byte) {
	if s.events == 0 && s.line == nil {
		s.prompt, s.output, s.cached = -1, 0, -1
	}
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			if len(s.line)+len(p) <= maxLine {
				s.line = append(s.line, p...)
			}
			return
		}
		if len(s.line) == 0 {
			s.endLine(p[:i])
		} else {
			s.line = append(s.line, p[:i]...)
			s.endLine(s.line)
			s.line = s.line[:0]
		}
		p = p[i+1:]
	}
}

var (
	dataPrefix = []byte("data:")
	doneWord   = []byte("[DONE]")
)

func (s *eventScan) endLine(line []byte) {
	data, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r"), dataPrefix)
	if !ok {
		return
	}
	data = bytes.TrimPrefix(data, []byte(" "))
	s.events++
	switch {
	case bytes.Equal(data, doneWord):
		s.done = true
	case bytes.HasPrefix(data, []byte(`{"error"`)):
		s.failed = true
		s.tail = append(s.tail[:0], data...)
	default:
		if hasContent(data) {
			s.tokens++
			if s.answer != nil {
				s.answer.collect(data)
			}
		}
		s.usage(data)
	}
}

func (s *eventScan) scanBody(body []byte) {
	s.prompt, s.output, s.cached = -1, 0, -1
	s.tail = cutTo(body, 512)
	s.usage(body)
}

// hasContent reports whether an event has output: text, a delta, tool calls or token
// ids. In a role chunk and a finish chunk "content" is "" or absent.
func hasContent(data []byte) bool {
	for _, key := range [...]string{`"content":"`, `"text":"`, `"reasoning":"`, `"reasoning_content":"`, `"arguments":"`} {
		if i := bytes.Index(data, []byte(key)); i >= 0 && i+len(key) < len(data) && data[i+len(key)] != '"' {
			return true
		}
	}
	if i := bytes.Index(data, []byte(`"token_ids":[`)); i >= 0 && data[i+len(`"token_ids":[`)] != ']' {
		return true
	}
	return false
}

func (s *eventScan) usage(data []byte) {
	i := bytes.Index(data, []byte(`"usage":{`))
	if i < 0 {
		return
	}
	u := data[i:]
	if n, ok := number(u, `"prompt_tokens":`); ok {
		s.prompt = n
	}
	if n, ok := number(u, `"completion_tokens":`); ok {
		s.output = n
	}
	if n, ok := number(u, `"cached_tokens":`); ok {
		s.cached = n
	}
}

func number(b []byte, key string) (int, bool) {
	i := bytes.Index(b, []byte(key))
	if i < 0 {
		return 0, false
	}
	b = bytes.TrimLeft(b[i+len(key):], " ")
	end := 0
	for end < len(b) && b[end] >= '0' && b[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(string(b[:end]))
	return n, err == nil
}
