package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"sluice/dataplane/certs"
	"sluice/dataplane/front"
	"sluice/dataplane/loop"
	"sluice/dataplane/takeover"
	"sluice/dataplane/wire"
	"sluice/router/routed"
)

// wireSockets are the listeners of the framed socket, once there are any.
type wireSockets struct {
	mu      sync.Mutex
	addrs   []net.Addr // that are served
	bound   []takeover.Listener
	passing bool // they are being passed on: none may be added
}

var errPassing = errors.New("another process is taking this one's place")

// open binds a way and has it served, unless the listeners are being passed on.
func (w *wireSockets) open(way *wireWay, serve func(net.Listener) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.passing {
		return errPassing
	}
	ln, err := way.bind()
	if err != nil {
		return err
	}
	if err := serve(ln); err != nil {
		return err
	}
	w.bound = append(w.bound, takeover.Listener{Name: way.name, Address: way.addr, Unlink: way.unlink, Listener: ln})
	w.addrs = append(w.addrs, ln.Addr())
	return nil
}

// pass gives the listeners to be passed on; none is opened until keep.
func (w *wireSockets) pass() []takeover.Listener {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.passing = true
	return w.bound
}

// own has the files of unix sockets go with their listeners: what was passed to this
// process is its own by now.
func (w *wireSockets) own() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.bound {
		if u, ok := l.Listener.(interface{ SetUnlinkOnClose(bool) }); ok {
			u.SetUnlinkOnClose(l.Unlink)
		}
	}
}

// keep takes back what pass has said: the other process did not come to be.
func (w *wireSockets) keep() {
	w.mu.Lock()
	w.passing = false
	w.mu.Unlock()
}

// startWireLoops starts the threads that drive the socket's streams; nil where they
// stay on goroutines. They are not the front's, which end with its last HTTP stream. As
// their streams share connections, a few carry what the front needs many for.
func (r *router) startWireLoops() *loop.Loops {
	if front.Relay(r.cfg.Relay.Driver) == front.RelayGoroutine {
		return nil
	}
	tick := time.Second
	if idle := r.cfg.Timeouts.StreamIdle; idle > 0 {
		tick = min(tick, max(idle/8, 10*time.Millisecond))
	}
	loops, err := loop.Start(loop.Options{
		Loops: max(1, runtime.GOMAXPROCS(0)/4), Tick: tick,
		OnFail: func(err error) {
			r.log.Error("an event loop of the engine socket failed; its streams were ended", "error", err)
		},
	})
	if err != nil {
		r.log.Warn("event loops are not to be had here", "error", err)
		return nil
	}
	return loops
}

// newRouted makes the router's engine, and its socket where one is wanted. The
// engine stands before the runner in any case.
func (r *router) newRouted() (err error) {
	c := &r.cfg.Routed
	if c.Socket() {
		r.wireLoops = r.startWireLoops()
	}
	r.routed, err = routed.New(routed.Options{
		Loops:  r.wireLoops,
		Runner: r.runner, Fleet: r.fleet, HTTP: c.HTTP, VLLM: c.VLLM, Hosts: c.Hosts, Gate: r.gate(), FreeUnix: c.Keys == "tcp",
		PoolWait: r.cfg.Timeouts.PoolWait, StreamIdle: r.cfg.Timeouts.StreamIdle, MaxDepth: r.cfg.Limits.MaxDepth, Log: r.log,
		MediaHosts: func() front.MediaHosts { return r.live.Load().MediaHosts },
	})
	if err != nil {
		return err
	}
	r.metrics.Func(func() float64 { n, _ := r.routed.Counts(); return float64(n) }, "sluice_routed_requests_total")
	r.metrics.Func(func() float64 { _, n := r.routed.Counts(); return float64(n) }, "sluice_routed_refused_total")
	if !c.Socket() {
		return nil
	}
	r.wire, err = wire.New(wire.Options{
		Handler: r.routed, Log: r.log, Token: c.Token, Agent: "sluice/" + version, Admit: r.routed.Admit,
		MaxConns: c.MaxConns, MaxStreams: c.MaxStreams, MaxFrame: int(c.MaxFrame), Budget: r.bodies,
		ReadTimeout: r.cfg.Timeouts.Body, Heartbeat: c.Heartbeat, StallTimeout: r.cfg.Timeouts.Write, WriteTimeout: r.cfg.Timeouts.Write,
	})
	if err != nil {
		return err
	}
	stat := func(f func(wire.Stats) float64) func() float64 { return func() float64 { return f(r.wire.Stats()) } }
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Conns) }), "sluice_routed_connections")
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Streams) }), "sluice_routed_streams")
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Stalled) }), "sluice_routed_stalled_total")
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Requests) }), "sluice_routed_request_bytes")
	if c.TCP() && c.TLSCert != "" {
		k, err := certs.New(routedFiles(r.cfg), r.log)
		if err != nil {
			return fmt.Errorf("routed.tls_cert: %w", err)
		}
		r.metrics.Func(func() float64 { return float64(k.Expires().UnixMilli()) / 1000 }, "sluice_routed_certificate_expiry_timestamp_seconds")
		if r.wireTLS, err = k.Server(tls.VersionTLS12); err != nil {
			return fmt.Errorf("routed.tls_cert: %w", err)
		}
	}
	return r.takeWire()
}

// wireWay is one way to the framed socket.
type wireWay struct {
	name, key, addr string // of the listener, in the configuration, where it is wanted
	unlink          bool   // see takeover.Listener
	passed          net.Listener
	make            func() (net.Listener, error)
}

func (w *wireWay) bind() (net.Listener, error) {
	if w.passed != nil {
		return w.passed, nil
	}
	return w.make()
}

// takeWire takes the listeners that were passed to this process, in whose queues callers
// wait. Those of a router that is replaced are served as soon as this process may
// accept, whatever start_wait says: that one had opened them.
func (r *router) takeWire() error {
	c := &r.cfg.Routed
	if c.Unix != "" {
		r.wireWays = append(r.wireWays, wireWay{name: socketRoutedUnix, key: "routed.unix", addr: c.Unix, unlink: true, make: func() (net.Listener, error) { return wire.ListenUnix(c.Unix) }})
	}
	if c.TCP() {
		r.wireWays = append(r.wireWays, wireWay{name: socketRouted, key: "routed.listen", addr: c.Listen, make: func() (net.Listener, error) { return net.Listen("tcp", c.Listen) }})
	}
	for i := range r.wireWays {
		w := &r.wireWays[i]
		ln, unlink, err := r.given.Passed(w.name, w.addr)
		if err != nil {
			return fmt.Errorf("%s: %w", w.key, err)
		}
		if ln == nil {
			continue
		}
		w.passed, w.unlink = ln, unlink
		if !r.given.Replaces() {
			continue
		}
		if err := r.openWire(context.Background(), w); err != nil {
			return fmt.Errorf("%s: %w", w.key, err)
		}
	}
	r.wireWays = slices.DeleteFunc(r.wireWays, func(w wireWay) bool { return w.passed != nil && r.given.Replaces() })
	return nil
}

func (r *router) serveWireOn(w *wireWay, ln net.Listener) error {
	r.log.Info("engine socket", "addr", ln.Addr().String())
	if w.name == socketRouted && r.wireTLS != nil {
		return r.wire.ServeTLS(ln, r.wireTLS)
	}
	return r.wire.Serve(ln)
}

// serveWire opens what of the framed socket is not open yet, when there are workers
// enough or the wait for them is over.
func (r *router) serveWire(ctx context.Context) error {
	c := &r.cfg.Routed
	if len(r.wireWays) == 0 {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, c.StartWait)
	defer cancel()
	if ready := r.routed.AwaitWorkers(wait, c.MinWorkers); ctx.Err() != nil {
		return nil
	} else if ready < c.MinWorkers {
		r.log.Warn("the engine socket opens with fewer workers than wanted", "ready", ready, "routed.min_workers", c.MinWorkers, "waited", c.StartWait)
	}
	if r.given.Replaces() {
		select {
		case <-r.tookPlace:
		case <-ctx.Done():
			return nil
		}
	}
	for i := range r.wireWays {
		w := &r.wireWays[i]
		if err := r.openWire(ctx, w); errors.Is(err, errPassing) || ctx.Err() != nil {
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: %w", w.key, err)
		}
	}
	return nil
}

// openWire opens one way to the framed socket. A process that takes another's place
// may find the address taken, if it was not passed on: that one lets go of it at once.
func (r *router) openWire(ctx context.Context, w *wireWay) error {
	for end := time.Now().Add(bindTime); ; {
		err := r.wireSockets.open(w, func(ln net.Listener) error { return r.serveWireOn(w, ln) })
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errPassing): // until it is known which process goes on
		case !r.given.Replaces() || time.Now().After(end):
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-r.passedOn:
			return errPassing
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drainWire lets the socket's streams end.
func (r *router) drainWire(ctx context.Context) {
	if r.wire == nil {
		return
	}
	if err := r.wire.Drain(ctx); err != nil {
		r.log.Warn("engine streams did not end in time", "open", r.wire.Stats().Streams)
	}
}
