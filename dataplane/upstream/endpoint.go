package upstream

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/certs"
)

// Options of an Endpoint. A zero value means the default in brackets.
type Options struct {
	// TLS returns the configuration of connections to an https engine, given the host of its URL, a
	// DNS name or an IP address [the system's roots]. An empty ServerName in it is set to that
	// host, and NextProtos is replaced.
	TLS func(serverName string) *tls.Config

	MaxConns       int           // open connections [4096]; beyond it Do fails with ErrTooManyConns
	MaxIdle        int           // kept-alive connections [256]
	IdleTimeout    time.Duration // maximum idle time of a reused connection [4s, below uvicorn's 5s]
	MaxAge         time.Duration // maximum age of a reused connection, ±12.5 % jitter; a running request is finished first [0: no bound]
	ConnectTimeout time.Duration // including the TLS handshake [2s]
	WriteTimeout   time.Duration // for sending a request, plus its size / 256 KiB/s [30s]
	MaxHeadBytes   int           // bound of the response head, including 1xx responses before it [64 KiB]
	// Periodic is for an Endpoint that is called regularly, as by probes. Expired idle connections
	// are closed by the next request or Close, so that no timer runs between requests.
	Periodic bool
	Key      string // sent with every request as a bearer token; Fields with another are dropped [none]
}

// ReloadableOptions are the Options that may change while an Endpoint is in use.
type ReloadableOptions struct {
	MaxConns                            int
	IdleTimeout, MaxAge, ConnectTimeout time.Duration
}

// Reloadable returns the reloadable options of o.
func (o Options) Reloadable() ReloadableOptions {
	b := ReloadableOptions{o.MaxConns, o.IdleTimeout, o.MaxAge, o.ConnectTimeout}
	b.defaults()
	return b
}

// WithReloadable returns o with the reloadable options b.
func (o Options) WithReloadable(b ReloadableOptions) Options {
	o.MaxConns, o.IdleTimeout, o.MaxAge, o.ConnectTimeout = b.MaxConns, b.IdleTimeout, b.MaxAge, b.ConnectTimeout
	return o
}

func (b *ReloadableOptions) defaults() {
	if b.MaxConns <= 0 {
		b.MaxConns = 4096
	}
	if b.IdleTimeout <= 0 {
		b.IdleTimeout = 4 * time.Second
	}
	if b.ConnectTimeout <= 0 {
		b.ConnectTimeout = 2 * time.Second
	}
}

func (o *Options) defaults() {
	if o.MaxIdle <= 0 {
		o.MaxIdle = 256
	}
	if o.WriteTimeout <= 0 {
		o.WriteTimeout = 30 * time.Second
	}
	if o.MaxHeadBytes <= 0 {
		o.MaxHeadBytes = 64 << 10
	}
}

// Endpoint is one engine server ("http://host:port" with an optional path prefix) and its
// connection pool. It is safe for concurrent use.
type Endpoint struct {
	url        string
	host       string // Host header
	addr       string // host:port to dial
	prefix     string // path before every Request.Path: "" or "/x"
	tls        *tls.Config
	opt        Options                           // except the ReloadableOptions
	reloadable atomic.Pointer[ReloadableOptions] // changed with mu held
	dialer     net.Dialer
	direct     directAddress // ok: the dialer is not needed

	staleWindow time.Duration // the constant, except in tests
	delayedACK  delayedACKDetector

	// Idle connections, the newest last. mu guards the list and the fields below. It is held for a
	// few pointer writes only.
	mu        sync.Mutex
	idle      []*conn
	closed    bool
	reaper    *time.Timer
	reaperSet bool

	open                                                      atomic.Int64
	dialed, reused, retried, stale, aged, cancelled, timedOut atomic.Uint64
}

// NewEndpoint creates an Endpoint for rawURL without dialling.
func NewEndpoint(rawURL string, opt Options) (*Endpoint, error) {
	refuse := func(why string) (*Endpoint, error) {
		return nil, fmt.Errorf("upstream: cannot use engine url %q: %s; want http://host:port or https://host:port, with an optional path", rawURL, why)
	}
	u, err := url.Parse(rawURL)
	switch {
	case err != nil:
		return refuse("it does not parse")
	case u.Scheme != "http" && u.Scheme != "https":
		return refuse("its scheme is not http or https")
	case u.Hostname() == "":
		return refuse("it names no host")
	case u.User != nil, u.RawQuery != "", u.Fragment != "":
		return refuse("it holds a user, a query or a fragment")
	}
	opt.defaults()
	e := &Endpoint{
		url:    strings.TrimSuffix(u.Scheme+"://"+u.Host+u.EscapedPath(), "/"),
		host:   u.Host,
		prefix: strings.TrimRight(u.EscapedPath(), "/"),
		opt:    opt,

		staleWindow: staleWindow,
		// A vanished host is noticed within half a minute, also during a silent stream.
		dialer: net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}},
	}
	if !validTarget(e.prefix) || !validValue(e.host) {
		return refuse("it holds control characters or spaces")
	}
	port := u.Port()
	if u.Scheme == "https" {
		if port == "" {
			port = "443"
		}
		e.tls = clientTLS(opt.TLS, u.Hostname())
	} else if port == "" {
		port = "80"
	}
	e.addr = net.JoinHostPort(u.Hostname(), port)
	e.direct = directAddressOf(e.addr)
	bounds := opt.Reloadable()
	e.reloadable.Store(&bounds)
	return e, nil
}

// clientTLS returns the configuration of connections to host, created by make unless that is nil.
func clientTLS(make func(string) *tls.Config, host string) *tls.Config {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, CipherSuites: certs.Suites}
	if make != nil {
		cfg = make(host).Clone()
	}
	if cfg.ServerName == "" {
		cfg.ServerName = host
	}
	cfg.NextProtos = []string{"http/1.1"}
	return cfg
}

// Reload applies other reloadable options; zero values mean the defaults. They apply to open
// connections too: those that have been idle for too long are closed now, those that are too old or
// too many when their requests end.
func (e *Endpoint) Reload(b ReloadableOptions) {
	b.defaults()
	e.mu.Lock()
	e.reloadable.Store(&b)
	set := e.reaperSet
	e.mu.Unlock()
	if set {
		e.reap()
	}
}

// Reloadable returns the present reloadable options.
func (e *Endpoint) Reloadable() ReloadableOptions { return *e.reloadable.Load() }

// URL returns the endpoint's base URL.
func (e *Endpoint) URL() string { return e.url }

// Stats are an endpoint's counters since its creation, and its present connections.
type Stats struct {
	Dialed    uint64 // connections made
	Reused    uint64 // requests sent on a kept-alive connection
	Retried   uint64 // requests sent again because the idle connection was stale
	Stale     uint64 // idle connections found closed before anything was sent
	Aged      uint64 // connections closed for their age
	Cancelled uint64 // calls ended by Call.Cancel
	TimedOut  uint64 // calls ended by a deadline
	Open      int    // open connections, including idle ones
	Idle      int    // kept alive and free
}

// Stats returns the counters. It is cheap and may be called from any goroutine.
func (e *Endpoint) Stats() Stats {
	e.mu.Lock()
	idle := len(e.idle)
	e.mu.Unlock()
	return Stats{
		Dialed: e.dialed.Load(), Reused: e.reused.Load(), Retried: e.retried.Load(), Stale: e.stale.Load(), Aged: e.aged.Load(),
		Cancelled: e.cancelled.Load(), TimedOut: e.timedOut.Load(), Open: int(e.open.Load()), Idle: idle,
	}
}

// Get fetches path by GET, for probes. timeout bounds the whole call, limit the body in bytes. The
// caller owns the body.
func (e *Endpoint) Get(path string, timeout time.Duration, limit int) (status int, body []byte, err error) {
	req := Request{Method: "GET", Path: path, Deadline: time.Now().Add(timeout), Redirects: true}
	resp, err := e.Do(&req, nil)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Release()
	body, err = resp.ReadAll(nil, limit)
	return resp.Status, body, err
}
