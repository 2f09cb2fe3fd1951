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

	"sluice/dataplane/descriptors"
	"sluice/dataplane/sock"
)

// connSet holds every open connection, for the limits and for the drain.
type connSet struct {
	mu   sync.Mutex
	all  []*conn            // each at its place
	byIP map[netip.Addr]int // connections and forwarded requests, while there is a limit
}

// add counts c in; it gives the number of open connections, and false when there are
// as many as may be.
func (s *connSet) add(c *conn, limit int) (open int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= limit {
		return len(s.all), false
	}
	c.place = int32(len(s.all))
	s.all = append(s.all, c)
	return len(s.all), true
}

// enter counts one more of ip's; false when the limit is reached. counted is the
// address for leave, invalid where nothing was counted.
func (s *connSet) enter(ip netip.Addr, limit int) (counted netip.Addr, ok bool) {
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

// leave takes back what enter counted.
func (s *connSet) leave(counted netip.Addr) {
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

// count is enter for a connection, whose address stays what it is.
func (s *connSet) count(c *conn, limit int) (ok bool) {
	counted, ok := s.enter(c.ip, limit)
	c.counted = counted.IsValid()
	return ok
}

func (s *connSet) uncount(c *conn) {
	if c.counted {
		s.leave(c.ip)
	}
}

func (s *connSet) remove(c *conn) {
	s.uncount(c)
	s.mu.Lock()
	open := s.drop(c)
	s.mu.Unlock()
	if o := c.srv.opt.Observer; o != nil {
		o.Connections(open)
	}
}

// drop takes c out, if it is there, and gives how many are left. Called with mu.
func (s *connSet) drop(c *conn) (open int) {
	last := len(s.all) - 1
	if at := int(c.place); at <= last && s.all[at] == c {
		s.all[at] = s.all[last]
		s.all[at].place = c.place
		s.all[last] = nil
		s.all = s.all[:last]
	}
	return len(s.all)
}

func (s *connSet) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.all)
}

// cut cuts the connections that which picks.
func (s *connSet) cut(which func(*conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.all {
		if which(c) {
			c.cut()
		}
	}
}

// list is the connections of now.
func (s *connSet) list() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// endStreams ends streams, and gives their number.
func (s *connSet) endStreams() (n int) {
	for _, c := range s.list() {
		if c.gone.endStream() {
			n++
		}
	}
	return n
}

// listener wraps, counts and limits what it accepts, and waits where nothing can be
// accepted now.
type listener struct {
	net.Listener
	byHand *sock.Listener // of the same socket, where there is one
	srv    *Server
	way    courtesy
}

// gated is a listener that accepts nothing before something has happened; Opened waits
// for that, and gives the listener behind the gate.
type gated interface {
	Opened() (net.Listener, error)
}

// listenOn makes a listener of ln. What TLS needs is in Go's poller for as long as the
// connection lasts, and is net's.
func (s *Server) listenOn(ln net.Listener) (*listener, error) {
	l := &listener{Listener: ln, srv: s}
	if s.opt.TLS != nil {
		return l, nil
	}
	if g, ok := ln.(gated); ok {
		var err error
		if ln, err = g.Opened(); err != nil {
			return nil, err
		}
	}
	byHand, ok := sock.ListenerOf(ln)
	if !ok {
		return l, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped() {
		_ = byHand.Close()
		return nil, net.ErrClosed
	}
	l.byHand, s.byHand = byHand, byHand
	return l, nil
}

// next waits for a connection; from is its other end, as far as it tells.
func (l *listener) next() (nc net.Conn, from netip.Addr, err error) {
	if l.byHand != nil {
		c, from, err := l.byHand.Accept()
		if err != nil {
			return nil, from, err
		}
		return c, from, nil
	}
	if nc, err = l.Listener.Accept(); err != nil {
		return nil, from, err
	}
	return nc, addressOf(nc), nil
}

func addressOf(nc net.Conn) (ip netip.Addr) {
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
		nc, from, err := l.next()
		if err != nil {
			if !passing(err) {
				return nil, err
			}
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			l.srv.cannotAccept(err)
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
		l.way.giveWay()
		if c := l.srv.admit(nc, from); c != nil {
			return c, nil
		}
	}
}

// passing says whether an accept may succeed later.
func passing(err error) bool {
	return descriptors.Wanting(err) || errors.Is(err, syscall.ECONNABORTED)
}

// newConn wraps a connection on which nothing has been asked for.
func (s *Server) newConn(nc net.Conn, from netip.Addr) *conn {
	c := &conn{Conn: nc, srv: s, due: dueHead, ip: from}
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
	if s.opt.TLS != nil {
		c.secure = tls.Server(&underTLS{nc, c}, s.opt.TLS)
		c.Conn = c.secure
	}
	live := s.live()
	// A proxy stands for all of its clients: whom to count is known later.
	c.proxy = live.Proxies.Trusted.Contain(c.ip)
	if !c.proxy && live.Proxies.Protocol == ProtocolRequired {
		s.refuseHeader(c, errors.New("the connection does not come from one of proxies.trusted, and proxies.protocol is required"))
		_ = nc.Close()
		return nil
	}
	if c.headed = c.proxy && live.Proxies.Protocol != ""; c.headed {
		c.input.stay()
	}
	if c.short() && !s.takeSpare(c) {
		s.turnAway(c)
		return nil
	}
	var ok bool
	if !c.proxy {
		if ok = s.conns.count(c, live.MaxConnsPerIP); !ok {
			s.turnAway(c)
			return nil
		}
	}
	open, ok := s.conns.add(c, live.MaxConns)
	if !ok {
		s.conns.uncount(c)
		s.turnAway(c)
		return nil
	}
	if o := s.opt.Observer; o != nil {
		o.Connections(open)
	}
	return c
}

// turnAway tells a connection that was not counted in that there are too many, and
// closes it.
func (s *Server) turnAway(c *conn) {
	if c.spare {
		s.scarce.spares.Add(-1)
	}
	s.tellFull(c)
	if c.secure != nil {
		_ = c.secure.NetConn().Close()
		return
	}
	c.readAway()
	_ = c.Conn.Close()
}

// readAway takes what lies in the socket, within a bound: a connection closed with unread
// bytes is reset, and the client may lose what it was told. Most have sent their request
// when they are accepted.
func (c *conn) readAway() {
	if c.raw == nil {
		return
	}
	_ = c.raw.Control(func(fd uintptr) {
		var sink [4 << 10]byte
		for range 16 {
			if n, errno := sock.Recv(int(fd), sink[:]); errno != 0 || n == 0 {
				return
			}
		}
	})
}

// tellFull counts and answers a connection beyond a limit.
func (s *Server) tellFull(c *conn) {
	id := s.ids.make()
	s.refused("", TooManyConnections, refusal{id: id, client: c.ip})
	if c.secure != nil {
		return // a handshake is more than a refusal is worth
	}
	// An empty socket takes this without blocking; the deadline is for the case
	// that it does not.
	_ = c.Conn.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = c.Conn.Write(refusalOf(TooManyConnections, "too many connections are open; try again later", id, "Retry-After: 1\r\n"))
}
