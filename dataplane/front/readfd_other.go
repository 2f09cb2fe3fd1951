//go:build !unix

package front

import "errors"

// tryRead is never called here: connections get no read-ahead.
func (c *conn) tryRead(uintptr) bool {
	c.ahead.n, c.ahead.err = 0, errors.ErrUnsupported
	return true
}
