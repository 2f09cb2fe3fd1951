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

// member is one worker of the fleet with its servers and goroutines: one that
// probes and one that scrapes each server, and one, run, that asks engines what
// they are and makes all callbacks.
type member struct {
	f       *Fleet
	w       *worker.Worker
	servers []*server
	ctx     context.Context
	cancel  context.CancelFunc
	wake    chan struct{}
	done    chan struct{}   // closed when OnLeave has returned
	after   <-chan struct{} // done of the former holder of the id; nil: none

	// Guarded by the fleet's mu.
	drain    bool
	guest    bool // see Fleet.Guest; set once
	gone     bool
	wasReady bool
	why      string // last failure
	events   []transition
	sources  []EventSource // found by asking

	joined bool // run's own: OnJoin was called, OnLeave was not since
}

type transition struct {
	from, to worker.State
	reason   string
}

func (m *member) makeServers() error {
	traffic := m.f.upstream()
	probes := traffic
	probes.MaxConns, probes.MaxIdle, probes.Regular = probeConns, 4, true
	for _, r := range m.w.Ranks {
		i := slices.IndexFunc(m.servers, func(s *server) bool { return s.url == r.URL })
		if i >= 0 {
			m.servers[i].ranks = append(m.servers[i].ranks, r)
			continue
		}
		s := &server{m: m, url: r.URL, ranks: []*worker.Rank{r}}
		var err error
		if s.traffic, err = upstream.NewEndpoint(r.URL, traffic); err != nil {
			return err
		}
		if s.probes, err = upstream.NewEndpoint(r.URL, probes); err != nil {
			return err
		}
		s.isSGLang.Store(m.w.Spec.Engine == SGLang)
		s.watch.init()
		m.servers = append(m.servers, s)
	}
	for _, r := range m.w.Ranks {
		unknown(r)
	}
	return nil
}

// start runs the member's goroutines. Called with mu.
func (m *member) start() {
	m.f.wg.Go(m.run)
	for _, s := range m.servers {
		m.f.wg.Go(func() { s.probe(m.ctx) })
		m.f.wg.Go(func() { s.scrape(m.ctx) })
	}
}

// poke wakes run.
func (m *member) poke() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// transit changes the worker's state and queues OnState. Called with mu.
func (m *member) transit(to worker.State, reason string) {
	from, old := m.w.State()
	if from == to && old == reason {
		return
	}
	m.w.SetState(to, reason)
	if from == to {
		if old == "" && to == worker.Joining {
			m.f.opt.Log.Warn("worker not there yet", "worker", m.w.Spec.ID, "url", m.w.Spec.URL, "role", m.w.Spec.Role, "reason", reason)
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
	m.f.opt.Log.Log(m.ctx, level, "worker "+to.String(), "worker", m.w.Spec.ID, "url", m.w.Spec.URL, "role", m.w.Spec.Role, "from", from.String(), "reason", reason)
	m.poke()
}

// settle derives the state from the servers. Called with mu.
func (m *member) settle() {
	if m.gone || m.drain || m.guest {
		return
	}
	state, _ := m.w.State()
	live := 0
	for _, s := range m.servers {
		if s.live.Load() && !s.allFrozen() {
			live++
		}
	}
	why := m.why
	if frozen := m.frozenWhy(); frozen != "" {
		why = frozen
	}
	switch {
	case live == len(m.servers):
		m.transit(worker.Ready, m.out())
	case live > 0:
		m.transit(worker.Ready, fmt.Sprintf("%d of %d rank servers are out: %s", len(m.servers)-live, len(m.servers), why))
	case state == worker.Joining && !m.wasReady:
		m.transit(worker.Joining, m.why)
	default:
		m.transit(worker.Unhealthy, why)
	}
}

// run admits servers that came up and makes the callbacks, until removal.
func (m *member) run() {
	defer m.leave()
	if m.after != nil {
		select {
		case <-m.after:
		case <-m.ctx.Done():
			return
		}
	}
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		m.deliver()
		again := m.admit()
		m.deliver()
		if again {
			retry.Reset(m.f.pace.Load().ProbeInterval)
		}
		select {
		case <-m.ctx.Done():
			return
		case <-m.wake:
		case <-retry.C:
		}
	}
}

func (m *member) leave() {
	m.deliver()
	m.f.mu.Lock()
	gone := m.gone
	m.f.mu.Unlock()
	if gone {
		if m.after != nil {
			<-m.after // the former holder of the id leaves first
		}
		if m.joined && m.f.opt.OnLeave != nil {
			m.f.opt.OnLeave(m.w)
		}
		m.f.release(m)
	}
	m.closeServers()
	m.cancel()
	close(m.done)
}

// deliver makes the queued OnState calls.
func (m *member) deliver() {
	m.f.mu.Lock()
	events := m.events
	m.events = nil
	m.f.mu.Unlock()
	if m.f.opt.OnState == nil {
		return
	}
	for _, e := range events {
		m.f.opt.OnState(m.w, e.from, e.to, e.reason)
	}
}

// hello is one server's answer to being asked what it is.
type hello struct {
	s      *server
	downs  uint32
	answer *Answer
	err    error
}

// admit asks every server that is up but not live, restarts the worker's
// listeners if one of them is a new process, and lets the servers in. It says
// whether one must be asked again.
func (m *member) admit() (again bool) {
	asked := m.ask()
	if len(asked) == 0 || m.ctx.Err() != nil {
		return false
	}
	good := asked[:0]
	sign, restart, newcomer := "", "", false
	for _, h := range asked {
		if h.err != nil {
			again = true
			m.f.mu.Lock()
			m.why = short(h.err)
			m.settle()
			m.f.mu.Unlock()
			continue
		}
		good = append(good, h)
		if old := h.s.life.Load(); old != nil {
			if by, why := h.s.newLife(old.ended(&h.answer.life, h.s.refused.Load())); by != "" {
				sign, restart = by, why
				h.s.restarts.Add(1)
			}
		} else {
			newcomer = true
		}
		l := h.answer.life
		h.s.life.Store(&l)
		h.s.isSGLang.Store(h.answer.Engine == SGLang)
	}
	if len(good) == 0 {
		return again
	}
	m.learn(good)
	if restart != "" && m.joined {
		m.f.opt.Log.Info("engine restarted", "worker", m.w.Spec.ID, "evidence", restart)
		m.f.restarts[slices.Index(RestartSigns[:], sign)].Add(1)
		m.joined = false
		if m.f.opt.OnLeave != nil {
			m.f.opt.OnLeave(m.w)
		}
	}
	if !m.joined || newcomer {
		m.joined = true
		if m.f.opt.OnJoin != nil {
			m.f.opt.OnJoin(m.w)
		}
	}
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	for _, h := range good {
		h.s.admitted(h.downs)
	}
	m.settle()
	m.f.publish()
	return again
}

func (m *member) ask() []hello {
	var asked []hello
	for _, s := range m.servers {
		if downs := s.downs.Load(); s.up.Load() && !s.live.Load() {
			asked = append(asked, hello{s: s, downs: downs})
		}
	}
	var wg sync.WaitGroup
	for i := range asked {
		wg.Go(func() { asked[i].answer, asked[i].err = m.askOne(asked[i].s) })
	}
	wg.Wait()
	return asked
}

func (m *member) askOne(s *server) (*Answer, error) {
	spec := &m.w.Spec
	answer := Ask(m.ctx, s.probes, m.f.pace.Load().ProbeTimeout)
	if len(answer.Refused) > 0 {
		m.f.opt.Log.Warn("the engine gives values that cannot be used", "worker", spec.ID, "url", answer.URL, "refused", answer.Refused)
	}
	if len(spec.Models) == 0 && len(answer.Models) == 0 {
		return nil, fmt.Errorf("it answers probes, but names no model: %w", answer.Err)
	}
	if err := checkRanks(spec, answer); err != nil {
		return nil, err
	}
	if addr := bootstrapOf(spec, s, answer); addr != "" {
		if err := s.askBootstrap(m.ctx, addr, m.f.pace.Load().ProbeTimeout); err != nil {
			return nil, err
		}
	}
	if m.f.pace.Load().ProbeInference {
		model := append(slices.Clone(spec.Models), answer.Names()...)[0]
		if err := tryCompletion(m.ctx, s.probes, model); err != nil {
			return nil, fmt.Errorf("it answers probes, but not a completion: %w", err)
		}
	}
	return answer, nil
}

// learn merges what the servers told into the worker's Info.
func (m *member) learn(good []hello) {
	spec := &m.w.Spec
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
			info.Base = a.Models[i].ID
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
			if err := within(spec.Networks, src); err != nil {
				m.f.opt.Log.Warn("KV events not followed", "worker", spec.ID, "rank", src.Rank, "reason", err)
				continue
			}
			sources = append(sources, src)
		}
	}
	if info.Base == "" && len(info.Models) > 0 {
		info.Base = info.Models[0]
	}
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	m.w.SetInfo(info)
	for _, src := range sources {
		m.sources = slices.DeleteFunc(m.sources, func(old EventSource) bool { return old.Rank == src.Rank })
		m.sources = append(m.sources, src)
	}
}
