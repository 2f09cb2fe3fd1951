package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"
)

// netTransport is a connection with goroutines of its own, for TLS.
type netTransport struct {
	nc            net.Conn
	limit         time.Duration
	deliverSignal chan struct{}
	done          chan struct{} // closed by close
	once          sync.Once
}

func (l *netTransport) write(p []byte) (int, error) {
	if err := l.nc.SetWriteDeadline(time.Now().Add(l.limit)); err != nil {
		return 0, err
	}
	return l.nc.Write(p)
}

func (l *netTransport) scheduleDelivery(*outbox, bool) {
	select {
	case l.deliverSignal <- struct{}{}:
	default:
	}
}

// waitWritable is never called, because write writes everything or fails.
func (l *netTransport) waitWritable([]byte) {}

func (l *netTransport) close() { l.once.Do(func() { close(l.done) }) }

// deliver is the writer's goroutine. It sends what was posted before the close.
func (l *netTransport) deliver(o *outbox) {
	defer l.nc.Close()
	for {
		select {
		case <-l.deliverSignal:
			o.deliver(false)
			continue
		case <-l.done:
		}
		select {
		case <-l.deliverSignal:
			l.limit = min(l.limit, time.Second)
			o.deliver(false)
		default:
		}
		return
	}
}

// handshake performs the TLS handshake, which the write deadline alone does not bound, because it
// reads too.
func (l *netTransport) handshake(within time.Duration) error {
	t, ok := l.nc.(*tls.Conn)
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	go func() {
		select {
		case <-l.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	return t.HandshakeContext(ctx)
}

// serveNet reads one connection to its end.
func (s *Server) serveNet(nc net.Conn) {
	l := &netTransport{nc: nc, limit: s.opt.WriteTimeout, deliverSignal: make(chan struct{}, 1), done: make(chan struct{})}
	c := newConn(s, l, nc.RemoteAddr())
	if !s.add(c) {
		rejectConn(nc)
		return
	}
	defer s.remove(c)
	if err := l.handshake(s.opt.HelloTimeout); err != nil {
		nc.Close()
		c.endStreams(err)
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
	for { // no deadline: the server's clock closes silent connections
		n, err := nc.Read(buf[have:])
		if n > 0 {
			have += n
			consumed, bad := c.feed(buf[:have])
			have = copy(buf, buf[consumed:have])
			if bad != nil {
				c.closeWith(bad)
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
	var closeErr *Error
	if errors.As(lost, &closeErr) { // sent first, because endStreams drops unsent bytes
		select {
		case <-delivered:
		case <-time.After(time.Second):
			nc.Close() // do not wait for a peer that reads nothing
		}
	}
	c.endStreams(lost)
}
