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

	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/fleet"
	"sluice/router/obs"
	"sluice/router/recording"
	"sluice/router/requestlog/recent"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/worker"
)

// Workers is the part of fleet.Fleet that the server uses.
type Workers interface {
	View() *fleet.View
	Drain(id string, on bool) error
}

// Options configures a Server. Workers, Scheduler and Metrics are required. A zero value of the
// others means the default in brackets.
type Options struct {
	Listen string // loopback address; port 0 selects a free port [127.0.0.1:9901]
	// Token is the bearer token, of at least 16 characters [$SLUICE_ADMIN_TOKEN, or else a random
	// one].
	Token string
	// RuntimeFile is the path to which New writes the address and the token for Client; "off":
	// none [DefaultRuntimeFile of the address].
	RuntimeFile string
	Version     string
	ConfigPath  string        // absolute path of the configuration file, for Identity; "": none
	ClientAddr  func() string // address of the clients' listener, for Identity; nil: unknown
	// Listener is the listener to use if it is open already; Listen is then only its configured
	// address.
	Listener net.Listener
	// DeferRuntimeFile makes New leave the runtime file alone, because another process still owns
	// it. The caller calls WriteRuntimeFile later.
	DeferRuntimeFile bool
	// Restart replaces this process with a new one and returns the new process id, for
	// /admin/v1/restart; nil: 404.
	Restart func(context.Context) (pid int, err error)
	// Reload applies the configuration file, as far as the running router can, and returns the
	// changes; with dry it only returns them. For /admin/v1/reload; nil: 404.
	Reload func(ctx context.Context, dry bool) ([]config.Change, error)
	Log    *slog.Logger // [discards]

	Workers   Workers
	Scheduler *schedule.Scheduler
	Metrics   *obs.Metrics
	// Config returns the configuration for /admin/v1/config; nil: 404. The server masks every
	// value whose key names a secret.
	Config func() any
	// Recorder serves /admin/v1/record; nil: 404.
	Recorder *recording.Recorder
	// Discovery returns the states of the discovery sources; nil: none.
	Discovery func() []discovery.State
	// Transfers returns the response to /admin/v1/transfers, to be encoded as JSON; nil: a
	// response without tiers and pairs.
	Transfers func() any
	// Sessions returns the response to /admin/v1/sessions with at most limit sessions, nil: a
	// response without any.
	Sessions func(limit int) session.Overview
	// Health returns the full /health page, for /admin/v1/health; nil: 404.
	Health func() (status int, body []byte)
	// Timelines has the newest finished requests; nil: none.
	Timelines *recent.Ring
	// Keyring has the API keys; nil: clients need none.
	Keyring *apikey.Keyring
	// BlocksByTier returns the number of a rank's blocks in the KV index by the names of tiers; nil:
	// unknown.
	BlocksByTier func(*worker.Rank) map[string]int
	// Queues returns the state of the admission queue for /admin/v1/queues, as JSON: an object with
	// members that are lists of flat objects, flat objects or values, which the console shows as they
	// are; nil: there is none.
	Queues func() any
	// Compared is a second router with the same load, for comparison; nil: none.
	Compared *Compared
}

// Compared is the other router in /admin/v1/compare. The server samples its metrics like its own.
type Compared struct {
	Name    string // name of its policy, such as "round robin"
	Metrics *obs.Metrics
}

const (
	defaultListen  = "127.0.0.1:9901"
	minTokenLength = 16
	maxHeadBytes   = 16 << 10
	maxBodyBytes   = 4 << 10 // bound of a request body, though no route reads one
	idleTimeout    = 60 * time.Second
	writeTimeout   = 10 * time.Second // for one response, or one flush of the event stream
)

// headTimeout bounds the time to read a request. Tests shorten it.
var headTimeout = 5 * time.Second

// Server is the admin listener. New binds it, and Serve serves it until Close.
type Server struct {
	opt             Options
	log             *slog.Logger
	ln              net.Listener
	http            *http.Server
	guard           tokenGuard
	hub             *hub
	ownSampler      *sampler
	comparedSampler *sampler // nil without Options.Compared
	models          *modelSampler
	workerList      workerList
	runtime         string // path of the runtime file that was written; "": none
	started         time.Time

	stop  context.CancelFunc
	work  sync.WaitGroup
	close sync.Once
}

// New binds the listener and writes the runtime file. It fails if the address is not a loopback
// address: the admin API is only for this machine, and remote operators reach it through a tunnel.
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
	opt.Token = "" // from here on, only the guard and the runtime file have the token
	if err := checkLoopback(opt.Listen); err != nil {
		return nil, err
	}
	ln := opt.Listener
	if ln == nil {
		if ln, err = net.Listen("tcp", opt.Listen); err != nil {
			return nil, fmt.Errorf("admin: cannot listen on %q: %w; choose another with --admin, port 0 selects a free one, off turns it off", opt.Listen, err)
		}
	} else if err := checkLoopback(ln.Addr().String()); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Server{opt: opt, log: opt.Log, ln: ln, guard: newTokenGuard(token), started: time.Now(), stop: stop}
	if !opt.DeferRuntimeFile {
		switch err := s.WriteRuntimeFile(); {
		case err == nil:
		case opt.RuntimeFile != "": // the operator's choice, which something else may rely on
			stop()
			ln.Close()
			return nil, err
		default: // such as a read-only file system; requests do not need the file
			opt.Log.Warn("cannot write the runtime file: commands such as sluice explain, reload and restart do not find this router (admin.runtime_file names another file or off)", "error", err)
		}
	}
	s.hub = newHub(opt.Scheduler)
	s.ownSampler = newSampler(opt.Metrics)
	s.models = newModelSampler(opt.Metrics)
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
	s.work.Go(func() { s.models.run(ctx) })
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

// WriteRuntimeFile writes the runtime file. New calls it unless DeferRuntimeFile is set.
func (s *Server) WriteRuntimeFile() error {
	if s.opt.RuntimeFile == "off" {
		return nil
	}
	path := s.opt.RuntimeFile
	if path == "" {
		path = DefaultRuntimeFile(s.Addr())
	}
	err := WriteRuntimeFile(path, Runtime{Address: s.Addr(), Token: s.guard.token, PID: os.Getpid(), Started: s.started.UTC(), Version: s.opt.Version, Config: s.opt.ConfigPath})
	if err == nil {
		s.runtime = path
	}
	return err
}

// Token returns the bearer token, for this process's successor.
func (s *Server) Token() string { return s.guard.token }

// Listener returns the listener, for this process's successor.
func (s *Server) Listener() net.Listener { return s.ln }

// Addr returns the address of the listener, HOST:PORT.
func (s *Server) Addr() string { return s.ln.Addr().String() }

// URL returns the address of the console, with the token in the fragment, which browsers do not
// send to servers. The caller must not log it.
func (s *Server) URL() string { return "http://" + s.Addr() + "/#token=" + s.guard.token }

// RuntimeFile returns the path of the runtime file, or "" if none was written.
func (s *Server) RuntimeFile() string { return s.runtime }

// Serve serves until Close and then returns nil.
func (s *Server) Serve() error {
	if err := s.http.Serve(s.ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin: cannot serve: %w", err)
	}
	return nil
}

// Close ends event streams, waits for the other responses in flight until ctx ends, closes their
// connections after that, and removes the runtime file. Further calls do nothing. Close also works
// if Serve was not called.
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

// CloseForSuccessor is Close for a server whose listener another process has inherited. The
// runtime file stays, because that process overwrites it.
func (s *Server) CloseForSuccessor(ctx context.Context) error {
	s.runtime = ""
	return s.Close(ctx)
}

// WorkerChanged adds a state change to the event stream. It has the signature of the fleet's
// OnState and does not block.
func (s *Server) WorkerChanged(w *worker.Worker, from, to worker.State, reason string) {
	s.workerList.changed()
	s.hub.offer(Event{Type: "state", At: time.Now().UnixMilli(), Worker: w.Spec.ID, Role: w.Spec.Role.String(),
		From: from.String(), To: to.String(), Reason: reason})
}
