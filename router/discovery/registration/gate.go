package registration

import (
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// gate is a listener that closes connections from outside its networks before a
// byte is read, and holds at most so many at once.
type gate struct {
	net.Listener
	from  []netip.Prefix
	seats chan struct{}
	log   *slog.Logger
	told  time.Time // last log line, so that a scanner does not fill the log
	since int       // turned away since
}

func newGate(ln net.Listener, networks []netip.Prefix, most int, log *slog.Logger) *gate {
	return &gate{Listener: ln, from: networks, seats: make(chan struct{}, most), log: log}
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
		select {
		case g.seats <- struct{}{}:
			return &seated{Conn: c, g: g}, nil
		default:
			g.turnAway(c, "too many connections are open")
		}
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
	s.once.Do(func() { <-s.g.seats })
	return s.Conn.Close()
}
