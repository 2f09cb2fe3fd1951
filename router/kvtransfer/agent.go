package kvtransfer

import (
	"context"
	"sync"
	"sync/atomic"

	"sluice/nixl"
)

// agentTier is the NIXL tier and the endpoint that connectors use to reach it.
type agentTier struct {
	*nixl.AgentTier
	watcher *Watcher
	slots   int

	mu        sync.Mutex // guards lastState and pending: states arrive one after another, but from two goroutines
	lastState nixl.TierState
	pending   *agentEndpoint // of the agent that is being prepared
	endpoint  atomic.Pointer[agentEndpoint]
}

// agentEndpoint is what a connector needs to reach the agent. Its bearer may write to the
// board, so it is never logged.
type agentEndpoint struct {
	agent    string
	metadata []byte
	version  string
	address  uint64
	slots    int
	board    *nixl.CompletionBoard
}

func (w *Watcher) startAgent(opt *Options) *agentTier {
	a := &agentTier{watcher: w, slots: opt.Slots, lastState: nixl.TierStarting}
	// The callbacks may run before StartAgentTier returns. They use every field of a but the
	// embedded tier, which is not set yet.
	a.AgentTier = nixl.StartAgentTier(nixl.AgentTierConfig{
		Agent: nixl.Config{
			Name: "sluice-" + w.epoch, Search: opt.Search, Parameters: opt.Parameters,
			OnNotification: func(n nixl.Notification) { w.handleMessage(n.Message) },
		},
		Isolate: opt.Isolate,
		Ready:   a.ready,
		OnState: a.setState,
	})
	return a
}

// ready creates the completion board of a new agent and records the agent's endpoint.
func (a *agentTier) ready(ctx context.Context, agent *nixl.Agent) error {
	b, err := nixl.NewCompletionBoard(ctx, agent, a.slots, a.watcher.recordCompletion)
	if err != nil {
		return err
	}
	metadata, err := agent.Metadata(ctx)
	if err != nil {
		return err
	}
	o := &agentEndpoint{agent: agent.Name(), metadata: metadata, board: b, address: b.Remote(nixl.CompletionSlot{}).Address, slots: b.Slots()}
	if l := agent.Library(); l != nil {
		o.version = l.NIXL
	}
	a.mu.Lock()
	a.pending = o
	a.mu.Unlock()
	return nil
}

func (a *agentTier) setState(s nixl.TierState, reason string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s == nixl.TierUp && a.pending != nil {
		a.watcher.setBoard(a.pending.board)
		a.endpoint.Store(a.pending)
	} else {
		a.endpoint.Store(nil)
		a.watcher.setBoard(a.watcher.messageBoard)
	}
	a.pending = nil
	previous := a.lastState
	a.lastState = s
	a.watcher.tierChanged(nixl.TierNIXL, previous, s, reason)
}
