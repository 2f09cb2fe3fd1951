package app

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
	"sluice/dataplane/eventloop"
	"sluice/dataplane/front"
	"sluice/dataplane/hotrestart"
	"sluice/dataplane/wire"
	"sluice/router/engineapi"
)

// wireSockets are the listeners of the framed socket, once there are any.
type wireSockets struct {
	mu          sync.Mutex
	addrs       []net.Addr // that are served
	listeners   []hotrestart.Listener
	handingOver bool // they are being passed on: none may be added
}

var errHandingOver = errors.New("another process is taking this one's place")

// open binds a way and has it served, unless the listeners are being passed on.
func (w *wireSockets) open(endpoint *wireEndpoint, serve func(net.Listener) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.handingOver {
		return errHandingOver
	}
	ln, err := endpoint.bind()
	if err != nil {
		return err
	}
	if err := serve(ln); err != nil {
		return err
	}
	w.listeners = append(w.listeners, hotrestart.Listener{Name: endpoint.name, Address: endpoint.addr, Unlink: endpoint.unlink, Listener: ln})
	w.addrs = append(w.addrs, ln.Addr())
	return nil
}

// beginHandOver gives the listeners to be passed on; none is opened until keep.
func (w *wireSockets) beginHandOver() []hotrestart.Listener {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.handingOver = true
	return w.listeners
}

// adoptUnixFiles has the files of unix sockets go with their listeners: what was passed to this
// process is its own by now.
func (w *wireSockets) adoptUnixFiles() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.listeners {
		if u, ok := l.Listener.(interface{ SetUnlinkOnClose(bool) }); ok {
			u.SetUnlinkOnClose(l.Unlink)
		}
	}
}

// cancelHandOver takes back what pass has said: the other process did not come to be.
func (w *wireSockets) cancelHandOver() {
	w.mu.Lock()
	w.handingOver = false
	w.mu.Unlock()
}

// startWireLoops starts the threads that drive the socket's streams; nil where they
// stay on goroutines. They are not the front's, which end with its last HTTP stream. As
// their streams share connections, a few carry what the front needs many for.
func (r *Router) startWireLoops() *eventloop.Loops {
	if front.RelayMode(r.cfg.Relay.Driver) == front.RelayGoroutine {
		return nil
	}
	tick := time.Second
	if idle := r.cfg.Timeouts.StreamIdle; idle > 0 {
		tick = min(tick, max(idle/8, 10*time.Millisecond))
	}
	loops, err := eventloop.Start(eventloop.Options{
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

// newEngineAPI makes the router's engine, and its socket where one is wanted. The
// engine stands before the runner in any case.
func (r *Router) newEngineAPI() (err error) {
	c := &r.cfg.EngineAPI
	if c.Socket() {
		r.wireLoops = r.startWireLoops()
	}
	r.engineAPI, err = engineapi.New(engineapi.Options{
		Loops:  r.wireLoops,
		Runner: r.runner, Fleet: r.fleet, HTTP: c.HTTP, VLLM: c.VLLM, Hosts: c.Hosts, Authenticator: r.authenticator(), UnixWithoutKey: c.Keys == "tcp",
		PoolWait: r.cfg.Timeouts.PoolWait, StreamIdle: r.cfg.Timeouts.StreamIdle, MaxDepth: r.cfg.Limits.MaxDepth, Log: r.log,
		MediaHosts: func() front.MediaHosts { return r.live.Load().MediaHosts },
	})
	if err != nil {
		return err
	}
	r.metrics.GaugeFunc(func() float64 { n, _ := r.engineAPI.Counts(); return float64(n) }, "sluice_engine_api_requests_total")
	r.metrics.GaugeFunc(func() float64 { _, n := r.engineAPI.Counts(); return float64(n) }, "sluice_engine_api_refused_total")
	if !c.Socket() {
		return nil
	}
	r.wire, err = wire.New(wire.Options{
		Handler: r.engineAPI, Log: r.log, Token: c.Token, Agent: "sluice/" + r.version, Admit: r.engineAPI.Admit,
		MaxConns: c.MaxConns, MaxStreams: c.MaxStreams, MaxFrame: int(c.MaxFrame), Budget: r.bodies,
		ReadTimeout: r.cfg.Timeouts.Body, Heartbeat: c.Heartbeat, StallTimeout: r.cfg.Timeouts.Write, WriteTimeout: r.cfg.Timeouts.Write,
	})
	if err != nil {
		return err
	}
	stat := func(f func(wire.Stats) float64) func() float64 { return func() float64 { return f(r.wire.Stats()) } }
	r.metrics.GaugeFunc(stat(func(s wire.Stats) float64 { return float64(s.Conns) }), "sluice_engine_api_connections")
	r.metrics.GaugeFunc(stat(func(s wire.Stats) float64 { return float64(s.Streams) }), "sluice_engine_api_streams")
	r.metrics.GaugeFunc(stat(func(s wire.Stats) float64 { return float64(s.Stalled) }), "sluice_engine_api_stalled_total")
	r.metrics.GaugeFunc(stat(func(s wire.Stats) float64 { return float64(s.Requests) }), "sluice_engine_api_request_bytes")
	if c.TCP() && c.TLSCert != "" {
		k, err := certs.New(routedFiles(r.cfg), r.log)
		if err != nil {
			return fmt.Errorf("engine_api.tls_cert: %w", err)
		}
		r.metrics.GaugeFunc(func() float64 { return float64(k.NotAfter().UnixMilli()) / 1000 }, "sluice_engine_api_certificate_expiry_timestamp_seconds")
		if r.wireTLS, err = k.ServerConfig(tls.VersionTLS12); err != nil {
			return fmt.Errorf("engine_api.tls_cert: %w", err)
		}
	}
	return r.adoptWireListeners()
}

// wireEndpoint is one way to the framed socket.
type wireEndpoint struct {
	name, key, addr string // of the listener, in the configuration, where it is wanted
	unlink          bool   // see takeover.Listener
	inherited       net.Listener
	listen          func() (net.Listener, error)
}

func (w *wireEndpoint) bind() (net.Listener, error) {
	if w.inherited != nil {
		return w.inherited, nil
	}
	return w.listen()
}

// adoptWireListeners takes the listeners that were passed to this process, in whose queues callers
// wait. Those of a router that is replaced are served as soon as this process may
// accept, whatever engine_api.start_timeout says: that one had opened them.
func (r *Router) adoptWireListeners() error {
	c := &r.cfg.EngineAPI
	if c.Unix != "" {
		r.wireEndpoints = append(r.wireEndpoints, wireEndpoint{name: socketRoutedUnix, key: "engine_api.unix_socket", addr: c.Unix, unlink: true, listen: func() (net.Listener, error) { return wire.ListenUnix(c.Unix) }})
	}
	if c.TCP() {
		r.wireEndpoints = append(r.wireEndpoints, wireEndpoint{name: socketRouted, key: "engine_api.listen", addr: c.Listen, listen: func() (net.Listener, error) { return net.Listen("tcp", c.Listen) }})
	}
	for i := range r.wireEndpoints {
		w := &r.wireEndpoints[i]
		ln, unlink, err := r.inherited.Listener(w.name, w.addr)
		if err != nil {
			return fmt.Errorf("%s: %w", w.key, err)
		}
		if ln == nil {
			continue
		}
		w.inherited, w.unlink = ln, unlink
		if !r.inherited.Replaces() {
			continue
		}
		if err := r.openWireEndpoint(context.Background(), w); err != nil {
			return fmt.Errorf("%s: %w", w.key, err)
		}
	}
	r.wireEndpoints = slices.DeleteFunc(r.wireEndpoints, func(w wireEndpoint) bool { return w.inherited != nil && r.inherited.Replaces() })
	return nil
}

func (r *Router) serveWireOn(w *wireEndpoint, ln net.Listener) error {
	r.log.Info("engine socket", "addr", ln.Addr().String())
	if w.name == socketRouted && r.wireTLS != nil {
		return r.wire.ServeTLS(ln, r.wireTLS)
	}
	return r.wire.Serve(ln)
}

// serveWire opens what of the framed socket is not open yet, when there are workers
// enough or the wait for them is over.
func (r *Router) serveWire(ctx context.Context) error {
	c := &r.cfg.EngineAPI
	if len(r.wireEndpoints) == 0 {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, c.StartWait)
	defer cancel()
	if ready := r.engineAPI.AwaitWorkers(wait, c.MinWorkers); ctx.Err() != nil {
		return nil
	} else if ready < c.MinWorkers {
		r.log.Warn("the engine socket opens with fewer workers than wanted", "ready", ready, "engine_api.min_workers", c.MinWorkers, "waited", c.StartWait)
	}
	if r.inherited.Replaces() {
		select {
		case <-r.replacedParent:
		case <-ctx.Done():
			return nil
		}
	}
	for i := range r.wireEndpoints {
		w := &r.wireEndpoints[i]
		if err := r.openWireEndpoint(ctx, w); errors.Is(err, errHandingOver) || ctx.Err() != nil {
			return nil
		} else if err != nil {
			return fmt.Errorf("%s: %w", w.key, err)
		}
	}
	return nil
}

// openWireEndpoint opens one way to the framed socket. A process that takes another's place
// may find the address taken, if it was not passed on: that one lets go of it at once.
func (r *Router) openWireEndpoint(ctx context.Context, w *wireEndpoint) error {
	for end := time.Now().Add(bindTimeout); ; {
		err := r.wireSockets.open(w, func(ln net.Listener) error { return r.serveWireOn(w, ln) })
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errHandingOver): // until it is known which process goes on
		case !r.inherited.Replaces() || time.Now().After(end):
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-r.replaced:
			return errHandingOver
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drainWire lets the socket's streams end.
func (r *Router) drainWire(ctx context.Context) {
	if r.wire == nil {
		return
	}
	if err := r.wire.Drain(ctx); err != nil {
		r.log.Warn("engine streams did not end in time", "open", r.wire.Stats().Streams)
	}
}
