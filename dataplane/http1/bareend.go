package http1

import (
	"bytes"
)

// BareEndMessage refuses a head with a line that ends in LF without CR, or with a CR that LF does
// not follow. RFC 9112, 2.2, allows a server to accept the former and to replace the latter with a
// space. But two servers that parse such a head differently can be made to see different requests.
const BareEndMessage = "header lines must end with CRLF"

// BareEndScanner looks for a bare LF or CR in the head that fasthttp reads. fasthttp itself would
// wait for CRLF CRLF, which never comes in a head whose lines end otherwise. The zero value is at
// the beginning of a head.
type BareEndScanner struct {
	Begun bool // a byte other than an empty line's has been read
	Ended bool // the empty line has been read; the body follows
	Bare  bool // there was a bare LF in the head, or a bare CR
	empty bool // the current line is empty so far
	last  byte
}

// Scan examines the next bytes of the connection. It accepts a bare LF as an empty line before the
// head, as fasthttp does.
func (s *BareEndScanner) Scan(p []byte) {
	for _, b := range p {
		switch {
		case s.Ended || s.Bare:
			return
		case b != '\n':
			s.Bare = s.last == '\r'
			s.Begun = s.Begun || b != '\r'
			s.empty = s.empty && b == '\r'
		case s.last != '\r':
			s.Bare = s.Begun
		default:
			s.Ended, s.empty = s.Begun && s.empty, true
		}
		s.last = b
	}
}

// HasBareEnd reports whether an incomplete head has a bare LF or CR. It skips the bytes before from,
// which an earlier call has examined. A bare LF before the head is an empty line. A CR at the end may
// still be followed by LF.
func HasBareEnd(head []byte, from int) bool {
	begin := len(head) - len(bytes.TrimLeft(head, LineEnds))
	for at := max(from-1, 0); ; at++ { // head[from-1] may be a CR
		i := bytes.IndexAny(head[at:], LineEnds)
		if i < 0 {
			return false
		}
		switch at += i; {
		case head[at] == '\n':
			if at >= begin && head[at-1] != '\r' {
				return true
			}
		case at+1 < len(head) && head[at+1] != '\n':
			return true
		}
	}
}

// LineEnds are the bytes of empty lines, which may precede a request: some clients end a body with one.
const LineEnds = "\r\n"
