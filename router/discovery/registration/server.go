package registration

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"sluice/dataplane/certs"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/worker"
)

// Options configures a Server.
type Options struct {
	Config config.Registration // already validated
	Log    *slog.Logger
	// State returns a worker's state and its reason; ok is false if the fleet has no worker with
	// this id.
	State func(id string) (state worker.State, reason string, ok bool)
	// Connector returns the response to GET /v1/connector, to be encoded as JSON. reached is the
	// local address of the caller's connection. An error says why this router accepts no reports
	// of transfers. If Connector is nil, it never does.
	Connector func(reached netip.Addr) (any, error)
	// Listener is the listener to use if it is open already; nil: New opens Config.Listen.
	Listener net.Listener
	// KnownWorkers are the workers registered with the router that this one replaces.
	KnownWorkers []KnownWorker
}

const (
	headTimeout  = 5 * time.Second
	callTimeout  = 10 * time.Second
	idleTimeout  = 2 * time.Minute
	maxHeadBytes = 16 << 10
)

// Server is the registration listener. New binds it; Run, which a discovery.Runner calls, serves
// it.
type Server struct {
	opt         Options
	log         *slog.Logger
	ln          net.Listener
	networks    []netip.Prefix
	settings    atomic.Pointer[Settings]
	limiter     *limitListener
	rawListener net.Listener // ln without limiter and TLS
	leases      *leases
}

// Settings are the fields of a config.Registration that can change while the Server runs.
type Settings struct {
	Token           string
	Lease, MaxLease time.Duration
	MaxWorkers      int
}

// SettingsOf returns the Settings in c.
func SettingsOf(c *config.Registration) Settings {
	return Settings{Token: c.Token, Lease: c.Lease, MaxLease: c.MaxLease, MaxWorkers: c.MaxWorkers}
}

// Reload applies t to leases and calls from now on. Workers that are registered stay, even if
// there are more than the new maximum.
func (s *Server) Reload(t Settings) {
	s.settings.Store(&t)
	s.leases.setMax(t.MaxWorkers)
	s.limiter.maxConns.Store(connsFor(t.MaxWorkers))
}

// connsFor returns the limit of connections for a number of workers: an idle and an active one for
// each worker, and some for other callers.
func connsFor(workers int) int64 { return 2*int64(workers) + 64 }

// New binds the listener and reads its certificates.
func New(opt Options) (*Server, error) {
	c := &opt.Config
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{opt: opt, log: opt.Log, networks: c.Prefixes()}
	tlsConf, err := s.tlsConfig()
	if err != nil {
		return nil, err
	}
	ln := opt.Listener
	if ln == nil {
		if ln, err = net.Listen("tcp", c.Listen); err != nil {
			return nil, fmt.Errorf("registration: cannot listen on %q: %w; choose another address with --register", c.Listen, err)
		}
	}
	s.rawListener, s.leases, s.limiter = ln, newLeases(), newLimitListener(ln, s.networks, s.log)
	s.ln = s.limiter
	s.Reload(SettingsOf(c))
	if tlsConf != nil {
		s.ln = tls.NewListener(s.ln, tlsConf)
	} else if a, ok := ln.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		s.log.Warn("the registration listener has no TLS: its token is sent unencrypted", "address", s.Addr(), "hint", "registration.tls_cert and registration.tls_key")
	}
	return s, nil
}

// tlsConfig returns nil for plain HTTP. It watches the files: a new certificate, or a CA that is
// no longer trusted, takes effect without a restart. Open connections stay.
func (s *Server) tlsConfig() (*tls.Config, error) {
	c := &s.opt.Config
	if c.TLSCert == "" {
		return nil, nil
	}
	keeper, err := certs.New(certs.Files{Cert: c.TLSCert, Key: c.TLSKey, CA: c.ClientCA}, s.log)
	if err != nil {
		return nil, fmt.Errorf("registration: registration.tls_cert, tls_key, client_ca: %w", err)
	}
	return keeper.ServerConfig(tls.VersionTLS12)
}

// Addr returns the address of the listener, HOST:PORT.
func (s *Server) Addr() string { return s.ln.Addr().String() }

// Name implements discovery.Source.
func (s *Server) Name() string { return "register " + s.Addr() }

// Close closes the listener of a Server whose Run was not called.
func (s *Server) Close() { s.ln.Close() }

// Run serves until ctx ends. The workers stay in the fleet after that: a router that shuts down
// need not remove them.
func (s *Server) Run(ctx context.Context, set *discovery.Set) error {
	s.leases.start(set, s.restoreKnown(), s.log)
	srv := &http.Server{
		Handler: s.guard(s.mux()), ReadHeaderTimeout: headTimeout, ReadTimeout: callTimeout, WriteTimeout: callTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeadBytes, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	looks := make(chan struct{})
	go func() {
		defer close(looks)
		s.expire(ctx)
	}()
	err := srv.Serve(s.ln)
	<-looks
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("registration: cannot serve: %w", err)
}

func (s *Server) expire(ctx context.Context) {
	tick := time.NewTicker(expiryInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if ended := s.leases.expire(); len(ended) > 0 {
			s.log.Warn("leases expired: workers removed", "workers", ended)
		}
	}
}

func (s *Server) mux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /v1/workers/{id}", s.put)
	mux.HandleFunc("POST /v1/workers/{id}/renew", s.renew)
	mux.HandleFunc("DELETE /v1/workers/{id}", s.drop)
	mux.HandleFunc("GET /v1/workers", s.list)
	mux.HandleFunc("GET /v1/connector", s.connector)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, &refusal{404, "unknown_route", "no such route; there are PUT and DELETE /v1/workers/{id}, POST /v1/workers/{id}/renew, GET /v1/workers, GET /v1/connector", 0})
	})
	return mux
}

// guard requires the token, if one is configured, and bounds request bodies. It compares hashes in
// constant time, so that response times reveal neither the token nor its length. Without a token,
// the TLS handshake has checked the client certificate.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if token := s.settings.Load().Token; token != "" {
			given, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			if got, want := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(token)); subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
				w.Header().Set("WWW-Authenticate", `Bearer realm="sluice registration"`)
				fail(w, &refusal{401, "unauthorized", "want the header Authorization: Bearer TOKEN, with the router's registration.token", 0})
				return
			}
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		next.ServeHTTP(w, r)
	})
}

func (s *Server) put(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		var big *http.MaxBytesError
		if errors.As(err, &big) {
			fail(w, &refusal{413, "too_large", fmt.Sprintf("the body has more than %d bytes", maxBody), 0})
			return
		}
		fail(w, bad(err))
		return
	}
	a, err := Decode(body)
	if err != nil {
		fail(w, bad(err))
		return
	}
	id, from := r.PathValue("id"), callerOf(r)
	spec, err := a.spec(id, scopeOf(from, s.networks))
	if err != nil {
		fail(w, bad(err))
		return
	}
	terms := s.settings.Load()
	lease, err := a.lease(terms.Lease, terms.MaxLease)
	if err != nil {
		fail(w, bad(err))
		return
	}
	changed, err := s.leases.put(id, from, spec, lease)
	if err != nil {
		s.log.Warn("registration refused", "worker", truncate(id), "client", from, "error", err)
		fail(w, err)
		return
	}
	status := http.StatusOK
	if changed {
		s.log.Info("worker registered", "worker", id, "client", from, "url", spec.URL, "role", spec.Role, "lease", lease)
		status = http.StatusCreated
	}
	answer(w, status, s.leaseOf(id, lease, changed))
}

func (s *Server) renew(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	lease, err := s.leases.renew(id, callerOf(r))
	if err != nil {
		fail(w, err)
		return
	}
	answer(w, http.StatusOK, s.leaseOf(id, lease, false))
}

func (s *Server) drop(w http.ResponseWriter, r *http.Request) {
	id, from := r.PathValue("id"), callerOf(r)
	if err := s.leases.remove(id, from); err != nil {
		fail(w, err)
		return
	}
	s.log.Info("worker deregistered", "worker", id, "client", from)
	w.WriteHeader(http.StatusNoContent)
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) {
	list := s.leases.list()
	for i := range list {
		list[i].State, list[i].Reason = s.state(list[i].ID)
	}
	answer(w, http.StatusOK, map[string]any{"version": Version, "workers": list})
}

func (s *Server) leaseOf(id string, lease time.Duration, changed bool) Lease {
	l := Lease{Version: Version, ID: id, LeaseSeconds: lease.Seconds(), RenewSeconds: lease.Seconds() / 3, Changed: changed}
	l.State, l.Reason = s.state(id)
	return l
}

func (s *Server) state(id string) (state, reason string) {
	if s.opt.State != nil {
		if st, why, ok := s.opt.State(id); ok {
			return st.String(), why
		}
	}
	return worker.Gone.String(), ""
}

// callerOf returns the address of the caller's connection. It trusts no header about it.
func callerOf(r *http.Request) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr().Unmap().WithZone("")
}

func bad(err error) error { return &refusal{400, "bad_announcement", err.Error(), 0} }

func fail(w http.ResponseWriter, err error) {
	var r *refusal
	if !errors.As(err, &r) {
		r = &refusal{500, "internal", err.Error(), 0}
	}
	if r.after > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((r.after+time.Second-1)/time.Second)))
	}
	answer(w, r.status, map[string]any{"error": map[string]string{"code": r.code, "message": r.msg}})
}

func answer(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // only for a type that JSON cannot encode, which is a bug
		http.Error(w, `{"error":{"code":"internal","message":"cannot encode the response as JSON"}}`, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}
