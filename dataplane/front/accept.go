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

	"sluice/dataplane/fdlimit"
	"sluice/dataplane/rawsocket"
)

// connSet holds every open connection, for the limits and for the drain.
type connSet struct {
	mu    sync.Mutex
	conns []*conn            // each at its place
	byIP  map[netip.Addr]int // connections and forwarded requests, while there is a limit
}

// add counts c in; it gives the number of open connections, and false when there are
// as many as may be.
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

// acquireIP counts one more of ip's; false when the limit is reached. counted is the
// address for leave, invalid where nothing was counted.
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

// releaseIP takes back what enter counted.
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

// acquireConnIP is enter for a connection, whose address stays what it is.
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

// removeLocked takes c out, if it is there, and gives how many are left. Called with mu.
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

// shutdownIf cuts the connections that which picks.
func (s *connSet) shutdownIf(match func(*conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if match(c) {
			c.shutdown()
		}
	}
}

// snapshot is the connections of now.
func (s *connSet) snapshot() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.conns)
}

// cancelStreams ends streams, and gives their number.
func (s *connSet) cancelStreams() (n int) {
	for _, c := range s.snapshot() {
		if c.clientWatch.cancelStream() {
			n++
		}
	}
	return n
}

// listener wraps, counts and limits what it accepts, and waits where nothing can be
// accepted now.
type listener struct {
	net.Listener
	rawListener *rawsocket.Listener // of the same socket, where there is one
	srv         *Server
	yielder     yielder
}

// gatedListener is a listener that accepts nothing before something has happened; Opened waits
// for that, and gives the listener behind the gate.
type gatedListener interface {
	Opened() (net.Listener, error)
}

// newListener makes a listener of ln. What TLS needs is in Go's poller for as long as the
// connection lasts, and is net's.
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

// acceptRaw waits for a connection; from is its other end, as far as it tells.
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

// accept gives the next connection within the limits. Want of descriptors or
// memory is waited out: it ends by itself, while a server that stopped accepting
// does not start again.
func (l *listener) accept() (*conn, error) {
	var delay time.Duration
	for {
		nc, from, err := l.acceptRaw()
		if err != nil {
			if !isTemporaryAcceptError(err) {
				return nil, err
			}
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			l.srv.onAcceptError(err)
			select {
			case <-time.After(delay):
				continue
			case <-l.srv.stop:
				return nil, net.ErrClosed
			}
		}
		delay = 0
		// Those that were accepted go first: of thousands that come at once more than can
		// be served would else stand before each other's locks, each with a goroutine's
		// stack and a request's buffers, where the kernel's queue holds them for nothing.
		l.yielder.yield()
		if c := l.srv.admit(nc, from); c != nil {
			return c, nil
		}
	}
}

// isTemporaryAcceptError says whether an accept may succeed later.
func isTemporaryAcceptError(err error) bool {
	return fdlimit.IsExhausted(err) || errors.Is(err, syscall.ECONNABORTED)
}

// newConn wraps a connection on which nothing has been asked for.
func (s *Server) newConn(nc net.Conn, from netip.Addr) *conn {
	c := &conn{Conn: nc, srv: s, deadlineKind: deadlineHead, ip: from}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			c.raw = raw
		}
	}
	return c
}

// admit wraps an accepted connection, or refuses it and gives nil.
func (s *Server) admit(nc net.Conn, from netip.Addr) *conn {
	c := s.newConn(nc, from)
	if s.initial.TLS != nil {
		c.tlsConn = tls.Server(&tlsTransport{nc, c}, s.initial.TLS)
		c.Conn = c.tlsConn
	}
	live := s.options()
	// A proxy stands for all of its clients: whom to count is known later.
	c.fromProxy = live.Proxies.Trusted.Contain(c.ip)
	if !c.fromProxy && live.Proxies.ProxyProtocol == ProxyProtocolRequired {
		s.rejectProxyHeader(c, errors.New("the connection does not come from one of proxies.trusted, and proxies.protocol is required"))
		_ = nc.Close()
		return nil
	}
	if c.expectProxyHeader = c.fromProxy && live.Proxies.ProxyProtocol != ""; c.expectProxyHeader {
		c.readState.pin()
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

// rejectConn tells a connection that was not counted in that there are too many, and
// closes it.
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

// discardUnread takes what lies in the socket, within a bound: a connection closed with unread
// bytes is reset, and the client may lose what it was told. Most have sent their request
// when they are accepted.
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

// respondTooManyConns counts and answers a connection beyond a limit.
func (s *Server) respondTooManyConns(c *conn) {
	id := s.ids.next()
	s.reportRefused("", TooManyConnections, refusal{id: id, client: c.ip})
	if c.tlsConn != nil {
		return // a handshake is more than a refusal is worth
	}
	// An empty socket takes this without blocking; the deadline is for the case
	// that it does not.
	_ = c.Conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = c.Conn.Write(rawRefusal(TooManyConnections, "too many connections are open; try again later", id, "Retry-After: 1\r\n"))
}
