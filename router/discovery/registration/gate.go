package registration

import (
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// gate is a listener that closes connections from outside its networks before a
// byte is read, and holds at most so many at once.
type gate struct {
	net.Listener
	from  []netip.Prefix
	most  atomic.Int64 // connections at once
	open  atomic.Int64
	log   *slog.Logger
	told  time.Time // last log line, so that a scanner does not fill the log
	since int       // turned away since
}

func newGate(ln net.Listener, networks []netip.Prefix, log *slog.Logger) *gate {
	return &gate{Listener: ln, from: networks, log: log}
}

// Accept is called by one goroutine, the HTTP server's.
func (g *gate) Accept() (net.Conn, error) {
	for {
		c, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		ap, err := netip.ParseAddrPort(c.RemoteAddr().String())
		if err != nil || !slices.ContainsFunc(g.from, func(n netip.Prefix) bool { return n.Contains(ap.Addr().Unmap().WithZone("")) }) {
			g.turnAway(c, "it is in none of register.networks")
			continue
		}
		if g.open.Add(1) <= g.most.Load() {
			return &seated{Conn: c, g: g}, nil
		}
		g.open.Add(-1)
		g.turnAway(c, "too many connections are open")
	}
}

func (g *gate) turnAway(c net.Conn, why string) {
	g.since++
	if time.Since(g.told) > 10*time.Second {
		g.log.Warn("registration connection closed", "from", c.RemoteAddr().String(), "reason", why, "closed", g.since)
		g.told, g.since = time.Now(), 0
	}
	c.Close()
}

type seated struct {
	net.Conn
	g    *gate
	once sync.Once
}

func (s *seated) Close() error {
	s.once.Do(func() { s.g.open.Add(-1) })
	return s.Conn.Close()
}
