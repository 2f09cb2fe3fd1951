package http1

import (
	"bytes"
	"math"

	"sluice/dataplane/ascii"
)

// Values of Head.Length that are not a Content-Length.
const (
	LengthNone    = -2
	LengthChunked = -1
)

// Line is a header line, as offsets in Head.raw.
type Line struct {
	name, nameEnd, value, valueEnd uint32
}

// Head is a parsed request head. Package front also reads with it the requests that fasthttp has
// read, because fasthttp's own parser is too lenient to decide where a request ends (Content-Length
// with Transfer-Encoding, obs-fold, HTTP/9.9). Head keeps header names as the client wrote them. It
// borrows the bytes that Parse was given.
type Head struct {
	raw          []byte
	Path         []byte // the path of the request target, without the query
	Lines        []Line
	Length       int64 // LengthNone, LengthChunked or a Content-Length
	HTTP11       bool
	Close        bool        // Connection has the option close
	hasNominated bool        // Connection names header lines that are hop-by-hop
	HasExpect    bool        // there is an Expect line
	options      [][2]uint32 // the names in Connection, as offsets in raw
}

// Name returns the name of a header line, borrowed.
func (h *Head) Name(l *Line) []byte { return h.raw[l.name:l.nameEnd] }

// Value returns the value of a header line without surrounding white space, borrowed.
func (h *Head) Value(l *Line) []byte { return h.raw[l.value:l.valueEnd] }

// Release drops what h borrows. Header lines are no longer found.
func (h *Head) Release() {
	h.raw, h.Path, h.Lines, h.options = nil, nil, h.Lines[:0], h.options[:0]
}

// Find returns the value of the first header line with a name, nil if there is none. It borrows
// raw.
func (h *Head) Find(name string) []byte {
	for i := range h.Lines {
		if l := &h.Lines[i]; ascii.EqualFold(h.Name(l), name) {
			return h.raw[l.value:l.valueEnd:l.valueEnd]
		}
	}
	return nil
}

// FindAll returns the values of all header lines with a name, joined by commas, nil if there are
// none. A single value borrows raw.
func (h *Head) FindAll(name string) (all []byte) {
	for i := range h.Lines {
		l := &h.Lines[i]
		switch {
		case !ascii.EqualFold(h.Name(l), name):
		case all == nil:
			all = h.raw[l.value:l.valueEnd:l.valueEnd]
		default: // append allocates, because all has no spare capacity; raw stays unchanged
			all = append(append(all, ','), h.Value(l)...)
		}
	}
	return all
}

// Parse parses a head: method, target and protocol as in the request line, and raw from the first
// header line to the empty line, inclusive. It returns "" if it accepts the head, otherwise an
// error message for the client. After an error the connection cannot serve another request,
// because the end of this one is unknown.
func (h *Head) Parse(method, target, protocol, raw []byte) (refused string) {
	h.raw, h.Lines, h.options = raw, h.Lines[:0], h.options[:0]
	h.Length, h.Close, h.hasNominated, h.HasExpect = LengthNone, false, false, false
	switch {
	case bytes.Equal(protocol, []byte("HTTP/1.1")):
		h.HTTP11 = true
	case bytes.Equal(protocol, []byte("HTTP/1.0")):
		h.HTTP11 = false
	default:
		return "the protocol must be HTTP/1.1 or HTTP/1.0"
	}
	if !isToken(method) {
		return "the method must be a token such as GET or POST"
	}
	if h.Path, refused = pathOf(method, target); refused != "" {
		return refused
	}
	if refused = h.splitLines(); refused != "" {
		return refused
	}
	return h.checkFraming()
}

// maxLines bounds the header lines of a request. Many short lines cost more than their bytes
// suggest; clients send about a dozen.
const maxLines = 256

// splitLines splits raw into header lines. Each must be a name, a colon and a value, and end with
// CRLF; folded lines are refused.
func (h *Head) splitLines() string {
	raw := h.raw
	if len(raw) > math.MaxInt32 {
		return "the head is too large"
	}
	at := 0
	for at < len(raw) {
		eol := bytes.IndexByte(raw[at:], '\n')
		if eol < 1 || raw[at+eol-1] != '\r' {
			return BareEndMessage
		}
		text := raw[at : at+eol-1]
		if len(text) == 0 {
			if at+eol+1 != len(raw) {
				return "there are bytes after the empty line that ends the head"
			}
			return ""
		}
		if len(h.Lines) == maxLines {
			return "the head has more than 256 header lines"
		}
		if text[0] == ' ' || text[0] == '\t' {
			return "a header line must not begin with white space (obsolete folding)"
		}
		colon := bytes.IndexByte(text, ':')
		if colon < 0 {
			return "a header line has no colon"
		}
		if !isToken(text[:colon]) {
			return "a header name is empty or holds a character that names may not have"
		}
		value, end := colon+1, len(text)
		for value < end && (text[value] == ' ' || text[value] == '\t') {
			value++
		}
		for end > value && (text[end-1] == ' ' || text[end-1] == '\t') {
			end--
		}
		for _, b := range text[value:end] {
			if b < ' ' && b != '\t' || b == 0x7f {
				return "the value of header " + string(text[:min(colon, 80)]) + " holds a control character"
			}
		}
		h.Lines = append(h.Lines, Line{uint32(at), uint32(at + colon), uint32(at + value), uint32(at + end)})
		at += eol + 1
	}
	if len(raw) != 0 {
		return "the head does not end with an empty line"
	}
	return ""
}

// checkFraming checks the lines about framing, host and content type, and sets the length and the
// connection options.
func (h *Head) checkFraming() string {
	var hosts, lengths, encodings, types int
	for i := range h.Lines {
		l := &h.Lines[i]
		name, value := h.Name(l), h.Value(l)
		switch len(name) {
		case len("Host"):
			if ascii.EqualFold(name, "Host") {
				hosts++
				if !isAuthority(value) {
					return "the Host header must be one host, with or without a port: host[:port]"
				}
			}
		case len("Content-Type"):
			if ascii.EqualFold(name, "Content-Type") {
				types++
			}
		case len("Content-Length"):
			if ascii.EqualFold(name, "Content-Length") {
				lengths++
				n, ok := parseLength(value)
				if !ok {
					return "Content-Length must be one number of decimal digits"
				}
				h.Length = n
			}
		case len("Transfer-Encoding"):
			if ascii.EqualFold(name, "Transfer-Encoding") {
				encodings++
				if !ascii.EqualFold(value, "chunked") {
					return "Transfer-Encoding must be chunked"
				}
			}
		case len("Expect"):
			h.HasExpect = h.HasExpect || ascii.EqualFold(name, "Expect")
		case len("Connection"):
			if ascii.EqualFold(name, "Connection") && !h.addConnectionOptions(l) {
				return "the Connection header must name at most 32 other headers"
			}
		}
	}
	switch {
	case hosts > 1 || hosts == 0 && h.HTTP11:
		return "there must be exactly one Host header"
	case lengths > 1:
		return "there must be at most one Content-Length header"
	case types > 1: // the router checks the first; an engine may use another
		return "there must be at most one Content-Type header"
	case encodings > 1:
		return "there must be at most one Transfer-Encoding header"
	case encodings == 1 && lengths == 1:
		return "Content-Length and Transfer-Encoding must not come together"
	case encodings == 1 && !h.HTTP11:
		return "Transfer-Encoding needs HTTP/1.1"
	case encodings == 1:
		h.Length = LengthChunked
	}
	return ""
}

// maxConnectionOptions bounds the header names in Connection, because each header line is
// compared with each of them. Clients name one or two.
const maxConnectionOptions = 32

// addConnectionOptions adds the options of a Connection line. It returns false if there are too
// many.
func (h *Head) addConnectionOptions(l *Line) bool {
	for at := l.value; at < l.valueEnd; {
		end := at
		for end < l.valueEnd && h.raw[end] != ',' {
			end++
		}
		from, to := at, end
		for from < to && (h.raw[from] == ' ' || h.raw[from] == '\t') {
			from++
		}
		for to > from && (h.raw[to-1] == ' ' || h.raw[to-1] == '\t') {
			to--
		}
		switch option := h.raw[from:to]; {
		case len(option) == 0, ascii.EqualFold(option, "keep-alive"):
		case ascii.EqualFold(option, "close"):
			h.Close = true
		case len(h.options) == maxConnectionOptions:
			return false
		default:
			h.hasNominated = true
			h.options = append(h.options, [2]uint32{from, to})
		}
		at = end + 1
	}
	return true
}

// IsOption reports whether Connection names this header, so that it is hop-by-hop.
func (h *Head) IsOption(name []byte) bool {
	if !h.hasNominated {
		return false
	}
	for _, o := range h.options {
		if ascii.EqualFold(h.raw[o[0]:o[1]], name) {
			return true
		}
	}
	return false
}

// parseLength parses a Content-Length. It accepts only digits, at most 18 of them, because two
// servers may disagree on a sign or an overflow.
func parseLength(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// tokenByte has the bytes of a token (RFC 9110, 5.6.2), hostByte those of a host and port (RFC
// 3986, 3.2.2), as lenient as net/http.
var tokenByte, hostByte = byteSet("!#$%&'*+-.^_`|~"), byteSet("!$%&'()*+,-.:;=[]_~")

func byteSet(more string) (set [256]bool) {
	for c := '0'; c <= '9'; c++ {
		set[c] = true
	}
	for c := 'a'; c <= 'z'; c++ {
		set[c], set[c-'a'+'A'] = true, true
	}
	for i := range len(more) {
		set[more[i]] = true
	}
	return set
}

// IsTokenByte reports whether b may occur in a token, such as a method or a header name.
func IsTokenByte(b byte) bool { return tokenByte[b] }

func isToken(b []byte) bool {
	for _, c := range b {
		if !tokenByte[c] {
			return false
		}
	}
	return len(b) > 0
}
