package front

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// bareEndMessage refuses a head with a line that ends in LF without CR, or with a CR that LF does
// not follow. RFC 9112, 2.2, allows a server to accept the former and to replace the latter with a
// space. But two servers that parse such a head differently can be made to see different requests.
const bareEndMessage = "header lines must end with CRLF"

// bareEndScanner looks for a bare LF or CR in the head that fasthttp reads. fasthttp itself would
// wait for CRLF CRLF, which never comes in a head whose lines end otherwise. The zero value is at
// the beginning of a head.
type bareEndScanner struct {
	begun bool // a byte other than an empty line's has been read
	ended bool // the empty line has been read; the body follows
	bare  bool // there was a bare LF in the head, or a bare CR
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

// scan examines the next bytes of the connection. It accepts a bare LF as an empty line before the
// head, as fasthttp does.
func (s *bareEndScanner) scan(p []byte) {
	for _, b := range p {
		switch {
		case s.ended || s.bare:
			return
		case b != '\n':
			s.bare = s.last == '\r'
			s.begun = s.begun || b != '\r'
			s.empty = s.empty && b == '\r'
		case s.last != '\r':
			s.bare = s.begun
		default:
			s.ended, s.empty = s.begun && s.empty, true
		}
		s.last = b
	}
}

// hasBareEnd reports whether an incomplete head has a bare LF or CR. It skips the bytes before from,
// which an earlier call has examined. A bare LF before the head is an empty line. A CR at the end may
// still be followed by LF.
func hasBareEnd(head []byte, from int) bool {
	begin := len(head) - len(bytes.TrimLeft(head, lineEnds))
	for at := max(from-1, 0); ; at++ { // head[from-1] may be a CR
		i := bytes.IndexAny(head[at:], lineEnds)
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
