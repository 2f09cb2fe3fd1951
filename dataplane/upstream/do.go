package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"sluice/dataplane/fdlimit"
)

// maxInformational bounds the 1xx responses before the final one.
const maxInformational = 8

// staleWindow is how soon a failure must come to mean "the engine had closed this idle connection":
// about a round trip. Later the engine may have worked on the request, and only the caller knows
// whether to run it twice.
const staleWindow = time.Second

// Do sends req and reads the response head. A request that fails on a reused connection before any
// byte of the response, because the engine had closed that idle connection, is sent once more on a
// new one. call may be nil. The errors are *Error; the caller must Release the Response.
func (e *Endpoint) Do(req *Request, call *Call) (*Response, error) {
	call.join(req)
	resp, err := e.do(req, call)
	if err != nil {
		call.leave()
		return nil, err
	}
	call.markAnswered(req, resp.Status)
	return resp, nil
}

func (e *Endpoint) do(req *Request, call *Call) (*Response, error) {
	if err := req.check(); err != nil {
		return nil, e.fail(PhaseDial, err, call)
	}
	if call.ended() {
		return nil, e.fail(PhaseDial, ErrCancelled, call)
	}
	start := now()
	c := e.acquireIdle(start)
	if c != nil {
		if !call.attach(&c.leg) {
			c.releaseExchange()
			e.releaseIdle(c)
			return nil, e.fail(PhaseDial, ErrCancelled, call)
		}
		e.reused.Add(1)
		phase, err := c.roundTrip(req, call, start)
		if err == nil {
			return &c.resp, nil
		}
		stale := (c.exchange == nil || c.w == 0) && isClosed(err) && now()-start < e.staleWindow
		detached := call.detach(&c.leg)
		c.close()
		if !stale || !detached {
			return nil, e.fail(phase, err, call)
		}
		e.retried.Add(1)
		if c, _ = e.dial(req, call); c == nil {
			// The phase of the request is that of its first sending.
			return nil, e.fail(phase, err, call)
		}
	} else {
		var err error
		if c, err = e.dial(req, call); err != nil {
			return nil, e.fail(PhaseDial, err, call)
		}
	}
	phase, err := c.roundTrip(req, call, now())
	if err != nil {
		call.detach(&c.leg)
		c.close()
		return nil, e.fail(phase, err, call)
	}
	return &c.resp, nil
}

// fail wraps err. If the call was ended, that is the error.
func (e *Endpoint) fail(phase Phase, err error, call *Call) error {
	switch {
	case call.Cancelled():
		err = ErrCancelled
		e.cancelled.Add(1)
	case call.wasAbandoned():
		err = ErrFrozen
	case errors.Is(err, ErrTimeout):
		e.timedOut.Add(1)
	}
	return &Error{Endpoint: e.url, Phase: phase, Err: err}
}

// dial makes a connection, attached to call.
func (e *Endpoint) dial(req *Request, call *Call) (*conn, error) {
	if maxConns := e.reloadable.Load().MaxConns; e.open.Add(1) > int64(maxConns) {
		e.open.Add(-1)
		return nil, fmt.Errorf("%w: the %d that limits.engine_conns allows are open", ErrTooManyConns, maxConns)
	}
	c, err := e.connect(req, call)
	if err != nil {
		e.open.Add(-1)
		return nil, err
	}
	e.dialed.Add(1)
	return c, nil
}

func (e *Endpoint) connect(req *Request, call *Call) (*conn, error) {
	by := time.Now().Add(e.reloadable.Load().ConnectTimeout)
	if !req.Deadline.IsZero() && req.Deadline.Before(by) {
		by = req.Deadline
	}
	var c *conn
	var err error
	if e.direct.ok && e.tls == nil {
		c, err = e.dialRaw(by, call)
	} else {
		c, err = e.dialNet(by, call)
	}
	if err == nil || err == ErrCancelled {
		return c, err
	}
	var ne net.Error
	if fdlimit.IsExhausted(err) {
		return nil, fmt.Errorf("%w: %w", ErrLocalResources, err)
	}
	if errors.As(err, &ne) && ne.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	return nil, err
}

// dialNet makes a connection by net.Dialer, attached to call.
func (e *Endpoint) dialNet(by time.Time, call *Call) (*conn, error) {
	ctx, cancel := context.WithDeadline(context.Background(), by)
	defer cancel()
	dials := &callLeg{dialInProgress(cancel)}
	if !call.attach(dials) {
		return nil, ErrCancelled
	}
	nc, err := e.dialContext(ctx)
	if err != nil {
		call.detach(dials)
		return nil, err
	}
	c := newConn(e, nc)
	if !call.swap(dials, &c.leg) {
		abort(nc)
		return nil, ErrCancelled
	}
	return c, nil
}

func (e *Endpoint) dialContext(ctx context.Context) (net.Conn, error) {
	nc, err := e.dialer.DialContext(ctx, "tcp", e.addr)
	if err != nil {
		return nil, err
	}
	if t, ok := nc.(*net.TCPConn); ok {
		// Otherwise Nagle's algorithm delays the end of a request by 40 ms.
		_ = t.SetNoDelay(true)
		if isReservedFD(t) {
			_ = nc.Close()
			return nil, fdlimit.ErrReserved
		}
	}
	if e.tls == nil {
		return nc, nil
	}
	if under, ok := nc.(*net.TCPConn); ok {
		if nc, err = newTLSTransport(under); err != nil {
			_ = under.Close()
			return nil, err
		}
	}
	t := tls.Client(nc, e.tls)
	if err := t.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return t, nil
}

// isReservedFD reports whether a connection uses a reserved descriptor.
func isReservedFD(t *net.TCPConn) (is bool) {
	if raw, err := t.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { is = fdlimit.IsReserved(int(fd)) })
	}
	return is
}

// roundTrip sends req and reads the response head. t is the present time.
func (c *conn) roundTrip(req *Request, call *Call, t time.Duration) (Phase, error) {
	size := req.size()
	deadline := req.deadline()
	by := headDeadline(req, deadline, t)
	if deadline != 0 && t >= deadline {
		return PhaseDial, ErrTimeout
	}
	c.acquireExchange()
	c.acquireBlock()
	c.head.reset(0)
	c.call = call
	out := req.appendHead(c.buf[:0], c.ep, size)
	c.vecSpare = append(c.vecSpare[:0], out)
	if len(out)+size <= blockSize {
		for _, b := range req.Body {
			out = append(out, b...)
		}
		c.vecSpare[0] = out
	} else {
		c.vecSpare = append(c.vecSpare, req.Body...)
	}
	c.out = c.vecSpare
	defer c.releaseOut()
	if c.raw != nil {
		c.send(by)
		switch {
		case c.writeErr == nil && len(c.out) > 0 && c.readErr == nil:
			c.writeErr = c.write(size, deadline)
			by = headDeadline(req, deadline, now())
		case !c.sent:
			return PhaseDial, c.readErr
		}
	} else {
		c.sent = true
		c.writeErr = c.write(size, deadline)
		by = headDeadline(req, deadline, now())
	}
	if c.writeErr == nil {
		call.markSent()
	} else {
		// An engine may refuse early and close. Its response is then already here.
		if !isClosed(c.writeErr) && c.writeErr != errEarlyRefusal || c.readHead(now()+100*time.Millisecond, deadline, req, call) != nil {
			return PhaseWrite, c.writeErr
		}
		c.resp.broken = true
		return 0, nil
	}
	if c.readErr != nil {
		return PhaseHead, c.readErr
	}
	if err := c.readHead(by, deadline, req, call); err != nil {
		return PhaseHead, err
	}
	return 0, nil
}

// headDeadline returns when the response head must have come.
func headDeadline(req *Request, deadline, t time.Duration) time.Duration {
	if req.HeadTimeout <= 0 {
		return deadline
	}
	by := t + req.HeadTimeout
	if deadline != 0 && deadline < by {
		return deadline
	}
	return by
}

// readHead reads until a final response head is complete.
func (c *conn) readHead(by, deadline time.Duration, req *Request, call *Call) error {
	informational := 0
	for {
		done, err := c.head.parse(c.buf[:c.w])
		if err != nil {
			return err
		}
		overLimit := c.w
		if done {
			overLimit = c.head.pos
		}
		if overLimit > c.ep.opt.MaxHeadBytes {
			return protocolError("a response head over %d bytes", c.ep.opt.MaxHeadBytes)
		}
		if done {
			if c.head.status >= 200 {
				break
			}
			if c.head.status == 101 {
				return protocolError("status 101 to a request without Upgrade")
			}
			if informational++; informational > maxInformational {
				return protocolError("more than %d informational responses", maxInformational)
			}
			c.head.reset(c.head.pos)
			continue
		}
		if err := c.fill(by); err != nil {
			return err
		}
	}
	if status := c.head.status; status >= 300 && status < 400 && !req.Redirects {
		return fmt.Errorf("%w: status %d", ErrRedirect, status)
	}
	c.r = c.head.pos
	c.resp.begin(req, call, deadline)
	return nil
}
