package zmtp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sluice/dataplane/backoff"
)

// Options of a Pull. A zero value means the default in brackets.
type Options struct {
	// Endpoint to bind, tcp://HOST:PORT. HOST is an address of this machine, or * for all. PORT *
	// or 0 picks a free port. Required.
	Endpoint string
	// Listener is an open listener to use instead; nil: Endpoint is bound.
	Listener *net.TCPListener
	Networks []netip.Prefix // accepted client networks [any]
	// Message is called with each message of one frame, which is borrowed. It is called by the
	// goroutine of the connection: in order for one connection, concurrently for several. It must
	// not block. Required.
	Message func(frame []byte)

	MaxFrame  int           // bytes; a longer frame closes the connection [4096]
	Conns     int           // connections at a time; further ones are closed [4096]
	PerHost   int           // of these, from one IPv4 address or IPv6 /64 [512]
	Handshake time.Duration // bound of the handshake [10s]
	Frame     time.Duration // bound of a frame that has begun [30s]
	Log       *slog.Logger  // [none]
}

func (o *Options) defaults() {
	set := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	set(&o.MaxFrame, 4<<10)
	set(&o.Conns, 4096)
	set(&o.PerHost, 512)
	if o.Handshake <= 0 {
		o.Handshake = 10 * time.Second
	}
	if o.Frame <= 0 {
		o.Frame = 30 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// Stats are a Pull's counters since it was opened.
type Stats struct {
	Conns      int64 // open now
	NotAllowed int64 // connections closed at accept: not from Networks
	AtCapacity int64 // connections closed at accept: over Conns or PerHost
	PeerErrors int64 // connections closed for malformed or overdue data
	Multipart  int64 // messages of several frames, which are ignored
}

// Add adds the counters of a closed predecessor.
func (s Stats) Add(before Stats) Stats {
	s.NotAllowed += before.NotAllowed
	s.AtCapacity += before.AtCapacity
	s.PeerErrors += before.PeerErrors
	s.Multipart += before.Multipart
	return s
}

// Pull is a listening PULL socket. All methods are safe for concurrent use.
type Pull struct {
	opt         Options
	endpoint    string
	listener    *net.TCPListener
	acceptDone  chan struct{} // closed when nothing is accepted any more
	serving     sync.WaitGroup
	lastPeerLog atomic.Int64 // unix seconds of the last log line about a peer

	open, notAllowed, atCapacity, peerErrors, multipart atomic.Int64
	closing                                             atomic.Bool // Close was called: nothing is read any more

	mu     sync.Mutex
	closed bool
	conns  map[*conn]struct{}
	hosts  map[netip.Addr]int
}

// Listen binds the endpoint and accepts connections. The caller closes the Pull.
func Listen(opt Options) (*Pull, error) {
	opt.defaults()
	p := &Pull{opt: opt, acceptDone: make(chan struct{}), conns: map[*conn]struct{}{}, hosts: map[netip.Addr]int{}}
	if err := p.bind(); err != nil {
		return nil, fmt.Errorf("zmtp: cannot listen on %q: %w", opt.Endpoint, err)
	}
	p.serving.Go(p.accept)
	return p, nil
}

// bindTimeout bounds the look-up of a host name.
const bindTimeout = 5 * time.Second

func (p *Pull) bind() error {
	address, ok := strings.CutPrefix(p.opt.Endpoint, "tcp://")
	if !ok {
		return errors.New("want tcp://HOST:PORT")
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("want tcp://HOST:PORT: %w", err)
	}
	if host == "" {
		return errors.New("want a host, or * for every address of this machine")
	}
	network := "tcp"
	if host == "*" {
		host = ""
	} else if a, err := netip.ParseAddr(host); err == nil && a.Is4() {
		network = "tcp4" // else Go binds IPv6 too for 0.0.0.0
	}
	if port == "*" {
		port = "0"
	}
	l := p.opt.Listener
	if l == nil {
		ctx, cancel := context.WithTimeout(context.Background(), bindTimeout)
		defer cancel()
		config := net.ListenConfig{KeepAliveConfig: keepAlive}
		bound, err := config.Listen(ctx, network, net.JoinHostPort(host, port))
		if err != nil {
			return err
		}
		l = bound.(*net.TCPListener)
	}
	p.listener = l
	at := l.Addr().(*net.TCPAddr).AddrPort()
	if !p.reachable(at.Addr().Unmap()) {
		l.Close()
		return fmt.Errorf("no network of %v can reach it", p.opt.Networks)
	}
	p.endpoint = "tcp://" + at.String()
	return nil
}

// reachable reports whether an address in Networks can connect to a at all.
func (p *Pull) reachable(a netip.Addr) bool {
	if len(p.opt.Networks) == 0 || a.Is6() && a.IsUnspecified() {
		return true
	}
	return slices.ContainsFunc(p.opt.Networks, func(n netip.Prefix) bool { return n.Addr().Unmap().Is4() == a.Is4() })
}

// Endpoint returns the bound endpoint with its port.
func (p *Pull) Endpoint() string { return p.endpoint }

// Done is closed when nothing is accepted any more: after Close, or when the listener has failed.
func (p *Pull) Done() <-chan struct{} { return p.acceptDone }

// Stats returns the counters.
func (p *Pull) Stats() Stats {
	return Stats{Conns: p.open.Load(), NotAllowed: p.notAllowed.Load(), AtCapacity: p.atCapacity.Load(), PeerErrors: p.peerErrors.Load(), Multipart: p.multipart.Load()}
}

// Listener returns the listening socket, to be passed to another process.
func (p *Pull) Listener() *net.TCPListener { return p.listener }

// StopAccepting stops accepting. Connections continue until Close.
func (p *Pull) StopAccepting() { p.listener.Close() }

// Close ends all connections. Message is not called after it. Close may be called more than once,
// but not from Message.
func (p *Pull) Close() {
	p.closing.Store(true)
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		c.tcp.Close()
	}
	p.mu.Unlock()
	p.listener.Close()
	p.serving.Wait()
}

// isTransientAcceptError reports whether accepting may succeed later.
func isTransientAcceptError(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.EPERM}, func(e error) bool { return errors.Is(err, e) })
}

// accept accepts connections until Close.
func (p *Pull) accept() {
	defer close(p.acceptDone)
	var retry backoff.Backoff
	for {
		tcp, err := p.listener.AcceptTCP()
		switch {
		case err == nil:
			retry.Reset()
			if p.opt.Listener != nil {
				_ = tcp.SetKeepAliveConfig(keepAlive) // without it the peer has TCP's defaults
			}
			p.admit(tcp)
		case errors.Is(err, net.ErrClosed):
			return
		case isTransientAcceptError(err):
			p.logPeer("no connection can be accepted", "", err)
			time.Sleep(retry.Next(5*time.Millisecond, time.Second))
		default:
			p.opt.Log.Error("zmq: the socket has failed", "endpoint", p.endpoint, "error", err)
			return
		}
	}
}

// admit serves a connection or closes it at once.
func (p *Pull) admit(tcp *net.TCPConn) {
	from := tcp.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	c := &conn{pull: p, tcp: tcp, host: hostOf(from)}
	c.session = session{maxFrame: p.opt.MaxFrame, onMessage: p.opt.Message, onMultipart: func() { p.multipart.Add(1) }, send: c.write}
	if why := p.track(c, from); why != "" {
		tcp.Close()
		if why != closingReason {
			p.logPeer("connection refused", from.String(), errors.New(why))
		}
		return
	}
	p.serving.Go(func() {
		err := c.serve()
		tcp.Close()
		p.untrack(c)
		if err != nil {
			p.peerErrors.Add(1)
			p.logPeer("a connection was closed", from.String(), err)
		}
	})
}

const closingReason = "the socket is being closed"

// track counts a connection, or returns why it is refused.
func (p *Pull) track(c *conn, from netip.Addr) (why string) {
	if len(p.opt.Networks) > 0 && !slices.ContainsFunc(p.opt.Networks, func(n netip.Prefix) bool { return n.Contains(from.WithZone("")) }) {
		p.notAllowed.Add(1)
		return "its address is in none of the networks"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return closingReason
	case len(p.conns) >= p.opt.Conns, p.hosts[c.host] >= p.opt.PerHost:
		p.atCapacity.Add(1)
		return fmt.Sprintf("%d connections, %d of them from this host; want at most %d and %d", len(p.conns), p.hosts[c.host], p.opt.Conns, p.opt.PerHost)
	}
	p.conns[c] = struct{}{}
	p.hosts[c.host]++
	p.open.Add(1)
	return ""
}

func (p *Pull) untrack(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	if p.hosts[c.host]--; p.hosts[c.host] == 0 {
		delete(p.hosts, c.host)
	}
	p.open.Add(-1)
}

// hostOf returns the prefix that counts as one host.
func hostOf(a netip.Addr) netip.Addr {
	if a.Is6() {
		if n, err := a.WithZone("").Prefix(64); err == nil {
			return n.Addr()
		}
	}
	return a
}

// peerLogInterval bounds log lines about peers, so that strangers cannot fill the log. The counters
// count all.
const peerLogInterval = 60

func (p *Pull) logPeer(what, peer string, err error) {
	now, was := time.Now().Unix(), p.lastPeerLog.Load()
	if now-was >= peerLogInterval && p.lastPeerLog.CompareAndSwap(was, now) {
		p.opt.Log.Warn("zmq: "+what, "endpoint", p.endpoint, "peer", peer, "reason", err)
	}
}
