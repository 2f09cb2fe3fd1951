package front

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/proxyproto"
)

// Proxies says which proxies stand before the server and what they are believed.
type Proxies struct {
	Trusted proxyproto.Networks
	// Protocol: connections of Trusted begin with a PROXY header, or may. Where it is
	// required nobody else is served [ProxyProtocolOff].
	ProxyProtocol ProxyProtocol
	// Forwarded is the header line in which Trusted name the client; the other one is
	// not looked at, since a proxy that does not write it passes on what clients sent
	// [ForwardedOff].
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

// Forwarded names a header line.
type Forwarded string

// Where trusted proxies name the client.
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

// readProxyHeader takes the PROXY header off the connection. It looks at what has come
// without taking it from the socket until the header is whole, so that nothing behind
// it needs to be kept: TLS, the read-ahead and the event loops go on with the socket as
// if there had been none. Like the TLS handshake it is done at the first read, on the
// connection's own goroutine, and has the time of a head.
func (c *conn) readProxyHeader() error {
	c.expectProxyHeader = false
	defer c.readState.unpin()
	live := c.srv.options()
	h, err := c.peekProxyHeader()
	switch {
	case err == nil:
	case errors.Is(err, proxyproto.ErrNoHeader) && live.Proxies.ProxyProtocol == ProxyProtocolOptional:
		if live.Proxies.Forwarded == ForwardedOff {
			return c.acquireClientIP(live) // somebody who is there besides the proxy
		}
		return c.resetHeadDeadline()
	case errors.Is(err, io.EOF):
		return err // gone without a word, as probes of a port do
	default:
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.New("no whole PROXY header came in time; is the one that connects a proxy that sends one?")
		}
		if errors.Is(err, proxyproto.ErrNoHeader) {
			err = errors.New("the connection does not begin with a PROXY header; make its proxy send one (send-proxy, proxy_protocol on), or set proxies.protocol to optional")
		}
		c.srv.rejectProxyHeader(c, err)
		return err
	}
	if !h.Client.IsValid() {
		return c.resetHeadDeadline() // the proxy speaks for itself
	}
	c.ip = h.Client.Addr()
	c.fromProxy = live.Proxies.Trusted.Contain(c.ip)
	return c.acquireClientIP(live)
}

// acquireClientIP counts the connection among its client's.
func (c *conn) acquireClientIP(live *Options) error {
	if !c.fromProxy || live.Proxies.Forwarded == ForwardedOff {
		if !c.srv.conns.acquireConnIP(c, live.MaxConnsPerIP) {
			c.srv.respondTooManyConns(c)
			c.needsLinger = true // its request may be there already
			return errors.New("too many connections of this client")
		}
	}
	return c.resetHeadDeadline()
}

// resetHeadDeadline gives what comes behind the header its own time.
func (c *conn) resetHeadDeadline() error {
	return c.SetReadDeadline(time.Now().Add(c.srv.options().HeadTimeout))
}

// rejectProxyHeader counts and logs a connection that is closed for its PROXY header.
func (s *Server) rejectProxyHeader(c *conn, err error) {
	if o := s.initial.Observer; o != nil {
		o.Refused("", BadProxyHeader)
	}
	s.proxyHeaderLog.warn(s.initial.Log, "connection closed: its PROXY header cannot be used", "from", c.ip, "error", err)
}

// peekProxyHeader waits for a whole header and takes it off the socket.
func (c *conn) peekProxyHeader() (h proxyproto.Header, err error) {
	if c.raw == nil {
		return h, errors.New("the connection has no descriptor to look at")
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
			if !peerClosed(int(fd)) {
				return false // the poller wakes us when more has come
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

// ClientIP is the address of the client: the connection's other end, or what trusted
// proxies say of it (Options.Proxies); invalid where neither tells one. A proxy that is
// not trusted stands for all of its clients.
func (x *Exchange) ClientIP() netip.Addr { return x.ip }

// Unix says whether the request came over a unix socket, so that no proxy stands for its
// client. HTTP clients never do.
func (x *Exchange) Unix() bool { return x.unix }

// resolveClientIP finds the client's address.
func (x *Exchange) resolveClientIP() {
	x.ip = x.c.ip
	p := &x.srv.options().Proxies
	if !x.c.fromProxy || p.Forwarded == ForwardedOff {
		return
	}
	chain := proxyproto.ForwardedChain{Trusted: p.Trusted}
	for i := range x.head.lines {
		l := &x.head.lines[i]
		switch name := x.head.nameOf(l); {
		case p.Forwarded == ForwardedX && equalFold(name, string(ForwardedX)):
			chain.AddXForwardedFor(x.head.valueOf(l))
		case p.Forwarded == ForwardedRFC && equalFold(name, string(ForwardedRFC)):
			chain.AddForwarded(x.head.valueOf(l))
		}
	}
	if ip := chain.Client(); ip.IsValid() {
		x.ip = ip
	}
}

// acquireForwardedIP counts a request that a proxy forwards among its client's, of whom the
// connection told nothing; when there are too many it has answered and gives false.
func (x *Exchange) acquireForwardedIP() bool {
	live := x.srv.options()
	if !x.c.fromProxy || live.Proxies.Forwarded == ForwardedOff {
		return true
	}
	var ok bool
	if x.countedIP, ok = x.srv.conns.acquireIP(x.ip, live.MaxConnsPerIP); !ok {
		x.Error(TooManyConnections, "", "too many requests of this client are under way; try again later", time.Second)
	}
	return ok
}
