package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"
)

// netLink is a connection with goroutines of its own: TLS.
type netLink struct {
	nc     net.Conn
	limit  time.Duration
	kicked chan struct{}
	end    chan struct{} // closed by close
	once   sync.Once
}

func (l *netLink) write(p []byte) (int, error) {
	if err := l.nc.SetWriteDeadline(time.Now().Add(l.limit)); err != nil {
		return 0, err
	}
	return l.nc.Write(p)
}

func (l *netLink) kick(*outbox, bool) {
	select {
	case l.kicked <- struct{}{}:
	default:
	}
}

// full is never called: write takes all or fails.
func (l *netLink) full([]byte) {}

func (l *netLink) close() { l.once.Do(func() { close(l.end) }) }

// deliver is the writer's goroutine. What was posted before the close goes out.
func (l *netLink) deliver(o *outbox) {
	defer l.nc.Close()
	for {
		select {
		case <-l.kicked:
			o.deliver(false)
			continue
		case <-l.end:
		}
		select {
		case <-l.kicked:
			l.limit = min(l.limit, time.Second)
			o.deliver(false)
		default:
		}
		return
	}
}

// handshake is TLS's, which no deadline of a write bounds: it reads too.
func (l *netLink) handshake(within time.Duration) error {
	t, ok := l.nc.(*tls.Conn)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	go func() {
		select {
		case <-l.end:
			cancel()
		case <-ctx.Done():
		}
	}()
	return t.HandshakeContext(ctx)
}

// serveNet reads one connection to its end.
func (s *Server) serveNet(nc net.Conn) {
	l := &netLink{nc: nc, limit: s.opt.WriteTimeout, kicked: make(chan struct{}, 1), end: make(chan struct{})}
	c := newConn(s, l, nc.RemoteAddr())
	if !s.add(c) {
		turnAway(nc)
		return
	}
	defer s.remove(c)
	if err := l.handshake(s.opt.HelloTimeout); err != nil {
		nc.Close()
		c.lost(err)
		return
	}
	delivered := make(chan struct{})
	go func() {
		defer close(delivered)
		l.deliver(&c.out)
	}()
	buf := make([]byte, 32<<10)
	have := 0
	var lost error
	for { // no deadline: the server's clock closes what is silent
		n, err := nc.Read(buf[have:])
		if n > 0 {
			have += n
			taken, bad := c.feed(buf[:have])
			have = copy(buf, buf[taken:have])
			if bad != nil {
				c.bye(bad)
				lost = bad
				break
			}
		}
		if err != nil {
			lost = err
			break
		}
	}
	if !errors.Is(lost, net.ErrClosed) {
		l.close()
	}
	var told *Error
	if errors.As(lost, &told) { // the reason goes out first: what is lost drops what is not sent
		select {
		case <-delivered:
		case <-time.After(time.Second):
			nc.Close() // a peer that reads nothing is not waited for any longer
		}
	}
	c.lost(lost)
}
