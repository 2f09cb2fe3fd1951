package front

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"time"
)

// plainHint is what a client gets that speaks HTTP where TLS is spoken.
const plainHint = "HTTP/1.0 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n\r\nthis port speaks HTTPS; use https://\n"

// tlsHandshake is the first byte of a TLS hello's record (RFC 8446, 5.1), with which no
// request begins.
const tlsHandshake = 0x16

// refuseTLS counts and tells of a connection that is closed because its client speaks TLS,
// which is not spoken here. An answer in HTTP would be nothing to that client.
func (c *conn) refuseTLS() {
	if o := c.srv.opt.Observer; o != nil {
		o.Refused("", BadTLS)
	}
	c.srv.shakes.say(c.srv.opt.Log, slog.LevelInfo, "connection closed: its client speaks TLS, and this port plain HTTP; use http://, or set tls.cert and tls.key", "client", c.ip)
}

// handshake opens the TLS of a connection within the time of a head. It is done when
// fasthttp first reads, on the connection's own goroutine, so that a client that does
// not go on holds up nobody.
func (c *conn) handshake() error {
	if err := c.secure.SetDeadline(time.Now().Add(c.srv.live().HeadTimeout)); err != nil {
		return err
	}
	err := c.secure.Handshake()
	if err == nil {
		c.shaken = true
		_ = c.secure.SetWriteDeadline(time.Time{})
		return c.secure.SetReadDeadline(c.readBy.time())
	}
	var header tls.RecordHeaderError
	if errors.As(err, &header) && header.Conn != nil && tokenByte[header.RecordHeader[0]] {
		c.lingered = true
		_, _ = io.WriteString(header.Conn, plainHint)
	}
	if o := c.srv.opt.Observer; o != nil {
		o.Refused("", BadTLS)
	}
	if errors.Is(err, io.EOF) { // it said nothing: a balancer that looks whether the port is open
		c.srv.opt.Log.Debug("TLS handshake failed", "client", c.RemoteAddr().String(), "error", err)
	} else {
		c.srv.shakes.say(c.srv.opt.Log, slog.LevelInfo, "TLS handshake failed", "client", c.RemoteAddr().String(), "error", err)
	}
	return err
}
