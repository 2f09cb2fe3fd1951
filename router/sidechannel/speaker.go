package sidechannel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sluice/nixl"
)

// job is one thing to say to an engine. meet is only to get to know it, which takes a
// moment that the first release should not have to wait for.
type job struct {
	meet    bool
	request string  // whose blocks to release
	renew   []*Hold // whose leases to renew
}

// speaker speaks to one engine, on a goroutine of its own that ends when there was
// nothing to say for restful.
type speaker struct {
	k     *Keeper
	lease lease // of a handle of the engine's: where it is asked
	jobs  chan job

	agent *nixl.Agent  // the one that peers are loaded into
	peers []*nixl.Peer // one a rank; nil: not loaded
	rest  time.Time    // the engine is not asked before, after a failure
}

const restful = 10 * time.Minute

// sayLocked hands j to the engine's speaker, and never waits; false: it has too much
// to say already, or there are too many. The caller holds k.mu.
func (k *Keeper) sayLocked(l lease, j job) bool {
	s := k.speakers[l.engine]
	if s == nil {
		if len(k.speakers) >= maxEngines || k.ctx.Err() != nil {
			return false
		}
		s = &speaker{k: k, lease: l, jobs: make(chan job, queue)}
		k.speakers[l.engine] = s
		k.running.Go(s.run)
	}
	select {
	case s.jobs <- j:
		return true
	default:
		return false
	}
}

func (s *speaker) run() {
	ctx := s.k.ctx
	idle := time.NewTimer(restful)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-s.jobs:
			s.do(ctx, &j)
			idle.Reset(restful)
		case <-idle.C:
			s.k.mu.Lock()
			leave := len(s.jobs) == 0
			if leave {
				delete(s.k.speakers, s.lease.engine)
			}
			s.k.mu.Unlock()
			if leave {
				return
			}
			idle.Reset(restful)
		}
	}
}

func (s *speaker) do(ctx context.Context, j *job) {
	switch {
	case j.meet:
		s.meet(ctx)
	case j.renew != nil:
		s.renew(ctx, j.renew)
	default:
		// One consumer that is done: what vLLM counts up to is in the message.
		if s.tell(ctx, j.request+":1") {
			s.k.released.Add(1)
		}
	}
}

// renew sends heartbeats.
func (s *speaker) renew(ctx context.Context, holds []*Hold) {
	for len(holds) > 0 {
		n, line := 0, []byte("HB:")
		for n < len(holds) && (n == 0 || len(line)+len(holds[n].lease.request) < maxLine) {
			if n > 0 {
				line = append(line, ',')
			}
			line = append(line, holds[n].lease.request...)
			n++
		}
		sent := time.Now() // not later than the engine counts from
		if !s.tell(ctx, string(line)) {
			return
		}
		for _, h := range holds[:n] {
			h.renewedAt.Store(sent.UnixNano())
		}
		s.k.renewed.Add(int64(n))
		holds = holds[n:]
	}
}

// meet loads an engine's metadata; a failure is not told: it is met again when there
// is something to say.
func (s *speaker) meet(ctx context.Context) {
	if time.Now().Before(s.rest) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if _, err := s.load(ctx); err != nil {
		s.k.opt.Log.Debug("side channel: a prefill engine could not be met", "engine_id", s.lease.engine, "at", s.lease.endpoint, "err", err)
	}
}

// tell sends a message to every rank of a prefill engine, and loads its metadata
// first where that was not done, or anew where the engine's agents are gone.
func (s *speaker) tell(ctx context.Context, message string) bool {
	if time.Now().Before(s.rest) {
		s.k.failed.Add(1)
		return false
	}
	met := s.peers != nil
	err := s.try(ctx, message)
	if err != nil && met && ctx.Err() == nil && !errors.Is(err, errOther) {
		s.peers = nil
		err = s.try(ctx, message)
	}
	if err == nil {
		return true
	}
	s.k.failed.Add(1)
	s.rest = time.Now().Add(callLimit)
	s.k.opt.Log.Warn("side channel: a prefill engine was not told", "engine_id", s.lease.engine, "at", s.lease.endpoint, "err", err)
	return false
}

// errOther: the engine was restarted; the blocks are gone with it.
var errOther = errors.New("sidechannel: another engine answers there now")

func (s *speaker) try(ctx context.Context, message string) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	peers, err := s.load(ctx)
	if err != nil {
		return err
	}
	for _, p := range peers {
		if err := s.agent.Notify(ctx, p, []byte(message)); err != nil {
			return err
		}
	}
	return nil
}

// load gives the agents of the engine's ranks.
func (s *speaker) load(ctx context.Context) ([]*nixl.Peer, error) {
	l, agent := &s.lease, s.k.opt.Agent()
	if agent == nil {
		return nil, errors.New("sidechannel: the router's NIXL agent is not up")
	}
	if agent != s.agent {
		s.agent, s.peers = agent, nil
	}
	if s.peers != nil {
		return s.peers, nil
	}
	var peers []*nixl.Peer
	for pp := range l.pp {
		for tp := range l.tp {
			asked := time.Now()
			engine, metadata, err := fetch(ctx, s.k.zctx, l.endpoint, ask(pp, tp, l.withPP))
			if err != nil {
				return nil, err
			}
			if s.k.opt.Met != nil && l.own {
				s.k.opt.Met(l.rank, engine, asked)
			}
			if engine != l.engine {
				return nil, fmt.Errorf("%w: %q, the handle is of %q", errOther, engine, l.engine)
			}
			p, err := agent.LoadPeer(ctx, metadata, "")
			if err != nil {
				return nil, err
			}
			peers = append(peers, p)
		}
	}
	s.peers = peers
	return peers, nil
}
