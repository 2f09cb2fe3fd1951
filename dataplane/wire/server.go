package wire

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/panjf2000/gnet/v2"

	"sluice/dataplane/backoff"
	"sluice/dataplane/membudget"
)

// Handler serves the streams of all connections.
type Handler interface {
	// ServeStream serves one request, on a goroutine of its own. A stream that it has not ended
	// when it returns ends without an error.
	ServeStream(s *Stream)
}

// Options of a Server. A zero value means the default in brackets.
type Options struct {
	Handler Handler
	Log     *slog.Logger // [none]
	Token   string       // that clients must send; "": none
	Agent   string       // the server's name in WELCOME ["sluice"]
	// Admit, if set, decides by the key of the HELLO (borrowed, may be empty) whether a caller is
	// admitted. It must not block.
	Admit func(key []byte, unix bool) *Error

	MaxConns   int // [256]
	MaxStreams int // open streams on one connection [16384]
	MaxFrame   int // bytes of a REQUEST's payload [8 MiB]
	// Budget, if set, is a budget shared with others that replaces RequestBudget.
	Budget        *membudget.Budget
	RequestBudget int64         // bytes of the payloads of all running requests, and of what they become (Stream.LeaseMemory) [1 GiB]
	QueueBytes    int           // bytes pending on one connection before its streams wait [4 MiB]
	HelloTimeout  time.Duration // from the accept to the HELLO [5s]
	ReadTimeout   time.Duration // from a REQUEST's header to the end of its payload, plus a second for each 256 KiB [30s]
	Heartbeat     time.Duration // silence before a PING; three times as long closes the connection [15s]
	StallTimeout  time.Duration // a stream whose caller reads nothing for so long, or has not read all after a STOP, is ended [30s]
	WriteTimeout  time.Duration // a connection that accepts none of its pending bytes for so long is closed [30s]
}

func (o *Options) defaults() {
	set := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	wait := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Agent == "" {
		o.Agent = "sluice"
	}
	if o.RequestBudget <= 0 {
		o.RequestBudget = 1 << 30
	}
	set(&o.MaxConns, 256)
	set(&o.MaxStreams, 16384)
	set(&o.MaxFrame, 8<<20)
	set(&o.QueueBytes, 4<<20)
	wait(&o.HelloTimeout, 5*time.Second)
	wait(&o.ReadTimeout, 30*time.Second)
	wait(&o.Heartbeat, 15*time.Second)
	wait(&o.StallTimeout, 30*time.Second)
	wait(&o.WriteTimeout, 30*time.Second)
}

// Server serves any number of listeners.
type Server struct {
	opt    Options
	budget *membudget.Budget
	clock  processClock

	draining atomic.Bool
	live     atomic.Int64 // running handlers
	stalled  atomic.Uint64
	refused  atomic.Uint64

	handshakeErrorLoggedAt atomic.Int64 // when one was last logged, in Unix nanoseconds
	suppressed             atomic.Int64 // handshake errors not logged since then

	mu      sync.Mutex
	conns   map[*Conn]struct{}
	closers []func()     // each closes a listener and waits for its accept loop
	loops   *gnet.Client // nil before the first Listen
	closed  bool
	done    chan struct{}
	ticker  sync.Once
}

// New creates a Server. It serves nothing before Listen or ListenTLS.
func New(opt Options) (*Server, error) {
	if opt.Handler == nil {
		return nil, errors.New("wire: cannot make a server without a Handler")
	}
	opt.defaults()
	budget := membudget.NewBudget(opt.RequestBudget)
	if opt.Budget != nil {
		budget = opt.Budget.NewChild()
	}
	return &Server{
		opt: opt, budget: budget,
		conns: make(map[*Conn]struct{}), done: make(chan struct{}),
	}, nil
}

// Stats are the counters of a Server.
type Stats struct {
	Conns    int
	Streams  int64 // running handlers
	Stalled  uint64
	Refused  uint64 // rejected by an END before the handler saw them
	Requests int64  // bytes acquired of RequestBudget
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	n := len(s.conns)
	s.mu.Unlock()
	return Stats{Conns: n, Streams: s.live.Load(), Stalled: s.stalled.Load(), Refused: s.refused.Load(), Requests: s.budget.Used()}
}

// add adds a connection; false: there are too many, or the server is closed.
func (s *Server) add(c *Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= s.opt.MaxConns {
		return false
	}
	s.conns[c] = struct{}{}
	s.ticker.Do(func() {
		s.clock.start(min(time.Second, s.opt.Heartbeat/4, s.opt.HelloTimeout/4, s.opt.ReadTimeout/4))
		go s.tick()
	})
	return true
}

func (s *Server) remove(c *Conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

func (s *Server) all() []*Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*Conn, 0, len(s.conns))
	for c := range s.conns {
		list = append(list, c)
	}
	return list
}

// tick keeps all connections alive until the server is closed.
func (s *Server) tick() {
	t := time.NewTicker(s.clock.step)
	defer t.Stop()
	for {
		select {
		case <-s.done:
			return
		case <-t.C:
		}
		now := s.clock.tick(time.Now())
		for _, c := range s.all() {
			if bad := c.tick(now); bad != nil {
				c.closeWith(bad)
			}
		}
	}
}

// closeWith sends the reason to the peer and closes the connection.
func (c *Conn) closeWith(bad *Error) {
	if bad.Code != "" {
		c.srv.logClosed(c, bad)
		c.out.postFrame(Fail, 0, appendError(nil, bad))
	}
	c.out.transport.close()
}

// handshakeErrorInterval is the least time between two log lines about rejected callers, because
// any peer may connect and be rejected.
const handshakeErrorInterval = 10 * time.Second

// logClosed logs why a connection was closed.
func (s *Server) logClosed(c *Conn, bad *Error) {
	args := []any{"client", c.peer.String(), "agent", c.agentName(), "code", bad.Code, "reason", bad.Message}
	if !c.open.Load() {
		now, last := time.Now().UnixNano(), s.handshakeErrorLoggedAt.Load()
		if last != 0 && now-last < int64(handshakeErrorInterval) || !s.handshakeErrorLoggedAt.CompareAndSwap(last, now) {
			s.suppressed.Add(1)
			return
		}
		if n := s.suppressed.Swap(0); n > 0 {
			args = append(args, "suppressed", n)
		}
	}
	s.opt.Log.Info("wire connection closed", args...)
}

func (c *Conn) agentName() string {
	if c.open.Load() {
		return c.agent
	}
	return ""
}

// Drain tells all clients that no more requests are accepted, and waits until the running ones or
// ctx have ended.
func (s *Server) Drain(ctx context.Context) error {
	if s.draining.CompareAndSwap(false, true) {
		for _, c := range s.all() {
			if c.open.Load() {
				c.out.postFrame(Goaway, 0, drainingError)
			}
		}
	}
	t := time.NewTicker(5 * time.Millisecond)
	defer t.Stop()
	for s.live.Load() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
	return nil
}

// CloseListeners closes the listeners; connections continue. For a process whose listeners another
// process has taken over.
func (s *Server) CloseListeners() {
	s.mu.Lock()
	ends := s.closers
	s.closers = nil
	s.mu.Unlock()
	for _, end := range ends {
		end()
	}
}

// Close closes listeners and connections and kills running streams. It returns when their handlers
// have returned, or after a grace time.
func (s *Server) Close() {
	s.draining.Store(true)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	s.mu.Unlock()
	close(s.done)
	s.CloseListeners()
	for _, c := range s.all() {
		c.out.transport.close()
	}
	if s.loops != nil {
		_ = s.loops.Stop() // closes open connections and returns ErrEngineShutdown
	}
	const grace = 5 * time.Second
	for by := time.Now().Add(grace); s.live.Load() > 0 && time.Now().Before(by); {
		time.Sleep(time.Millisecond)
	}
}

// addCloser adds what Close must close; false: Close has been called.
func (s *Server) addCloser(end func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.closers = append(s.closers, end)
	return true
}

// peerOf returns the address of a connection's other end.
func peerOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		ip, _ := netip.AddrFromSlice(t.IP)
		return ip.Unmap()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// ListenTLS serves TLS on a TCP address and returns the bound address. gnet has no TLS, so each of
// these connections has two goroutines, a reader and a writer.
func (s *Server) ListenTLS(addr string, conf *tls.Config) (net.Addr, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("wire: cannot listen on %q: %w", addr, err)
	}
	return ln.Addr(), s.ServeTLS(ln, conf)
}

// ServeTLS is Serve for TLS.
func (s *Server) ServeTLS(ln net.Listener, conf *tls.Config) error {
	return s.acceptLoop(tls.NewListener(ln, conf), func(nc net.Conn) { go s.serveNet(nc) })
}

// acceptLoop accepts until CloseListeners or Close.
func (s *Server) acceptLoop(ln net.Listener, handle func(net.Conn)) error {
	ended := make(chan struct{})
	if !s.addCloser(func() { ln.Close(); <-ended }) {
		ln.Close()
		return errClosed
	}
	go func() {
		defer close(ended)
		s.accept(ln, handle)
	}()
	return nil
}

// rejectConn closes a connection over the limit.
func rejectConn(nc net.Conn) {
	_ = nc.SetDeadline(time.Now().Add(time.Second)) // over TLS the first write reads too
	_, _ = nc.Write(errorFrame(&Error{CodeConnections, "too many connections are open (engine_api.max_conns); close one, or try again later"}))
	nc.Close()
}

func (s *Server) accept(ln net.Listener, handle func(net.Conn)) {
	var retry backoff.Backoff
	for {
		nc, err := ln.Accept()
		switch {
		case err == nil:
			retry.Reset()
			handle(nc)
		case errors.Is(err, net.ErrClosed):
			return
		default: // probably out of descriptors, which is temporary
			s.opt.Log.Error("cannot accept a wire connection", "address", ln.Addr().String(), "error", err)
			time.Sleep(retry.Next(time.Millisecond, time.Second))
		}
	}
}
