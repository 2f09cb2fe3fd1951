package front

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// bareLFMessage refuses a head with a line that ends in LF without CR. RFC 9112, 2.2, allows a
// server to accept such a line. But two servers that parse such a head differently can be made
// to see different requests.
const bareLFMessage = "header lines must end with CRLF"

// bareLFScanner looks for a bare LF in the head that fasthttp reads. fasthttp itself would wait
// for CRLF CRLF, which never comes in a head with bare LFs. The zero value is at the beginning
// of a head.
type bareLFScanner struct {
	begun bool // a byte other than an empty line's has been read
	ended bool // the empty line has been read; the body follows
	bare  bool // a line has ended with a bare LF
	empty bool // the current line is empty so far
	last  byte
	reads uint8 // reads that returned a part of the head, but not its end
	room  headRoom
}

// headRoom says whether the memory budget includes fasthttp's buffer for a head.
type headRoom uint8

const (
	headUncounted headRoom = iota
	headCounted
	headRefused // the budget had no room for it
)

// shortReads is how many reads of a head are not counted against the budget. fasthttp reads the
// first byte alone, and most heads are complete with the next read. After these, fasthttp's
// buffer waits for a slow client.
const shortReads = 2

// countHead counts fasthttp's buffer against the budget while a head over TLS is incomplete after
// shortReads reads. It returns false if the budget is exhausted. An incomplete head without
// TLS waits in the pending-header queue instead.
func (c *conn) countHead() bool {
	if c.tlsConn == nil || c.scan.ended || c.scan.reads < shortReads || c.scan.room == headCounted {
		return true
	}
	if !c.srv.budget.Acquire(headBuffer(c.srv)) {
		c.scan.room = headRefused
		return false
	}
	c.scan.room = headCounted
	return true
}

// uncountHead releases the budget that countHead has acquired.
func (c *conn) uncountHead() {
	if c.scan.room == headCounted {
		c.srv.budget.Release(headBuffer(c.srv))
		c.scan.room = headUncounted
	}
}

// headBuffer is the size of fasthttp's buffer for a head, as the budget counts it.
func headBuffer(s *Server) int64 { return int64(membudget.SizeOf(s.initial.MaxHeadBytes)) }

// scan examines the next bytes of the connection.
func (s *bareLFScanner) scan(p []byte) {
	if !s.begun {
		if p = bytes.TrimLeft(p, lineEnds); len(p) == 0 {
			return
		}
		s.begun = true
	}
	for _, b := range p {
		switch {
		case s.ended || s.bare:
			return
		case b != '\n':
			s.empty = s.empty && b == '\r'
		case s.last != '\r':
			s.bare = true
		default:
			s.ended, s.empty = s.empty, true
		}
		s.last = b
	}
}

// hasBareLF reports whether a line of an incomplete head ends with a bare LF. It skips the bytes
// before from, which an earlier call has examined, and empty lines before the head.
func hasBareLF(head []byte, from int) bool {
	begin := len(head) - len(bytes.TrimLeft(head, lineEnds))
	for at := max(from, begin); ; at++ {
		i := bytes.IndexByte(head[at:], '\n')
		if i < 0 {
			return false
		}
		if at += i; head[at-1] != '\r' {
			return true
		}
	}
}
