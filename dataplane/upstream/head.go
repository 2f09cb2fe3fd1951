package upstream

import (
	"bytes"
	"fmt"

	"sluice/dataplane/ascii"
)

// maxHeadLines bounds the header lines of one response.
const maxHeadLines = 256

// span is a part of the head, by offsets, because the buffer may move when it grows.
type span struct{ from, to int }

type headField struct {
	name, value span
	hop         bool
}

// headParser parses a response head line by line as it arrives. It is strict: CRLF only, no
// folding, no control characters, one Content-Length or one Transfer-Encoding that is exactly
// "chunked".
type headParser struct {
	pos     int // end of what has been parsed: the start of the next line
	scanned int // buf[pos:scanned] has no line end
	fields  []headField
	status  int
	minor   byte // HTTP/1.minor
	started bool // the status line has been read

	length       int64 // -1: not given
	chunked      bool
	keepAlive    bool // Connection: keep-alive
	closing      bool // Connection: close
	hasNominated bool // Connection names other headers
}

// reset prepares for a head that begins at pos.
func (h *headParser) reset(pos int) {
	*h = headParser{pos: pos, scanned: pos, fields: h.fields[:0], length: -1}
}

// parse continues in buf, which holds everything since the beginning of the head. done: the empty
// line has been parsed, and pos is the start of the body.
func (h *headParser) parse(buf []byte) (done bool, err error) {
	for {
		i := bytes.IndexByte(buf[h.scanned:], '\n')
		if i < 0 {
			h.scanned = len(buf)
			return false, nil
		}
		end := h.scanned + i
		if end == h.pos || buf[end-1] != '\r' {
			return false, protocolError("a head line that ends with a bare LF")
		}
		line := span{h.pos, end - 1}
		h.pos, h.scanned = end+1, end+1
		switch {
		case !h.started:
			err = h.statusLine(buf[line.from:line.to])
		case line.from == line.to:
			return true, h.finish(buf)
		default:
			err = h.fieldLine(buf, line)
		}
		if err != nil {
			return false, err
		}
	}
}

func (h *headParser) statusLine(b []byte) error {
	if len(b) < 12 || string(b[:7]) != "HTTP/1." || (b[7] != '0' && b[7] != '1') || b[8] != ' ' ||
		(len(b) > 12 && b[12] != ' ') || !validValue(b) {
		return protocolError("status line %q: want HTTP/1.1 and three digits", cutTo(b, 40))
	}
	for _, d := range b[9:12] {
		if d < '0' || d > '9' {
			return protocolError("status %q: want three digits", b[9:12])
		}
		h.status = h.status*10 + int(d-'0')
	}
	if h.status < 100 || h.status > 599 {
		return protocolError("status %d: want 100 to 599", h.status)
	}
	h.minor = b[7] - '0'
	h.started = true
	return nil
}

func (h *headParser) fieldLine(buf []byte, line span) error {
	b := buf[line.from:line.to]
	if b[0] == ' ' || b[0] == '\t' {
		return protocolError("a folded header line")
	}
	colon := bytes.IndexByte(b, ':')
	if colon < 0 {
		return protocolError("header line %q: want name: value", cutTo(b, 40))
	}
	name := b[:colon]
	if !validToken(name) {
		return protocolError("header name %q: want a token", cutTo(name, 40))
	}
	value := trimSpace(b[colon+1:])
	if !validValue(value) {
		return protocolError("a control character in header %q", name)
	}
	if len(h.fields) >= maxHeadLines {
		return protocolError("more than %d header lines", maxHeadLines)
	}
	f := headField{name: span{line.from, line.from + colon}, hop: hopByHop(name)}
	f.value.from = line.to - len(b) + colon + 1
	for f.value.from < line.to && (buf[f.value.from] == ' ' || buf[f.value.from] == '\t') {
		f.value.from++
	}
	f.value.to = f.value.from + len(value)
	h.fields = append(h.fields, f)
	if f.hop {
		return h.hopField(name, value)
	}
	if len(name) == len("content-encoding") && len(value) > 0 && ascii.EqualFold(name, "content-encoding") && !ascii.EqualFold(value, "identity") {
		return fmt.Errorf("%w: %q", ErrContentEncoding, cutTo(value, 40))
	}
	return nil
}

// hopField handles the headers that determine framing and keep-alive.
func (h *headParser) hopField(name, value []byte) error {
	switch {
	case ascii.EqualFold(name, "content-length"):
		if h.length >= 0 {
			return protocolError("two Content-Length headers")
		}
		if len(value) == 0 || len(value) > 18 {
			return protocolError("Content-Length %q: want 1 to 18 digits", cutTo(value, 40))
		}
		n := int64(0)
		for _, d := range value {
			if d < '0' || d > '9' {
				return protocolError("Content-Length %q: want 1 to 18 digits", cutTo(value, 40))
			}
			n = n*10 + int64(d-'0')
		}
		h.length = n
	case ascii.EqualFold(name, "transfer-encoding"):
		if h.chunked {
			return protocolError("two Transfer-Encoding headers")
		}
		if !ascii.EqualFold(value, "chunked") {
			return protocolError("Transfer-Encoding %q: want chunked", cutTo(value, 40))
		}
		h.chunked = true
	case ascii.EqualFold(name, "connection"):
		eachToken(value, func(token []byte) {
			switch {
			case ascii.EqualFold(token, "close"):
				h.closing = true
			case ascii.EqualFold(token, "keep-alive"):
				h.keepAlive = true
			default:
				h.hasNominated = true
			}
		})
	}
	return nil
}

// finish validates the head as a whole.
func (h *headParser) finish(buf []byte) error {
	if h.chunked && h.length >= 0 {
		return protocolError("Content-Length and Transfer-Encoding together")
	}
	if h.chunked && h.minor == 0 {
		return protocolError("Transfer-Encoding in an HTTP/1.0 response")
	}
	if !h.hasNominated {
		return nil
	}
	for _, f := range h.fields {
		if !f.hop || !ascii.EqualFold(buf[f.name.from:f.name.to], "connection") {
			continue
		}
		eachToken(buf[f.value.from:f.value.to], func(token []byte) {
			for i := range h.fields {
				n := h.fields[i].name
				if ascii.EqualFold(buf[n.from:n.to], token) {
					h.fields[i].hop = true
				}
			}
		})
	}
	return nil
}

// persistent reports whether the engine keeps the connection open after this response.
func (h *headParser) persistent() bool {
	return !h.closing && (h.minor == 1 || h.keepAlive)
}

// eachToken calls f for every element of a comma-separated list.
func eachToken(list []byte, f func(token []byte)) {
	for len(list) > 0 {
		token := list
		if i := bytes.IndexByte(list, ','); i >= 0 {
			token, list = list[:i], list[i+1:]
		} else {
			list = nil
		}
		if token = trimSpace(token); len(token) > 0 {
			f(token)
		}
	}
}

func cutTo(b []byte, n int) []byte {
	if len(b) > n {
		return b[:n]
	}
	return b
}
