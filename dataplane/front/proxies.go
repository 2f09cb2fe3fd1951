package front

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"sluice/dataplane/membudget"
	"sluice/dataplane/proxied"
)

// Proxies says which proxies stand before the server and what they are believed.
type Proxies struct {
	Trusted proxied.Networks
	// Protocol: connections of Trusted begin with a PROXY header, or may. Where it is
	// required nobody else is served [ProtocolOff].
	Protocol Protocol
	// Forwarded is the header line in which Trusted name the client; the other one is
	// not looked at, since a proxy that does not write it passes on what clients sent
	// [ForwardedOff].
	Forwarded Forwarded
}

// Protocol says whether PROXY headers are read.
type Protocol string

// Whether connections from trusted proxies begin with a PROXY header.
const (
	ProtocolOff      Protocol = ""
	ProtocolOptional Protocol = "optional"
	ProtocolRequired Protocol = "required"
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
	switch p.Protocol {
	case ProtocolOff, ProtocolOptional, ProtocolRequired:
	default:
		return fmt.Errorf("front: cannot use Proxies.Protocol %q: want optional, required, or none", p.Protocol)
	}
	switch p.Forwarded {
	case ForwardedOff, ForwardedX, ForwardedRFC:
	default:
		return fmt.Errorf("front: cannot use Proxies.Forwarded %q: want %s, %s, or none", p.Forwarded, ForwardedX, ForwardedRFC)
	}
	return nil
}

// readHeader takes the PROXY header off the connection. It looks at what has come
// without taking it from the socket until the header is whole, so that nothing behind
// it needs to be kept: TLS, the read-ahead and the event loops go on with the socket as
// if there had been none. Like the TLS handshake it is done at the first read, on the
// connection's own goroutine, and has the time of a head.
func (c *conn) readHeader() error {
	c.headed = false
	defer c.input.mayPass()
	live := c.srv.live()
	h, err := c.peekHeader()
	switch {
	case err == nil:
	case errors.Is(err, proxied.ErrNone) && live.Proxies.Protocol == ProtocolOptional:
		if live.Proxies.Forwarded == ForwardedOff {
			return c.countIn(live) // somebody who is there besides the proxy
		}
		return c.again()
	case errors.Is(err, io.EOF):
		return err // gone without a word, as probes of a port do
	default:
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errors.New("no whole PROXY header came in time; is the one that connects a proxy that sends one?")
		}
		if errors.Is(err, proxied.ErrNone) {
			err = errors.New("the connection does not begin with a PROXY header; make its proxy send one (send-proxy, proxy_protocol on), or set proxies.protocol to optional")
		}
		c.srv.refuseHeader(c, err)
		return err
	}
	if !h.Client.IsValid() {
		return c.again() // the proxy speaks for itself
	}
	c.ip = h.Client.Addr()
	c.proxy = live.Proxies.Trusted.Contain(c.ip)
	return c.countIn(live)
}

// countIn counts the connection among its client's.
func (c *conn) countIn(live *Options) error {
	if !c.proxy || live.Proxies.Forwarded == ForwardedOff {
		if !c.srv.conns.count(c, live.MaxConnsPerIP) {
			c.srv.tellFull(c)
			c.lingered = true // its request may be there already
			return errors.New("too many connections of this client")
		}
	}
	return c.again()
}

// again gives what comes behind the header its own time.
func (c *conn) again() error { return c.SetReadDeadline(time.Now().Add(c.srv.live().HeadTimeout)) }

// refuseHeader counts and logs a connection that is closed for its PROXY header.
func (s *Server) refuseHeader(c *conn, err error) {
	if o := s.opt.Observer; o != nil {
		o.Refused("", BadProxyHeader)
	}
	s.strangers.warn(s.opt.Log, "connection closed: its PROXY header cannot be used", "from", c.ip, "error", err)
}

// peekHeader waits for a whole header and takes it off the socket.
func (c *conn) peekHeader() (h proxied.Header, err error) {
	if c.raw == nil {
		return h, errors.New("the connection has no descriptor to look at")
	}
	if err := c.again(); err != nil {
		return h, err
	}
	buf := membudget.Default.Get(proxied.MaxHeader)
	defer membudget.Default.Put(buf)
	var failed error
	err = c.raw.Read(func(fd uintptr) bool {
		n, again, peekErr := peek(int(fd), buf.B)
		switch {
		case again:
			return false
		case peekErr != nil:
			failed = peekErr
			return true
		}
		if h, failed = proxied.Parse(buf.B[:n]); errors.Is(failed, proxied.ErrShort) {
			if !ended(int(fd)) {
				return false // the poller wakes us when more has come
			}
			failed = errors.New("the connection ended within its PROXY header")
		}
		if failed == nil {
			failed = skip(int(fd), buf.B[:h.Size])
		}
		return true
	})
	if failed == nil || err != nil && errors.Is(failed, proxied.ErrShort) {
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

// locate finds the client's address.
func (x *Exchange) locate() {
	x.ip = x.c.ip
	p := &x.srv.live().Proxies
	if !x.c.proxy || p.Forwarded == ForwardedOff {
		return
	}
	chain := proxied.Chain{Trusted: p.Trusted}
	for i := range x.head.lines {
		l := &x.head.lines[i]
		switch name := x.head.nameOf(l); {
		case p.Forwarded == ForwardedX && equalFold(name, string(ForwardedX)):
			chain.XForwardedFor(x.head.valueOf(l))
		case p.Forwarded == ForwardedRFC && equalFold(name, string(ForwardedRFC)):
			chain.Forwarded(x.head.valueOf(l))
		}
	}
	if ip := chain.Client(); ip.IsValid() {
		x.ip = ip
	}
}

// enterFor counts a request that a proxy forwards among its client's, of whom the
// connection told nothing; when there are too many it has answered and gives false.
func (x *Exchange) enterFor() bool {
	live := x.srv.live()
	if !x.c.proxy || live.Proxies.Forwarded == ForwardedOff {
		return true
	}
	var ok bool
	if x.counted, ok = x.srv.conns.enter(x.ip, live.MaxConnsPerIP); !ok {
		x.Error(TooManyConnections, "", "too many requests of this client are under way; try again later", time.Second)
	}
	return ok
}
