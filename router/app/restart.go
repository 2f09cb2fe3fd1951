package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/hotrestart"
	"sluice/router/discovery/registration"
	"sluice/router/worker"
)

// The names of the sockets that one process passes to the next. A systemd socket unit sets
// the same names with FileDescriptorName=.
const (
	socketClient   = "client"
	socketAdmin    = "admin"
	socketRegister = "register"
	socketReports  = "reports" // transfer reports over ZMQ
	// The endpoints of the engine API's framed socket: TCP and unix.
	socketEngineAPI     = "engine-api"
	socketEngineAPIUnix = "engine-api-unix"
)

// formerSockets maps the names of the previous release to the present ones.
var formerSockets = map[string]string{"routed": socketEngineAPI, "routed-unix": socketEngineAPIUnix}

// restartState is the state that a process passes, with its listeners, to the process that
// replaces it. Its JSON names are part of the protocol between two releases.
type restartState struct {
	Token             string                     `json:"token,omitempty"` // token of the admin listener
	WasReady          bool                       `json:"ready"`           // the old process was ready
	ReadyWorkers      []string                   `json:"ranks,omitempty"` // ids of the workers that were ready
	RegisteredWorkers []registration.KnownWorker `json:"workers,omitempty"`
	// DrainedWorkers are the ids of the workers that are drained (sluice drain).
	DrainedWorkers []string `json:"drained,omitempty"`
	// Networks are the networks against which the addresses of RegisteredWorkers were checked.
	Networks []string `json:"networks,omitempty"`
}

func (r *Router) readRestartState() error {
	if text := r.inherited.State(); len(text) > 0 {
		if err := json.Unmarshal(text, &r.previous); err != nil {
			return fmt.Errorf("cannot read the state of the previous process: %w", err)
		}
	}
	return nil
}

// knownWorkers returns the registered workers of the process that this one replaces. It
// returns none if registration.networks differs: the workers then have to register again,
// which checks their addresses.
func (r *Router) knownWorkers() []registration.KnownWorker {
	if len(r.previous.RegisteredWorkers) == 0 {
		return nil
	}
	if !slices.Equal(r.previous.Networks, r.cfg.Registration.Networks) {
		r.log.Info("registration.networks changed: registered workers are not inherited; they register again", "workers", len(r.previous.RegisteredWorkers))
		return nil
	}
	return r.previous.RegisteredWorkers
}

// Restart replaces this process: it starts the program's file, as it is on disk now, with the
// same flags and environment, and passes its listeners and restartState to the new process.
// Restart returns the new process's id once that process accepts connections. Run then drains
// this process (drainReplaced) and returns. After an error this process goes on as before.
func (r *Router) Restart(ctx context.Context) (pid int, err error) {
	if !r.restartMu.TryLock() {
		return 0, errors.New("a restart is already in progress")
	}
	defer r.restartMu.Unlock()
	if r.child != nil {
		return 0, fmt.Errorf("process %d has already replaced this one", r.child.PID)
	}
	if os.Getpid() == 1 {
		return 0, errors.New("this is process 1 of a container, and the container would end with it; replace the container instead")
	}
	if r.pages.draining.Load() {
		return 0, errors.New("this router is draining")
	}
	opt := hotrestart.Options{Args: os.Args[1:], Stdout: os.Stdout, Stderr: os.Stderr, ReadyTimeout: r.live.Load().Timeouts.Restart}
	opt.Listeners = append(opt.Listeners, hotrestart.Listener{Name: socketClient, Address: r.cfg.Listen, Listener: r.listener})
	state := restartState{WasReady: len(r.pages.notReadyReasons(true)) == 0}
	if r.admin != nil {
		state.Token = r.admin.Token()
		opt.Listeners = append(opt.Listeners, hotrestart.Listener{Name: socketAdmin, Address: r.cfg.Admin.Listen, Listener: r.admin.Listener()})
	}
	if r.register != nil {
		state.RegisteredWorkers, state.Networks = r.register.Workers(), r.cfg.Registration.Networks
		opt.Listeners = append(opt.Listeners, hotrestart.Listener{Name: socketRegister, Address: r.cfg.Registration.Listen, Listener: r.register.Listener()})
	}
	if ln := r.transfers.Listener(); ln != nil {
		opt.Listeners = append(opt.Listeners, hotrestart.Listener{Name: socketReports, Address: r.cfg.ReportEndpoint(), Listener: ln})
	}
	opt.Listeners = append(opt.Listeners, r.wireSockets.beginHandOver()...)
	for _, w := range r.fleet.View().Workers {
		if s, _ := w.State(); s == worker.Ready {
			state.ReadyWorkers = append(state.ReadyWorkers, w.Spec.ID)
		}
	}
	state.DrainedWorkers = r.fleet.Drained()
	opt.State = state
	r.log.Info("starting a new process to replace this one", "deadline", opt.ReadyTimeout)
	if r.snapshots != nil {
		_ = r.snapshots.Write() // logs its own failure; without a snapshot the new process learns from the engines
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	signalled := make(chan struct{})
	defer close(signalled)
	go func() {
		select {
		case <-r.stopping:
			cancel(errStopping)
		case <-signalled:
		}
	}()
	child, err := hotrestart.Start(ctx, opt)
	if err != nil {
		r.wireSockets.cancelHandOver()
		if errors.Is(err, errStopping) {
			r.log.Info("restart failed; this process exits", "error", err)
		} else {
			r.log.Error("restart failed; this process continues", "error", err)
		}
		return 0, err
	}
	r.child = child
	if r.wire != nil {
		r.wire.CloseListeners() // from now on only the new process accepts; this one is draining
	}
	hotrestart.Notify("MAINPID="+strconv.Itoa(child.PID), hotrestart.NotifyReady)
	close(r.replaced)
	return child.PID, nil
}

// errStopping cancels a restart because its process has been asked to stop.
var errStopping = errors.New("this process is shutting down")

// readyPoll is how often a process that replaces another checks whether it is ready.
const readyPoll = 10 * time.Millisecond

// workersTimeout is how long a process that is ready waits for the workers that were ready in
// the process it replaces. The wait is bounded because workers may have left for good.
const workersTimeout = 5 * time.Second

// replaceParent notifies systemd that this process serves. If this process replaces another,
// replaceParent first waits until it is as ready as the old process was, and then tells the
// old process to drain.
func (r *Router) replaceParent(ctx context.Context) error {
	defer func() {
		for _, name := range r.inherited.Close() {
			r.log.Warn("closing an inherited socket that the configuration does not use", "socket", name)
		}
	}()
	if r.inherited.Replaces() {
		if err := r.awaitParentReadiness(ctx); err != nil {
			r.inherited.ReportFailed(err)
			return err
		}
		r.receiveClients()
		if err := r.inherited.Ready(); err != nil {
			return err
		}
		if r.admin != nil {
			if err := r.admin.WriteRuntimeFile(); err != nil {
				r.log.Error("cannot write the runtime file; tools will not find this router", "error", err)
			}
		}
		r.wireSockets.adoptUnixFiles()
		close(r.replacedParent)
		r.log.Info("replaced the previous process", "address", r.Addr())
	}
	hotrestart.Notify(hotrestart.NotifyReady)
	return nil
}

// awaitParentReadiness waits for the conditions of /readyz if the old process was ready, and
// then for at most workersTimeout for the workers that were ready there. The old process
// bounds the whole wait with timeouts.restart.
func (r *Router) awaitParentReadiness(ctx context.Context) error {
	if !r.previous.WasReady {
		return nil // the operator may replace it because it is not ready
	}
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	var since time.Time
	for {
		if len(r.pages.notReadyReasons(true)) > 0 {
			since = time.Time{}
		} else if since.IsZero() {
			since = time.Now()
		}
		if !since.IsZero() && (r.allReady(r.previous.ReadyWorkers) || time.Since(since) > workersTimeout) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.New("it received a request to stop")
		case <-tick.C:
		}
	}
}

// allReady reports whether the workers with these ids are ready. It ignores ids that the
// fleet does not know if no discovery source can still find them.
func (r *Router) allReady(ids []string) bool {
	states := map[string]worker.State{}
	for _, w := range r.fleet.View().Workers {
		s, _ := w.State()
		states[w.Spec.ID] = s
	}
	for _, id := range ids {
		if s, known := states[id]; known && s != worker.Ready || !known && r.cfg.Dynamic() {
			return false
		}
	}
	return true
}

// childClients passes the front's idle client connections to the new process.
type childClients struct {
	child  *hotrestart.Child
	sent   atomic.Int64
	failed atomic.Pointer[error]
}

// Pass implements front.Successor.
func (h *childClients) Pass(fd int, about front.PassedState) bool {
	state, err := json.Marshal(about)
	if err != nil {
		return false
	}
	accepted, err := h.child.SendConnection(fd, state)
	if err != nil {
		h.failed.CompareAndSwap(nil, &err)
	}
	if accepted {
		h.sent.Add(1)
	}
	return accepted
}

// receiveClients serves the client connections that the replaced process passes to this one.
// The replaced process keeps its connections if the two listen on different addresses.
func (r *Router) receiveClients() {
	r.inherited.AcceptConnections(socketClient, func(fd int, state []byte) bool {
		var about front.PassedState
		if err := json.Unmarshal(state, &about); err != nil {
			r.log.Warn("rejected an inherited connection; the previous process keeps it", "error", err)
			return false
		}
		return r.front.Adopt(fd, about)
	})
}

// drainFront passes idle client connections to the new process, and waits until all other
// connections have ended.
func (r *Router) drainFront(ctx context.Context, drain time.Duration) error {
	if !r.child.AcceptsConnections() {
		return r.front.Retire(ctx, nil, drain)
	}
	child := &childClients{child: r.child}
	err := r.front.Retire(ctx, child, drain)
	if failed := child.failed.Load(); failed != nil {
		r.log.Warn("some idle client connections were not passed to the new process; they stayed open until their timeout", "error", *failed)
	}
	r.log.Info("idle client connections were passed to the new process", "connections", child.sent.Load())
	return err
}

// drainReplaced drains a router that another process has replaced. Requests in progress run
// to their end, for at most timeouts.drain. Idle client connections go to the new process; one
// that cannot go stays open until its keep-alive timeout, or until ctx ends. /readyz does not
// change, because the new process serves the address.
func (r *Router) drainReplaced(ctx context.Context) error {
	r.log.Info("replaced by another process; ending", "pid", r.child.PID, "deadline", r.live.Load().Timeouts.Drain)
	drain, cancel := context.WithTimeout(context.Background(), r.live.Load().Timeouts.Drain)
	defer cancel()
	if r.snapshots != nil {
		r.snapshots.CloseWithoutWrite()
	}
	if r.admin != nil {
		soon, cancel := context.WithTimeout(drain, drainGrace)
		_ = r.admin.CloseForSuccessor(soon) // consoles and tools reconnect to the new process
		cancel()
	}
	r.discovery.Close() // the fleet keeps its workers, which now renew their registrations at the new process
	r.runner.Sessions().Drain()
	go r.completions.release()
	go r.transfers.PassOn()
	go r.feeds.ReleaseBound()
	wire := make(chan struct{})
	go func() {
		defer close(wire)
		r.drainWire(drain)
	}()
	defer func() { <-wire }()
	if err := r.drainFront(ctx, r.live.Load().Timeouts.Drain); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}
