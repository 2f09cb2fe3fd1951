package front

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"time"

	"sluice/dataplane/http1"
	"sluice/dataplane/membudget"
	"sluice/dataplane/rawsocket"
)

// pipelineDetector finds pipelined requests (RFC 9112, 9.3.2): those that the client has sent
// before the response to the previous request was written. The server refuses them. It answers
// the first request as usual, then the pipelined one with an error, and closes the connection.
// If it served them in order, a request could wait for minutes behind a stream, unseen by
// limits and drain, and a client that disconnects could not be distinguished from one that sends more.
//
// The detector looks for input before each write of a response. A client that sends its next
// request after it has the whole response is therefore never refused. The pipelined bytes are
// in one of two places:
//   - They have been read together with the previous request. The fast path finds them in its
//     read-ahead. fasthttp finds the next request in its own reader without reading from the
//     connection, which the detector notices.
//   - They are still in the socket or in the TLS layer, where checkPipelined looks.
//
// The fast path passes a connection with pipelined bytes to fasthttp, which refuses the request.
//
// The detector belongs to the goroutine that serves the connection, like the fields of conn that
// are not atomic.
type pipelineDetector struct {
	responding        bool // a response is being written: each write is preceded by a check
	found             bool // there were pipelined bytes
	idleSinceResponse bool // a response has been written and no request has begun since
	read              bool // fasthttp has read from the connection since: its reader was empty
	startedBuffered   bool // the current request began with bytes that fasthttp's reader had
	prefix            [8]byte
	prefixLen         uint8 // valid bytes of prefix: the first bytes read since the request began, without line ends
}

// onIdle records that a response has been written and the server waits for the next request.
func (e *pipelineDetector) onIdle() {
	e.responding, e.idleSinceResponse, e.read, e.startedBuffered, e.prefixLen = false, true, false, false, 0
}

// onRequest records that a request begins.
func (e *pipelineDetector) onRequest() {
	e.idleSinceResponse, e.startedBuffered = false, e.idleSinceResponse && !e.read
}

// onRead records bytes that fasthttp has read from the connection.
func (e *pipelineDetector) onRead(p []byte) {
	e.read = true
	if e.startedBuffered && int(e.prefixLen) < len(e.prefix) {
		if e.prefixLen == 0 {
			p = bytes.TrimLeft(p, http1.LineEnds)
		}
		e.prefixLen += uint8(copy(e.prefix[e.prefixLen:], p))
	}
}

// isPipelined reports whether the request with the given method is pipelined. If fasthttp's
// reader had only line ends, the bytes read since begin with the method, and the request is
// not pipelined.
func (e *pipelineDetector) isPipelined(method []byte) bool {
	n := min(int(e.prefixLen), len(method))
	return e.found || e.startedBuffered && (n == 0 || !bytes.Equal(e.prefix[:n], method[:n]))
}

// peekSocket looks for input on the socket of a connection without TLS.
func (e *pipelineDetector) peekSocket(fd uintptr) {
	n, _ := rawsocket.Peek(int(fd), e.prefix[:]) // prefix is unused while a response is written
	e.onBytes(e.prefix[:n])
}

// onBytes records input that arrived before the response was written.
func (e *pipelineDetector) onBytes(p []byte) {
	e.found = e.found || len(bytes.Trim(p, http1.LineEnds)) > 0
}

// checkPipelined looks for pipelined bytes on the connection, without waiting.
func (c *conn) checkPipelined() {
	e := &c.pipelined
	switch {
	case c.raw == nil || e.found:
	case c.tlsConn == nil:
		s := c.connState
		if s == nil { // an event loop drives the stream
			s = connStates.Get()
			s.c = c
			defer func() { s.c = nil; connStates.Put(s) }()
		}
		_ = c.raw.Control(s.peekFunc)
	case c.readAhead.buf == nil:
		c.probing = true
		defer func() { c.probing = false }()
		n, _ := c.tlsConn.Read(c.probe[:]) // a later read returns the end or the error again
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

// hasBuffered reports whether fasthttp's reader of a hijacked connection has bytes of another
// request. It does not read from the socket. The reader's bytes are lost.
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

const pipelinedMessage = "this request arrived before the answer to the previous one on the same connection; pipelining is not supported: send it again after that answer, or on another connection"

// rejectPipelined answers a pipelined request with an error, behind the response to the previous
// request. The connection must then be closed.
func (s *Server) rejectPipelined(c *conn) {
	c.needsLinger = true
	id := s.ids.next()
	_, _ = c.Write(rawRefusal(Pipelined, pipelinedMessage, id))
	s.reportRefused(Refusal{Reason: Pipelined, RequestID: id, Client: c.ip})
}

// rawRefusal returns a whole error response with Connection: close, for a request without an
// Exchange. lines are additional header lines, each with its CRLF.
func rawRefusal(reason Reason, message, id string, lines ...string) []byte {
	body := appendError(nil, 0, reason, "", message, id)
	head := fmt.Appendf(nil, "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\nX-Sluice-Reason: %s\r\nX-Request-Id: %s\r\n",
		reason.Status(), reasonPhrase(reason.Status()), len(body), reason, id)
	head = appendDate(head, time.Now())
	for _, line := range lines {
		head = append(head, line...)
	}
	return append(append(head, http1.LineEnds...), body...)
}

// tlsTransport is the transport below a TLS connection. While conn.probing is set its Read does
// not wait.
type tlsTransport struct {
	net.Conn
	c *conn
}

// Read implements net.Conn for crypto/tls. While conn.probing is set it returns errProbe instead of
// waiting.
func (u *tlsTransport) Read(p []byte) (n int, err error) {
	if !u.c.probing {
		if n, err = u.Conn.Read(p); n > 0 && u.c.handshakeDone {
			u.c.readState.startRead() // crypto/tls may keep an incomplete record
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

// Write waits for the client of a stream if it reads slowly, see writeWithStallCheck.
func (u *tlsTransport) Write(p []byte) (int, error) { return u.c.writeWithStallCheck(u.Conn, p) }

// probeError is the error of a read without waiting that finds no input. It is temporary,
// because crypto/tls works again after a temporary error.
type probeError struct{}

func (probeError) Error() string   { return "front: no data has arrived yet" }
func (probeError) Timeout() bool   { return true }
func (probeError) Temporary() bool { return true }

var errProbe net.Error = probeError{}
