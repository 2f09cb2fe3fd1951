package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/worker"
)

// member is one worker of the fleet with its servers and goroutines: one that probes and one that
// scrapes each server, and one, run, that inspects engines and makes all callbacks.
type member struct {
	fleet       *Fleet
	worker      *worker.Worker
	servers     []*server
	ctx         context.Context
	cancel      context.CancelFunc
	wake        chan struct{}
	done        chan struct{}   // closed when OnLeave has returned
	predecessor <-chan struct{} // done of the previous member with this id; nil: none

	// Guarded by the fleet's mu.
	drain       bool
	transient   bool // see Fleet.AddTransient; set once
	removed     bool
	wasReady    bool
	lastFailure string // last failure
	events      []transition
	sources     []EventSource // found by inspection

	joined bool // used by run only: OnJoin was called, OnLeave was not since
}

type transition struct {
	from, to worker.State
	reason   string
}

func (m *member) makeServers() error {
	traffic := m.fleet.upstream()
	probes := traffic
	probes.MaxConns, probes.MaxIdle, probes.Periodic = probeConns, 4, true
	for _, r := range m.worker.Ranks {
		i := slices.IndexFunc(m.servers, func(s *server) bool { return s.url == r.URL })
		if i >= 0 {
			m.servers[i].ranks = append(m.servers[i].ranks, r)
			continue
		}
		s := &server{member: m, url: r.URL, ranks: []*worker.Rank{r}}
		var err error
		if s.traffic, err = upstream.NewEndpoint(r.URL, traffic); err != nil {
			return err
		}
		if s.probes, err = upstream.NewEndpoint(r.URL, probes); err != nil {
			return err
		}
		s.isSGLang.Store(m.worker.Spec.Engine == SGLang)
		s.schedule.init()
		m.servers = append(m.servers, s)
	}
	for _, r := range m.worker.Ranks {
		setUnknownLoad(r)
	}
	return nil
}

// start starts the member's goroutines. Called with mu.
func (m *member) start() {
	m.fleet.wg.Go(m.run)
	for _, s := range m.servers {
		m.fleet.wg.Go(func() { s.probe(m.ctx) })
		m.fleet.wg.Go(func() { s.scrape(m.ctx) })
	}
}

// wakeUp wakes run.
func (m *member) wakeUp() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// setState changes the worker's state and queues OnState. Called with mu.
func (m *member) setState(to worker.State, reason string) {
	from, old := m.worker.State()
	if from == to && old == reason {
		return
	}
	m.worker.SetState(to, reason)
	if from == to {
		if old == "" && to == worker.Joining {
			m.fleet.opt.Log.Warn("worker not ready", "worker", m.worker.Spec.ID, "url", m.worker.Spec.URL, "role", m.worker.Spec.Role, "reason", reason)
		}
		return
	}
	if to == worker.Ready {
		m.wasReady = true
	}
	m.events = append(m.events, transition{from, to, reason})
	level := slog.LevelInfo
	if to == worker.Unhealthy {
		level = slog.LevelWarn
	}
	m.fleet.opt.Log.Log(m.ctx, level, "worker "+to.String(), "worker", m.worker.Spec.ID, "url", m.worker.Spec.URL, "role", m.worker.Spec.Role, "previous_state", from.String(), "reason", reason)
	m.wakeUp()
}

// updateState derives the worker's state from the servers. Called with mu.
func (m *member) updateState() {
	if m.removed || m.drain || m.transient {
		return
	}
	state, _ := m.worker.State()
	live := 0
	for _, s := range m.servers {
		if s.live.Load() && !s.allFrozen() {
			live++
		}
	}
	reason := m.lastFailure
	if frozen := m.frozenReason(); frozen != "" {
		reason = frozen
	}
	switch {
	case live == len(m.servers):
		m.setState(worker.Ready, m.unavailableReason())
	case live > 0:
		m.setState(worker.Ready, fmt.Sprintf("%d of %d rank servers are down: %s", len(m.servers)-live, len(m.servers), reason))
	case state == worker.Joining && !m.wasReady:
		m.setState(worker.Joining, m.lastFailure)
	default:
		m.setState(worker.Unhealthy, reason)
	}
}

// run admits servers that became healthy and makes the callbacks, until removal.
func (m *member) run() {
	defer m.notifyLeave()
	if m.predecessor != nil {
		select {
		case <-m.predecessor:
		case <-m.ctx.Done():
			return
		}
	}
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		m.deliverEvents()
		again := m.admit()
		m.deliverEvents()
		if again {
			retry.Reset(m.fleet.settings.Load().ProbeInterval)
		}
		select {
		case <-m.ctx.Done():
			return
		case <-m.wake:
		case <-retry.C:
		}
	}
}

func (m *member) notifyLeave() {
	m.deliverEvents()
	m.fleet.mu.Lock()
	removed := m.removed
	m.fleet.mu.Unlock()
	if removed {
		if m.predecessor != nil {
			<-m.predecessor // the previous member with this id leaves first
		}
		if m.joined && m.fleet.opt.OnLeave != nil {
			m.fleet.opt.OnLeave(m.worker)
		}
		m.fleet.releaseSlots(m)
	}
	m.closeServers()
	m.cancel()
	close(m.done)
}

// deliverEvents makes the queued OnState calls.
func (m *member) deliverEvents() {
	m.fleet.mu.Lock()
	events := m.events
	m.events = nil
	m.fleet.mu.Unlock()
	if m.fleet.opt.OnState == nil {
		return
	}
	for _, e := range events {
		m.fleet.opt.OnState(m.worker, e.from, e.to, e.reason)
	}
}

// inspection is the result of inspecting one server.
type inspection struct {
	s      *server
	downs  uint32
	answer *EngineInfo
	err    error
}

// admit inspects every server that is up but not live, restarts the worker's listeners if one of
// them is a new process, and makes the servers live. It reports whether one must be inspected
// again.
func (m *member) admit() (again bool) {
	asked := m.inspectServers()
	if len(asked) == 0 || m.ctx.Err() != nil {
		return false
	}
	good := asked[:0]
	sign, restart, newcomer := "", "", false
	for _, h := range asked {
		if h.err != nil {
			again = true
			m.fleet.mu.Lock()
			m.lastFailure = short(h.err)
			m.updateState()
			m.fleet.mu.Unlock()
			continue
		}
		good = append(good, h)
		if old := h.s.incarnation.Load(); old != nil {
			if by, why := h.s.detectRestart(old.restartSign(&h.answer.incarnation, h.s.refused.Load())); by != "" {
				sign, restart = by, why
				h.s.restarts.Add(1)
			}
		} else {
			newcomer = true
		}
		l := h.answer.incarnation
		h.s.incarnation.Store(&l)
		h.s.isSGLang.Store(h.answer.Engine == SGLang)
	}
	if len(good) == 0 {
		return again
	}
	m.mergeInfo(good)
	if restart != "" && m.joined {
		m.fleet.opt.Log.Info("engine restarted", "worker", m.worker.Spec.ID, "evidence", restart)
		m.fleet.restarts[slices.Index(RestartSigns[:], sign)].Add(1)
		m.joined = false
		if m.fleet.opt.OnLeave != nil {
			m.fleet.opt.OnLeave(m.worker)
		}
	}
	if !m.joined || newcomer {
		m.joined = true
		if m.fleet.opt.OnJoin != nil {
			m.fleet.opt.OnJoin(m.worker)
		}
	}
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	for _, h := range good {
		h.s.admit(h.downs)
	}
	m.updateState()
	m.fleet.publish()
	return again
}

func (m *member) inspectServers() []inspection {
	var asked []inspection
	for _, s := range m.servers {
		if downs := s.downCount.Load(); s.up.Load() && !s.live.Load() {
			asked = append(asked, inspection{s: s, downs: downs})
		}
	}
	var wg sync.WaitGroup
	for i := range asked {
		wg.Go(func() { asked[i].answer, asked[i].err = m.inspectServer(asked[i].s) })
	}
	wg.Wait()
	return asked
}

func (m *member) inspectServer(s *server) (*EngineInfo, error) {
	spec := &m.worker.Spec
	answer := Inspect(m.ctx, s.probes, m.fleet.settings.Load().ProbeTimeout)
	if len(answer.Refused) > 0 {
		m.fleet.opt.Log.Warn("ignoring invalid values from the engine", "worker", spec.ID, "url", answer.URL, "invalid", answer.Refused)
	}
	if len(spec.Models) == 0 && len(answer.Models) == 0 {
		return nil, fmt.Errorf("it answers probes, but lists no model: %w", answer.Err)
	}
	if err := checkRanks(spec, answer); err != nil {
		return nil, err
	}
	if addr := bootstrapOf(spec, s, answer); addr != "" {
		if err := s.checkBootstrap(m.ctx, addr, m.fleet.settings.Load().ProbeTimeout); err != nil {
			return nil, err
		}
	}
	if m.fleet.settings.Load().ProbeInference {
		model := append(slices.Clone(spec.Models), answer.Names()...)[0]
		if err := tryCompletion(m.ctx, s.probes, model); err != nil {
			return nil, fmt.Errorf("it answers probes, but a completion fails: %w", err)
		}
	}
	return answer, nil
}

// mergeInfo merges the servers' results into the worker's Info.
func (m *member) mergeInfo(good []inspection) {
	spec := &m.worker.Spec
	info := &worker.Info{Models: spec.Models, Engine: spec.Engine, BlockSize: spec.BlockSize}
	var sources []EventSource
	for _, h := range good {
		a := h.answer
		if len(spec.Models) == 0 {
			for _, name := range a.Names() {
				if !slices.Contains(info.Models, name) {
					info.Models = append(info.Models, name)
				}
			}
		}
		for _, name := range a.adapters() {
			if !slices.Contains(info.Adapters, name) {
				info.Adapters = append(info.Adapters, name)
			}
		}
		if i := slices.IndexFunc(a.Models, func(m Model) bool { return m.Parent == "" }); i >= 0 && info.Base == "" {
			info.Base, info.Root = a.Models[i].ID, a.Models[i].Root
		}
		if spec.Engine == "" && a.Engine != "" {
			info.Engine = a.Engine
		}
		if spec.BlockSize == 0 && a.BlockSize > 0 {
			info.BlockSize = a.BlockSize
		}
		info.Version = a.Version
		info.MaxModelLen = a.MaxModelLen
		info.TotalBlocks = a.TotalBlocks
		info.BootstrapPort, info.DPSize, info.StartRank, info.Deltas = a.BootstrapPort, a.Ranks, a.StartRank, a.Deltas
		for _, src := range sourcesOf(h.s, a) {
			if err := checkNetwork(spec.Networks, src); err != nil {
				m.fleet.opt.Log.Warn("cannot subscribe to KV events", "worker", spec.ID, "rank", src.Rank, "reason", err)
				continue
			}
			sources = append(sources, src)
		}
	}
	if info.Base == "" && len(info.Models) > 0 {
		info.Base = info.Models[0]
	}
	m.fleet.mu.Lock()
	defer m.fleet.mu.Unlock()
	m.worker.SetInfo(info)
	for _, src := range sources {
		m.sources = slices.DeleteFunc(m.sources, func(old EventSource) bool { return old.Rank == src.Rank })
		m.sources = append(m.sources, src)
	}
}
