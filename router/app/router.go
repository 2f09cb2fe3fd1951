package app

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/eventloop"
	"sluice/dataplane/front"
	"sluice/dataplane/hotrestart"
	"sluice/dataplane/membudget"
	"sluice/dataplane/wire"
	"sluice/router/admin"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/registration"
	"sluice/router/engineapi"
	"sluice/router/fleet"
	"sluice/router/kvevents"
	"sluice/router/kvindex"
	"sluice/router/kvtransfer"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/obs"
	"sluice/router/pd"
	"sluice/router/recording"
	"sluice/router/recording/snapshot"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Router is one assembled router: the one place where policy (router/) and the
// moving of bytes (dataplane/) are wired together.
type Router struct {
	cfg            *config.Config
	version        string
	kubeError      error // see Options
	snapshotProof  time.Duration
	log            *slog.Logger
	fleet          *fleet.Fleet
	index          kvindex.Index
	approx         *kvindex.Approx
	scheduler      *schedule.Scheduler
	tokenizer      *tokenize.Tokenizer
	metrics        *obs.Metrics
	runner         *pd.Runner
	bodies         *membudget.Budget
	engineAPI      *engineapi.Engine
	wire           *wire.Server     // nil: no framed socket
	wireLoops      *eventloop.Loops // that drive its streams; nil: goroutines do
	wireTLS        *tls.Config      // of its TCP listener; nil: none
	wireSockets    wireSockets
	wireEndpoints  []wireEndpoint // that are to be opened
	feeds          *kvevents.Feeds
	loads          *kvevents.Loads
	recorder       *recording.Recorder
	discovery      *discovery.Runner
	snapshots      *snapshot.Keeper     // nil without index.snapshot
	register       *registration.Server // nil when off
	front          *front.Server
	admin          *admin.Server // nil when off
	listener       net.Listener
	inherited      *hotrestart.InheritedListeners // listeners and state that this process began with; nil: none
	previous       restartState                   // what the router before this one left
	restartMu      sync.Mutex                     // one restart at a time
	replaced       chan struct{}                  // closed when another process has taken this one's place
	stopping       chan struct{}                  // closed when this one is told to end
	live           atomic.Pointer[config.Config]  // cfg, with what has been reloaded since
	level          *slog.LevelVar                 // of log; nil: it stays as it is
	reloads        sync.Mutex                     // one at a time
	fileSource     chan discovery.Text            // what was read of the configuration's file
	replacedParent chan struct{}                  // closed when this one has taken another's place
	child          *hotrestart.Child              // set before that
	keyring        *apikey.Keyring                // nil: anybody may send requests

	completions *completionBoard     // nil: no family needs them
	transfers   *kvtransfer.Watcher  // nil: no tier is wanted
	sidechannel *sidechannel.Manager // nil: off
	pages       *pages
	sidecar     *sidecar // beside one engine; nil: a router
	compared    *Router  // shown beside this one on the console; the demo's
	closeOnce   sync.Once
}

// Options say what New assembles. Config is required; the rest may be zero.
type Options struct {
	// Config is a validated configuration. The router keeps it and never changes it.
	Config *config.Config
	// Log receives the router's log; nil discards it.
	Log *slog.Logger
	// LogLevel is the level of Log; a reload sets it. Nil: a reload leaves the level alone.
	LogLevel *slog.LevelVar
	// Version is shown at /version, in metrics and to clients of the engine API.
	Version string
	// Inherited are the listeners and the state that systemd or the router before this
	// one passed to the process, from InheritListeners; nil: none.
	Inherited *hotrestart.InheritedListeners
	// Sidecar makes the router a sidecar of one engine; nil: a router.
	Sidecar *config.SidecarFlags
	// Compared is a router whose figures the console shows beside this one's.
	Compared *Router
	// KubeError is why a binary without the Kubernetes client did not run the build that
	// has it. New returns it where the configuration sets kube.selector.
	KubeError error
	// SnapshotProof is how long the engine of a joining rank has to show that it still has
	// the blocks of the index snapshot. The rank takes no request meanwhile. 0: one second.
	SnapshotProof time.Duration
}

// New assembles a router: it binds the listeners and starts to probe the workers.
// Nothing is served before Run. After an error everything is closed again.
func New(opt Options) (_ *Router, err error) {
	r := &Router{cfg: opt.Config, log: opt.Log, level: opt.LogLevel, version: opt.Version, inherited: opt.Inherited, compared: opt.Compared, kubeError: opt.KubeError, snapshotProof: cmp.Or(opt.SnapshotProof, defaultSnapshotProof)}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	if opt.Sidecar != nil {
		if r.sidecar, err = newSidecar(opt.Config, opt.Sidecar, r.log); err != nil {
			return nil, err
		}
	}
	if err := r.assemble(); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// assemble makes and starts the parts, in the order in which they need each other.
func (r *Router) assemble() (err error) {
	cfg, log := r.cfg, r.log
	r.live.Store(cfg)
	r.fileSource = make(chan discovery.Text)
	r.replaced, r.stopping, r.replacedParent = make(chan struct{}), make(chan struct{}), make(chan struct{})
	if err := r.readRestartState(); err != nil {
		return err
	}
	if r.listener, err = r.inherited.Listen(socketClient, cfg.Listen); err != nil {
		return fmt.Errorf("cannot listen on %q: %w; choose another address with --listen (port 0 takes a free one)", cfg.Listen, err)
	}
	r.metrics = obs.NewMetrics()
	if r.cfg.Metrics.LegacyNames {
		r.metrics.ShowLegacyNames()
	}
	r.index = kvindex.New(kvindex.Options{MaxBytes: cfg.Index.MaxBytes})
	r.approx = kvindex.NewApprox(kvindex.ApproxOptions{MaxBytes: cfg.Index.MaxBytes / 4, TTL: cfg.Index.ApproxTTL})
	if err := r.newKeyring(); err != nil {
		return err
	}
	r.bodies = newBodies(cfg)
	r.recorder = r.newRecorder()
	choice := scheduleOptions(cfg)
	choice.OnEnd = r.recorder.RequestEnded
	r.scheduler = schedule.New(choice)
	r.tokenizer = tokenize.New(tokenOptions(cfg))
	r.loads = kvevents.NewLoads(log)
	r.feeds = kvevents.NewFeeds(kvevents.Options{Index: r.index, Log: log, Counters: r.metrics, OnClear: r.dropPredictions, IndexObserver: r.recorder,
		OnRestart: r.engineRestarted})
	if r.snapshots, err = r.newSnapshotKeeper(); err != nil {
		return err
	}
	toEngines, err := engineTLS(cfg, log)
	if err != nil {
		return err
	}
	members := fleetOptions(cfg)
	members.Log, members.Upstream.TLS = log, toEngines
	members.OnJoin, members.OnLeave, members.OnState = r.workerReady, r.workerRemoved, r.breakerChanged
	r.fleet = fleet.New(members)
	if r.transfers, err = newTransfers(cfg, r.inherited, log); err != nil {
		return err
	}
	if r.sidechannel, err = newSideChannel(cfg, r.transfers, r.fleet, log); err != nil {
		return err
	}
	if r.completions, err = newCompletionBoard(cfg, r.transfers, r.inherited.Replaces(), log); err != nil {
		return err
	}
	r.sidecar.start(r)
	runs := runnerOptions(cfg)
	runs.Fleet, runs.Scheduler, runs.Index, runs.Approx, runs.Tokenizer = r.fleet, r.scheduler, r.index, r.approx, r.tokenizer
	runs.Observer, runs.Recorder, runs.Log = r.metrics, r.recorder, log
	runs.Completions, runs.Selector, runs.Transfers, runs.SideChannel = r.completions.runnerCompletions(), r.sidecar.workerSelector(), r.transfers, r.sidechannel
	if r.runner, err = pd.NewRunner(runs); err != nil {
		return err
	}
	r.metrics.ExposeWorkers(func() []*worker.Worker { return r.fleet.View().Workers })
	r.metrics.ExposeIndex(r.index, r.approx)
	r.metrics.ExposeTokenizer(r.tokenizer)
	r.pages = newPages(r)
	if err = r.newEngineAPI(); err != nil {
		return err
	}
	fromClients, err := r.clientTLS()
	if err != nil {
		return err
	}
	options := frontOptions(cfg)
	options.Budget = r.bodies
	options.Handler, options.Pages, options.Observer, options.Log = r.engineAPI, r.pages, r.metrics, log
	options.TLS, options.Authenticator = fromClients, r.authenticator()
	if r.front, err = front.New(options); err != nil {
		return err
	}
	r.exposeMetrics()
	if cfg.Admin.Listen != "off" {
		if r.admin, err = r.newAdmin(); err != nil {
			return err
		}
	}
	if err := r.startRecording(); err != nil {
		return err
	}
	// Last: from here on workers join, and changed and joined are called.
	if err := r.discover(); err != nil {
		return err
	}
	return nil
}

func (r *Router) newAdmin() (*admin.Server, error) {
	opt := admin.Options{
		Listen: r.cfg.Admin.Listen, Token: r.cfg.Admin.Token, RuntimeFile: r.cfg.Admin.RuntimeFile, Version: r.version, Log: r.log,
		Workers: r.fleet, Scheduler: r.scheduler, Metrics: r.metrics, Recorder: r.recorder,
		Config:    func() any { return r.live.Load() },
		Discovery: func() []discovery.State { return r.discovery.States() },
		Transfers: r.transfersView, Health: func() (int, []byte) { return r.pages.Health(true) },
		Restart: r.Restart, Reload: r.Reload, DeferRuntimeFile: r.inherited.Replaces(),
	}
	if opt.Token == "" && os.Getenv("SLUICE_ADMIN_TOKEN") == "" {
		opt.Token = r.previous.Token // consoles and tools go on
	}
	var err error
	if opt.Listener, err = r.inherited.Listen(socketAdmin, r.cfg.Admin.Listen); err != nil {
		return nil, fmt.Errorf("admin: cannot listen on %q: %w; choose another with --admin, port 0 takes a free one, off turns it off", r.cfg.Admin.Listen, err)
	}
	if r.compared != nil {
		opt.Compared = &admin.Compared{Name: "round robin", Metrics: r.compared.metrics}
	}
	return admin.New(opt)
}

// Addr is the address the front listens on.
func (r *Router) Addr() string { return r.listener.Addr().String() }

// Run serves until ctx ends, then drains: not ready first, and answers that end their
// connections; then no new requests; then streams end or the drain time is over. It
// ends likewise once a Restart has put another process in its place.
func (r *Router) Run(ctx context.Context) error {
	defer r.Close()
	failed := make(chan error, 3)
	go func() { failed <- r.front.Serve(r.listener) }()
	if r.admin != nil {
		go func() {
			if err := r.admin.Serve(); err != nil {
				failed <- err
			}
		}()
	}
	if r.wire != nil {
		go func() {
			err := r.serveWire(ctx)
			switch {
			case err == nil:
			case r.inherited.Replaces(): // what it has taken over goes on
				r.log.Error("no engine socket", "err", err)
			default:
				failed <- err
			}
		}()
	}
	r.log.Info("listening", "addr", r.Addr(), "workers", len(r.cfg.Workers))
	if err := r.replaceParent(ctx); err != nil {
		return err
	}
	select {
	case err := <-failed:
		return err
	case <-r.replaced:
		return r.drainReplaced(ctx)
	case <-ctx.Done():
	}
	close(r.stopping)
	r.restartMu.Lock() // a restart that is under way ends now, one way or the other
	if r.child != nil {
		return r.drainReplaced(ctx)
	}
	hotrestart.Notify(hotrestart.NotifyStopping)
	r.pages.draining.Store(true)
	r.front.CloseAfterResponse()
	within := r.live.Load().Timeouts
	r.log.Info("draining", "delay", within.DrainDelay, "deadline", within.Drain)
	time.Sleep(within.DrainDelay)
	drain, cancel := context.WithTimeout(context.Background(), within.Drain)
	defer cancel()
	if within.DrainDelay == 0 {
		r.awaitNoRequests(min(announceTimeout, within.Drain/4))
	}
	r.drainWire(drain)
	if err := r.front.Shutdown(drain); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// announceTimeout is how long /readyz says 503 before the listener closes, so that
// whoever sends requests here learns of it by asking, not by a refusal.
const announceTimeout = time.Second

// awaitNoRequests waits for limit, or until no request is under way: there is then
// nothing that anybody could miss, and an idle router ends at once.
func (r *Router) awaitNoRequests(limit time.Duration) {
	for end := time.Now().Add(limit); r.busy() && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
}

func (r *Router) busy() bool {
	for _, w := range r.fleet.View().Workers {
		for _, rank := range w.Ranks {
			if rank.Requests.Load() > 0 {
				return true
			}
		}
	}
	return false
}

// drainGrace bounds how long the admin listener's requests may take to end.
const drainGrace = time.Second

// Close ends everything that New started. Further calls do nothing.
func (r *Router) Close() {
	r.closeOnce.Do(func() {
		if r.listener != nil {
			r.listener.Close()
		}
		if r.wire != nil {
			r.wire.Close()
		}
		if r.wireLoops != nil {
			r.wireLoops.Close()
		}
		for _, w := range r.wireEndpoints {
			if w.inherited != nil {
				w.inherited.Close() // the end may have come before it was opened
			}
		}
		r.inherited.Close()
		if r.child != nil {
			r.child.Close()
		}
		if r.admin != nil {
			ctx, cancel := context.WithTimeout(context.Background(), drainGrace)
			defer cancel()
			r.admin.Close(ctx)
		}
		if r.snapshots != nil {
			r.snapshots.Close() // while there is something to write
		}
		if r.discovery != nil {
			r.discovery.Close()
		}
		r.sidecar.close()
		if r.fleet != nil {
			r.fleet.Close()
		}
		if r.loads != nil {
			r.loads.Close()
		}
		if r.feeds != nil {
			r.feeds.Close()
		}
		if r.recorder != nil {
			r.recorder.Close()
		}
		r.completions.close()
		r.sidechannel.Close()
		r.transfers.Close()
	})
}

// workerReady starts the event feeds of a worker that has become ready.
func (r *Router) workerReady(w *worker.Worker) {
	var sources []kvevents.Source
	for _, rank := range w.Ranks {
		if worker.FeedState(rank.Feed.Load()) != worker.FeedNone {
			continue // joined before; another of the worker's servers came up
		}
		r.metrics.RankAdded(rank)
		r.recorder.RankAdded(rank)
		if ep, topic := r.fleet.LoadSource(rank); ep != "" {
			if err := r.loads.Start(kvevents.LoadSource{Rank: rank, Endpoint: ep, Topic: topic}); err != nil {
				r.log.Error("no load messages", "rank", rank.ID.String(), "endpoint", ep, "err", err)
			}
		}
		src, ok := r.fleet.EventSource(rank)
		if !ok && r.sidecar != nil {
			continue
		}
		if !ok {
			r.log.Warn("no KV events: what this rank holds is a guess from the router's own choices",
				"rank", rank.ID.String(), "help", "start the engine with KV events, or name them with kv_events=tcp://HOST:PORT")
			continue
		}
		if index, ok := r.index.(kvindex.Reserver); ok {
			index.Reserve(rank.Slot, w.Info().TotalBlocks) // so that storing them moves no table
		}
		sources = append(sources, kvevents.Source{
			Rank: rank, Model: w.Info().Base, Engine: w.Info().Engine,
			Endpoint: src.Endpoint, Bind: src.Bind, ReplayEndpoint: src.Replay, Topic: src.Topic,
		})
	}
	r.restore(sources)
	for _, src := range sources {
		if src.Resume != nil {
			r.recorder.RankAdded(src.Rank) // again, with what it has got back
		}
		if err := r.feeds.Start(src); err != nil {
			r.index.Clear(src.Rank.Slot)
			r.log.Error("cannot subscribe to KV events", "rank", src.Rank.ID.String(), "endpoint", src.Endpoint, "err", err)
		}
	}
}

// dropPredictions drops what was foretold of a rank whose events say that it lost its blocks: its
// choices of late, and the guesses made while no events told of it. A feed that only
// begins has nothing to lose, and the guesses stand.
func (r *Router) dropPredictions(slot worker.Slot) {
	r.scheduler.Forget(slot)
	if r.index.CachedBlocks(slot) > 0 {
		r.approx.Clear(slot)
	}
}

// engineRestarted drops what is believed of a rank whose events show that its engine has, or may
// have, a new life; its feed drops what the index holds. Guesses made while the feed was
// not live are of the old one even where the index has nothing.
func (r *Router) engineRestarted(rank *worker.Rank) {
	r.fleet.ReportEventRestart(rank)
	rank.ResetCaching()
	r.scheduler.Forget(rank.Slot)
	r.approx.Clear(rank.Slot)
}

// workerRemoved drops what the router knows of a worker's KV.
func (r *Router) workerRemoved(w *worker.Worker) {
	r.runner.WorkerRemoved(w)
	r.loads.Stop(w)
	r.dropTransferPairs(w)
	for _, rank := range w.Ranks {
		r.feeds.Stop(rank.ID)
		r.index.Clear(rank.Slot)
		r.approx.Clear(rank.Slot)
		r.scheduler.Forget(rank.Slot)
		rank.ResetCaching()
		r.recorder.RankRemoved(rank)
		r.metrics.RankRemoved(rank)
	}
}

func (r *Router) breakerChanged(w *worker.Worker, from, to worker.State, reason string) {
	if from == worker.Ready {
		for _, rank := range w.Ranks { // it may come back without what it was sent
			r.scheduler.Forget(rank.Slot)
		}
	}
	r.runner.WorkerChanged(w, to)
	if r.admin != nil {
		r.admin.WorkerChanged(w, from, to, reason)
	}
}

// orphanRanks counts the ranks whose events place no block.
func (r *Router) orphanRanks() float64 {
	n := 0
	for _, w := range r.fleet.View().Workers {
		for _, rank := range w.Ranks {
			if rank.Orphans.Load() {
				n++
			}
		}
	}
	return float64(n)
}
