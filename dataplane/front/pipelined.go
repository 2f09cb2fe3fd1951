package front

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/sock"
)

// early finds requests that came before the answer to the one before had left
// (pipelining, RFC 9112 9.3.2). They are refused: the first is answered as ever, the one
// behind it is told so, and the connection ends. Served in turn they would wait behind
// an answer that takes minutes, unseen by limits and drain, and a client that leaves
// could not be told from one that has more to say.
//
// What came is looked for as the last bytes of an answer leave, so a client that sends
// its next request as soon as it has the answer is never taken for one that did not
// wait. The bytes are in one of two places. They may have been read with the request before:
// the plain lane sees them in its read-ahead; fasthttp's reader then has no need to read
// while it waits for the next request. Or they are in the socket still (or in TLS),
// which is asked. What the plain lane finds it leaves to fasthttp's, which refuses it.
//
// It belongs to whoever serves the connection, as the plain fields of conn do.
type early struct {
	asks   bool // an answer leaves: the socket is asked before each of its writes
	came   bool // it had something
	after  bool // an answer has left, and no request has begun since
	read   bool // since then the socket was read: nothing had come before
	rest   bool // the request that has begun did so in fasthttp's reader
	begin  [8]byte
	begins uint8 // how many of begin are known: what was read since, but for line ends
}

// Empty lines between requests are no request: some clients end a body with one.
const lineEnds = "\r\n"

// idle notes that an answer has left and the next request is waited for.
func (e *early) idle() { e.asks, e.after, e.read, e.rest, e.begins = false, true, false, false, 0 }

// active notes that a request begins.
func (e *early) active() { e.after, e.rest = false, e.after && !e.read }

// took notes what fasthttp reads.
func (e *early) took(p []byte) {
	e.read = true
	if e.rest && int(e.begins) < len(e.begin) {
		if e.begins == 0 {
			p = bytes.TrimLeft(p, lineEnds)
		}
		e.begins += uint8(copy(e.begin[e.begins:], p))
	}
}

// is says whether the request whose method was read came too early. What fasthttp's
// reader held may have been line ends alone, and then the whole request was read since.
func (e *early) is(method []byte) bool {
	n := min(int(e.begins), len(method))
	return e.came || e.rest && (n == 0 || !bytes.Equal(e.begin[:n], method[:n]))
}

// atSocket asks a plain connection's descriptor.
func (e *early) atSocket(fd uintptr) {
	n, _ := sock.Peek(int(fd), e.begin[:]) // of no other use while an answer leaves
	e.sees(e.begin[:n])
}

// sees notes what came before an answer has left.
func (e *early) sees(p []byte) { e.came = e.came || len(bytes.Trim(p, lineEnds)) > 0 }

// lookAhead asks the connection whether more has come, without waiting.
func (c *conn) lookAhead() {
	e := &c.early
	switch {
	case c.raw == nil || e.came:
	case c.secure == nil:
		s := c.serving
		if s == nil { // a loop drives its stream
			s = servings.Get()
			s.c = c
			defer func() { s.c = nil; servings.Put(s) }()
		}
		_ = c.raw.Control(s.look)
	case c.ahead.buf == nil:
		c.probing = true
		defer func() { c.probing = false }()
		n, _ := c.secure.Read(c.probe[:]) // an end or an error comes again
		if n == 0 {
			return
		}
		a := &c.ahead
		a.buf = membudget.Default.Get(membudget.Page)
		a.buf.B[0] = c.probe[0]
		n, _ = c.secure.Read(a.buf.B[1:])
		a.r, a.w = 0, int32(1+n)
		e.sees(a.buf.B[:a.w])
	}
}

// leftover says whether fasthttp's reader of a hijacked connection holds the beginning
// of a next request, without touching the socket. What it holds is lost.
func (c *conn) leftover(hijacked io.Reader) bool {
	c.probing = true
	defer func() { c.probing = false }()
	for {
		n, err := hijacked.Read(c.probe[:])
		if n > 0 && c.probe[0] != '\r' && c.probe[0] != '\n' {
			return true
		}
		if n == 0 || err != nil {
			return false
		}
	}
}

// Ending implements relay.Ender.
func (st *stream) Ending() {
	if st.keep {
		st.c.lookAhead()
	}
}

const pipelinedText = "this request came before the answer to the one before it on the same connection (pipelining), which is not served; send it again behind that answer, or on a connection of its own"

// refuseEarly tells a client, behind the answer to its request, that the next one came
// too early. The connection ends with it.
func (s *Server) refuseEarly(c *conn) {
	c.lingered = true
	id := s.ids.make()
	_, _ = c.Write(refusalOf(Pipelined, pipelinedText, id))
	s.refused("", Pipelined, refusal{id: id, client: c.ip})
}

// refusalOf is a whole answer behind which a connection ends, for those that no Exchange
// was made for; lines are more header lines, each with its end.
func refusalOf(reason Reason, message, id string, lines ...string) []byte {
	body := appendError(nil, 0, reason, "", message, id)
	head := fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\nX-Sluice-Reason: %s\r\nX-Request-Id: %s\r\n",
		reason.Status(), phrase(reason.Status()), len(body), reason, id)
	head = appendDate(head, time.Now())
	for _, line := range lines {
		head = append(head, line...)
	}
	return append(append(head, lineEnds...), body...)
}

// underTLS is the connection below a TLS one, which can be asked for what has come.
type underTLS struct {
	net.Conn
	c *conn
}

func (u *underTLS) Read(p []byte) (n int, err error) {
	if !u.c.probing {
		if n, err = u.Conn.Read(p); n > 0 && u.c.shaken {
			u.c.input.hear() // half of a record stays with crypto/tls
		}
		return n, err
	}
	err = errProbe
	_ = u.c.raw.Control(func(fd uintptr) {
		if got, errno := sock.Recv(int(fd), p); errno == 0 {
			if n, err = got, nil; got == 0 {
				err = io.EOF
			}
		}
	})
	return n, err
}

// Write waits for a stream's client that reads slowly.
func (u *underTLS) Write(p []byte) (int, error) { return u.c.persist(u.Conn, p) }

// probeError is what a read gives that must not wait: crypto/tls goes on after one that
// is temporary.
type probeError struct{}

func (probeError) Error() string   { return "front: nothing has come" }
func (probeError) Timeout() bool   { return true }
func (probeError) Temporary() bool { return true }

var errProbe net.Error = probeError{}
