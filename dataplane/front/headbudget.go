package front

import "sluice/dataplane/membudget"

// headBudget says how much of fasthttp's buffer for a head the memory budget includes. The zero value
// is at the beginning of a head.
type headBudget struct {
	reads uint8 // reads that returned a part of the head, but not its end
	state headState
}

// headState says whether the memory budget includes fasthttp's buffer for a head.
type headState uint8

const (
	headUncounted headState = iota
	headCounted
	headRefused // the budget was exhausted
)

// shortReads is how many reads of a head are not counted against the budget. fasthttp reads the
// first byte alone, and most heads are complete with the next read. After these, fasthttp's
// buffer waits for a slow client.
const shortReads = 2

// countHead counts fasthttp's buffer against the budget while a head over TLS is incomplete after
// shortReads reads. It returns false if the budget is exhausted. An incomplete head without
// TLS waits in the pending-header queue instead.
func (c *conn) countHead() bool {
	if c.tlsConn == nil || c.scan.Ended || c.headBudget.reads < shortReads || c.headBudget.state == headCounted {
		return true
	}
	if !c.srv.budget.Acquire(headBuffer(c.srv)) {
		c.headBudget.state = headRefused
		return false
	}
	c.headBudget.state = headCounted
	return true
}

// uncountHead releases the budget that countHead has acquired.
func (c *conn) uncountHead() {
	if c.headBudget.state == headCounted {
		c.srv.budget.Release(headBuffer(c.srv))
		c.headBudget.state = headUncounted
	}
}

// headBuffer is the size of fasthttp's buffer for a head, as the budget counts it.
func headBuffer(s *Server) int64 { return int64(membudget.SizeOf(s.initial.MaxHeadBytes)) }
