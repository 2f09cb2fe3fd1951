package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"sluice/dataplane/backoff"
)

// StreamOptions are the options of a Stream.
type StreamOptions struct {
	// Type is the type of the socket: SUB, whose peers are PUB and XPUB, or DEALER, whose peers are
	// ROUTER, DEALER and REP.
	Type  string
	Topic string // the prefix that a SUB subscribes to; "": all messages
	// MaxMessage bounds the parts of a message, in bytes. A peer that sends more loses its
	// connection.
	MaxMessage int
	Handshake  time.Duration // bound of the connect and the handshake
}

var peersOf = map[string][]string{
	"SUB":    {"PUB", "XPUB"},
	"DEALER": {"ROUTER", "DEALER", "REP"},
}

// keepAlive detects a peer whose machine has vanished within 30 s. The kernel does it, so that it
// costs no wake-up of the process.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}

// Connect connects to an endpoint: tcp://HOST:PORT or ipc://PATH.
func Connect(ctx context.Context, endpoint string, opt StreamOptions) (*Stream, error) {
	network, addr, err := address(endpoint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, opt.Handshake)
	defer cancel()
	c, err := (&net.Dialer{KeepAliveConfig: keepAlive}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return handshake(ctx, c, opt)
}

// handshake exchanges greetings and READY commands over c. It closes c in any case.
func handshake(ctx context.Context, c net.Conn, opt StreamOptions) (*Stream, error) {
	defer c.Close() // the Stream has a duplicate descriptor
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()
	if _, err := c.Write(ourGreeting[:]); err != nil {
		return nil, err
	}
	var g [greetingBytes]byte
	for from := 0; from < len(g); {
		n, err := c.Read(g[from:])
		from += n
		if wrong := checkGreeting(g[:from]); wrong != nil {
			return nil, wrong
		}
		if err != nil {
			return nil, handshakeError(err)
		}
	}
	if _, err := c.Write(readyOf(opt.Type)); err != nil {
		return nil, err
	}
	flags, body, err := readFrame(c)
	if err != nil {
		return nil, handshakeError(err)
	}
	if err := checkReady(flags, body, peersOf[opt.Type]...); err != nil {
		return nil, err
	}
	if opt.Type == "SUB" {
		// Every release of ZMTP 3 knows this one of the two forms.
		if _, err := c.Write(encode(nil, append([]byte{1}, opt.Topic...))); err != nil {
			return nil, err
		}
	}
	fd, err := descriptorOf(c)
	if err != nil {
		return nil, err
	}
	return &Stream{fd: fd, maxMessage: opt.MaxMessage, minor: g[11]}, nil
}

func handshakeError(err error) error {
	var t net.Error
	switch {
	case errors.As(err, &t) && t.Timeout():
		return errSlow
	case errors.Is(err, io.EOF):
		return errors.New("the peer closed the connection during the handshake")
	}
	return err
}

// readyBytes bounds a READY command, whose properties are few and short.
const readyBytes = 4 << 10

// readFrame reads one frame and not a byte more.
func readFrame(c io.Reader) (flags byte, body []byte, err error) {
	p := make([]byte, longHead)
	n := 2
	if _, err := io.ReadFull(c, p[:n]); err != nil {
		return 0, nil, err
	}
	if p[0]&flagLong != 0 {
		n = longHead
		if _, err := io.ReadFull(c, p[2:]); err != nil {
			return 0, nil, err
		}
	}
	_, _, need, err := splitFrame(p[:n], readyBytes)
	if err != nil {
		return 0, nil, err
	}
	p = append(p[:n], make([]byte, need-n)...)
	if _, err := io.ReadFull(c, p[n:]); err != nil {
		return 0, nil, err
	}
	flags, body, _, err = splitFrame(p, readyBytes)
	return flags, body, err
}

// descriptorOf duplicates the descriptor of a connection. The runtime does not watch the duplicate,
// and so does not wake up for it.
func descriptorOf(c net.Conn) (fd int, err error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return -1, errors.ErrUnsupported
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	wrong := raw.Control(func(old uintptr) {
		if fd, err = duplicate(int(old)); err == nil {
			err = syscall.SetNonblock(fd, true)
		}
	})
	return fd, errors.Join(wrong, err)
}

// Acceptor listens at an endpoint for peers of a socket that binds.
type Acceptor struct {
	l   net.Listener
	opt StreamOptions
}

// Accept listens at an endpoint.
func Accept(endpoint string, opt StreamOptions) (*Acceptor, error) {
	network, addr, err := address(endpoint)
	if err != nil {
		return nil, err
	}
	l, err := (&net.ListenConfig{KeepAliveConfig: keepAlive}).Listen(context.Background(), network, addr)
	if err != nil {
		return nil, err
	}
	return &Acceptor{l: l, opt: opt}, nil
}

// Addr returns the address that the Acceptor listens at.
func (a *Acceptor) Addr() net.Addr { return a.l.Addr() }

// Close ends Run.
func (a *Acceptor) Close() { a.l.Close() }

// Run accepts connections until Close. It calls handle for each, on a goroutine of its own, when
// the handshake is complete, and logError for each failure. At most pending handshakes run at a
// time; further connections are closed.
func (a *Acceptor) Run(ctx context.Context, pending int, handle func(*Stream), logError func(error)) {
	room := make(chan struct{}, pending)
	var retry backoff.Backoff
	for {
		c, err := a.l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			logError(fmt.Errorf("zmtp: cannot accept a connection: %w", err))
			time.Sleep(retry.Next(5*time.Millisecond, time.Second))
			continue
		}
		retry.Reset()
		select {
		case room <- struct{}{}:
		default:
			c.Close()
			continue
		}
		go func() {
			defer func() { <-room }()
			ctx, cancel := context.WithTimeout(ctx, a.opt.Handshake)
			defer cancel()
			s, err := handshake(ctx, c, a.opt)
			if err != nil {
				logError(err)
				return
			}
			handle(s)
		}()
	}
}
