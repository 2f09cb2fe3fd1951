package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"time"

	"sluice/dataplane/wire"
	"sluice/router/routed"
)

// wireAddrs are where the framed socket listens, once it does.
type wireAddrs struct {
	mu    sync.Mutex
	addrs []net.Addr
}

func (a *wireAddrs) add(addr net.Addr) {
	a.mu.Lock()
	a.addrs = append(a.addrs, addr)
	a.mu.Unlock()
}

// newRouted makes the router's engine, and its socket where one is wanted. The
// engine stands before the runner in any case.
func (r *router) newRouted() (err error) {
	c := &r.cfg.Routed
	r.routed, err = routed.New(routed.Options{
		Runner: r.runner, Fleet: r.fleet, HTTP: c.HTTP, VLLM: c.VLLM, Hosts: c.Hosts,
		PoolWait: r.cfg.Timeouts.PoolWait, StreamIdle: r.cfg.Timeouts.StreamIdle, MaxDepth: r.cfg.Limits.MaxDepth, Log: r.log,
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
		Handler: r.routed, Log: r.log, Token: c.Token, Agent: "sluice/" + version,
		MaxConns: c.MaxConns, MaxStreams: c.MaxStreams, MaxFrame: int(c.MaxFrame), RequestBudget: r.cfg.Limits.BodyBudget,
		Heartbeat: c.Heartbeat, StallTimeout: r.cfg.Timeouts.Write, WriteTimeout: r.cfg.Timeouts.Write,
	})
	if err != nil {
		return err
	}
	stat := func(f func(wire.Stats) float64) func() float64 { return func() float64 { return f(r.wire.Stats()) } }
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Conns) }), "sluice_routed_connections")
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Streams) }), "sluice_routed_streams")
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Stalled) }), "sluice_routed_stalled_total")
	r.metrics.Func(stat(func(s wire.Stats) float64 { return float64(s.Requests) }), "sluice_routed_request_bytes")
	return nil
}

// serveWire opens the framed socket when there are workers enough, or the wait for
// them is over.
func (r *router) serveWire(ctx context.Context) error {
	c := &r.cfg.Routed
	wait, cancel := context.WithTimeout(ctx, c.StartWait)
	defer cancel()
	if ready := r.routed.AwaitWorkers(wait, c.MinWorkers); ctx.Err() != nil {
		return nil
	} else if ready < c.MinWorkers {
		r.log.Warn("the engine socket opens with fewer workers than wanted", "ready", ready, "routed.min_workers", c.MinWorkers, "waited", c.StartWait)
	}
	if c.Unix != "" {
		addr, err := r.bindWire(ctx, func() (net.Addr, error) { return r.wire.Listen("unix://" + c.Unix) })
		if err != nil {
			return fmt.Errorf("routed.unix: %w", err)
		}
		r.wireAddrs.add(addr)
	}
	if !c.TCP() {
		return nil
	}
	var addr net.Addr
	var err error
	if c.TLSCert == "" {
		addr, err = r.bindWire(ctx, func() (net.Addr, error) { return r.wire.Listen("tcp://" + c.Listen) })
	} else {
		cert, e := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
		if e != nil {
			return fmt.Errorf("routed.tls_cert %q: %w", c.TLSCert, e)
		}
		conf := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
		addr, err = r.bindWire(ctx, func() (net.Addr, error) { return r.wire.ListenTLS(c.Listen, conf) })
	}
	if err != nil {
		return fmt.Errorf("routed.listen: %w", err)
	}
	r.wireAddrs.add(addr)
	r.log.Info("engine socket", "addr", addr.String())
	return nil
}

// bindWire binds the framed socket, which is none that one process can pass to
// another: a router that takes another's place tries until that one's streams have
// ended, for timeouts.drain at most. Callers connect again meanwhile.
func (r *router) bindWire(ctx context.Context, bind func() (net.Addr, error)) (net.Addr, error) {
	if !r.given.Replaces() {
		return bind()
	}
	select {
	case <-r.tookPlace:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for end := time.Now().Add(r.cfg.Timeouts.Drain + bindTime); ; {
		addr, err := bind()
		if err == nil || time.Now().After(end) {
			return addr, err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
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
