package front

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"time"

	"sluice/dataplane/http1"
)

// plaintextHint is the response to a client that sends plain HTTP to a TLS port.
const plaintextHint = "HTTP/1.0 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\nthis port speaks HTTPS; use https://\n"

// tlsHandshakeByte is the first byte of the record that has a TLS ClientHello (RFC 8446, 5.1). No
// HTTP request begins with it.
const tlsHandshakeByte = 0x16

// rejectTLS reports and logs a connection that is closed because its client speaks TLS to a plain
// HTTP port. The client gets no response, because it could not read HTTP.
func (c *conn) rejectTLS() {
	if o := c.srv.initial.Observer; o != nil {
		o.Refused("", BadTLS)
	}
	c.srv.tlsErrorLog.log(c.srv.initial.Log, slog.LevelInfo, "connection closed: its client speaks TLS, and this port plain HTTP; use http://, or set tls.cert and tls.key", "client", c.ip)
}

// handshake does the TLS handshake within the head timeout. It runs at fasthttp's first read, on
// the connection's own goroutine, so that a client that stops in the handshake delays nobody
// else.
func (c *conn) handshake() error {
	if err := c.tlsConn.SetDeadline(time.Now().Add(c.srv.options().HeadTimeout)); err != nil {
		return err
	}
	err := c.tlsConn.Handshake()
	if err == nil {
		c.handshakeDone = true
		_ = c.tlsConn.SetWriteDeadline(time.Time{})
		return c.tlsConn.SetReadDeadline(c.readDeadline.Time())
	}
	var header tls.RecordHeaderError
	if errors.As(err, &header) && header.Conn != nil && http1.IsTokenByte(header.RecordHeader[0]) {
		c.needsLinger = true
		_, _ = io.WriteString(header.Conn, plaintextHint)
	}
	if o := c.srv.initial.Observer; o != nil {
		o.Refused("", BadTLS)
	}
	if errors.Is(err, io.EOF) { // closed without a byte: a load balancer's port probe
		c.srv.initial.Log.Debug("TLS handshake failed", "client", c.RemoteAddr().String(), "error", err)
	} else {
		c.srv.tlsErrorLog.log(c.srv.initial.Log, slog.LevelInfo, "TLS handshake failed", "client", c.RemoteAddr().String(), "error", err)
	}
	return err
}
