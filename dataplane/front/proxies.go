package front

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"sluice/dataplane/ascii"
	"sluice/dataplane/membudget"
	"sluice/dataplane/proxyproto"
	"sluice/dataplane/rawsocket"
)

// Proxies lists the proxies in front of the server, and says how they name the client.
type Proxies struct {
	Trusted proxyproto.Networks
	// ProxyProtocol says whether connections from Trusted begin with a PROXY header. If it is
	// ProxyProtocolRequired, connections from other addresses are refused [ProxyProtocolOff].
	ProxyProtocol ProxyProtocol
	// Forwarded is the header line in which Trusted name the client. The server ignores the
	// other line, because a proxy that does not write it forwards whatever the client has
	// sent in it [ForwardedOff].
	Forwarded Forwarded
}

// ProxyProtocol says whether PROXY headers are read.
type ProxyProtocol string

// Whether connections from trusted proxies begin with a PROXY header.
const (
	ProxyProtocolOff      ProxyProtocol = ""
	ProxyProtocolOptional ProxyProtocol = "optional"
	ProxyProtocolRequired ProxyProtocol = "required"
)

// Forwarded is the name of a header line.
type Forwarded string

// The header lines in which trusted proxies can name the client.
const (
	ForwardedOff Forwarded = ""
	ForwardedX   Forwarded = "X-Forwarded-For"
	ForwardedRFC Forwarded = "Forwarded" // RFC 7239
)

func (p *Proxies) check() error {
	switch p.ProxyProtocol {
	case ProxyProtocolOff, ProxyProtocolOptional, ProxyProtocolRequired:
	default:
		return fmt.Errorf("front: cannot use Proxies.Protocol %q: want optional, required, or none", p.ProxyProtocol)
	}
	switch p.Forwarded {
	case ForwardedOff, ForwardedX, ForwardedRFC:
	default:
		return fmt.Errorf("front: cannot use Proxies.Forwarded %q: want %s, %s, or none", p.Forwarded, ForwardedX, ForwardedRFC)
	}
	return nil
}

// readProxyHeader reads the PROXY header of the connection. It peeks at the input until the
// header is complete, and then reads exactly the header, so that no later bytes need a buffer:
// TLS, the read-ahead and the event loops use the socket as if there had been no header. Like
// the TLS handshake it runs at the first read, on the connection's own goroutine, within the
// head timeout.
func (c *conn) readProxyHeader() error {
	c.expectProxyHeader = false
	defer c.readState.allowPass()
	live := c.srv.options()
	h, err := c.peekProxyHeader()
	switch {
	case err == nil:
	case errors.Is(err, proxyproto.ErrNoHeader) && live.Proxies.ProxyProtocol == ProxyProtocolOptional:
		if live.Proxies.Forwarded == ForwardedOff {
			return c.acquireClientIP(live) // a client on the proxy's host that connects directly
		}
		return c.resetHeadDeadline()
	case errors.Is(err, io.EOF):
		return err // closed without a byte, as port probes do
	default:
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.New("no complete PROXY header arrived in time; check that the client is a proxy that sends one, or set proxies.protocol to optional")
		}
		if errors.Is(err, proxyproto.ErrNoHeader) {
			err = errors.New("the connection does not begin with a PROXY header; make its proxy send one (send-proxy, proxy_protocol on), or set proxies.protocol to optional")
		}
		c.srv.rejectProxyHeader(c, err)
		return err
	}
	if !h.Client.IsValid() {
		return c.resetHeadDeadline() // a connection of the proxy itself, such as a health check
	}
	c.ip = h.Client.Addr()
	c.fromProxy = live.Proxies.Trusted.Contain(c.ip)
	return c.acquireClientIP(live)
}

// acquireClientIP counts the connection for its client, unless requests will name their clients.
// It fails if the client has too many connections.
func (c *conn) acquireClientIP(live *Options) error {
	if !c.fromProxy || live.Proxies.Forwarded == ForwardedOff {
		if !c.srv.conns.acquireConnIP(c, live.MaxConnsPerIP) {
			c.srv.respondTooManyConns(c)
			c.needsLinger = true // the request may have arrived already
			return errors.New("too many connections of this client")
		}
	}
	return c.resetHeadDeadline()
}

// resetHeadDeadline starts the head timeout again.
func (c *conn) resetHeadDeadline() error {
	return c.SetReadDeadline(time.Now().Add(c.srv.options().HeadTimeout))
}

// rejectProxyHeader reports and logs a connection that is closed because of its PROXY header.
func (s *Server) rejectProxyHeader(c *conn, err error) {
	if o := s.initial.Observer; o != nil {
		o.Refused("", BadProxyHeader)
	}
	s.proxyHeaderLog.warn(s.initial.Log, "connection closed: its PROXY header cannot be used", "client", c.ip, "error", err)
}

// peekProxyHeader waits for a complete header and removes it from the socket.
func (c *conn) peekProxyHeader() (h proxyproto.Header, err error) {
	if c.raw == nil {
		return h, errors.New("the connection has no descriptor")
	}
	if err := c.resetHeadDeadline(); err != nil {
		return h, err
	}
	buf := membudget.Default.Get(proxyproto.MaxHeader)
	defer membudget.Default.Put(buf)
	var failed error
	err = c.raw.Read(func(fd uintptr) bool {
		n, again, peekErr := peekRaw(int(fd), buf.B)
		switch {
		case again:
			return false
		case peekErr != nil:
			failed = peekErr
			return true
		}
		if h, failed = proxyproto.Parse(buf.B[:n]); errors.Is(failed, proxyproto.ErrIncomplete) {
			if !rawsocket.PeerClosed(int(fd)) {
				return false // Go's poller calls again when more input arrives
			}
			failed = errors.New("the connection ended within its PROXY header")
		}
		if failed == nil {
			failed = skip(int(fd), buf.B[:h.Size])
		}
		return true
	})
	if failed == nil || err != nil && errors.Is(failed, proxyproto.ErrIncomplete) {
		failed = err
	}
	return h, failed
}

// resolveClientIP sets x.ClientIP to the client's address.
func (x *httpExchange) resolveClientIP() {
	x.ClientIP = x.c.ip
	p := &x.srv.options().Proxies
	if !x.c.fromProxy || p.Forwarded == ForwardedOff {
		return
	}
	chain := proxyproto.ForwardedChain{Trusted: p.Trusted}
	for i := range x.head.Lines {
		l := &x.head.Lines[i]
		switch name := x.head.Name(l); {
		case p.Forwarded == ForwardedX && ascii.EqualFold(name, string(ForwardedX)):
			chain.AddXForwardedFor(x.head.Value(l))
		case p.Forwarded == ForwardedRFC && ascii.EqualFold(name, string(ForwardedRFC)):
			chain.AddForwarded(x.head.Value(l))
		}
	}
	if ip := chain.Client(); ip.IsValid() {
		x.ClientIP = ip
	}
}

// acquireForwardedIP counts a request from a trusted proxy for the client that its header lines
// name, because the connection is not counted for a client. If the client has too many
// requests it answers with an error and returns false.
func (x *httpExchange) acquireForwardedIP() bool {
	live := x.srv.options()
	if !x.c.fromProxy || live.Proxies.Forwarded == ForwardedOff {
		return true
	}
	var ok bool
	if x.countedIP, ok = x.srv.conns.acquireIP(x.ClientIP, live.MaxConnsPerIP); !ok {
		x.Error(TooManyConnections, "", "too many requests of this client are in flight; try again later", time.Second)
	}
	return ok
}
