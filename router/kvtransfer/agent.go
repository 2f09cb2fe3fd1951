package kvtransfer

import (
	"context"
	"sync"
	"sync/atomic"

	"sluice/nixl"
)

// agentTier is the NIXL tier with what connectors are told of it.
type agentTier struct {
	*nixl.AgentTier
	watcher *Watcher
	slots   int

	mu        sync.Mutex // guards was: states come one after another, but from two places
	lastState nixl.TierState
	pending   *agentEndpoint // of the agent that is being made ready
	endpoint  atomic.Pointer[agentEndpoint]
}

// agentEndpoint is what a connector needs to reach the agent. Whoever has it may write to
// the board: it is never logged.
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
	// The state may change before StartAgentTier has answered: a is complete but
	// for the embedded tier, which the callbacks do not touch.
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

// ready gives a new agent its board.
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
