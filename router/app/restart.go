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

// The names of the sockets that one process passes to the next, and that a systemd
// socket unit gives them by FileDescriptorName=.
const (
	socketClient   = "client"
	socketAdmin    = "admin"
	socketRegister = "register"
	socketReports  = "reports" // of transfers, over ZMQ
	// The framed socket's two ways.
	socketRouted     = "routed"
	socketRoutedUnix = "routed-unix"
)

// restartState is what a router leaves to the one that takes its place, beside its
// listeners.
type restartState struct {
	Token             string                     `json:"token,omitempty"` // of the admin listener
	WasReady          bool                       `json:"ready"`           // it was ready itself
	ReadyWorkers      []string                   `json:"ranks,omitempty"` // workers that were ready
	RegisteredWorkers []registration.KnownWorker `json:"workers,omitempty"`
	// Networks are those that the addresses of Workers were checked against.
	Networks []string `json:"networks,omitempty"`
}

func (r *Router) readRestartState() error {
	if text := r.inherited.State(); len(text) > 0 {
		if err := json.Unmarshal(text, &r.previous); err != nil {
			return fmt.Errorf("cannot read what the router before this one left: %w", err)
		}
	}
	return nil
}

// knownWorkers are the registered workers of the router before. Where the networks
// differ they have to register again, which checks their addresses.
func (r *Router) knownWorkers() []registration.KnownWorker {
	if len(r.previous.RegisteredWorkers) == 0 {
		return nil
	}
	if !slices.Equal(r.previous.Networks, r.cfg.Register.Networks) {
		r.log.Info("registration.networks changed: registered workers are not taken over, they register again", "workers", len(r.previous.RegisteredWorkers))
		return nil
	}
	return r.previous.RegisteredWorkers
}

// Restart starts this program's file, as it is now, in the place of this process:
// with the same flags and environment, the listeners, and what belongs to handover.
// It gives the new process's id once that one accepts; from then on this one ends,
// by retire. With an error this one goes on as before.
func (r *Router) Restart(ctx context.Context) (pid int, err error) {
	if !r.restartMu.TryLock() {
		return 0, errors.New("a restart is under way already")
	}
	defer r.restartMu.Unlock()
	if r.child != nil {
		return 0, fmt.Errorf("process %d has taken this one's place already", r.child.PID)
	}
	if os.Getpid() == 1 {
		return 0, errors.New("this is process 1 of a container, which ends with it; replace the container instead")
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
		state.RegisteredWorkers, state.Networks = r.register.Workers(), r.cfg.Register.Networks
		opt.Listeners = append(opt.Listeners, hotrestart.Listener{Name: socketRegister, Address: r.cfg.Register.Listen, Listener: r.register.Listener()})
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
	opt.State = state
	r.log.Info("starting a new process in the place of this one", "deadline", opt.ReadyTimeout)
	if r.snapshots != nil {
		_ = r.snapshots.Write() // it logs its failure; without it the new process learns from the engines
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
			r.log.Info("not restarted; this process ends", "err", err)
		} else {
			r.log.Error("not restarted; this process goes on", "err", err)
		}
		return 0, err
	}
	r.child = child
	if r.wire != nil {
		r.wire.CloseListeners() // who connects from now on is the new process's: to this one it would be for nothing
	}
	hotrestart.Notify("MAINPID="+strconv.Itoa(child.PID), hotrestart.NotifyReady)
	close(r.replaced)
	return child.PID, nil
}

// errStopping is why a restart is given up whose process is told to end.
var errStopping = errors.New("this process is shutting down")

// readyPoll is how often a process that takes another's place looks whether it is ready.
const readyPoll = 10 * time.Millisecond

// workersTimeout is how long it waits, being ready, for workers that the router before
// it had: they may be gone for good.
const workersTimeout = 5 * time.Second

// replaceParent tells systemd that this process serves; one that takes another's place
// first waits until it can do what that one could.
func (r *Router) replaceParent(ctx context.Context) error {
	defer func() {
		for _, name := range r.inherited.Close() {
			r.log.Warn("a socket that was passed to this process is not used; it is closed", "name", name)
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
				r.log.Error("tools will not find this router", "err", err)
			}
		}
		r.wireSockets.adoptUnixFiles()
		close(r.replacedParent)
		r.log.Info("took the place of the process before", "addr", r.Addr())
	}
	hotrestart.Notify(hotrestart.NotifyReady)
	return nil
}

// awaitParentReadiness waits for what /readyz waits for, if the router before was ready, and
// for a while for the workers that it had. It is that router which sets the limit.
func (r *Router) awaitParentReadiness(ctx context.Context) error {
	if !r.previous.WasReady {
		return nil // it may be replaced because it is not ready
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
			return errors.New("it was told to end")
		case <-tick.C:
		}
	}
}

// allReady says whether the workers of these ids are ready, those left out that no
// source of this router's names.
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

// childClients is the new process as the front's Heir.
type childClients struct {
	child  *hotrestart.Child
	sent   atomic.Int64
	failed atomic.Pointer[error]
}

// HandOff implements front.Heir.
func (h *childClients) HandOff(fd int, about front.HandoffState) bool {
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

// receiveClients serves the client connections that the router before this one passes. Where
// it listens elsewhere that router keeps them.
func (r *Router) receiveClients() {
	r.inherited.AcceptConnections(socketClient, func(fd int, state []byte) bool {
		var about front.HandoffState
		if err := json.Unmarshal(state, &about); err != nil {
			r.log.Warn("a connection that was passed to this process is refused; the router before keeps it", "err", err)
			return false
		}
		return r.front.Adopt(fd, about)
	})
}

// drainFront passes idle client connections to the new process, and waits until all
// others have ended.
func (r *Router) drainFront(ctx context.Context, drain time.Duration) error {
	if !r.child.AcceptsConnections() {
		return r.front.Retire(ctx, nil, drain)
	}
	child := &childClients{child: r.child}
	err := r.front.Retire(ctx, child, drain)
	if failed := child.failed.Load(); failed != nil {
		r.log.Warn("not all idle client connections were passed to the new process; the others were kept until their time was over", "err", *failed)
	}
	r.log.Info("idle client connections were passed to the new process", "connections", child.sent.Load())
	return err
}

// drainReplaced ends a router whose place another process has taken: what is under way
// ends, idle client connections go to the new process or are kept for as long as idle ones
// are, and timeouts.drain ends the rest. /readyz stays as it was, for the address is served.
// Once ctx ends idle connections are closed that cannot be passed.
func (r *Router) drainReplaced(ctx context.Context) error {
	r.log.Info("another process has taken this one's place; ending", "pid", r.child.PID, "deadline", r.live.Load().Timeouts.Drain)
	drain, cancel := context.WithTimeout(context.Background(), r.live.Load().Timeouts.Drain)
	defer cancel()
	if r.snapshots != nil {
		r.snapshots.CloseWithoutWrite()
	}
	if r.admin != nil {
		soon, cancel := context.WithTimeout(drain, drainGrace)
		_ = r.admin.CloseForSuccessor(soon) // who watches there comes again
		cancel()
	}
	r.discovery.Close() // the fleet stays as it is: its workers renew their leases elsewhere
	go r.completions.handOver()
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
