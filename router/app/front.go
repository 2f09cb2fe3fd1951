package app

import (
	"sluice/dataplane/front"
	"sluice/dataplane/membudget"
	"sluice/router/config"
)

// bufferShare is the divisor of limits.memory_budget that gives the bytes of body buffers
// that stay in memory between requests for reuse.
const bufferShare = 8

// newBodies returns the memory budget shared by the request bodies of all listeners.
func newBodies(cfg *config.Config) *membudget.Budget {
	limitBuffers(cfg.Limits.MemoryBudget)
	return membudget.NewBudget(cfg.Limits.MemoryBudget)
}

// limitBuffers sets how many bytes of buffers stay in memory between requests; budget is
// limits.memory_budget.
func limitBuffers(budget int64) { membudget.Default.SetRetain(budget / bufferShare) }

// frontOptions returns the front's options that come from the configuration.
func frontOptions(cfg *config.Config) front.Options {
	opt := front.Options{
		MaxBodyBytes: cfg.Limits.MaxBody, BodyBudgetBytes: cfg.Limits.MemoryBudget, MaxHeadBytes: cfg.Limits.MaxHead, MaxDepth: cfg.Limits.MaxDepth,
		HeadTimeout: cfg.Timeouts.Head, BodyTimeout: cfg.Timeouts.Body, BodyIdleTimeout: cfg.Timeouts.BodyIdle, IdleTimeout: cfg.Timeouts.KeepAlive, WriteTimeout: cfg.Timeouts.Write,
		StreamIdleTimeout: cfg.Timeouts.StreamIdle, MaxConns: cfg.Limits.MaxConns, MaxConnsPerIP: cfg.Limits.MaxConnsPerIP,
		WithholdClientKeys: cfg.EngineKey != "", StripForbidden: cfg.StripForbidden, MediaHosts: cfg.MediaHosts, CompressMin: cfg.Compression.MinBytes, CompressStreams: cfg.Compression.Streams,
		EarlyHeaders: cfg.Relay.EarlyHeadersAfter >= 0, EarlyHeadersAfter: max(cfg.Relay.EarlyHeadersAfter, 0), KeepAlive: cfg.Relay.CommentInterval,
		RelayMode: front.RelayMode(cfg.Relay.Driver), RelayThreads: cfg.Relay.Threads,
		Proxies: front.Proxies{Trusted: cfg.TrustedProxies()},
	}
	if p := cfg.Proxies.Protocol; p != "off" {
		opt.Proxies.ProxyProtocol = front.ProxyProtocol(p)
	}
	switch cfg.Proxies.Forwarded {
	case "x-forwarded-for":
		opt.Proxies.Forwarded = front.ForwardedX
	case "forwarded":
		opt.Proxies.Forwarded = front.ForwardedRFC
	}
	if c := cfg.CORS; len(c.Origins) > 0 {
		opt.CORS = &front.CORS{Origins: c.Origins, Methods: c.Methods, Headers: c.Headers, MaxAge: c.MaxAge}
	}
	return opt
}
