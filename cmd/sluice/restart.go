package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/takeover"
	"sluice/router/admin"
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

// handover is what a router leaves to the one that takes its place, beside its
// listeners.
type handover struct {
	Token   string               `json:"token,omitempty"` // of the admin listener
	Ready   bool                 `json:"ready"`           // it was ready itself
	Ranks   []string             `json:"ranks,omitempty"` // workers that were ready
	Workers []registration.Known `json:"workers,omitempty"`
	// Networks are those that the addresses of Workers were checked against.
	Networks []string `json:"networks,omitempty"`
}

func (r *router) readHandover() error {
	if text := r.given.State(); len(text) > 0 {
		if err := json.Unmarshal(text, &r.before); err != nil {
			return fmt.Errorf("cannot read what the router before this one left: %w", err)
		}
	}
	return nil
}

// knownWorkers are the registered workers of the router before. Where the networks
// differ they have to register again, which checks their addresses.
func (r *router) knownWorkers() []registration.Known {
	if len(r.before.Workers) == 0 {
		return nil
	}
	if !slices.Equal(r.before.Networks, r.cfg.Register.Networks) {
		r.log.Info("register.networks changed: registered workers are not taken over, they register again", "workers", len(r.before.Workers))
		return nil
	}
	return r.before.Workers
}

// Restart starts this program's file, as it is now, in the place of this process:
// with the same flags and environment, the listeners, and what belongs to handover.
// It gives the new process's id once that one accepts; from then on this one ends,
// by retire. With an error this one goes on as before.
func (r *router) Restart(ctx context.Context) (pid int, err error) {
	if !r.passing.TryLock() {
		return 0, errors.New("a restart is under way already")
	}
	defer r.passing.Unlock()
	if r.heir != nil {
		return 0, fmt.Errorf("process %d has taken this one's place already", r.heir.PID)
	}
	if os.Getpid() == 1 {
		return 0, errors.New("this is process 1 of a container, which ends with it; replace the container instead")
	}
	if r.pages.draining.Load() {
		return 0, errors.New("this router is draining")
	}
	opt := takeover.Options{Args: os.Args[1:], Stdout: os.Stdout, Stderr: os.Stderr, Within: r.live.Load().Timeouts.Restart}
	opt.Listeners = append(opt.Listeners, takeover.Listener{Name: socketClient, Address: r.cfg.Listen, Listener: r.listener})
	left := handover{Ready: len(r.pages.waitingFor(true)) == 0}
	if r.admin != nil {
		left.Token = r.admin.Token()
		opt.Listeners = append(opt.Listeners, takeover.Listener{Name: socketAdmin, Address: r.cfg.Admin.Listen, Listener: r.admin.Listener()})
	}
	if r.register != nil {
		left.Workers, left.Networks = r.register.Known(), r.cfg.Register.Networks
		opt.Listeners = append(opt.Listeners, takeover.Listener{Name: socketRegister, Address: r.cfg.Register.Listen, Listener: r.register.Listener()})
	}
	if ln := r.transfers.Listener(); ln != nil {
		opt.Listeners = append(opt.Listeners, takeover.Listener{Name: socketReports, Address: r.cfg.ReportEndpoint(), Listener: ln})
	}
	opt.Listeners = append(opt.Listeners, r.wireSockets.pass()...)
	for _, w := range r.fleet.View().Workers {
		if s, _ := w.State(); s == worker.Ready {
			left.Ranks = append(left.Ranks, w.Spec.ID)
		}
	}
	opt.State = left
	r.log.Info("starting a new process in the place of this one", "deadline", opt.Within)
	if r.keeper != nil {
		_ = r.keeper.Write() // it logs its failure; without it the new process learns from the engines
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	told := make(chan struct{})
	defer close(told)
	go func() {
		select {
		case <-r.ending:
			cancel(errEnding)
		case <-told:
		}
	}()
	heir, err := takeover.Start(ctx, opt)
	if err != nil {
		r.wireSockets.keep()
		if errors.Is(err, errEnding) {
			r.log.Info("not restarted; this process ends", "err", err)
		} else {
			r.log.Error("not restarted; this process goes on", "err", err)
		}
		return 0, err
	}
	r.heir = heir
	if r.wire != nil {
		r.wire.Leave() // who connects from now on is the new process's: to this one it would be for nothing
	}
	takeover.Notify("MAINPID="+strconv.Itoa(heir.PID), takeover.NotifyReady)
	close(r.passedOn)
	return heir.PID, nil
}

// errEnding is why a restart is given up whose process is told to end.
var errEnding = errors.New("this process is shutting down")

// readyPoll is how often a process that takes another's place looks whether it is ready.
const readyPoll = 10 * time.Millisecond

// othersTime is how long it waits, being ready, for workers that the router before
// it had: they may be gone for good.
const othersTime = 5 * time.Second

// takePlace tells systemd that this process serves; one that takes another's place
// first waits until it can do what that one could.
func (r *router) takePlace(ctx context.Context) error {
	defer func() {
		for _, name := range r.given.Close() {
			r.log.Warn("a socket that was passed to this process is not used; it is closed", "name", name)
		}
	}()
	if r.given.Replaces() {
		if err := r.awaitReady(ctx); err != nil {
			r.given.Failed(err)
			return err
		}
		r.takeClients()
		if err := r.given.Ready(); err != nil {
			return err
		}
		if r.admin != nil {
			if err := r.admin.Announce(); err != nil {
				r.log.Error("tools will not find this router", "err", err)
			}
		}
		r.wireSockets.own()
		close(r.tookPlace)
		r.log.Info("took the place of the process before", "addr", r.Addr())
	}
	takeover.Notify(takeover.NotifyReady)
	return nil
}

// awaitReady waits for what /readyz waits for, if the router before was ready, and
// for a while for the workers that it had. It is that router which sets the limit.
func (r *router) awaitReady(ctx context.Context) error {
	if !r.before.Ready {
		return nil // it may be replaced because it is not ready
	}
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	var since time.Time
	for {
		if len(r.pages.waitingFor(true)) > 0 {
			since = time.Time{}
		} else if since.IsZero() {
			since = time.Now()
		}
		if !since.IsZero() && (r.hasAll(r.before.Ranks) || time.Since(since) > othersTime) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.New("it was told to end")
		case <-tick.C:
		}
	}
}

// hasAll says whether the workers of these ids are ready, those left out that no
// source of this router's names.
func (r *router) hasAll(ids []string) bool {
	states := map[string]worker.State{}
	for _, w := range r.fleet.View().Workers {
		s, _ := w.State()
		states[w.Spec.ID] = s
	}
	for _, id := range ids {
		if s, here := states[id]; here && s != worker.Ready || !here && r.cfg.Dynamic() {
			return false
		}
	}
	return true
}

// heirOfClients is the new process as the front's Heir.
type heirOfClients struct {
	to     *takeover.Successor
	passed atomic.Int64
	failed atomic.Pointer[error]
}

// Take implements front.Heir.
func (h *heirOfClients) Take(fd int, about front.Passed) bool {
	state, err := json.Marshal(about)
	if err != nil {
		return false
	}
	taken, err := h.to.Pass(fd, state)
	if err != nil {
		h.failed.CompareAndSwap(nil, &err)
	}
	if taken {
		h.passed.Add(1)
	}
	return taken
}

// takeClients serves the client connections that the router before this one passes. Where
// it listens elsewhere that router keeps them.
func (r *router) takeClients() {
	r.given.Connections(socketClient, func(fd int, state []byte) bool {
		var about front.Passed
		if err := json.Unmarshal(state, &about); err != nil {
			r.log.Warn("a connection that was passed to this process is refused; the router before keeps it", "err", err)
			return false
		}
		return r.front.Adopt(fd, about)
	})
}

// retireFront passes idle client connections to the new process, and waits until all
// others have ended.
func (r *router) retireFront(ctx context.Context, drain time.Duration) error {
	if !r.heir.TakesConnections() {
		return r.front.Retire(ctx, nil, drain)
	}
	heir := &heirOfClients{to: r.heir}
	err := r.front.Retire(ctx, heir, drain)
	if failed := heir.failed.Load(); failed != nil {
		r.log.Warn("not all idle client connections were passed to the new process; the others were kept until their time was over", "err", *failed)
	}
	r.log.Info("idle client connections were passed to the new process", "connections", heir.passed.Load())
	return err
}

// retire ends a router whose place another process has taken: what is under way
// ends, idle client connections go to the new process or are kept for as long as idle ones
// are, and timeouts.drain ends the rest. /readyz stays as it was, for the address is served.
// Once ctx ends idle connections are closed that cannot be passed.
func (r *router) retire(ctx context.Context) error {
	r.log.Info("another process has taken this one's place; ending", "pid", r.heir.PID, "deadline", r.live.Load().Timeouts.Drain)
	drain, cancel := context.WithTimeout(context.Background(), r.live.Load().Timeouts.Drain)
	defer cancel()
	if r.keeper != nil {
		r.keeper.Leave()
	}
	if r.admin != nil {
		soon, cancel := context.WithTimeout(drain, drainGrace)
		_ = r.admin.PassOn(soon) // who watches there comes again
		cancel()
	}
	r.discovery.Close() // the fleet stays as it is: its workers renew their leases elsewhere
	go r.notifications.release()
	go r.transfers.PassOn()
	wire := make(chan struct{})
	go func() {
		defer close(wire)
		r.drainWire(drain)
	}()
	defer func() { <-wire }()
	if err := r.retireFront(ctx, r.live.Load().Timeouts.Drain); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

const restartUsage = `Usage: sluice restart [--admin ADDR | --runtime-file FILE]

Replaces a running router by a new process of the same program file, flags and
environment, without a request that is lost: the new process takes its listeners,
and the old one ends when what it serves has ended. Answers when the new process
serves; when it does not become ready the old one goes on, and the reason is
printed. The signal USR2 does the same. A router whose runtime file is not in the
default place (admin.runtime_file) is named with --runtime-file, or with --admin
and its token in SLUICE_ADMIN_TOKEN.

Flags:
`

// runRestart asks a running router to be replaced.
func runRestart(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice restart", flag.ContinueOnError)
	fs.SetOutput(stderr)
	addr := fs.String("admin", "", "`ADDR` of the router's admin listener [the one that runs]")
	file := fs.String("runtime-file", "", "the router's runtime `FILE` [found by --admin]")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), restartUsage)
		fs.PrintDefaults()
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	rt, err := findRouter(*addr, *file)
	if err != nil {
		notFound(stderr, "restart", *addr, "USR2", err)
		return 1
	}
	c := admin.NewClient(rt)
	defer c.Close()
	pid, err := c.Restart(ctx)
	if err != nil {
		fmt.Fprintln(stderr, "sluice restart:", err)
		return 1
	}
	replaced := "the router at " + rt.Address
	if rt.PID != 0 { // by a runtime file alone
		replaced = fmt.Sprintf("process %d", rt.PID)
	}
	fmt.Fprintf(stdout, "process %d has taken the place of %s\n", pid, replaced)
	return 0
}
