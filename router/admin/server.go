package admin

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/fleet"
	"sluice/router/obs"
	"sluice/router/recording"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Workers is what the server needs of a fleet.Fleet.
type Workers interface {
	View() *fleet.View
	Drain(id string, on bool) error
}

// Options of a Server. Workers, Scheduler and Metrics are required; the zero
// value of the others means what stands in brackets.
type Options struct {
	Listen string // a loopback address; port 0 takes a free one [127.0.0.1:9901]
	// Token of at least 16 characters [$SLUICE_ADMIN_TOKEN, else random].
	Token string
	// RuntimeFile is where New writes address and token for Client; "off" for
	// none [DefaultRuntimeFile of the address].
	RuntimeFile string
	Version     string
	// Bound is the listener where it is open already; Listen then only says what it
	// was configured as.
	Listener net.Listener
	// Unannounced leaves the runtime file to Announce: it is another process's yet.
	DeferRuntimeFile bool
	// Restart replaces this process by a new one and gives its id, for
	// /admin/v1/restart; nil: 404.
	Restart func(context.Context) (pid int, err error)
	// Reload takes over what it can of the configuration's file, or says what it would,
	// for /admin/v1/reload; nil: 404.
	Reload func(ctx context.Context, dry bool) ([]config.Change, error)
	Log    *slog.Logger // [discard]

	Workers   Workers
	Scheduler *schedule.Scheduler
	Metrics   *obs.Metrics
	// Config gives the configuration for /admin/v1/config, where every value
	// whose key names a secret is masked; nil: 404.
	Config func() any
	// Recorder for /admin/v1/record; nil: 404.
	Recorder *recording.Recorder
	// Discovery is how the sources of workers are doing; nil: none.
	Discovery func() []discovery.State
	// Transfers is what /admin/v1/transfers answers, as JSON; nil: that there are none.
	Transfers func() any
	// Health is the full /health page, for /admin/v1/health; nil: 404.
	Health func() (status int, body []byte)
	// Twin is a second router on the same load to compare with; nil: none.
	Compared *Compared
}

// Compared is what /admin/v1/compare shows: another router's figures, sampled like
// the server's own.
type Compared struct {
	Name    string // such as "round robin"
	Metrics *obs.Metrics
}

const (
	defaultListen  = "127.0.0.1:9901"
	minTokenLength = 16
	maxHeadBytes   = 16 << 10
	maxBodyBytes   = 4 << 10 // no route reads one
	idleTimeout    = 60 * time.Second
	writeTimeout   = 10 * time.Second // of one answer, or one flush of the event stream
)

// headTimeout bounds the reading of a request; tests shorten it.
var headTimeout = 5 * time.Second

// Server is the admin listener. New binds it, Serve serves until Close.
type Server struct {
	opt             Options
	log             *slog.Logger
	ln              net.Listener
	http            *http.Server
	guard           tokenGuard
	hub             *hub
	ownSampler      *sampler
	comparedSampler *sampler // nil without one
	runtime         string   // path of the runtime file, "" for none
	started         time.Time

	stop  context.CancelFunc
	work  sync.WaitGroup
	close sync.Once
}

// New binds the listener and writes the runtime file. It fails on an address
// that is not loopback: the admin API is for this machine, others come through
// a tunnel.
func New(opt Options) (*Server, error) {
	if opt.Workers == nil || opt.Scheduler == nil || opt.Metrics == nil {
		return nil, errors.New("admin: cannot start without Workers, Scheduler and Metrics")
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Listen == "" {
		opt.Listen = defaultListen
	}
	token, err := chooseToken(opt.Token)
	if err != nil {
		return nil, err
	}
	opt.Token = "" // from here on only the door and the runtime file know it
	if err := checkLoopback(opt.Listen); err != nil {
		return nil, err
	}
	ln := opt.Listener
	if ln == nil {
		if ln, err = net.Listen("tcp", opt.Listen); err != nil {
			return nil, fmt.Errorf("admin: cannot listen on %q: %w; choose another with --admin, port 0 takes a free one, off turns it off", opt.Listen, err)
		}
	} else if err := checkLoopback(ln.Addr().String()); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Server{opt: opt, log: opt.Log, ln: ln, guard: newTokenGuard(token), started: time.Now(), stop: stop}
	if !opt.DeferRuntimeFile {
		if err := s.WriteRuntimeFile(); err != nil {
			stop()
			ln.Close()
			return nil, err
		}
	}
	s.hub = newHub(opt.Scheduler)
	s.ownSampler = newSampler(opt.Metrics)
	if opt.Compared != nil {
		s.comparedSampler = newSampler(opt.Compared.Metrics)
	}
	s.http = &http.Server{
		Handler:           s.guard.checkRequest(s.mux()),
		ReadHeaderTimeout: headTimeout, ReadTimeout: headTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeadBytes,
		BaseContext:    func(net.Listener) context.Context { return ctx },
		ErrorLog:       slog.NewLogLogger(opt.Log.Handler(), slog.LevelDebug),
	}
	s.work.Go(func() { s.hub.run(ctx) })
	s.work.Go(func() { s.ownSampler.run(ctx) })
	if s.comparedSampler != nil {
		s.work.Go(func() { s.comparedSampler.run(ctx) })
	}
	return s, nil
}

func chooseToken(token string) (string, error) {
	if token == "" {
		token = os.Getenv("SLUICE_ADMIN_TOKEN")
	}
	if token == "" {
		var b [24]byte
		rand.Read(b[:])
		return hex.EncodeToString(b[:]), nil
	}
	if len(token) < minTokenLength {
		return "", fmt.Errorf("admin: cannot use a token of %d characters: want at least %d, or none for a random one", len(token), minTokenLength)
	}
	for i := range len(token) {
		if token[i] <= ' ' || token[i] > '~' {
			return "", errors.New("admin: cannot use the token: want visible ASCII characters without spaces")
		}
	}
	return token, nil
}

func checkLoopback(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("admin: cannot listen on %q: %w; want HOST:PORT such as %s", addr, err, defaultListen)
	}
	if !isLoopback(host) {
		return fmt.Errorf("admin: cannot listen on %q: want a loopback address (127.0.0.1, ::1, localhost); reach it from elsewhere through a tunnel", addr)
	}
	return nil
}

// WriteRuntimeFile writes the runtime file. New does it, unless told not to.
func (s *Server) WriteRuntimeFile() error {
	if s.opt.RuntimeFile == "off" {
		return nil
	}
	path := s.opt.RuntimeFile
	if path == "" {
		path = DefaultRuntimeFile(s.Addr())
	}
	err := WriteRuntimeFile(path, Runtime{Address: s.Addr(), Token: s.guard.token, PID: os.Getpid(), Started: s.started.UTC(), Version: s.opt.Version})
	if err == nil {
		s.runtime = path
	}
	return err
}

// Token is what opens it; for the process that takes this one's place.
func (s *Server) Token() string { return s.guard.token }

// Listener is where it listens; for the same.
func (s *Server) Listener() net.Listener { return s.ln }

// Addr is the address it listens on, HOST:PORT.
func (s *Server) Addr() string { return s.ln.Addr().String() }

// URL is the console's address, with the token in its fragment, which browsers
// send to nobody. Never log it.
func (s *Server) URL() string { return "http://" + s.Addr() + "/#token=" + s.guard.token }

// RuntimeFile is where address and token were written; "" when nowhere.
func (s *Server) RuntimeFile() string { return s.runtime }

// Serve serves until Close and then returns nil.
func (s *Server) Serve() error {
	if err := s.http.Serve(s.ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin: cannot serve: %w", err)
	}
	return nil
}

// Close ends event streams, waits for answers under way until ctx ends, then
// cuts them, and removes the runtime file. It may be called on a server that
// never served, and more than once.
func (s *Server) Close(ctx context.Context) (err error) {
	s.close.Do(func() {
		s.stop()
		if err = s.http.Shutdown(ctx); err != nil {
			s.http.Close()
		}
		s.ln.Close()
		s.work.Wait()
		if s.runtime != "" {
			removeRuntimeFile(s.runtime)
		}
	})
	return err
}

// CloseForSuccessor is Close for a server whose listener another process has: the runtime file
// stays, for that process to write over.
func (s *Server) CloseForSuccessor(ctx context.Context) error {
	s.runtime = ""
	return s.Close(ctx)
}

// WorkerChanged puts a change of state into the event stream; for the fleet's
// OnState. It returns at once.
func (s *Server) WorkerChanged(w *worker.Worker, from, to worker.State, reason string) {
	s.hub.offer(Event{Type: "state", At: time.Now().UnixMilli(), Worker: w.Spec.ID, Role: w.Spec.Role.String(),
		From: from.String(), To: to.String(), Reason: reason})
}
