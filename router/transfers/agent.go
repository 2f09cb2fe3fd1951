package transfers

import (
	"context"
	"sync"
	"sync/atomic"

	"sluice/nixl"
)

// agentTier is the NIXL tier with what connectors are told of it.
type agentTier struct {
	*nixl.AgentTier
	w     *Watch
	slots int

	mu    sync.Mutex // guards was: states come one after another, but from two places
	was   nixl.TierState
	made  *offer // of the agent that is being made ready
	offer atomic.Pointer[offer]
}

// offer is what a connector needs to reach the agent. Whoever has it may write to
// the board: it is never logged.
type offer struct {
	agent    string
	metadata []byte
	version  string
	address  uint64
	slots    int
	board    *nixl.Board
}

func (w *Watch) startAgent(opt *Options) *agentTier {
	a := &agentTier{w: w, slots: opt.Slots, was: nixl.TierStarting}
	// The state may change before StartAgentTier has answered: a is complete but
	// for the embedded tier, which the callbacks do not touch.
	a.AgentTier = nixl.StartAgentTier(nixl.AgentTierConfig{
		Agent: nixl.Config{
			Name: "sluice-" + w.start, Search: opt.Search, Parameters: opt.Parameters,
			OnNotification: func(n nixl.Notification) { w.frame(n.Message) },
		},
		Isolate: opt.Isolate,
		Ready:   a.ready,
		OnState: a.state,
	})
	return a
}

// ready gives a new agent its board.
func (a *agentTier) ready(ctx context.Context, agent *nixl.Agent) error {
	b, err := nixl.NewBoard(ctx, agent, a.slots, a.w.landed)
	if err != nil {
		return err
	}
	metadata, err := agent.Metadata(ctx)
	if err != nil {
		return err
	}
	o := &offer{agent: agent.Name(), metadata: metadata, board: b, address: b.Remote(nixl.Ticket{}).Address, slots: b.Slots()}
	if l := agent.Library(); l != nil {
		o.version = l.NIXL
	}
	a.mu.Lock()
	a.made = o
	a.mu.Unlock()
	return nil
}

func (a *agentTier) state(s nixl.TierState, reason string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s == nixl.TierUp && a.made != nil {
		a.w.use(a.made.board)
		a.offer.Store(a.made)
	} else {
		a.offer.Store(nil)
		a.w.use(a.w.plain)
	}
	a.made = nil
	was := a.was
	a.was = s
	a.w.changed(nixl.TierNIXL, was, s, reason)
}
