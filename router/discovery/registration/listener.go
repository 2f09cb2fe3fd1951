package registration

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// limitListener is a listener that bounds the number of open connections and closes connections
// from outside its networks before it reads a byte.
type limitListener struct {
	net.Listener
	networks         []netip.Prefix
	maxConns         atomic.Int64 // limit of open connections
	open             atomic.Int64
	log              *slog.Logger
	lastLog          time.Time // last log line; at most one in 10 seconds, so that a scanner does not fill the log
	rejectedSinceLog int       // connections closed since lastLog
}

func newLimitListener(ln net.Listener, networks []netip.Prefix, log *slog.Logger) *limitListener {
	return &limitListener{Listener: ln, networks: networks, log: log}
}

// Accept is called by one goroutine, that of the HTTP server.
func (g *limitListener) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		ap, err := netip.ParseAddrPort(c.RemoteAddr().String())
		if err != nil || !slices.ContainsFunc(g.networks, func(n netip.Prefix) bool { return n.Contains(ap.Addr().Unmap().WithZone("")) }) {
			g.reject(c, "the client address is in none of registration.networks")
			continue
		}
		limit := g.maxConns.Load()
		if g.open.Add(1) <= limit {
			return &limitedConn{Conn: c, listener: g}, nil
		}
		g.open.Add(-1)
		g.reject(c, fmt.Sprintf("%d connections are open, which is the limit for registration.max_workers", limit))
	}
}

func (g *limitListener) reject(c net.Conn, why string) {
	g.rejectedSinceLog++
	if time.Since(g.lastLog) > 10*time.Second {
		g.log.Warn("registration connection closed", "client", c.RemoteAddr().String(), "reason", why, "suppressed", g.rejectedSinceLog)
		g.lastLog, g.rejectedSinceLog = time.Now(), 0
	}
	c.Close()
}

type limitedConn struct {
	net.Conn
	listener *limitListener
	once     sync.Once
}

// Close implements net.Conn. The first call releases the connection's place in the limit.
func (s *limitedConn) Close() error {
	s.once.Do(func() { s.listener.open.Add(-1) })
	return s.Conn.Close()
}
