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
	Name    string // name that peers know; unique among them
	Search  Search
	Backend string // default "UCX"
	// Parameters of the backend, over its defaults: "ucx_error_handling_mode",
	// "num_workers", "device_list", …
	Parameters map[string]string
	// Progress makes NIXL progress in a thread of its own. Without it the agent's
	// thread makes the progress and waits for UCX's descriptors, which takes a fifth of
	// the CPU and half of the time for a notification (docs/nixl.md).
	Progress bool
	// ProgressDelay is how long NIXL's progress thread sleeps between polls while
	// nothing wakes it; default 5 ms. NIXL's own default of 0 uses a whole core.
	ProgressDelay time.Duration
	Telemetry     bool          // measure time and bytes of each transfer
	Poll          PollIntervals // default: poll every 40 µs while something is outstanding that no descriptor signals, without a pause for 20 µs while a transfer is in flight; else at least every 5 ms
	Commands      int           // slots of the command ring, a power of two; default 1024
	Events        int           // slots of the event ring, a power of two; default 4096

	StartTimeout time.Duration // load and creation; default 20 s
	CallTimeout  time.Duration // limit of a call whose context has no deadline; default 10 s

	// OnNotification receives every notification, in order for each sender. It runs on
	// the goroutine that reads all events, so it must not block, or call the agent and
	// wait.
	OnNotification func(Notification)
	// OnPeerDown is called once for a peer that rejected a send or a transfer.
	OnPeerDown func(*Peer)
}

func (c *Config) defaults() error {
	if c.Name == "" || strings.ContainsRune(c.Name, 0) || len(c.Name) > 256 {
		return fmt.Errorf("nixl: cannot use agent name %q: want 1 to 256 bytes without NUL", c.Name)
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
			return fmt.Errorf("nixl: cannot use a ring of %d slots: want a power of two from 16 to %d", n, 1<<20)
		}
	}
	for k, v := range c.Parameters {
		if k == "" || strings.ContainsRune(k+v, 0) {
			return fmt.Errorf("nixl: cannot use backend parameter %q=%q: want a key, and no NUL", k, v)
		}
	}
	return nil
}

// Agent is a participant in NIXL: it owns registered memory, knows peers, transfers and
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
	exitReason   string        // valid once processEnded is closed
	pollStatus   atomic.Int32  // last status of the poll for notifications
	probe        atomic.Pointer[probe]

	mu               sync.Mutex
	waiters          map[uint64]*waiter
	peers            map[uint64]*Peer
	completionBoards []*CompletionBoard

	senderNames map[string]string // owned by the reader: avoids an allocation for each notification
}

// waiter is a call in flight.
type waiter struct {
	result      chan callResult
	lateCleanup uint32 // operation that undoes the handle of an answer that arrives after the caller gave up
	abandoned   bool
}

type callResult struct {
	status Status
	handle uint64
	arg    [3]uint64
	aux    uint32
	data   []byte
}

// Open loads NIXL if it is not loaded yet, and starts an agent with a backend. The
// error is a *LoadError if there is no usable library, and an *Error if NIXL rejected a
// call.
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
	library.UCX = ucxVersion() // the backend has loaded it
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

// Name returns the agent's name.
func (a *Agent) Name() string { return a.cfg.Name }

// Library returns the NIXL that the agent runs on; nil for the fake.
func (a *Agent) Library() *Library { return a.library }

// Parameters returns the parameters of the backend, as the backend reports them.
func (a *Agent) Parameters() map[string]string { return maps.Clone(a.parameters) }

// Counters returns what the agent's thread has counted.
func (a *Agent) Counters() Counters { return a.driver.counters() }

// Plugins returns the names of the backends that this NIXL can create.
func (a *Agent) Plugins(ctx context.Context) ([]string, error) {
	ans, err := a.call(ctx, &command{op: opPlugins}, "list plugins")
	return strings.Fields(string(ans.data)), err
}

// Metadata returns what a peer loads to reach this agent: its addresses, and the keys
// of all registered memory. Its holder can read and write that memory, so it is sent to
// configured peers only and never logged.
func (a *Agent) Metadata(ctx context.Context) ([]byte, error) {
	ans, err := a.call(ctx, &command{op: opMetadata}, "read the agent's own metadata")
	return ans.data, err
}

// Register makes m accessible: peers that load metadata read after this call can read
// and write it.
func (a *Agent) Register(ctx context.Context, m *Memory) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d, ok := a.driver.(*isolated); ok && m.shared != d.memory {
		return &Error{Operation: fmt.Sprintf("register %d bytes of %s", m.size, m.kind), Status: InvalidParam, Hint: "the agent runs in a process of its own, which shares only the memory of boards"}
	}
	if m.agent != nil || m.address == 0 {
		return &Error{Operation: fmt.Sprintf("register %d bytes of %s", m.size, m.kind), Status: InvalidState, Hint: "the memory is registered already, or freed"}
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

// Deregister undoes Register. The memory may be freed once it has succeeded.
func (a *Agent) Deregister(ctx context.Context, m *Memory) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.agent != a {
		return &Error{Operation: fmt.Sprintf("deregister %d bytes of %s", m.size, m.kind), Status: InvalidState, Hint: "the memory is not registered with this agent"}
	}
	_, err := a.call(ctx, &command{op: opDeregister, handle: m.handle, memory: m}, fmt.Sprintf("deregister %d bytes of %s", m.size, m.kind))
	if err != nil {
		m.unreusable = true
	}
	m.agent = nil
	return err
}

// Health returns nil if the agent can be used, or the reason why not.
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

// Close releases everything and ends the agent's thread. If the library hangs, Close
// abandons the thread after CallTimeout and the error says so.
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
		// The command asks for no answer, because the event ring may be full.
		if e := a.submit(ctx, &command{op: opStop}); e != nil {
			err = &Error{Operation: "close", Status: statusOf(e), Hint: a.stuckHint()}
		}
	}
	stopped := a.driver.stop(deadline)
	if _, own := a.driver.(*isolated); own && stopped {
		err = nil // the thread ended with its process
	} else if !stopped && err == nil {
		err = &Error{Operation: "close", Status: Hung, Hint: strings.TrimPrefix(a.stuckHint()+"; its thread was abandoned", "; ")}
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
