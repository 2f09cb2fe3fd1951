package upstream

import (
	"errors"
	"io"
	"net"
	"syscall"

	"sluice/dataplane/rawsocket"
)

// peerClosedTLS is peerClosed over TLS: a read that fails where it would have to wait.
func (c *conn) peerClosedTLS() bool {
	under, ok := transportOf(c.nc).(*tlsTransport)
	if !ok {
		return false
	}
	under.nonBlocking = true
	n, err := c.nc.Read(c.one[:])
	under.nonBlocking = false
	return n > 0 || !errors.Is(err, errWouldBlock) || under.inRecord()
}

// tlsTruncated reports whether a TLS connection was ended by TCP alone, without the engine's
// close_notify. Anyone on the path can do that, and crypto/tls returns io.EOF in both cases if the
// last record was complete.
func (c *conn) tlsTruncated() bool {
	if c.raw != nil {
		return false
	}
	under, ok := transportOf(c.nc).(*tlsTransport)
	return ok && under.eof
}

// tlsTransport is the connection below TLS, which can be asked for what has arrived.
type tlsTransport struct {
	*net.TCPConn
	raw         syscall.RawConn
	nonBlocking bool // Read must not wait
	eof         bool // TCP has ended; after a close_notify nobody reads that far

	tryReadFunc func(fd uintptr) // allocated once
	p           []byte
	n           int
	errno       syscall.Errno

	// The position in the present TLS record: headerLen bytes of its header have come, and then
	// remaining bytes of its content have not.
	recordHeader    [recordHeaderSize]byte
	headerLen       int
	recordRemaining int
}

// recordHeaderSize is the length of a TLS record's header, whose last two bytes are the length of
// the content (RFC 8446, 5.1).
const recordHeaderSize = 5

// trackRecord records the position after p has been received.
func (u *tlsTransport) trackRecord(p []byte) {
	for len(p) > 0 {
		if u.headerLen < recordHeaderSize {
			n := copy(u.recordHeader[u.headerLen:], p)
			p = p[n:]
			if u.headerLen += n; u.headerLen == recordHeaderSize {
				u.recordRemaining = int(u.recordHeader[3])<<8 | int(u.recordHeader[4])
			}
		} else {
			n := min(u.recordRemaining, len(p))
			p = p[n:]
			u.recordRemaining -= n
		}
		if u.headerLen == recordHeaderSize && u.recordRemaining == 0 {
			u.headerLen = 0
		}
	}
}

// inRecord reports whether a record has come in part. crypto/tls keeps that part and reports that
// nothing has come.
func (u *tlsTransport) inRecord() bool { return u.headerLen > 0 }

func newTLSTransport(t *net.TCPConn) (*tlsTransport, error) {
	raw, err := t.SyscallConn()
	if err != nil {
		return nil, err
	}
	u := &tlsTransport{TCPConn: t, raw: raw}
	u.tryReadFunc = func(fd uintptr) { u.n, u.errno = rawsocket.Recv(int(fd), u.p) }
	return u, nil
}

// Read implements net.Conn for crypto/tls. While nonBlocking is set it returns errWouldBlock instead of
// waiting.
func (u *tlsTransport) Read(p []byte) (int, error) {
	if !u.nonBlocking {
		n, err := u.TCPConn.Read(p)
		u.trackRecord(p[:n])
		u.eof = u.eof || err == io.EOF
		return n, err
	}
	u.p = p
	err := u.raw.Control(u.tryReadFunc)
	u.p = nil
	switch {
	case err != nil:
		return 0, err
	case u.errno == syscall.EAGAIN:
		return 0, errWouldBlock
	case u.errno != 0:
		return 0, u.errno
	case u.n == 0:
		u.eof = true
		return 0, io.EOF
	}
	u.trackRecord(p[:u.n])
	return u.n, nil
}

// wouldBlockError is returned by a read that must not wait. crypto/tls continues after an error
// that is temporary.
type wouldBlockError struct{}

func (wouldBlockError) Error() string   { return "upstream: no data has arrived yet" }
func (wouldBlockError) Timeout() bool   { return true }
func (wouldBlockError) Temporary() bool { return true }

var errWouldBlock net.Error = wouldBlockError{}
