package wire

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/panjf2000/gnet/v2"

	"sluice/dataplane/rawsocket"
)

// Listen serves an address on gnet event loops: "unix:///path/of.sock" or
// "tcp://host:port", the port 0 for a free one. It gives the address bound. A
// socket file that nobody listens on is replaced; any other file is not.
//
// The connections are accepted here and then enrolled in the loops, because
// gnet's own listeners write a path's letters small and do not tell a port.
func (s *Server) Listen(addr string) (net.Addr, error) {
	network, host, ok := strings.Cut(addr, "://")
	if !ok || network != "unix" && network != "tcp" || host == "" {
		return nil, fmt.Errorf("wire: cannot listen on %q: want unix:///PATH or tcp://HOST:PORT", addr)
	}
	var ln net.Listener
	var err error
	if network == "unix" {
		ln, err = ListenUnix(host)
	} else {
		ln, err = net.Listen(network, host)
	}
	if err != nil {
		return nil, fmt.Errorf("wire: cannot listen on %q: %w", addr, err)
	}
	return ln.Addr(), s.Serve(ln)
}

// ListenUnix binds a unix socket's path, in the place of one that a process has left
// which ended. Closing the listener removes the file.
func ListenUnix(path string) (net.Listener, error) {
	if err := removeStaleSocket(path); err != nil {
		return nil, err
	}
	return net.Listen("unix", path)
}

// Serve serves what ln accepts, over TCP or a unix socket, on gnet event loops. It
// returns at once; ln is the Server's to close, by Leave or Close.
func (s *Server) Serve(ln net.Listener) error {
	if err := s.startLoops(); err != nil {
		ln.Close()
		return fmt.Errorf("wire: cannot start event loops: %w", err)
	}
	return s.acceptLoop(ln, s.addToLoops)
}

// startLoops starts the event loops, once.
func (s *Server) startLoops() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if s.loops != nil {
		return nil
	}
	loops, err := gnet.NewClient(&gnetHandler{srv: s},
		gnet.WithNumEventLoop(max(1, runtime.GOMAXPROCS(0)/4)), gnet.WithLogger(discardLogger{}),
		gnet.WithTCPKeepAlive(time.Minute), gnet.WithTCPNoDelay(gnet.TCPNoDelay), gnet.WithReadBufferCap(64<<10))
	if err != nil {
		return err
	}
	if err := loops.Start(); err != nil {
		return err
	}
	s.loops = loops
	return nil
}

// addToLoops gives a connection to the loops.
func (s *Server) addToLoops(nc net.Conn) {
	k := &gnetTransport{limit: s.opt.WriteTimeout}
	k.conn = newConn(s, k, nc.RemoteAddr())
	if !s.add(k.conn) {
		rejectConn(nc)
		return
	}
	if _, err := s.loops.EnrollContext(nc, k); err != nil { // it closes nc, whatever becomes of it
		s.opt.Log.Error("cannot take a wire connection", "err", err)
		s.remove(k.conn)
	}
}

// removeStaleSocket removes a socket file that is left of a process that ended.
func removeStaleSocket(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode()&fs.ModeSocket == 0:
		return errors.New("the file exists and is no socket")
	}
	nc, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		nc.Close()
		return errors.New("another process listens on it")
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return os.Remove(path)
}

// gnetHandler is gnet's event handler for all connections of a Server.
type gnetHandler struct {
	gnet.BuiltinEventEngine
	srv *Server
}

// OnOpen implements gnet.EventHandler.
func (*gnetHandler) OnOpen(g gnet.Conn) (out []byte, action gnet.Action) {
	k, ok := g.Context().(*gnetTransport)
	if !ok {
		return nil, gnet.Close
	}
	k.open(g)
	return nil, gnet.None
}

// OnTraffic implements gnet.EventHandler: bytes have come, or somebody woke the
// connection.
func (*gnetHandler) OnTraffic(g gnet.Conn) gnet.Action {
	k, ok := g.Context().(*gnetTransport)
	if !ok {
		return gnet.Close
	}
	if k.handedOver.Load() {
		k.handOver()
	}
	if k.closing.Load() {
		return gnet.Close
	}
	p, err := g.Peek(-1)
	if err != nil || len(p) == 0 {
		return gnet.None
	}
	consumed, bad := k.conn.feed(p)
	if consumed > 0 {
		_, _ = g.Discard(consumed)
	}
	if bad != nil {
		k.conn.closeWith(bad)
		return gnet.Close
	}
	return gnet.None
}

// OnClose implements gnet.EventHandler. gnet closes the descriptor after it.
func (e *gnetHandler) OnClose(g gnet.Conn, err error) gnet.Action {
	k, ok := g.Context().(*gnetTransport)
	if !ok {
		return gnet.None
	}
	k.mu.Lock() // a write under way ends first, a later one finds gone
	k.closed = true
	k.mu.Unlock()
	k.conn.endStreams(err)
	e.srv.remove(k.conn)
	return gnet.None
}

// gnetTransport is a connection of an event loop. Items are written by whoever sends
// them, straight into the socket: a detour over the loop would cost a wake-up
// each. Only when the socket is full does the loop take over; gnet then sends
// the rest as the socket takes it.
type gnetTransport struct {
	conn  *Conn
	limit time.Duration

	mu     sync.Mutex // held over a write, so that the descriptor is not closed under it
	g      gnet.Conn  // nil before the loop has it, set once
	fd     int
	closed bool

	closing         atomic.Bool
	handedOver      atomic.Bool // rest is the loop's
	unsent          []byte      // not yet given to gnet
	gnetPending     int         // given to it and not known to have left
	fullSince       time.Time   // when the socket became full
	gnetLastPending int         // bytes that gnet held when looked at last
}

func (k *gnetTransport) open(g gnet.Conn) {
	k.mu.Lock()
	k.g, k.fd = g, g.Fd()
	k.mu.Unlock()
}

// wakeUp has the loop call OnTraffic.
func (k *gnetTransport) wakeUp() {
	k.mu.Lock()
	g := k.g
	k.mu.Unlock()
	if g != nil {
		_ = g.Wake(nil)
	}
}

func (k *gnetTransport) write(p []byte) (n int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed || k.g == nil {
		return 0, errClosed
	}
	n, errno := rawsocket.Send(k.fd, p)
	if errno != 0 && errno != syscall.EAGAIN {
		return n, errno
	}
	return n, nil
}

// scheduleDelivery delivers on the spot: the socket's buffer usually takes it.
func (k *gnetTransport) scheduleDelivery(o *outbox, gathered bool) { o.deliver(gathered) }

// waitWritable has the loop take what is left.
func (k *gnetTransport) waitWritable(rest []byte) {
	k.unsent = rest
	k.fullSince = time.Now()
	k.handedOver.Store(true)
	k.wakeUp()
}

// resumeBelow is how soon the loop looks again whether gnet has sent what it was given.
const resumeBelow = 5 * time.Millisecond

// handOver runs on the loop while the socket is full.
func (k *gnetTransport) handOver() {
	o := &k.conn.out
	if k.unsent != nil {
		k.gnetPending, k.gnetLastPending = len(k.unsent), len(k.unsent)
		rest := k.unsent
		k.unsent = nil
		if _, err := k.g.Write(rest); err != nil {
			return // closed by now
		}
	}
	left := k.g.OutboundBuffered()
	if left > 0 {
		if left < k.gnetLastPending {
			k.gnetLastPending, k.fullSince = left, time.Now()
		}
		if time.Since(k.fullSince) > k.limit {
			k.closing.Store(true)
			return
		}
		time.AfterFunc(resumeBelow, k.wakeUp)
		return
	}
	given := k.gnetPending
	k.gnetPending = 0
	k.handedOver.Store(false)
	o.resume(given)
}

func (k *gnetTransport) close() {
	k.closing.Store(true)
	k.wakeUp()
}

// discardLogger takes gnet's log lines, which concern single connections.
type discardLogger struct{}

func (discardLogger) Debugf(string, ...any) {}
func (discardLogger) Infof(string, ...any)  {}
func (discardLogger) Warnf(string, ...any)  {}
func (discardLogger) Errorf(string, ...any) {}
func (discardLogger) Fatalf(string, ...any) {}
