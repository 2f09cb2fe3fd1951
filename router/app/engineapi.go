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

// wireSockets are the open listeners of the engine API's framed socket.
type wireSockets struct {
	mu          sync.Mutex
	addrs       []net.Addr // of listeners
	listeners   []hotrestart.Listener
	handingOver bool // a hot restart is passing listeners to the new process: add none
}

var errHandingOver = errors.New("another process is replacing this one")

// open binds an endpoint and passes its listener to serve. It returns errHandingOver while a
// hot restart passes the listeners to the new process.
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

// beginHandOver returns the listeners that a hot restart passes to the new process. Until
// cancelHandOver, open returns errHandingOver.
func (w *wireSockets) beginHandOver() []hotrestart.Listener {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.handingOver = true
	return w.listeners
}

// adoptUnixFiles makes the inherited unix listeners unlink their socket files on close if
// the old process would have. It is called once this process has replaced the old one and
// so owns the files.
func (w *wireSockets) adoptUnixFiles() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.listeners {
		if u, ok := l.Listener.(interface{ SetUnlinkOnClose(bool) }); ok {
			u.SetUnlinkOnClose(l.Unlink)
		}
	}
}

// cancelHandOver undoes beginHandOver after the new process failed to start.
func (w *wireSockets) cancelHandOver() {
	w.mu.Lock()
	w.handingOver = false
	w.mu.Unlock()
}

// startWireLoops starts the event loops that drive the socket's streams. It returns nil if
// streams are driven by goroutines. The socket has event loops of its own because the front's
// end with the last HTTP stream. A quarter of the usable cores suffices, since many streams
// share one connection.
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
		r.log.Warn("cannot start event loops; streams of the engine API use goroutines", "error", err)
		return nil
	}
	return loops
}

// newEngineAPI creates the engine API, and its framed socket if one is configured. The engine
// API always exists, because the front sends its requests to the runner through it.
func (r *Router) newEngineAPI() (err error) {
	c := &r.cfg.EngineAPI
	if c.Socket() {
		r.wireLoops = r.startWireLoops()
	}
	r.engineAPI, err = engineapi.New(engineapi.Options{
		Loops:  r.wireLoops,
		Runner: r.runner, Fleet: r.fleet, HTTP: c.HTTP, VLLM: c.VLLMDialect, Hosts: c.AllowedHosts, Authenticator: r.authenticator(), UnixWithoutKey: c.RequireAPIKeys == "tcp",
		Log: r.log,
		Live: func() engineapi.LiveOptions {
			c := r.live.Load()
			return engineapi.LiveOptions{MediaHosts: c.MediaHosts, PoolWait: c.Timeouts.PoolWait, StreamIdle: c.Timeouts.StreamIdle, MaxDepth: c.Limits.MaxDepth}
		},
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
		k, err := certs.New(engineAPIFiles(r.cfg), r.log)
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

// wireEndpoint is one endpoint of the framed socket: the TCP or the unix one.
type wireEndpoint struct {
	name, key, addr string // listener name for a hot restart, configuration key, configured address
	unlink          bool   // see hotrestart.Listener
	inherited       net.Listener
	listen          func() (net.Listener, error)
}

func (w *wireEndpoint) bind() (net.Listener, error) {
	if w.inherited != nil {
		return w.inherited, nil
	}
	return w.listen()
}

// adoptWireListeners lists the configured endpoints and takes over their inherited listeners,
// whose accept queues may hold callers. Listeners from a process that this one replaces are
// served at once, without the wait for engine_api.start_timeout, because the old process had
// opened them already. Listeners from systemd wait as new ones do.
func (r *Router) adoptWireListeners() error {
	c := &r.cfg.EngineAPI
	if c.UnixSocket != "" {
		r.wireEndpoints = append(r.wireEndpoints, wireEndpoint{name: socketEngineAPIUnix, key: "engine_api.unix_socket", addr: c.UnixSocket, unlink: true, listen: func() (net.Listener, error) { return wire.ListenUnix(c.UnixSocket) }})
	}
	if c.TCP() {
		r.wireEndpoints = append(r.wireEndpoints, wireEndpoint{name: socketEngineAPI, key: "engine_api.listen", addr: c.Listen, listen: func() (net.Listener, error) { return net.Listen("tcp", c.Listen) }})
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
	r.log.Info("engine socket", "address", ln.Addr().String())
	if w.name == socketEngineAPI && r.wireTLS != nil {
		return r.wire.ServeTLS(ln, r.wireTLS)
	}
	return r.wire.Serve(ln)
}

// serveWire opens the endpoints of the framed socket that are not open yet. It first waits
// until engine_api.min_workers workers are ready or engine_api.start_timeout has passed.
func (r *Router) serveWire(ctx context.Context) error {
	c := &r.cfg.EngineAPI
	if len(r.wireEndpoints) == 0 {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, c.StartTimeout)
	defer cancel()
	if ready := r.engineAPI.AwaitWorkers(wait, c.MinWorkers); ctx.Err() != nil {
		return nil
	} else if ready < c.MinWorkers {
		r.log.Warn("the engine socket opens with fewer workers than engine_api.min_workers", "ready", ready, "min_workers", c.MinWorkers, "start_timeout", c.StartTimeout)
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

// openWireEndpoint opens one endpoint of the framed socket. If this process replaces another
// and did not inherit the listener, the old process may still use the address; it closes its
// listeners as soon as it is replaced, so openWireEndpoint retries for at most bindTimeout.
func (r *Router) openWireEndpoint(ctx context.Context, w *wireEndpoint) error {
	for end := time.Now().Add(bindTimeout); ; {
		err := r.wireSockets.open(w, func(ln net.Listener) error { return r.serveWireOn(w, ln) })
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errHandingOver): // retry until the hot restart succeeds or fails
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

// drainWire waits until the socket's streams have ended or ctx ends.
func (r *Router) drainWire(ctx context.Context) {
	if r.wire == nil {
		return
	}
	if err := r.wire.Drain(ctx); err != nil {
		r.log.Warn("engine streams did not end before the drain deadline", "streams", r.wire.Stats().Streams)
	}
}
