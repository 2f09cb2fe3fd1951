package front

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/fdlimit"
	"sluice/dataplane/rawsocket"
)

// connSet holds every open connection, for the limits and for the drain.
type connSet struct {
	mu    sync.Mutex
	conns []*conn            // conns[c.index] is c
	byIP  map[netip.Addr]int // connections and forwarded requests by client; filled only while MaxConnsPerIP is set
}

// add adds c to the set and returns the number of open connections. ok is false if limit
// connections are open already; c is then not in the set.
func (s *connSet) add(c *conn, limit int) (open int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= limit {
		return len(s.conns), false
	}
	c.index = int32(len(s.conns))
	s.conns = append(s.conns, c)
	return len(s.conns), true
}

// acquireIP counts one more connection or request of ip. ok is false if ip has reached limit.
// counted is the address to pass to releaseIP, invalid if nothing was counted: without a
// limit, or for an unknown address.
func (s *connSet) acquireIP(ip netip.Addr, limit int) (counted netip.Addr, ok bool) {
	if limit <= 0 || !ip.IsValid() {
		return netip.Addr{}, true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byIP[ip] >= limit {
		return netip.Addr{}, false
	}
	s.byIP[ip]++
	return ip, true
}

// releaseIP undoes an acquireIP that returned counted.
func (s *connSet) releaseIP(counted netip.Addr) {
	if !counted.IsValid() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.byIP[counted] - 1; n > 0 {
		s.byIP[counted] = n
	} else {
		delete(s.byIP, counted)
	}
}

// acquireConnIP is acquireIP for the client of c. c.ip must not change afterwards, because
// releaseConnIP uses it.
func (s *connSet) acquireConnIP(c *conn, limit int) (ok bool) {
	counted, ok := s.acquireIP(c.ip, limit)
	c.ipCounted = counted.IsValid()
	return ok
}

func (s *connSet) releaseConnIP(c *conn) {
	if c.ipCounted {
		s.releaseIP(c.ip)
	}
}

func (s *connSet) remove(c *conn) {
	s.releaseConnIP(c)
	s.mu.Lock()
	open := s.removeLocked(c)
	s.mu.Unlock()
	if o := c.srv.initial.Observer; o != nil {
		o.Connections(open)
	}
}

// removeLocked removes c if it is in the set and returns the number of open connections. The
// caller holds mu.
func (s *connSet) removeLocked(c *conn) (open int) {
	last := len(s.conns) - 1
	if at := int(c.index); at <= last && s.conns[at] == c {
		s.conns[at] = s.conns[last]
		s.conns[at].index = c.index
		s.conns[last] = nil
		s.conns = s.conns[:last]
	}
	return len(s.conns)
}

func (s *connSet) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// shutdownIf shuts down the connections for which match returns true. match runs with the set
// locked.
func (s *connSet) shutdownIf(match func(*conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if match(c) {
			c.shutdown()
		}
	}
}

// snapshot returns a copy of the list of open connections.
func (s *connSet) snapshot() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.conns)
}

// cancelStreams ends all streams and returns their number.
func (s *connSet) cancelStreams() (n int) {
	for _, c := range s.snapshot() {
		if c.clientWatch.CancelStream() {
			n++
		}
	}
	return n
}

// listener accepts connections, wraps them as conns, and enforces the connection limits. It
// retries when the process has no descriptors or memory for another connection.
type listener struct {
	net.Listener
	rawListener *rawsocket.Listener // for the same socket; nil: accept through Listener
	srv         *Server
	yielder     yielder
}

// gatedListener is a listener that accepts nothing until an event of its own has happened.
// Opened waits for that event and returns the underlying listener.
type gatedListener interface {
	Opened() (net.Listener, error)
}

// newListener makes a listener from ln. With TLS it accepts through package net, because
// crypto/tls needs a net.Conn that is in Go's poller for as long as the connection lasts.
func (s *Server) newListener(ln net.Listener) (*listener, error) {
	l := &listener{Listener: ln, srv: s}
	if s.initial.TLS != nil {
		return l, nil
	}
	if g, ok := ln.(gatedListener); ok {
		var err error
		if ln, err = g.Opened(); err != nil {
			return nil, err
		}
	}
	rawLn, ok := rawsocket.NewListener(ln)
	if !ok {
		return l, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped() {
		_ = rawLn.Close()
		return nil, net.ErrClosed
	}
	l.rawListener, s.rawListener = rawLn, rawLn
	return l, nil
}

// acceptRaw waits for a connection. from is the peer's address, invalid if it has none.
func (l *listener) acceptRaw() (nc net.Conn, from netip.Addr, err error) {
	if l.rawListener != nil {
		c, from, err := l.rawListener.Accept()
		if err != nil {
			return nil, from, err
		}
		return c, from, nil
	}
	if nc, err = l.Listener.Accept(); err != nil {
		return nil, from, err
	}
	return nc, remoteIP(nc), nil
}

func remoteIP(nc net.Conn) (ip netip.Addr) {
	if tcp, ok := nc.RemoteAddr().(*net.TCPAddr); ok {
		ip = tcp.AddrPort().Addr().Unmap()
	}
	return ip
}

// accept returns the next connection within the limits. If the process has no descriptors or
// memory, accept waits and tries again: such a shortage ends, but a server that has stopped
// accepting does not start again.
func (l *listener) accept() (*conn, error) {
	var shortage backoff.Backoff
	for {
		nc, from, err := l.acceptRaw()
		if err != nil {
			if !isTemporaryAcceptError(err) {
				return nil, err
			}
			l.srv.onAcceptError(err)
			select {
			case <-time.After(shortage.Next(5*time.Millisecond, time.Second)):
				continue
			case <-l.srv.stop:
				return nil, net.ErrClosed
			}
		}
		shortage.Reset()
		// Connections that are already accepted go first. When thousands of clients connect at
		// once, the rest wait in the kernel's queue, where they cost nothing. Accepted, each
		// would have a stack and the buffers of a request, and all would contend for the same
		// locks.
		l.yielder.yield()
		if c := l.srv.admit(nc, from); c != nil {
			return c, nil
		}
	}
}

// isTemporaryAcceptError reports whether a later accept may succeed.
func isTemporaryAcceptError(err error) bool {
	return fdlimit.IsExhausted(err) || errors.Is(err, syscall.ECONNABORTED)
}

// newConn wraps a connection that has had no request.
func (s *Server) newConn(nc net.Conn, from netip.Addr) *conn {
	c := &conn{Conn: nc, srv: s, deadlineKind: deadlineHead, ip: from}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			c.raw = raw
		}
	}
	return c
}

// admit wraps an accepted connection. It returns nil if it has refused and closed it.
func (s *Server) admit(nc net.Conn, from netip.Addr) *conn {
	c := s.newConn(nc, from)
	if s.initial.TLS != nil {
		c.tlsConn = tls.Server(&tlsTransport{nc, c}, s.initial.TLS)
		c.Conn = c.tlsConn
	}
	live := s.options()
	// A trusted proxy connects for many clients. The client to count is known only from the
	// PROXY header or the request.
	c.fromProxy = live.Proxies.Trusted.Contain(c.ip)
	if !c.fromProxy && live.Proxies.ProxyProtocol == ProxyProtocolRequired {
		s.rejectProxyHeader(c, errors.New("the connection does not come from one of proxies.trusted, and proxies.protocol is required"))
		_ = nc.Close()
		return nil
	}
	if c.expectProxyHeader = c.fromProxy && live.Proxies.ProxyProtocol != ""; c.expectProxyHeader {
		c.readState.keepLocal()
	}
	if c.hasReservedFD() && !s.acquireReservedConn(c) {
		s.rejectConn(c)
		return nil
	}
	var ok bool
	if !c.fromProxy {
		if ok = s.conns.acquireConnIP(c, live.MaxConnsPerIP); !ok {
			s.rejectConn(c)
			return nil
		}
	}
	open, ok := s.conns.add(c, live.MaxConns)
	if !ok {
		s.conns.releaseConnIP(c)
		s.rejectConn(c)
		return nil
	}
	if o := s.initial.Observer; o != nil {
		o.Connections(open)
	}
	return c
}

// rejectConn answers that too many connections are open and closes c, which is not in connSet.
func (s *Server) rejectConn(c *conn) {
	if c.usesReservedFD {
		s.fdStats.reservedConns.Add(-1)
	}
	s.respondTooManyConns(c)
	if c.tlsConn != nil {
		_ = c.tlsConn.NetConn().Close()
		return
	}
	c.discardUnread()
	_ = c.Conn.Close()
}

// discardUnread reads and discards up to 64 KiB that have arrived on the socket. The kernel
// resets a connection that is closed with unread bytes, and the client may then lose the
// refusal. Most clients have sent their request before their connection is accepted.
func (c *conn) discardUnread() {
	if c.raw == nil {
		return
	}
	_ = c.raw.Control(func(fd uintptr) {
		var sink [4 << 10]byte
		for range 16 {
			if n, errno := rawsocket.Recv(int(fd), sink[:]); errno != 0 || n == 0 {
				return
			}
		}
	})
}

// respondTooManyConns reports a connection beyond a limit and answers 503, except with TLS.
func (s *Server) respondTooManyConns(c *conn) {
	id := s.ids.next()
	s.reportRefused(Refusal{Reason: TooManyConnections, RequestID: id, Client: c.ip})
	if c.tlsConn != nil {
		return // a refusal is not worth a TLS handshake
	}
	// The send buffer is empty, so this write does not block; the deadline bounds it if it does.
	_ = c.Conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = c.Conn.Write(rawRefusal(TooManyConnections, "too many connections are open; try again later", id, "Retry-After: 1\r\n"))
}
