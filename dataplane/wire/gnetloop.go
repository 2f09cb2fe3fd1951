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

// Listen serves an address on gnet event loops: "unix:///path/of.sock" or "tcp://host:port", where
// port 0 picks a free one. It returns the bound address. A socket file that nobody listens on is
// replaced; another file is an error.
//
// The connections are accepted here and then enrolled in the loops, because gnet's own listeners
// convert paths to lower case and do not report the port.
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

// ListenUnix binds the path of a unix socket. It replaces the socket file of a process that has
// ended. Closing the listener removes the file.
func ListenUnix(path string) (net.Listener, error) {
	if err := removeStaleSocket(path); err != nil {
		return nil, err
	}
	return net.Listen("unix", path)
}

// Serve serves the connections of ln, TCP or unix, on gnet event loops. It returns at once. The
// Server closes ln, in CloseListeners or Close.
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

// addToLoops passes a connection to the loops.
func (s *Server) addToLoops(nc net.Conn) {
	k := &gnetTransport{limit: s.opt.WriteTimeout}
	k.conn = newConn(s, k, nc.RemoteAddr())
	if !s.add(k.conn) {
		rejectConn(nc)
		return
	}
	if _, err := s.loops.EnrollContext(nc, k); err != nil { // it closes nc in any case
		s.opt.Log.Error("cannot serve a wire connection", "error", err)
		s.remove(k.conn)
	}
}

// removeStaleSocket removes the socket file of a process that has ended.
func removeStaleSocket(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode()&fs.ModeSocket == 0:
		return errors.New("the file exists and is not a socket; want a path that does not exist")
	}
	nc, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		nc.Close()
		return errors.New("another process listens on it; want another path, or stop that process")
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return os.Remove(path)
}

// gnetHandler is the gnet event handler of a Server's connections.
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

// OnTraffic implements gnet.EventHandler: bytes have come, or wakeUp was called.
func (*gnetHandler) OnTraffic(g gnet.Conn) gnet.Action {
	k, ok := g.Context().(*gnetTransport)
	if !ok {
		return gnet.Close
	}
	if k.loopSends.Load() {
		k.sendRest()
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
	k.mu.Lock() // a running write ends first, a later one finds closed set
	k.closed = true
	k.mu.Unlock()
	k.conn.endStreams(err)
	e.srv.remove(k.conn)
	return gnet.None
}

// gnetTransport is a connection of an event loop. The sender of an item writes it directly to the
// socket, because passing it to the loop would cost a wake-up each. Only when the socket is full
// does the loop take over; gnet then sends the rest.
type gnetTransport struct {
	conn  *Conn
	limit time.Duration

	mu     sync.Mutex // held during a write, so that the descriptor stays open
	g      gnet.Conn  // set once by the loop; nil before
	fd     int
	closed bool

	closing         atomic.Bool
	loopSends       atomic.Bool // the loop sends unsent
	unsent          []byte      // not yet passed to gnet
	gnetPending     int         // passed to gnet and not known to be sent
	fullSince       time.Time   // when the socket became full
	gnetLastPending int         // bytes that gnet held at the last check
}

func (k *gnetTransport) open(g gnet.Conn) {
	k.mu.Lock()
	k.g, k.fd = g, g.Fd()
	k.mu.Unlock()
}

// wakeUp makes the loop call OnTraffic.
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

// scheduleDelivery delivers at once, because the socket usually has space.
func (k *gnetTransport) scheduleDelivery(o *outbox, gathered bool) { o.deliver(gathered) }

// waitWritable makes the loop send the rest.
func (k *gnetTransport) waitWritable(rest []byte) {
	k.unsent = rest
	k.fullSince = time.Now()
	k.loopSends.Store(true)
	k.wakeUp()
}

// resumeBelow is how soon the loop checks again whether gnet has sent its bytes.
const resumeBelow = 5 * time.Millisecond

// sendRest runs on the loop while the socket is full.
func (k *gnetTransport) sendRest() {
	o := &k.conn.out
	if k.unsent != nil {
		k.gnetPending, k.gnetLastPending = len(k.unsent), len(k.unsent)
		rest := k.unsent
		k.unsent = nil
		if _, err := k.g.Write(rest); err != nil {
			return // closed meanwhile
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
	k.loopSends.Store(false)
	o.resume(given)
}

func (k *gnetTransport) close() {
	k.closing.Store(true)
	k.wakeUp()
}

// discardLogger drops gnet's log lines, which concern single connections.
type discardLogger struct{}

func (discardLogger) Debugf(string, ...any) {}
func (discardLogger) Infof(string, ...any)  {}
func (discardLogger) Warnf(string, ...any)  {}
func (discardLogger) Errorf(string, ...any) {}
func (discardLogger) Fatalf(string, ...any) {}
