package nixl

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Config describes an agent. The zero value of every field but Name is usable.
type Config struct {
	Name    string // as peers see it; unique among them
	Search  Search
	Backend string // default "UCX"
	// Parameters of the backend, over its defaults: "ucx_error_handling_mode",
	// "num_workers", "device_list", …
	Parameters map[string]string
	// Progress has NIXL make its progress in a thread of its own. Without it the agent's
	// thread does, which waits for UCX's descriptors: that takes a fifth of the CPU and
	// half of the time for a notification (docs/nixl.md).
	Progress bool
	// ProgressDelay is how long that thread sleeps between looks when nothing wakes it;
	// default 5 ms. NIXL's own default of 0 burns a core.
	ProgressDelay time.Duration
	Telemetry     bool          // time and bytes of each transfer
	Poll          PollIntervals // default: look every 40 µs while something is outstanding that no descriptor tells of, without a pause for 20 µs while a transfer of ours is; else at least every 5 ms
	Commands      int           // slots of the command ring, a power of two; default 1024
	Events        int           // slots of the event ring, a power of two; default 4096

	StartTimeout time.Duration // load and creation; default 20 s
	CallTimeout  time.Duration // a call whose context has no deadline; default 10 s

	// OnNotification gets every notification, in order per sender. It runs on the
	// goroutine that reads all events: it must not block nor call the agent and wait.
	OnNotification func(Notification)
	// OnPeerDown is told once of a peer that refused a send or a transfer.
	OnPeerDown func(*Peer)
}

func (c *Config) defaults() error {
	if c.Name == "" || strings.ContainsRune(c.Name, 0) || len(c.Name) > 256 {
		return fmt.Errorf("nixl: agent name %q: want 1 to 256 bytes without NUL", c.Name)
	}
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&c.ProgressDelay, 5*time.Millisecond)
	set(&c.Poll.Spin, 20*time.Microsecond)
	set(&c.Poll.Busy, 40*time.Microsecond)
	set(&c.Poll.Idle, 5*time.Millisecond)
	set(&c.StartTimeout, 20*time.Second)
	set(&c.CallTimeout, 10*time.Second)
	if c.Backend == "" {
		c.Backend = "UCX"
	}
	if c.Commands == 0 {
		c.Commands = 1024
	}
	if c.Events == 0 {
		c.Events = 4096
	}
	for _, n := range []int{c.Commands, c.Events} {
		if n < 16 || n > 1<<20 || n&(n-1) != 0 {
			return fmt.Errorf("nixl: a ring of %d slots: want a power of two from 16 to %d", n, 1<<20)
		}
	}
	for k, v := range c.Parameters {
		if k == "" || strings.ContainsRune(k+v, 0) {
			return fmt.Errorf("nixl: backend parameter %q=%q: want a key, and no NUL", k, v)
		}
	}
	return nil
}

// Agent takes part in NIXL: it owns registered memory, knows peers, transfers and
// notifies. Its methods may be called from any goroutine.
type Agent struct {
	cfg        Config
	driver     driver
	library    *Library
	parameters map[string]string

	token        atomic.Uint64
	closing      atomic.Bool
	closed       chan struct{}
	processEnded chan struct{} // closed when the process of an isolated agent has ended
	exitReason   string        // why; valid then
	pollStatus   atomic.Int32  // last status of the look for notifications
	probe        atomic.Pointer[probe]

	mu               sync.Mutex
	waiters          map[uint64]*waiter
	peers            map[uint64]*Peer
	completionBoards []*CompletionBoard

	senderNames map[string]string // the reader's own: names, so that none is allocated per notification
}

// waiter is a call in flight.
type waiter struct {
	result      chan callResult
	lateCleanup uint32 // what to do with a handle that comes when nobody waits any more
	abandoned   bool
}

type callResult struct {
	status Status
	handle uint64
	arg    [3]uint64
	aux    uint32
	data   []byte
}

// Open loads NIXL where it is not loaded yet, and starts an agent with a backend.
// The error is a *LoadError when there is no usable library, an *Error when NIXL
// refused.
func Open(ctx context.Context, cfg Config) (*Agent, error) {
	if err := cfg.defaults(); err != nil {
		return nil, err
	}
	limit := cfg.StartTimeout
	if d, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(d))
	}
	library, err := load(ctx, cfg.Search, limit)
	if err != nil {
		return nil, err
	}
	a, err := openWithLibrary(ctx, cfg, library, startThread)
	library.UCX = ucxVersion() // its backend has brought it
	return a, err
}

func openWithLibrary(ctx context.Context, cfg Config, library *Library, start func(*Config, func(*event)) (driver, error)) (*Agent, error) {
	a := newAgent(cfg)
	a.library = library
	t, err := start(&a.cfg, a.receive)
	if err != nil {
		return nil, fmt.Errorf("nixl: cannot start the agent's thread: %w", err)
	}
	a.driver = t
	if err := a.start(ctx); err != nil {
		return nil, err
	}
	return a, nil
}

func newAgent(cfg Config) *Agent {
	return &Agent{cfg: cfg, closed: make(chan struct{}), processEnded: make(chan struct{}), waiters: map[uint64]*waiter{}, peers: map[uint64]*Peer{}, senderNames: map[string]string{}}
}

// start creates the agent and its backend.
func (a *Agent) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.StartTimeout)
	defer cancel()
	var flags uint64
	if a.cfg.Progress {
		flags |= 1
	}
	if a.cfg.Telemetry {
		flags |= 2
	}
	create := command{op: opCreate, arg: [3]uint64{flags, uint64(a.cfg.ProgressDelay.Microseconds())}, data: append([]byte(a.cfg.Name), 0)}
	_, err := a.call(ctx, &create, fmt.Sprintf("create agent %q", a.cfg.Name))
	if err == nil {
		payload := append([]byte(a.cfg.Backend), 0)
		for _, k := range slices.Sorted(maps.Keys(a.cfg.Parameters)) {
			payload = append(append(append(append(payload, k...), 0), a.cfg.Parameters[k]...), 0)
		}
		var ans callResult
		ans, err = a.call(ctx, &command{op: opBackend, data: payload}, fmt.Sprintf("create backend %q", a.cfg.Backend))
		a.parameters = map[string]string{}
		for line := range strings.Lines(string(ans.data)) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			a.parameters[k] = v
		}
	}
	if err != nil {
		a.Close()
	}
	return err
}

// Name is the agent's name.
func (a *Agent) Name() string { return a.cfg.Name }

// Library is the NIXL the agent runs on; nil for the fake.
func (a *Agent) Library() *Library { return a.library }

// Parameters are the backend's, as it took them.
func (a *Agent) Parameters() map[string]string { return maps.Clone(a.parameters) }

// Counters tell what the agent's owner has seen.
func (a *Agent) Counters() Counters { return a.driver.counters() }

// Plugins are the backends this NIXL could create.
func (a *Agent) Plugins(ctx context.Context) ([]string, error) {
	ans, err := a.call(ctx, &command{op: opPlugins}, "list plugins")
	return strings.Fields(string(ans.data)), err
}

// Metadata is what a peer loads to reach this agent: addresses, and the keys of all
// registered memory. Whoever has it may read and write that memory, so it goes to
// configured peers only, and into no log.
func (a *Agent) Metadata(ctx context.Context) ([]byte, error) {
	ans, err := a.call(ctx, &command{op: opMetadata}, "read the agent's own metadata")
	return ans.data, err
}

// Register makes m reachable: peers that load metadata taken afterwards may read
// and write it.
func (a *Agent) Register(ctx context.Context, m *Memory) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d, ok := a.driver.(*isolated); ok && m.shared != d.memory {
		return &Error{Operation: fmt.Sprintf("register %d bytes of %s", m.size, m.kind), Status: InvalidParam, Hint: "the agent lives in a process of its own, which has only its boards' memory"}
	}
	if m.agent != nil || m.address == 0 {
		return &Error{Operation: fmt.Sprintf("register %d bytes of %s", m.size, m.kind), Status: InvalidState, Hint: "they are registered already, or freed"}
	}
	c := command{op: opRegister, arg: [3]uint64{m.address, uint64(m.size), uint64(m.device) | uint64(m.kind)<<32}, memory: m}
	ans, err := a.call(ctx, &c, fmt.Sprintf("register %d bytes of %s", m.size, m.kind))
	if err != nil {
		m.unreusable = m.unreusable || timedOut(err)
		return err
	}
	m.agent, m.handle = a, ans.handle
	return nil
}

// Deregister undoes Register. The memory may be freed when it succeeded.
func (a *Agent) Deregister(ctx context.Context, m *Memory) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.agent != a {
		return &Error{Operation: fmt.Sprintf("deregister %d bytes of %s", m.size, m.kind), Status: InvalidState, Hint: "they are not registered with this agent"}
	}
	_, err := a.call(ctx, &command{op: opDeregister, handle: m.handle, memory: m}, fmt.Sprintf("deregister %d bytes of %s", m.size, m.kind))
	if err != nil {
		m.unreusable = true
	}
	m.agent = nil
	return err
}

// Health says whether the agent can be used: nil, or why not.
func (a *Agent) Health() error {
	if a.closing.Load() {
		return ErrClosed
	}
	select {
	case <-a.processEnded:
		return &Error{Operation: "use agent " + a.cfg.Name, Status: Died, Hint: a.exitReason}
	default:
	}
	if op, since := a.driver.busy(); since > a.cfg.CallTimeout {
		return &Error{Operation: opNames[min(op, uint32(len(opNames)-1))], Status: Hung, Hint: fmt.Sprintf("in the library for %s", since.Round(time.Millisecond))}
	}
	if s := Status(a.pollStatus.Load()); s != Success {
		return &Error{Operation: opNames[opPoll], Status: s}
	}
	return nil
}

// Close releases everything and ends the agent's thread. When the library hangs,
// it is left behind after CallTimeout, and the error says so.
func (a *Agent) Close() error {
	if !a.closing.CompareAndSwap(false, true) {
		<-a.closed
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.CallTimeout)
	defer cancel()
	deadline, _ := ctx.Deadline()
	var err error
	select {
	case <-a.processEnded:
	default:
		// No answer is asked for: it might find the ring of events full.
		if e := a.submit(ctx, &command{op: opStop}); e != nil {
			err = &Error{Operation: "close", Status: statusOf(e), Hint: a.stuckHint()}
		}
	}
	stopped := a.driver.stop(deadline)
	if _, own := a.driver.(*isolated); own && stopped {
		err = nil // with its process, nothing is left behind
	} else if !stopped && err == nil {
		err = &Error{Operation: "close", Status: Hung, Hint: strings.TrimPrefix(a.stuckHint()+"; its thread is left behind", "; ")}
	}
	close(a.closed)
	a.mu.Lock()
	for _, w := range a.waiters {
		w.deliver(callResult{status: Closed})
	}
	clear(a.waiters)
	if stopped {
		for _, b := range a.completionBoards {
			b.agentClosed()
		}
	}
	a.mu.Unlock()
	return err
}
