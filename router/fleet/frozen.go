package fleet

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/liveness"
	"sluice/router/worker"
)

// Frozen gives the states in which an engine is frozen, as they stand in metrics.
var Frozen = [...]liveness.State{liveness.ProcessStopped, liveness.CoreStalled, liveness.HostVanished}

// lookEvery is between two looks for frozen engines.
const lookEvery = 250 * time.Millisecond

// idleLooks is how many looks there are for one at a server without work.
const idleLooks = 4

// hasWork says whether a rank of s has requests under way, or is frozen.
func (s *server) hasWork() bool {
	return slices.ContainsFunc(s.seats, func(t *seat) bool { return t.rank.Requests.Load() > 0 || t.frozen() })
}

// signs are what a server's probes and readings have shown, for its Detector. They are
// written by the goroutines that probe and scrape.
type signs struct {
	answered, hung, unreachable atomic.Uint64
}

// note takes in how a probe or a reading of /metrics ended.
func (s *signs) note(err error) {
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

// vital is what a rank's seat has for the search for frozen engines.
type vital struct {
	calls  upstream.Group
	state  atomic.Uint32 // liveness.State; changes under the fleet's mu
	digest atomic.Uint64 // of the progress counters read last
	reads  atomic.Uint64
	bytes  uint64 // Evidence.Bytes at the last look; lookForFrozen's own

	// Of the questions to its core: see ask.
	asked  atomic.Int64 // when the one under way was put, in ns since the fleet was made; 0: none is
	proofs atomic.Uint64
	mute   atomic.Bool
}

// Calls is the group that requests to a rank belong to (upstream.Request); nil for a rank
// that was removed. Calls that are in it end when the rank is found frozen.
func (f *Fleet) Calls(r *worker.Rank) *upstream.Group {
	if t := f.seat(r); t != nil {
		return &t.vital.calls
	}
	return nil
}

// IsFrozen says whether a rank was found frozen, and has shown no sign of life since.
func (f *Fleet) IsFrozen(r *worker.Rank) bool {
	t := f.seat(r)
	return t != nil && t.frozen()
}

func (t *seat) frozen() bool { return t.frozenState() != liveness.Alive }

func (t *seat) frozenState() liveness.State { return liveness.State(t.vital.state.Load()) }

// FrozenVerdicts is how often ranks were found in a state, one of Frozen, FrozenCalls how
// many calls were ended for it, and FrozenRanks how many ranks are in it now.
func (f *Fleet) FrozenVerdicts(s liveness.State) uint64 { return f.freezes[s].Load() }

// FrozenCalls: see FrozenVerdicts.
func (f *Fleet) FrozenCalls(s liveness.State) uint64 { return f.abandoned[s].Load() }

// FrozenRanks: see FrozenVerdicts.
func (f *Fleet) FrozenRanks(s liveness.State) (n int) {
	for _, w := range f.View().Workers {
		for _, r := range w.Ranks {
			if t := f.seat(r); t != nil && t.frozenState() == s {
				n++
			}
		}
	}
	return n
}

// lookForFrozen samples the evidence of all servers until ctx ends.
func (f *Fleet) lookForFrozen(ctx context.Context) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var e liveness.Evidence
	for round := 0; ; round++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		e.At = f.uptime()
		for _, w := range f.View().Workers {
			for _, r := range w.Ranks {
				if t := f.seat(r); t != nil && t.s.seats[0] == t && (round%idleLooks == 0 || t.s.hasWork()) {
					t.s.look(&e)
				}
			}
		}
	}
}

// uptime is the time since the fleet was made; never 0.
func (f *Fleet) uptime() time.Duration { return time.Since(f.made) + 1 }

// look samples the evidence of one server and acts on the verdict. Only lookForFrozen
// calls it.
func (s *server) look(e *liveness.Evidence) {
	f := s.m.f
	e.Answered, e.Hung, e.Unreachable = s.signs.answered.Load(), s.signs.hung.Load(), s.signs.unreachable.Load()
	e.Ranks = e.Ranks[:0]
	bounds := f.pace.Load().Frozen
	for _, t := range s.seats {
		rank := t.evidence(e.At, bounds.Core)
		if rank.Bytes != t.vital.bytes {
			t.vital.bytes = rank.Bytes
			s.lives() // a stream that flows takes the place of probes
		}
		e.Ranks = append(e.Ranks, rank)
	}
	s.detector.Look(e, bounds)
	for i, t := range s.seats {
		was, now := t.frozenState(), s.detector.State(i)
		switch {
		case now != was && now != liveness.Alive:
			t.freeze(now, s.detector.Reason(i))
		case now != was:
			t.thaw()
		}
		if now != liveness.Alive && e.Ranks[i].Calls > 0 {
			f.abandoned[now].Add(uint64(t.vital.calls.Abandon()))
		}
		if s.detector.Doubts(i) && t.vital.asked.CompareAndSwap(0, int64(e.At)) {
			f.wg.Go(t.ask)
		}
	}
}

// evidence is that of a rank, of which calls are overdue after bound.
func (t *seat) evidence(now, bound time.Duration) liveness.Rank {
	v, calls := &t.vital, t.vital.calls.State(bound)
	l := t.s.life.Load()
	e := liveness.Rank{
		Answered: calls.Answered, Bytes: calls.Bytes, Events: t.rank.Events.Load(),
		Counters: v.digest.Load(), Reads: v.reads.Load(), Proofs: v.proofs.Load(), Mute: v.mute.Load(),
		Calls: calls.Calls, Overdue: calls.Overdue, Running: t.rank.Running.Load(), Longest: prefillTime(&calls),
		Warm: l != nil && l.tokens > 0,
	}
	if at := v.asked.Load(); at != 0 {
		e.Asked = now - time.Duration(at)
	}
	return e
}

// askFor is how long one question waits for its answer; then the next is put.
const askFor = time.Minute

// ask puts a question to the rank's core that no API server answers by itself: a completion
// of one token, of SGLang its own check of the scheduler, which works for the halves of a
// pair too.
func (t *seat) ask() {
	v, m := &t.vital, t.s.m
	defer v.asked.Store(0)
	req := &upstream.Request{Method: "GET", Path: "/health_generate", Deadline: time.Now().Add(askFor), Redirects: true}
	if !t.s.isSGLang.Load() {
		body, err := tinyCompletion(m.w.Info().Base)
		if err != nil {
			return
		}
		req.Method, req.Path, req.Body = "POST", "/v1/completions", [][]byte{body}
		req.Fields = []upstream.Field{{Name: "Content-Type", Value: "application/json"}}
		if t.rank.SendRank {
			req.Fields = append(req.Fields, upstream.Field{Name: "X-data-parallel-rank", Value: strconv.Itoa(t.rank.HeaderRank())})
		}
	}
	status, _, err := send(m.ctx, t.s.probes, req, askBody)
	switch {
	case err != nil: // unanswered, as a frozen core leaves it, or cut off
		t.pause(m.ctx)
	case status == 200:
		v.mute.Store(false)
		v.proofs.Add(1)
	case t.s.isSGLang.Load() && status == 503: // its scheduler does not answer
		t.pause(m.ctx)
	default:
		v.mute.Store(true)
		t.pause(m.ctx)
	}
}

// pause keeps the next question from following at once.
func (t *seat) pause(ctx context.Context) {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// unknownPace is what a prompt token is expected to take where no prompt has shown it.
const unknownPace = 5 * time.Millisecond

// prefillTime is how long the longest prompt under way is expected to take.
func prefillTime(calls *upstream.GroupState) time.Duration {
	if calls.Pace == 0 {
		return time.Duration(max(calls.Longest, 0)) * unknownPace
	}
	return time.Duration(max(calls.Longest, 0)) * calls.Pace
}

// freeze takes a rank out of the pools because it is frozen. Its calls are ended by the
// caller.
func (t *seat) freeze(to liveness.State, why string) {
	s, f := t.s, t.s.m.f
	if to != liveness.CoreStalled && s.up.Load() {
		s.fall(why)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.m.gone || f.closed {
		return
	}
	t.vital.state.Store(uint32(to))
	f.freezes[to].Add(1)
	f.opt.Log.Warn("engine frozen", "rank", t.rank.ID.String(), "state", to.String(), "reason", why, "calls", t.vital.calls.State(0).Calls)
	s.m.why, t.why = why, why
	t.turn(worker.BreakerOpen, 0)
}

// thaw lets a rank that has shown a sign of life in again: one request at a time where its
// server was up all along, else when the server is admitted.
func (t *seat) thaw() {
	f := t.s.m.f
	f.mu.Lock()
	defer f.mu.Unlock()
	was := t.frozenState()
	t.vital.state.Store(uint32(liveness.Alive))
	if t.s.m.gone || f.closed {
		return
	}
	f.opt.Log.Info("engine no longer frozen", "rank", t.rank.ID.String(), "state", was.String())
	if t.open() {
		t.turn(worker.BreakerHalfOpen, halfFor)
		return
	}
	t.s.m.settle()
	f.publish()
}

// allFrozen says whether every rank of the server is frozen.
func (s *server) allFrozen() bool {
	return !slices.ContainsFunc(s.seats, func(t *seat) bool { return !t.frozen() })
}

// frozenWhy is the reason of the member's first frozen rank, "" for none. Called with mu.
func (m *member) frozenWhy() string {
	for _, s := range m.servers {
		if i := slices.IndexFunc(s.seats, (*seat).frozen); i >= 0 {
			return "frozen: " + s.seats[i].why
		}
	}
	return ""
}
