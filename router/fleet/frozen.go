package fleet

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/monotime"
	"sluice/dataplane/upstream"
	"sluice/router/liveness"
	"sluice/router/worker"
)

// Frozen are the states of a frozen engine, by their names in metrics.
var Frozen = [...]liveness.State{liveness.ProcessStopped, liveness.CoreStalled, liveness.HostVanished}

// sampleInterval is the interval between two samples of the evidence.
const sampleInterval = 250 * time.Millisecond

// idleSamples is the number of sample intervals between two samples of a server without work.
const idleSamples = 4

// hasRequests reports whether a rank of s has running requests of this router.
func (s *server) hasRequests() bool {
	for _, r := range s.ranks {
		if r.Requests.Load() > 0 {
			return true
		}
	}
	return false
}

// serverEvidence is what a server's probes and readings have shown, for its Detector. The
// goroutines that probe and scrape write it.
type serverEvidence struct {
	answered, hung, unreachable atomic.Uint64
}

// add records the result of a probe or a reading of /metrics.
func (s *serverEvidence) add(err error) {
	var up *upstream.Error
	switch {
	case err == nil:
		s.answered.Add(1)
	case !errors.Is(err, upstream.ErrTimeout):
	case errors.As(err, &up) && up.Phase == upstream.PhaseDial:
		s.unreachable.Add(1)
	default:
		s.hung.Add(1)
	}
}

// rankEvidence is a rank's part of the detection of frozen engines.
type rankEvidence struct {
	calls  upstream.Group
	state  atomic.Uint32 // liveness.State; changes under the fleet's mu
	digest atomic.Uint64 // of the progress counters read last
	reads  atomic.Uint64
	bytes  uint64 // Evidence.Bytes at the last sample; used by detectFrozen only

	// Of the probes of its core: see probeCore.
	probePending   atomic.Int64 // when the current probe was sent, in ns since the fleet was created; 0: there is none
	probesAnswered atomic.Uint64
	probeRefused   atomic.Bool
}

// Calls returns the group of a rank's requests (upstream.Request); nil for a rank that was removed.
// The calls in it end when the rank is found frozen.
func (f *Fleet) Calls(r *worker.Rank) *upstream.Group {
	if t := f.breaker(r); t != nil {
		return &t.evidence.calls
	}
	return nil
}

// IsFrozen reports whether a rank was found frozen and has shown no sign of life since.
func (f *Fleet) IsFrozen(r *worker.Rank) bool {
	t := f.breaker(r)
	return t != nil && t.frozen()
}

func (t *rankBreaker) frozen() bool { return t.frozenState() != liveness.Alive }

func (t *rankBreaker) frozenState() liveness.State { return liveness.State(t.evidence.state.Load()) }

// FrozenVerdicts returns how often ranks were found in a state, one of Frozen; FrozenCalls how many
// calls were ended because of it; FrozenRanks how many ranks are in it now.
func (f *Fleet) FrozenVerdicts(s liveness.State) uint64 { return f.freezes[s].Load() }

// FrozenCalls is described at FrozenVerdicts.
func (f *Fleet) FrozenCalls(s liveness.State) uint64 { return f.frozenCalls[s].Load() }

// FrozenRanks is described at FrozenVerdicts.
func (f *Fleet) FrozenRanks(s liveness.State) (n int) {
	for _, w := range f.View().Workers {
		for _, r := range w.Ranks {
			if t := f.breaker(r); t != nil && t.frozenState() == s {
				n++
			}
		}
	}
	return n
}

// detectFrozen samples the evidence of all servers until ctx ends.
func (f *Fleet) detectFrozen(ctx context.Context) {
	ticker := time.NewTicker(sampleInterval)
	defer ticker.Stop()
	var e liveness.Evidence
	for round := 0; ; round++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		e.At = monotime.Uptime()
		for _, s := range *f.servers.Load() {
			if round%idleSamples == 0 || s.anyFrozen || s.hasRequests() {
				s.sampleEvidence(&e)
			}
		}
	}
}

// sampleEvidence samples the evidence of one server and acts on the verdict. Only detectFrozen
// calls it.
func (s *server) sampleEvidence(e *liveness.Evidence) {
	f := s.member.fleet
	e.Answered, e.Hung, e.Unreachable = s.evidence.answered.Load(), s.evidence.hung.Load(), s.evidence.unreachable.Load()
	e.Ranks = e.Ranks[:0]
	bounds := f.settings.Load().Frozen
	for _, t := range s.breakers {
		rank := t.readEvidence(e.At, bounds.Core)
		if rank.Bytes != t.evidence.bytes {
			t.evidence.bytes = rank.Bytes
			s.recordAnswer() // a running stream replaces probes
		}
		e.Ranks = append(e.Ranks, rank)
	}
	s.detector.Observe(e, bounds)
	for i, t := range s.breakers {
		previous, now := t.frozenState(), s.detector.State(i)
		switch {
		case now != previous && now != liveness.Alive:
			t.freeze(now, s.detector.Reason(i))
		case now != previous:
			t.thaw()
		}
		if now != liveness.Alive && e.Ranks[i].Calls > 0 {
			f.frozenCalls[now].Add(uint64(t.evidence.calls.Abandon()))
		}
		if s.detector.NeedsProbe(i) && t.evidence.probePending.CompareAndSwap(0, int64(e.At)) {
			f.wg.Go(t.probeCore)
		}
	}
	s.anyFrozen = slices.ContainsFunc(s.breakers, (*rankBreaker).frozen)
}

// readEvidence returns a rank's evidence. Calls are overdue after bound.
func (t *rankBreaker) readEvidence(now, bound time.Duration) liveness.Rank {
	v, calls := &t.evidence, t.evidence.calls.State(bound)
	l := t.server.incarnation.Load()
	e := liveness.Rank{
		Answered: calls.Answered, Bytes: calls.Bytes, Events: t.rank.Events.Load(),
		Counters: v.digest.Load(), Reads: v.reads.Load(), ProbesAnswered: v.probesAnswered.Load(), ProbeRefused: v.probeRefused.Load(),
		Calls: calls.Calls, Overdue: calls.Overdue, Running: t.rank.Running.Load(), LongestPrefill: prefillTime(&calls),
		HasComputed: l != nil && l.tokens > 0,
	}
	if at := v.probePending.Load(); at != 0 {
		e.ProbePending = now - time.Duration(at)
	}
	return e
}

// coreProbeTimeout is how long a probe of the core waits for its answer before the next is sent.
const coreProbeTimeout = time.Minute

// probeCore sends the rank's core a request that no API server answers by itself: a completion of
// one token or, for SGLang, its own check of the scheduler, which also works for prefill and decode
// engines.
func (t *rankBreaker) probeCore() {
	v, m := &t.evidence, t.server.member
	defer v.probePending.Store(0)
	req := &upstream.Request{Method: "GET", Path: "/health_generate", Deadline: time.Now().Add(coreProbeTimeout), Redirects: true}
	if !t.server.isSGLang.Load() {
		body, err := tinyCompletion(m.worker.Info().Base)
		if err != nil {
			return
		}
		req.Method, req.Path, req.Body = "POST", "/v1/completions", [][]byte{body}
		req.Fields = []upstream.Field{{Name: "Content-Type", Value: "application/json"}}
		if t.rank.SendRank {
			req.Fields = append(req.Fields, upstream.Field{Name: "X-data-parallel-rank", Value: strconv.Itoa(t.rank.HeaderRank())})
		}
	}
	status, _, err := send(m.ctx, t.server.probes, req, maxInspectBody)
	switch {
	case err != nil: // unanswered, as by a frozen core, or ended
		t.pause(m.ctx)
	case status == 200:
		v.probeRefused.Store(false)
		v.probesAnswered.Add(1)
	case t.server.isSGLang.Load() && status == 503: // its scheduler does not answer
		t.pause(m.ctx)
	default:
		v.probeRefused.Store(true)
		t.pause(m.ctx)
	}
}

// pause delays the next probe.
func (t *rankBreaker) pause(ctx context.Context) {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// unknownPrefillTime is the expected time per prompt token if no prompt has shown it.
const unknownPrefillTime = 5 * time.Millisecond

// prefillTime returns how long the longest running prompt is expected to take.
func prefillTime(calls *upstream.GroupState) time.Duration {
	if calls.TimePerToken == 0 {
		return time.Duration(max(calls.Longest, 0)) * unknownPrefillTime
	}
	return time.Duration(max(calls.Longest, 0)) * calls.TimePerToken
}

// freeze removes a frozen rank from the pools. The caller ends its calls.
func (t *rankBreaker) freeze(to liveness.State, reason string) {
	s, f := t.server, t.server.member.fleet
	if to != liveness.CoreStalled && s.up.Load() {
		s.markDown(reason)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.member.removed || f.closed {
		return
	}
	t.evidence.state.Store(uint32(to))
	f.freezes[to].Add(1)
	f.opt.Log.Warn("engine frozen", "rank", t.rank.ID.String(), "state", to.String(), "reason", reason, "calls", t.evidence.calls.State(0).Calls)
	s.member.lastFailure, t.lastFailure = reason, reason
	t.transition(worker.BreakerOpen, 0)
}

// thaw readmits a rank that has shown a sign of life: one request at a time if its server was up
// all the time, otherwise when the server is admitted.
func (t *rankBreaker) thaw() {
	f := t.server.member.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	previous := t.frozenState()
	t.evidence.state.Store(uint32(liveness.Alive))
	if t.server.member.removed || f.closed {
		return
	}
	f.opt.Log.Info("engine no longer frozen", "rank", t.rank.ID.String(), "state", previous.String())
	if t.open() {
		t.transition(worker.BreakerHalfOpen, halfOpenTimeout)
		return
	}
	t.server.member.updateState()
	f.publish()
}

// allFrozen reports whether every rank of the server is frozen.
func (s *server) allFrozen() bool {
	return !slices.ContainsFunc(s.breakers, func(t *rankBreaker) bool { return !t.frozen() })
}

// frozenReason returns the reason of the member's first frozen rank, or "". Called with mu.
func (m *member) frozenReason() string {
	for _, s := range m.servers {
		if i := slices.IndexFunc(s.breakers, (*rankBreaker).frozen); i >= 0 {
			return "frozen: " + s.breakers[i].lastFailure
		}
	}
	return ""
}
