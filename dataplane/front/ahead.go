package front

import (
	"bytes"
	"io"
	"time"

	"sluice/dataplane/membudget"
)

// ahead is the read-ahead of a connection that begins, or comes back from a
// stream. fasthttp asks such a connection for one byte, holding no memory, and
// only then takes its 16 KiB reader. We give that byte when the whole head has
// come: a client that trickles its head costs 4 KiB and a goroutine, one that
// sends nothing not even these; and the head and a short body take one read of
// the socket instead of two.
type ahead struct {
	fresh  bool // the next read is that one byte
	buf    *membudget.Buffer
	r, w   int
	failed error // after the bytes that came
}

// firstByte waits for a head and gives its first byte; the rest is in buf.
func (c *conn) firstByte(p []byte) (int, error) {
	a := &c.ahead
	a.fresh = false
	for {
		n, err := c.await(opAhead, nil)
		if err != nil && n == 0 && c.tooEarly(err) {
			continue
		}
		if a.w += n; n == 0 {
			if err == nil {
				err = io.EOF
			}
			c.readErr = err
			if a.w == 0 {
				a.drop()
				return 0, err
			}
			a.failed = err
			break
		}
		head := a.buf.B[:a.w]
		if a.w == len(a.buf.B) || bytes.Contains(head, []byte("\r\n\r\n")) || !beginsRequest(head[0]) {
			break
		}
		if a.w == n { // the first piece
			if err := c.SetReadDeadline(time.Now().Add(c.srv.live().HeadTimeout)); err != nil {
				a.failed = err
				break
			}
		}
	}
	return a.take(p), nil
}

// beginsRequest says whether a request may begin with b; something else, such
// as a TLS hello, gets its answer at once.
func beginsRequest(b byte) bool { return tokenByte[b] || b == '\r' || b == '\n' }

// take gives bytes that were read ahead.
func (a *ahead) take(p []byte) int {
	n := copy(p, a.buf.B[a.r:a.w])
	if a.r += n; a.r == a.w {
		a.drop()
	}
	return n
}

func (a *ahead) drop() {
	membudget.Default.Put(a.buf)
	a.buf, a.r, a.w = nil, 0, 0
}
