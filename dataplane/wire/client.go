package wire

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// DialOptions are the options of a Client. A zero value means the default in brackets.
type DialOptions struct {
	Token  string      // of the socket, if it has one
	Key    string      // an API key, if the router requires one
	Agent  string      // ["go"]
	TLS    *tls.Config // for tcp:// addresses; nil: none
	Window int         // bytes of unread items that a stream may hold [256 KiB]
	// WriteTimeout bounds how long the server may accept no bytes [30s].
	WriteTimeout time.Duration
}

// Client is one connection to a Server. It is safe for concurrent use. Its streams are independent:
// one that is not read stops only itself.
type Client struct {
	nc        net.Conn
	opt       DialOptions
	window    int
	server    greeting
	heartbeat time.Duration

	in frameReader // used by handshake, then by readLoop

	wmu  sync.Mutex // guards writes
	wbuf []byte

	mu      sync.Mutex
	streams map[uint32]*ClientStream
	last    uint32
	err     error // why the connection is closed
	goaway  *Error

	clock        processClock
	lastReceived atomic.Int64  // when bytes last came, by the process clock
	done         chan struct{} // closed when readLoop ends
}

// Dial connects to addr, unix:///PATH or tcp://HOST:PORT, and performs the handshake.
func Dial(ctx context.Context, addr string, opt DialOptions) (*Client, error) {
	network, host, ok := strings.Cut(addr, "://")
	if !ok || network != "unix" && network != "tcp" {
		return nil, fmt.Errorf("wire: cannot dial %q: want unix:///PATH or tcp://HOST:PORT", addr)
	}
	if opt.Window <= 0 {
		opt.Window = 256 << 10
	}
	if opt.Agent == "" {
		opt.Agent = "go"
	}
	if opt.WriteTimeout <= 0 {
		opt.WriteTimeout = 30 * time.Second
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, network, host)
	if err != nil {
		return nil, fmt.Errorf("wire: cannot dial %q: %w", addr, err)
	}
	if opt.TLS != nil {
		t := tls.Client(nc, opt.TLS)
		if err := t.HandshakeContext(ctx); err != nil {
			nc.Close()
			return nil, fmt.Errorf("wire: cannot dial %q: %w", addr, err)
		}
		nc = t
	}
	c := &Client{nc: nc, opt: opt, window: min(opt.Window, maxWindow), streams: make(map[uint32]*ClientStream), done: make(chan struct{})}
	c.in = frameReader{nc: nc, buf: make([]byte, 64<<10), onReceive: func() { c.lastReceived.Store(int64(c.clock.now())) }}
	if err := c.handshake(ctx); err != nil {
		nc.Close()
		return nil, fmt.Errorf("wire: cannot dial %q: %w", addr, err)
	}
	c.clock.start(max(c.heartbeat/4, 5*time.Millisecond))
	go c.readLoop()
	go c.heartbeatLoop()
	return c, nil
}

// handshake sends HELLO and waits for WELCOME.
func (c *Client) handshake(ctx context.Context) error {
	by, ok := ctx.Deadline()
	if !ok {
		by = time.Now().Add(10 * time.Second)
	}
	if err := c.nc.SetDeadline(by); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	hello := greeting{protocol: protocolName, version: Version, oldest: Version, token: c.opt.Token, key: c.opt.Key, agent: c.opt.Agent, window: uint64(c.window)}
	_, unsent := c.nc.Write(appendFrame(nil, Hello, 0, hello.append(nil)))
	h, payload, err := c.in.next(maxHello) // possibly the server's reason
	switch {
	case err != nil && unsent != nil:
		return unsent
	case err != nil:
		return err
	case h.kind == Fail:
		if e := readError(payload); e != nil {
			return e
		}
		return errClosed
	case h.kind != Welcome:
		return &Error{CodeProtocol, "the first frame of the server is " + h.kind.String() + "; want WELCOME"}
	}
	if err := c.server.read(payload); err != nil {
		return &Error{CodeProtocol, "WELCOME: " + err.Error()}
	}
	if c.server.protocol != protocolName || c.server.version != Version {
		return &Error{CodeVersion, fmt.Sprintf("WELCOME: version %d of %q; want %d of %q", c.server.version, c.server.protocol, Version, protocolName)}
	}
	c.heartbeat = 15 * time.Second
	if ms := c.server.heartbeatMS; ms > 0 && ms < 1<<31 {
		c.heartbeat = time.Duration(ms) * time.Millisecond
	}
	return c.nc.SetDeadline(time.Time{})
}

// Err returns why the connection is closed; nil: it is open.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Done is closed with the connection.
func (c *Client) Done() <-chan struct{} { return c.done }

// MaxFrame returns the largest request that the server accepts, in bytes.
func (c *Client) MaxFrame() int { return int(c.server.maxFrame) }

// Server returns the name of the other end.
func (c *Client) Server() string { return c.server.agent }

// Close closes the connection. The server kills its streams.
func (c *Client) Close() error {
	_ = c.send(Fail, 0, nil)
	c.fail(errClosed)
	<-c.done
	return nil
}

func (c *Client) fail(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	c.nc.Close()
}

// send writes one frame.
func (c *Client) send(k Kind, stream uint32, payload []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.sendLocked(k, stream, payload)
}

func (c *Client) sendLocked(k Kind, stream uint32, payload []byte) error {
	c.wbuf = appendFrame(c.wbuf[:0], k, stream, payload)
	_ = c.nc.SetWriteDeadline(time.Now().Add(c.opt.WriteTimeout))
	if _, err := c.nc.Write(c.wbuf); err != nil {
		c.fail(err) // the frame may be partially written, so nothing can follow
		return err
	}
	if cap(c.wbuf) > 1<<20 {
		c.wbuf = nil
	}
	return nil
}

// Open sends a request and returns its stream.
func (c *Client) Open(payload []byte) (*ClientStream, error) {
	if maxFrame := c.MaxFrame(); maxFrame > 0 && len(payload) > maxFrame {
		return nil, &Error{CodeTooLarge, fmt.Sprintf("the request has %d bytes; the server accepts at most %d", len(payload), maxFrame)}
	}
	// Stream ids must increase in the order of the frames, so both locks are held.
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.mu.Lock()
	switch {
	case c.err != nil:
		err := c.err
		c.mu.Unlock()
		return nil, err
	case c.goaway != nil:
		err := c.goaway
		c.mu.Unlock()
		return nil, err
	case c.last == 1<<32-1:
		c.mu.Unlock()
		return nil, errors.New("wire: the connection has no stream ids left; dial another")
	}
	c.last++
	s := &ClientStream{c: c, id: c.last, wake: make(chan struct{}, 1)}
	c.streams[s.id] = s
	c.mu.Unlock()
	if err := c.sendLocked(Request, s.id, payload); err != nil {
		c.removeStream(s.id)
		return nil, err
	}
	return s, nil
}

func (c *Client) removeStream(id uint32) {
	c.mu.Lock()
	delete(c.streams, id)
	c.mu.Unlock()
}

// readLoop handles frames until the connection ends.
func (c *Client) readLoop() {
	err := c.readFrames()
	c.fail(err)
	c.mu.Lock()
	all := make([]*ClientStream, 0, len(c.streams))
	for _, s := range c.streams {
		all = append(all, s)
	}
	clear(c.streams)
	err = c.err
	c.mu.Unlock()
	for _, s := range all {
		s.finish(err)
	}
	close(c.done)
}

// maxItem bounds an item, in bytes.
const maxItem = 64 << 20

func (c *Client) readFrames() error {
	for {
		h, payload, err := c.in.next(maxItem)
		if err != nil {
			return err
		}
		if err := c.handleFrame(h, payload); err != nil {
			return err
		}
	}
}

func (c *Client) handleFrame(h header, payload []byte) error {
	switch h.kind {
	case Item, End:
		c.mu.Lock()
		s := c.streams[h.stream]
		if h.kind == End {
			delete(c.streams, h.stream)
		}
		c.mu.Unlock()
		switch {
		case s == nil: // killed by this end
		case h.kind == Item:
			s.addItem(payload)
		default:
			s.finish(asError(readError(payload)))
		}
	case Ping:
		return c.send(Pong, 0, payload)
	case Pong:
	case Goaway:
		c.mu.Lock()
		c.goaway = readError(payload)
		if c.goaway == nil {
			c.goaway = &Error{CodeDraining, "the server accepts no more requests; open another connection"}
		}
		c.mu.Unlock()
	case Fail:
		if e := readError(payload); e != nil {
			return e
		}
		return errClosed
	default:
		return &Error{CodeProtocol, "a server must not send " + h.kind.String()}
	}
	return nil
}

// asError converts a nil *Error to a nil error.
func asError(e *Error) error {
	if e == nil {
		return nil
	}
	return e
}

// heartbeatLoop sends PINGs and detects a silent server.
func (c *Client) heartbeatLoop() {
	t := time.NewTicker(c.clock.step)
	defer t.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-t.C:
		}
		quiet := c.clock.tick(time.Now()) - time.Duration(c.lastReceived.Load())
		if quiet > 3*c.heartbeat+c.clock.step {
			c.fail(&Error{CodeHeartbeat, "no frame was received from the server for " + quiet.Round(time.Millisecond).String()})
			return
		}
		if quiet > c.heartbeat/2 && c.send(Ping, 0, nil) != nil {
			return
		}
	}
}

// ClientStream is one running request at the client. Recv is called by one goroutine at a time, the
// other methods by any.
type ClientStream struct {
	c  *Client
	id uint32

	mu    sync.Mutex
	items []byte // unread items: 4 bytes of length, then the payload
	ended bool
	err   error
	wake  chan struct{}

	out        []byte // of Recv: the previous buffer of items
	read       int
	uncredited int // bytes consumed but not returned as credit
}

// addItem stores an item until Recv returns it.
func (s *ClientStream) addItem(payload []byte) {
	s.mu.Lock()
	s.items = binary.BigEndian.AppendUint32(s.items, uint32(len(payload)))
	s.items = append(s.items, payload...)
	s.mu.Unlock()
	s.signal()
}

func (s *ClientStream) finish(err error) {
	s.mu.Lock()
	if !s.ended {
		s.ended, s.err = true, err
	}
	s.mu.Unlock()
	s.signal()
}

func (s *ClientStream) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// ID returns the stream's id on its connection.
func (s *ClientStream) ID() uint32 { return s.id }

// Recv returns the payload of the next item, valid until the next Recv. ok is false at the end of
// the stream, with the reason if it ended early. When ctx ends the stream is killed.
func (s *ClientStream) Recv(ctx context.Context) (payload []byte, ok bool, err error) {
	for s.read == len(s.out) {
		s.mu.Lock()
		switch {
		case len(s.items) > 0:
			s.items, s.out = s.out[:0], s.items
			s.read = 0
			s.mu.Unlock()
			continue
		case s.ended:
			err := s.err
			s.mu.Unlock()
			return nil, false, err
		}
		s.mu.Unlock()
		select {
		case <-s.wake:
		case <-ctx.Done():
			s.Kill()
			return nil, false, ctx.Err()
		}
	}
	n := int(binary.BigEndian.Uint32(s.out[s.read:]))
	from := s.read + 4
	s.read = from + n
	s.uncredited += n
	if s.uncredited >= s.c.window/2 {
		var credit [4]byte
		binary.BigEndian.PutUint32(credit[:], uint32(s.uncredited))
		s.uncredited = 0
		_ = s.c.send(Credit, s.id, credit[:])
	}
	return s.out[from:s.read], true, nil
}

// Stop asks the server to finish cleanly: the items already generated are sent, then the end.
func (s *ClientStream) Stop() { _ = s.c.send(Stop, s.id, nil) }

// Kill ends the stream now. Recv returns the items that have come and then ErrKilled.
func (s *ClientStream) Kill() {
	s.c.mu.Lock()
	live := s.c.streams[s.id] == s
	delete(s.c.streams, s.id)
	s.c.mu.Unlock()
	if live {
		s.finish(ErrKilled)
		_ = s.c.send(Kill, s.id, nil)
	}
}
