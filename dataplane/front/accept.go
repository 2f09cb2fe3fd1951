package front

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// connSet holds every open connection, for the limits and for the drain.
type connSet struct {
	mu   sync.Mutex
	all  map[*conn]struct{}
	byIP map[netip.Addr]int // only with a limit
}

// add counts c in; it gives the number of open connections, and false when a
// limit is reached.
func (s *connSet) add(c *conn, limit, limitPerIP int) (open int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= limit {
		return len(s.all), false
	}
	if limitPerIP > 0 && c.ip.IsValid() {
		if s.byIP[c.ip] >= limitPerIP {
			return len(s.all), false
		}
		s.byIP[c.ip]++
	}
	s.all[c] = struct{}{}
	return len(s.all), true
}

func (s *connSet) remove(c *conn) {
	s.mu.Lock()
	delete(s.all, c)
	open := len(s.all)
	if n, ok := s.byIP[c.ip]; ok {
		if n--; n > 0 {
			s.byIP[c.ip] = n
		} else {
			delete(s.byIP, c.ip)
		}
	}
	s.mu.Unlock()
	if o := c.srv.opt.Observer; o != nil {
		o.Connections(open)
	}
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
	for c := range s.all {
		if which(c) {
			c.cut()
		}
	}
}

// listener accepts for fasthttp: it wraps, counts and limits, and waits where
// fasthttp would give up.
type listener struct {
	net.Listener
	srv *Server
}

// Accept gives the next connection within the limits. Want of descriptors or
// memory is waited out: it ends by itself, while a server that stopped accepting
// does not start again.
func (l *listener) Accept() (net.Conn, error) {
	var delay time.Duration
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			if !passing(err) {
				return nil, err
			}
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			l.srv.opt.Log.Warn("cannot accept, trying again", "error", err, "after", delay)
			select {
			case <-time.After(delay):
				continue
			case <-l.srv.stop:
				return nil, net.ErrClosed
			}
		}
		delay = 0
		if c := l.srv.admit(nc); c != nil {
			return c, nil
		}
	}
}

// passing says whether an accept may succeed later.
func passing(err error) bool {
	for _, e := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// admit wraps an accepted connection, or refuses it and gives nil.
func (s *Server) admit(nc net.Conn) *conn {
	c := &conn{Conn: nc, srv: s}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			c.raw = raw
			c.ahead.fresh, c.ahead.try = s.opt.TLS == nil, c.tryRead
		}
	}
	if s.opt.TLS != nil {
		c.secure = tls.Server(nc, s.opt.TLS)
		c.Conn = c.secure
	}
	if tcp, ok := nc.RemoteAddr().(*net.TCPAddr); ok {
		c.ip = tcp.AddrPort().Addr().Unmap()
	}
	open, ok := s.conns.add(c, s.opt.MaxConns, s.opt.MaxConnsPerIP)
	if ok {
		if o := s.opt.Observer; o != nil {
			o.Connections(open)
		}
		return c
	}
	if o := s.opt.Observer; o != nil {
		o.Refused("", TooManyConnections)
	}
	if c.secure != nil {
		_ = nc.Close() // a handshake is more than a refusal is worth
		return nil
	}
	// An empty socket takes this without blocking; the deadline is for the case
	// that it does not.
	_ = nc.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = nc.Write(s.fullAnswer)
	_ = nc.Close()
	return nil
}
