package sidechannel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sluice/nixl"
)

// job is one operation for an engine. connect only loads the engine's metadata, which takes a
// moment that the first release should not have to wait for.
type job struct {
	connect bool
	request string   // whose blocks to release
	renew   []*Lease // whose leases to renew
}

// engineClient sends messages to one engine. Its goroutine ends after idleTimeout without a
// job.
type engineClient struct {
	manager *Manager
	handle  handleInfo // of one of the engine's handles; gives the endpoint
	jobs    chan job

	agent   *nixl.Agent  // the agent into which peers are loaded
	peers   []*nixl.Peer // one per rank; nil: not loaded
	retryAt time.Time    // no message is sent before this time, after a failure
}

const idleTimeout = 10 * time.Minute

// enqueueLocked queues j for the engine without blocking. It returns false when the engine's
// queue is full or there are maxEngines engines. The caller holds k.mu.
func (k *Manager) enqueueLocked(l handleInfo, j job) bool {
	s := k.clients[l.engine]
	if s == nil {
		if len(k.clients) >= maxEngines || k.ctx.Err() != nil {
			return false
		}
		s = &engineClient{manager: k, handle: l, jobs: make(chan job, maxQueue)}
		k.clients[l.engine] = s
		k.running.Go(s.run)
	}
	select {
	case s.jobs <- j:
		return true
	default:
		return false
	}
}

func (s *engineClient) run() {
	ctx := s.manager.ctx
	idle := time.NewTimer(idleTimeout)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case j := <-s.jobs:
			s.runJob(ctx, &j)
			idle.Reset(idleTimeout)
		case <-idle.C:
			s.manager.mu.Lock()
			stop := len(s.jobs) == 0
			if stop {
				delete(s.manager.clients, s.handle.engine)
			}
			s.manager.mu.Unlock()
			if stop {
				return
			}
			idle.Reset(idleTimeout)
		}
	}
}

func (s *engineClient) runJob(ctx context.Context, j *job) {
	switch {
	case j.connect:
		s.connect(ctx)
	case j.renew != nil:
		s.renew(ctx, j.renew)
	default:
		// ":1" reports one finished consumer: vLLM reads the expected number from the message.
		if s.send(ctx, j.request+":1") {
			s.manager.released.Add(1)
		}
	}
}

// renew sends heartbeats for leases in messages of at most maxLine bytes.
func (s *engineClient) renew(ctx context.Context, leases []*Lease) {
	for len(leases) > 0 {
		n, line := 0, []byte("HB:")
		for n < len(leases) && (n == 0 || len(line)+len(leases[n].handle.request) < maxLine) {
			if n > 0 {
				line = append(line, ',')
			}
			line = append(line, leases[n].handle.request...)
			n++
		}
		sent := time.Now() // at most the time from which the engine counts
		if !s.send(ctx, string(line)) {
			return
		}
		for _, h := range leases[:n] {
			h.renewedAt.Store(sent.UnixNano())
		}
		s.manager.renewed.Add(int64(n))
		leases = leases[n:]
	}
}

// connect loads an engine's metadata in advance. It logs a failure at level debug only, because
// the failure occurs again with the next message.
func (s *engineClient) connect(ctx context.Context) {
	if time.Now().Before(s.retryAt) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := s.loadPeers(ctx); err != nil {
		s.manager.opt.Log.Debug("side channel: cannot connect to a prefill engine", "engine_id", s.handle.engine, "endpoint", s.handle.endpoint, "error", err)
	}
}

// send sends a message to every rank of a prefill engine. It loads the engine's metadata first
// if necessary, and reloads it once when sending to known agents fails.
func (s *engineClient) send(ctx context.Context, message string) bool {
	if time.Now().Before(s.retryAt) {
		s.manager.failed.Add(1)
		return false
	}
	connected := s.peers != nil
	err := s.sendOnce(ctx, message)
	if err != nil && connected && ctx.Err() == nil && !errors.Is(err, errOtherEngine) {
		s.peers = nil
		err = s.sendOnce(ctx, message)
	}
	if err == nil {
		return true
	}
	s.manager.failed.Add(1)
	s.retryAt = time.Now().Add(callTimeout)
	s.manager.opt.Log.Warn("side channel: cannot send to a prefill engine", "engine_id", s.handle.engine, "endpoint", s.handle.endpoint, "error", err)
	return false
}

// errOtherEngine means that the engine has restarted and the blocks are lost.
var errOtherEngine = errors.New("sidechannel: another engine answers at this address now")

func (s *engineClient) sendOnce(ctx context.Context, message string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	peers, err := s.loadPeers(ctx)
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

// loadPeers returns the agents of the engine's ranks.
func (s *engineClient) loadPeers(ctx context.Context) ([]*nixl.Peer, error) {
	l, agent := &s.handle, s.manager.opt.Agent()
	if agent == nil {
		return nil, errors.New("sidechannel: the NIXL agent of the router is not up; GET /admin/v1/transfers says why")
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
			sentAt := time.Now()
			engine, metadata, err := fetch(ctx, s.manager.zctx, l.endpoint, appendQuery(pp, tp, l.withPP))
			if err != nil {
				return nil, err
			}
			if s.manager.opt.OnEngineID != nil && l.ownHost {
				s.manager.opt.OnEngineID(l.rank, engine, sentAt)
			}
			if engine != l.engine {
				return nil, fmt.Errorf("%w: its id is %q, the handle names %q", errOtherEngine, engine, l.engine)
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
