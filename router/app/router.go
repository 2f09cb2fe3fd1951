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
	"path/filepath"
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
	"sluice/router/requestlog"
	"sluice/router/requestlog/accesslog"
	"sluice/router/requestlog/recent"
	"sluice/router/requestlog/tracing"
	"sluice/router/schedule"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// Router is one assembled router. It connects the policy of router/ with the data plane of
// dataplane/. Its methods may be called from any goroutine; Run may be called once.
type Router struct {
	cfg            *config.Config
	version        string
	snapshotProof  time.Duration
	log            *slog.Logger
	fleet          *fleet.Fleet
	index          kvindex.Index
	approx         *kvindex.Approx
	scheduler      *schedule.Scheduler
	tokenizer      *tokenize.Tokenizer
	tokenizers     *tokenizers
	metrics        *obs.Metrics
	runner         *pd.Runner
	bodies         *membudget.Budget
	engineAPI      *engineapi.Engine
	wire           *wire.Server     // nil: no engine API socket
	wireLoops      *eventloop.Loops // drive the streams of wire; nil: goroutines do
	wireTLS        *tls.Config      // of the TCP listener of wire; nil: plain TCP
	wireSockets    wireSockets
	wireEndpoints  []wireEndpoint // not opened yet
	feeds          *kvevents.Feeds
	loads          *kvevents.Loads
	recorder       *recording.Recorder
	discovery      *discovery.Runner
	snapshots      *snapshot.Keeper     // nil: index.snapshot is not set
	register       *registration.Server // nil: off
	front          *front.Server
	admin          *admin.Server // nil: off
	listener       net.Listener
	inherited      *hotrestart.InheritedListeners // listeners and state that systemd or the old process passed; nil: none
	previous       restartState                   // state of the process that this one replaces
	restartMu      sync.Mutex                     // held during Restart
	replaced       chan struct{}                  // closed when another process has replaced this one
	stopping       chan struct{}                  // closed when Run's context ends
	accessLog      *accesslog.Writer              // nil: off
	tracer         *tracing.Exporter              // nil: off
	recent         *recent.Ring                   // nil: admin.timelines is 0, or the admin listener is off
	live           atomic.Pointer[config.Config]  // the configuration in effect: cfg with all reloads since
	level          *slog.LevelVar                 // level of log; nil: a reload leaves it alone
	reloads        sync.Mutex                     // held during Reload
	fileSource     chan discovery.Text            // text of a reloaded configuration file, for its discovery source
	replacedParent chan struct{}                  // closed when this process has replaced another
	child          *hotrestart.Child              // the process that replaces this one; guarded by restartMu, set before replaced is closed
	keyring        *apikey.Keyring                // nil: clients need no API key

	completions *completionBoard     // nil: no model uses the lmcache family
	transfers   *kvtransfer.Watcher  // nil: no tier is configured
	sidechannel *sidechannel.Manager // nil: off
	pages       *pages
	sidecar     *sidecar // nil: a router, not a sidecar
	compared    *Router  // the demo's second router, which the console compares with this one
	closeOnce   sync.Once
}

// Options are the parameters of New. Config is required; the other fields may be zero.
type Options struct {
	// Config is a validated configuration. The router keeps it and never changes it.
	Config *config.Config
	// Log receives the router's log; nil discards it.
	Log *slog.Logger
	// LogLevel is the level of Log; a reload sets it. Nil: a reload leaves the level alone.
	LogLevel *slog.LevelVar
	// Version is shown at /version, in metrics and to clients of the engine API.
	Version string
	// Inherited are the listeners and the state that systemd or the replaced process passed
	// to this process, as returned by InheritListeners; nil: none.
	Inherited *hotrestart.InheritedListeners
	// Sidecar makes the router a sidecar of one engine; nil: a router.
	Sidecar *config.SidecarFlags
	// Compared is a router whose figures the console shows beside this one's.
	Compared *Router
	// SnapshotProof is how long the router waits for the engine of a joining rank to prove
	// that it still has the blocks of the index snapshot. The rank receives no requests
	// during that time. 0: one second.
	SnapshotProof time.Duration
}

// New assembles a router: it binds the listeners and starts to probe the workers. It serves
// nothing; Run does. After an error New has closed everything that it opened.
func New(opt Options) (_ *Router, err error) {
	r := &Router{cfg: opt.Config, log: opt.Log, level: opt.LogLevel, version: opt.Version, inherited: opt.Inherited, compared: opt.Compared, snapshotProof: cmp.Or(opt.SnapshotProof, defaultSnapshotProof)}
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

// assemble creates and starts the parts, each after the parts that it depends on.
func (r *Router) assemble() (err error) {
	cfg, log := r.cfg, r.log
	r.live.Store(cfg)
	r.fileSource = make(chan discovery.Text)
	r.replaced, r.stopping, r.replacedParent = make(chan struct{}), make(chan struct{}), make(chan struct{})
	if err := r.readRestartState(); err != nil {
		return err
	}
	if r.listener, err = r.inherited.Listen(socketClient, cfg.Listen); err != nil {
		return fmt.Errorf("cannot listen on %q: %w; choose another address with --listen (port 0 selects a free one)", cfg.Listen, err)
	}
	r.metrics = newMetrics(&cfg.Metrics)
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
	r.tokenizer.ReportMismatches(r.tokensDiffer)
	r.tokenizers = newTokenizers(r.tokenizer, log)
	r.loads = kvevents.NewLoads(log)
	r.feeds = kvevents.NewFeeds(kvevents.Options{Index: r.index, Log: log, Counters: r.metrics, OnClear: r.dropPredictions, IndexObserver: r.recorder,
		OnRestart: r.engineRestarted})
	if r.snapshots, err = r.newSnapshotKeeper(); err != nil {
		return err
	}
	if err := r.newFleet(); err != nil {
		return err
	}
	r.tokenizers.askServers(r.fleet)
	r.tokenizers.configure(tokenizerSettingsOf(cfg))
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
	requests, err := r.newRequestLog()
	if err != nil {
		return err
	}
	if err := r.newRunner(requests); err != nil {
		return err
	}
	r.metrics.ExposeWorkers(func() []*worker.Worker { return r.fleet.View().Workers })
	r.metrics.ExposeIndex(r.index, r.approx)
	r.metrics.ExposeTokenizer(r.tokenizer)
	r.pages = newPages(r)
	if err = r.newEngineAPI(); err != nil {
		return err
	}
	if err := r.newFront(requests); err != nil {
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
	// Last, because from here on workers join and workerReady and breakerChanged are called.
	if err := r.discover(); err != nil {
		return err
	}
	return nil
}

func newMetrics(c *config.Metrics) *obs.Metrics {
	m := obs.NewMetrics()
	if c.NativeHistograms {
		m.UseNativeHistograms()
	}
	if c.LegacyNames {
		m.ShowLegacyNames()
	}
	return m
}

// newFleet creates the fleet, which has no workers before discover. It needs the listener's address,
// because a worker at an address of the router itself is refused.
func (r *Router) newFleet() error {
	toEngines, err := engineTLS(r.cfg, r.log)
	if err != nil {
		return err
	}
	opt := fleetOptions(r.cfg)
	opt.Log, opt.Upstream.TLS = r.log, toEngines
	opt.Own = ownListeners(r.cfg)
	opt.Own.Add("listen", r.listener.Addr().String())
	opt.Drained = r.previous.DrainedWorkers
	opt.OnJoin, opt.OnLeave, opt.OnState = r.workerReady, r.workerRemoved, r.breakerChanged
	r.fleet = fleet.New(opt)
	return nil
}

// newRunner creates the runner, which connects nearly all other parts.
func (r *Router) newRunner(requests *requestlog.Log) (err error) {
	opt := runnerOptions(r.cfg)
	opt.Fleet, opt.Scheduler, opt.Index, opt.Approx, opt.Tokenizer = r.fleet, r.scheduler, r.index, r.approx, r.tokenizer
	opt.Observer, opt.Recorder, opt.RequestLog, opt.Log = runObserver{r.metrics}, r.recorder, requests, r.log
	opt.Completions, opt.Selector, opt.Transfers, opt.SideChannel = r.completions.runnerCompletions(), r.sidecar.workerSelector(), r.transfers, r.sidechannel
	r.runner, err = pd.NewRunner(opt)
	return err
}

// newFront creates the server of the client listener. It serves nothing before Run.
func (r *Router) newFront(requests *requestlog.Log) error {
	fromClients, err := r.clientTLS()
	if err != nil {
		return err
	}
	opt := frontOptions(r.cfg)
	opt.Budget = r.bodies
	opt.Handler, opt.Pages, opt.Observer, opt.Log = r.engineAPI, r.pages, r.metrics, r.log
	opt.TLS, opt.Authenticator = fromClients, r.authenticator()
	opt.OnRefused = logRefused(requests)
	r.front, err = front.New(opt)
	return err
}

func (r *Router) newAdmin() (*admin.Server, error) {
	opt := admin.Options{
		Listen: r.cfg.Admin.Listen, Token: r.cfg.Admin.Token, RuntimeFile: r.cfg.Admin.RuntimeFile, Version: r.version, Log: r.log,
		ClientAddr: r.Addr,
		Workers:    r.fleet, Scheduler: r.scheduler, Metrics: r.metrics, Recorder: r.recorder,
		Config:    func() any { return r.live.Load() },
		Discovery: func() []discovery.State { return r.discovery.States() },
		Sessions:  r.runner.Sessions().Overview,
		Queues:    func() any { return r.runner.Admission().View() },
		Transfers: r.transfersView, Health: func() (int, []byte) { return r.pages.Health(true) },
		Timelines: r.recent, Keyring: r.keyring, BlocksByTier: r.blocksByTier,
		Restart: r.Restart, Reload: r.Reload, DeferRuntimeFile: r.inherited.Replaces(),
	}
	if path := r.cfg.Path(); path != "" {
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
		opt.ConfigPath = path
	}
	if opt.Token == "" && os.Getenv("SLUICE_ADMIN_TOKEN") == "" {
		opt.Token = r.previous.Token // so that consoles and tools stay logged in
	}
	var err error
	if opt.Listener, err = r.inherited.Listen(socketAdmin, r.cfg.Admin.Listen); err != nil {
		return nil, fmt.Errorf("admin: cannot listen on %q: %w; choose another with --admin, port 0 selects a free one, off turns it off", r.cfg.Admin.Listen, err)
	}
	if r.compared != nil {
		opt.Compared = &admin.Compared{Name: "round robin", Metrics: r.compared.metrics}
	}
	return admin.New(opt)
}

// blocksByTier returns the number of a rank's blocks in the KV index by tier; nil if the index does
// not count them.
func (r *Router) blocksByTier(rank *worker.Rank) map[string]int {
	counter, ok := r.index.(kvindex.TierCounter)
	if !ok {
		return nil
	}
	out := make(map[string]int, kvindex.NumTiers)
	for tier, n := range counter.CachedBlocksByTier(rank.Slot) {
		out[kvindex.Tier(tier).String()] = n
	}
	return out
}

// Addr returns the address that the front listens on.
func (r *Router) Addr() string { return r.listener.Addr().String() }

// Run serves until ctx ends, then drains and calls Close. To drain, /readyz first reports 503
// and each response closes its connection; then the listener closes; then Run waits until all
// streams have ended, for at most timeouts.drain. Run also drains and returns after Restart
// has replaced this process.
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
			case r.inherited.Replaces(): // keep serving what was inherited from the replaced process
				r.log.Error("cannot open the engine socket", "error", err)
			default:
				failed <- err
			}
		}()
	}
	r.log.Info("listening", "address", r.Addr(), "workers", len(r.cfg.Workers))
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
	r.restartMu.Lock() // waits for a running Restart, which the closed stopping channel cancels
	if r.child != nil {
		return r.drainReplaced(ctx)
	}
	hotrestart.Notify(hotrestart.NotifyStopping)
	r.pages.draining.Store(true)
	r.runner.Sessions().Drain()
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

// announceTimeout bounds how long /readyz reports 503 before the listener closes, so that a
// load balancer sees it before connections are refused.
const announceTimeout = time.Second

// awaitNoRequests waits until no request is in progress, for at most limit. An idle router
// thus ends at once.
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

// Close stops everything that New started. Further calls do nothing.
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
				w.inherited.Close() // serveWire may not have opened it
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
			r.snapshots.Close() // before the fleet and the index lose their content
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
		r.tokenizers.close()
		r.completions.close()
		r.sidechannel.Close()
		r.transfers.Close()
		r.closeRequestLog() // last: requests end until the front is closed
	})
}

// workerReady starts the event feeds of a worker that has become ready.
func (r *Router) workerReady(w *worker.Worker) {
	r.tokenizers.workerReady(w)
	var sources []kvevents.Source
	for _, rank := range w.Ranks {
		if worker.FeedState(rank.Feed.Load()) != worker.FeedNone {
			continue // the rank joined before; another server of the worker has become ready
		}
		r.metrics.RankAdded(rank)
		r.recorder.RankAdded(rank)
		if ep, topic := r.fleet.LoadSource(rank); ep != "" {
			if err := r.loads.Start(kvevents.LoadSource{Rank: rank, Endpoint: ep, Topic: topic}); err != nil {
				r.log.Error("cannot subscribe to load messages", "rank", rank.ID.String(), "endpoint", ep, "error", err)
			}
		}
		src, ok := r.fleet.EventSource(rank)
		if !ok && r.sidecar != nil {
			continue
		}
		if !ok {
			r.log.Warn("no KV events: this rank's cached blocks are predicted from the router's own choices",
				"rank", rank.ID.String(), "hint", "start the engine with KV events, or name them with kv_events=tcp://HOST:PORT")
			continue
		}
		if index, ok := r.index.(kvindex.Reserver); ok {
			index.Reserve(rank.Slot, w.Info().TotalBlocks) // so that storing the blocks does not move a table
		}
		sources = append(sources, kvevents.Source{
			Rank: rank, Model: w.Info().Base, Engine: w.Info().Engine,
			Endpoint: src.Endpoint, Bind: src.Bind, ReplayEndpoint: src.Replay, Topic: src.Topic,
		})
	}
	r.restore(sources)
	for _, src := range sources {
		if src.Resume != nil {
			r.recorder.RankAdded(src.Rank) // again, now with the blocks from the snapshot
		}
		if err := r.feeds.Start(src); err != nil {
			r.index.Clear(src.Rank.Slot)
			r.log.Error("cannot subscribe to KV events", "rank", src.Rank.ID.String(), "endpoint", src.Endpoint, "error", err)
		}
	}
}

// dropPredictions drops the predictions about a rank whose events report that it lost its
// blocks: the blocks in flight, and the approximate index's entries, which the router added
// while the rank had no live feed. A feed that only begins has no blocks in the index; the
// approximate entries then stay.
func (r *Router) dropPredictions(slot worker.Slot) {
	r.scheduler.Forget(slot)
	if r.index.CachedBlocks(slot) > 0 {
		r.approx.Clear(slot)
	}
}

// engineRestarted drops the predictions about a rank whose events show that its engine has, or
// may have, restarted. The feed itself drops the rank's blocks from the index. The approximate
// entries are dropped even if the index has none of the rank's blocks, because they describe
// the engine before the restart.
func (r *Router) engineRestarted(rank *worker.Rank) {
	r.fleet.ReportEventRestart(rank)
	rank.ResetCaching()
	r.scheduler.Forget(rank.Slot)
	r.approx.Clear(rank.Slot)
}

// workerRemoved drops all state that the router has about a worker: its feeds, index entries,
// predictions, rates, comparisons of token ids, transfer measurements and metrics. An engine that has restarted
// leaves and joins.
func (r *Router) workerRemoved(w *worker.Worker) {
	r.runner.WorkerRemoved(w)
	r.loads.Stop(w)
	r.dropTransferPairs(w)
	r.scheduler.ForgetRates(w)
	for _, rank := range w.Ranks {
		r.feeds.Stop(rank.ID)
		r.index.Clear(rank.Slot)
		r.approx.Clear(rank.Slot)
		r.scheduler.Forget(rank.Slot)
		rank.ResetCaching()
		r.tokenizer.EngineLeft(r.fleet.Endpoint(rank).URL())
		r.recorder.RankRemoved(rank)
		r.metrics.RankRemoved(rank)
	}
}

func (r *Router) breakerChanged(w *worker.Worker, from, to worker.State, reason string) {
	if from == worker.Ready {
		for _, rank := range w.Ranks { // the worker may return without the blocks in flight
			r.scheduler.Forget(rank.Slot)
		}
	}
	r.runner.WorkerChanged(w, to)
	if r.admin != nil {
		r.admin.WorkerChanged(w, from, to, reason)
	}
}

// orphanRanks counts the ranks whose events contain only blocks with an unknown parent.
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
