package front

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"time"
)

// plaintextHint is what a client gets that speaks HTTP where TLS is spoken.
const plaintextHint = "HTTP/1.0 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\nthis port speaks HTTPS; use https://\n"

// tlsHandshakeByte is the first byte of a TLS hello's record (RFC 8446, 5.1), with which no
// request begins.
const tlsHandshakeByte = 0x16

// rejectTLS counts and tells of a connection that is closed because its client speaks TLS,
// which is not spoken here. An answer in HTTP would be nothing to that client.
func (c *conn) rejectTLS() {
	if o := c.srv.initial.Observer; o != nil {
		o.Refused("", BadTLS)
	}
	c.srv.tlsErrorLog.log(c.srv.initial.Log, slog.LevelInfo, "connection closed: its client speaks TLS, and this port plain HTTP; use http://, or set tls.cert and tls.key", "client", c.ip)
}

// handshake opens the TLS of a connection within the time of a head. It is done when
// fasthttp first reads, on the connection's own goroutine, so that a client that does
// not go on holds up nobody.
func (c *conn) handshake() error {
	if err := c.tlsConn.SetDeadline(time.Now().Add(c.srv.options().HeadTimeout)); err != nil {
		return err
	}
	err := c.tlsConn.Handshake()
	if err == nil {
		c.handshakeDone = true
		_ = c.tlsConn.SetWriteDeadline(time.Time{})
		return c.tlsConn.SetReadDeadline(c.readDeadline.time())
	}
	var header tls.RecordHeaderError
	if errors.As(err, &header) && header.Conn != nil && tokenByte[header.RecordHeader[0]] {
		c.needsLinger = true
		_, _ = io.WriteString(header.Conn, plaintextHint)
	}
	if o := c.srv.initial.Observer; o != nil {
		o.Refused("", BadTLS)
	}
	if errors.Is(err, io.EOF) { // it said nothing: a balancer that looks whether the port is open
		c.srv.initial.Log.Debug("TLS handshake failed", "client", c.RemoteAddr().String(), "error", err)
	} else {
		c.srv.tlsErrorLog.log(c.srv.initial.Log, slog.LevelInfo, "TLS handshake failed", "client", c.RemoteAddr().String(), "error", err)
	}
	return err
}
