package front

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
)

// pipelineDetector finds requests that came before the answer to the one before had left
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
type pipelineDetector struct {
	responding        bool // an answer leaves: the socket is asked before each of its writes
	found             bool // it had something
	idleSinceResponse bool // an answer has left, and no request has begun since
	read              bool // since then the socket was read: nothing had come before
	startedBuffered   bool // the request that has begun did so in fasthttp's reader
	prefix            [8]byte
	prefixLen         uint8 // how many of begin are known: what was read since, but for line ends
}

// Empty lines between requests are no request: some clients end a body with one.
const lineEnds = "\r\n"

// onIdle notes that an answer has left and the next request is waited for.
func (e *pipelineDetector) onIdle() {
	e.responding, e.idleSinceResponse, e.read, e.startedBuffered, e.prefixLen = false, true, false, false, 0
}

// onRequest notes that a request begins.
func (e *pipelineDetector) onRequest() {
	e.idleSinceResponse, e.startedBuffered = false, e.idleSinceResponse && !e.read
}

// onRead notes what fasthttp reads.
func (e *pipelineDetector) onRead(p []byte) {
	e.read = true
	if e.startedBuffered && int(e.prefixLen) < len(e.prefix) {
		if e.prefixLen == 0 {
			p = bytes.TrimLeft(p, lineEnds)
		}
		e.prefixLen += uint8(copy(e.prefix[e.prefixLen:], p))
	}
}

// isPipelined says whether the request whose method was read came too early. What fasthttp's
// reader held may have been line ends alone, and then the whole request was read since.
func (e *pipelineDetector) isPipelined(method []byte) bool {
	n := min(int(e.prefixLen), len(method))
	return e.found || e.startedBuffered && (n == 0 || !bytes.Equal(e.prefix[:n], method[:n]))
}

// peekSocket asks a plain connection's descriptor.
func (e *pipelineDetector) peekSocket(fd uintptr) {
	n, _ := rawsocket.Peek(int(fd), e.prefix[:]) // of no other use while an answer leaves
	e.onBytes(e.prefix[:n])
}

// onBytes notes what came before an answer has left.
func (e *pipelineDetector) onBytes(p []byte) { e.found = e.found || len(bytes.Trim(p, lineEnds)) > 0 }

// checkPipelined asks the connection whether more has come, without waiting.
func (c *conn) checkPipelined() {
	e := &c.pipelined
	switch {
	case c.raw == nil || e.found:
	case c.tlsConn == nil:
		s := c.connState
		if s == nil { // a loop drives its stream
			s = connStates.Get()
			s.c = c
			defer func() { s.c = nil; connStates.Put(s) }()
		}
		_ = c.raw.Control(s.peekFunc)
	case c.readAhead.buf == nil:
		c.probing = true
		defer func() { c.probing = false }()
		n, _ := c.tlsConn.Read(c.probe[:]) // an end or an error comes again
		if n == 0 {
			return
		}
		a := &c.readAhead
		a.buf = membudget.Default.Get(membudget.Page)
		a.buf.B[0] = c.probe[0]
		n, _ = c.tlsConn.Read(a.buf.B[1:])
		a.r, a.w = 0, int32(1+n)
		e.onBytes(a.buf.B[:a.w])
	}
}

// hasBuffered says whether fasthttp's reader of a hijacked connection holds the beginning
// of a next request, without touching the socket. What it holds is lost.
func (c *conn) hasBuffered(hijacked io.Reader) bool {
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

// BeforeEnd implements relay.ClientConn.
func (st *stream) BeforeEnd() {
	if st.keep {
		st.c.checkPipelined()
	}
}

const pipelinedMessage = "this request came before the answer to the one before it on the same connection (pipelining), which is not served; send it again behind that answer, or on a connection of its own"

// rejectPipelined tells a client, behind the answer to its request, that the next one came
// too early. The connection ends with it.
func (s *Server) rejectPipelined(c *conn) {
	c.needsLinger = true
	id := s.ids.next()
	_, _ = c.Write(rawRefusal(Pipelined, pipelinedMessage, id))
	s.reportRefused("", Pipelined, refusal{id: id, client: c.ip})
}

// rawRefusal is a whole answer behind which a connection ends, for those that no Exchange
// was made for; lines are more header lines, each with its end.
func rawRefusal(reason Reason, message, id string, lines ...string) []byte {
	body := appendError(nil, 0, reason, "", message, id)
	head := fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\nX-Sluice-Reason: %s\r\nX-Request-Id: %s\r\n",
		reason.Status(), reasonPhrase(reason.Status()), len(body), reason, id)
	head = appendDate(head, time.Now())
	for _, line := range lines {
		head = append(head, line...)
	}
	return append(append(head, lineEnds...), body...)
}

// tlsTransport is the connection below a TLS one, which can be asked for what has come.
type tlsTransport struct {
	net.Conn
	c *conn
}

func (u *tlsTransport) Read(p []byte) (n int, err error) {
	if !u.c.probing {
		if n, err = u.Conn.Read(p); n > 0 && u.c.handshakeDone {
			u.c.readState.startRead() // half of a record stays with crypto/tls
		}
		return n, err
	}
	err = errProbe
	_ = u.c.raw.Control(func(fd uintptr) {
		if got, errno := rawsocket.Recv(int(fd), p); errno == 0 {
			if n, err = got, nil; got == 0 {
				err = io.EOF
			}
		}
	})
	return n, err
}

// Write waits for a stream's client that reads slowly.
func (u *tlsTransport) Write(p []byte) (int, error) { return u.c.writeWithStallCheck(u.Conn, p) }

// probeError is what a read gives that must not wait: crypto/tls goes on after one that
// is temporary.
type probeError struct{}

func (probeError) Error() string   { return "front: nothing has come" }
func (probeError) Timeout() bool   { return true }
func (probeError) Temporary() bool { return true }

var errProbe net.Error = probeError{}
