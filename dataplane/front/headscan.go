package front

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// bareLFMessage is the refusal of a head with a line that ends without CR. RFC 9112, 2.2, lets a
// server accept it; two servers that read such a head differently can be made to see
// different requests.
const bareLFMessage = "header lines must end with CRLF"

// bareLFScanner looks for a bare LF in the head that fasthttp reads. fasthttp waits for CRLF
// CRLF, which a head of bare LFs never has. The zero value is at the beginning of a head.
type bareLFScanner struct {
	begun bool // something besides empty lines has come
	ended bool // the empty line has come: what follows is the body
	bare  bool // a line ended with a bare LF
	empty bool // the line being read is empty so far
	last  byte
	reads uint8 // that brought some of the head, but not its end
	room  headRoom
}

// headRoom says whether a head that fasthttp reads takes of the budget.
type headRoom uint8

const (
	headUncounted headRoom = iota
	headCounted
	headRefused // the budget was spent
)

// shortReads is how many reads of a head go without being counted: fasthttp reads the first
// byte by itself, and most heads come whole with the next. Behind these the head waits for its
// client.
const shortReads = 2

// countHead counts the buffer in which fasthttp reads a head over TLS, once the head has not
// come whole; false where the budget is spent. A plain connection's head waits in the lobby.
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

// uncountHead gives back what countHead has taken.
func (c *conn) uncountHead() {
	if c.scan.room == headCounted {
		c.srv.budget.Release(headBuffer(c.srv))
		c.scan.room = headUncounted
	}
}

// headBuffer is the memory of fasthttp's buffer.
func headBuffer(s *Server) int64 { return int64(membudget.SizeOf(s.initial.MaxHeadBytes)) }

// scan takes the next bytes of the connection.
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

// hasBareLF says whether a line of head, which has not come whole, ends with a bare LF.
// Bytes before from were looked at already. Empty lines before the head are none of it.
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
