package nixl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"
)

// AgentTier provides the router with an agent: it opens the agent, tests it with a
// notification to itself, watches it, and opens it again when it fails. It never blocks
// the router: every call that may hang runs on a goroutine of its own.
type AgentTier struct {
	cfg  AgentTierConfig
	stop context.CancelFunc
	done chan struct{}

	mu             sync.Mutex
	state          TierState
	reason         string
	agent          *Agent
	closedCounters Counters // of closed agents
}

// AgentTierConfig describes the tier.
type AgentTierConfig struct {
	Agent Config
	// Ready is called with each new agent that passed the self-test, before the tier is
	// up, to make the board and to load peers. An error keeps the tier down.
	Ready func(context.Context, *Agent) error
	// OnState is called on every change; it must not block.
	OnState func(TierState, string)
	// Isolate, if not empty, is a command that runs ServeHost: the agent lives in that
	// process, and a crash costs the tier about a second instead of the router.
	Isolate []string
	// CheckInterval is the interval of health checks; default 1 s. MaxRetryPause is the
	// longest pause before a failed agent is opened again, the first being a hundredth of
	// it; default 10 s.
	CheckInterval, MaxRetryPause time.Duration

	open func(context.Context, Config) (*Agent, error)
	tier Tier // the tier that open opens; NIXL's if empty
	// after is a tier whose start must end first, because it may load the library.
	after TierService
	path  string // of libucp
	// disabledReason, if not nil, keeps the tier off.
	disabledReason error
}

// maxAbandoned is how many agents that hang may be abandoned: each keeps a thread and
// its memory.
const maxAbandoned = 3

// StartAgentTier starts to open the agent and returns at once.
func StartAgentTier(cfg AgentTierConfig) *AgentTier {
	if cfg.CheckInterval <= 0 {
		cfg.CheckInterval = time.Second
	}
	if cfg.MaxRetryPause <= 0 {
		cfg.MaxRetryPause = 10 * time.Second
	}
	if cfg.open == nil {
		cfg.open = Open
	}
	reason := "UCX is being loaded"
	if cfg.tier == "" {
		cfg.tier, reason = TierNIXL, "NIXL is being loaded"
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &AgentTier{cfg: cfg, stop: cancel, done: make(chan struct{}), state: TierStarting, reason: reason}
	go t.run(ctx)
	return t
}

// Tier implements TierService.
func (t *AgentTier) Tier() Tier { return t.cfg.tier }

// Status implements TierService.
func (t *AgentTier) Status() (TierState, string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state, t.reason
}

// Agent returns the agent while the tier is up, else nil.
func (t *AgentTier) Agent() *Agent {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.agent
}

// Counters returns the sum over all agents that the tier has had.
func (t *AgentTier) Counters() Counters {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.agent == nil {
		return t.closedCounters
	}
	return t.closedCounters.add(t.agent.Counters())
}

// Close ends the tier and its agent.
func (t *AgentTier) Close() error {
	t.stop()
	<-t.done
	return nil
}

func (t *AgentTier) set(s TierState, a *Agent, format string, args ...any) {
	t.mu.Lock()
	changed := t.state != s
	t.state, t.reason, t.agent = s, fmt.Sprintf(format, args...), a
	reason := t.reason
	t.mu.Unlock()
	if changed && t.cfg.OnState != nil {
		t.cfg.OnState(s, reason)
	}
}

func (t *AgentTier) run(ctx context.Context) {
	defer close(t.done)
	if t.cfg.disabledReason != nil {
		t.set(TierOff, nil, "%v", t.cfg.disabledReason)
		<-ctx.Done()
	}
	t.awaitTier(ctx)
	abandoned, pause := 0, t.cfg.MaxRetryPause/100
	for ctx.Err() == nil {
		began := time.Now()
		a, end, err := t.openAgent(ctx)
		var missing *LoadError
		switch {
		case ctx.Err() != nil:
		case errors.As(err, &missing):
			// Without a library a retry is pointless: loading another one later would
			// put a second NIXL into this process.
			end()
			t.set(TierOff, nil, "%v", err)
			<-ctx.Done()
		case err != nil:
			t.set(TierDown, nil, "%v", err)
		default:
			t.set(TierUp, a, "agent %q passed its self-test (%s)%s", a.Name(), a.Library(), a.location())
			if err = t.watch(ctx, a); err != nil {
				t.set(TierDown, nil, "%v", err)
			}
		}
		if a != nil {
			t.mu.Lock()
			t.agent, t.closedCounters = nil, t.closedCounters.add(a.Counters())
			t.mu.Unlock()
			if a.Close() != nil {
				abandoned++
			}
		}
		end()
		if abandoned >= maxAbandoned {
			t.set(TierOff, nil, "%d agents hang and were abandoned; restart the router to try again", abandoned)
			<-ctx.Done()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		if pause = min(2*pause, t.cfg.MaxRetryPause); time.Since(began) > 2*t.cfg.MaxRetryPause { // the agent worked for a while
			pause = t.cfg.MaxRetryPause / 100
		}
	}
	t.set(TierOff, nil, "closed")
}

// awaitTier waits until the tier that may load the library has started or failed, for a
// limited time.
func (t *AgentTier) awaitTier(ctx context.Context) {
	if t.cfg.after == nil {
		return
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if state, _ := t.cfg.after.Status(); state != TierStarting {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// openAgent opens an agent, tests it and prepares it; it closes the agent again if that
// fails. The caller calls end after closing the agent.
func (t *AgentTier) openAgent(ctx context.Context) (a *Agent, end func(), err error) {
	open, end := t.cfg.open, func() {}
	if len(t.cfg.Isolate) > 0 {
		h, err := startHost(t.cfg.Isolate)
		if err != nil {
			return nil, end, err
		}
		end = h.close
		open = func(ctx context.Context, cfg Config) (*Agent, error) {
			return h.open(ctx, cfg, t.cfg.tier == TierUCX, t.cfg.path)
		}
	}
	if a, err = open(ctx, t.cfg.Agent); err != nil {
		return nil, end, err
	}
	if err = t.selfTest(ctx, a, open); err == nil && t.cfg.Ready != nil {
		err = t.cfg.Ready(ctx, a)
	}
	return a, end, err
}

// watch returns when the agent can no longer be used.
func (t *AgentTier) watch(ctx context.Context, a *Agent) error {
	tick := time.NewTicker(t.cfg.CheckInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.processEnded:
			return a.Health()
		case <-tick.C:
			err := a.Health()
			if err == nil {
				err = a.pingOwner(ctx)
			}
			if err != nil {
				a.killHost(err)
				return err
			}
		}
	}
}

// selfTest makes a second agent send a notification to a over the loopback and waits
// for it: NIXL loads and makes agents without error on machines where no message ever
// arrives. An agent cannot load its own metadata, so a second one is needed.
func (t *AgentTier) selfTest(ctx context.Context, a *Agent, open func(context.Context, Config) (*Agent, error)) error {
	cfg := t.cfg.Agent
	cfg.Name += "/self-test"
	cfg.OnNotification, cfg.OnPeerDown = nil, nil
	if _, ports := cfg.Parameters[ucxPorts]; ports { // these ports are the agent's own, and may be few
		cfg.Parameters = maps.Clone(cfg.Parameters)
		delete(cfg.Parameters, ucxPorts)
	}
	cfg.Commands, cfg.Events = 16, 16
	other, err := open(ctx, cfg)
	if err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	defer other.Close()
	md, err := a.Metadata(ctx)
	if err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	p, err := other.LoadPeer(ctx, md, "")
	if err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	arrived := make(chan struct{}, 1)
	a.probe.Store(&probe{from: cfg.Name, arrived: arrived})
	defer a.probe.Store(nil)
	if err := other.Notify(ctx, p, []byte(probeMessage)); err != nil {
		return fmt.Errorf("self-test: %w", err)
	}
	select {
	case <-arrived:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-a.processEnded:
		return a.Health()
	case <-time.After(a.cfg.CallTimeout):
		return &Error{Operation: "reach the agent over the loopback", Status: Hung, Hint: "a notification was sent and did not arrive; UCX_TLS or UCX_NET_DEVICES may exclude TCP over lo"}
	}
}

// ucxPorts is UCX's setting of its listening ports.
const ucxPorts = "TCP_PORT_RANGE"

const probeMessage = "sluice self-test"

// probe is a notification that this package itself waits for.
type probe struct {
	from    string
	arrived chan struct{}
}
