package fleet

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"sluice/dataplane/backoff"
	"sluice/dataplane/monotime"
	"sluice/router/worker"
)

// rankBreaker is one rank at its server, with its breaker: failures of one rank must not exclude
// the others of its server from choices.
//
// A closed breaker opens after BreakerThreshold consecutive failures. While it is open, the rank is
// out of the pools for BreakerTimeout, twice as long each time up to maxBreakerTimeout. Then it is
// half open: back in the pools for one request at a time, until one is answered (closed), one fails
// (open), or halfOpenTimeout passes without either (closed). A timer bounds each state, so no lost
// response keeps a rank out.
//
// fails and the rank's Breaker are atomics and read without a lock on the request path, where a
// healthy rank writes neither. The state changes only under the fleet's mu.
type rankBreaker struct {
	server *server
	rank   *worker.Rank
	fails  atomic.Int32

	// Guarded by the fleet's mu.
	opens       int         // since the last success
	timer       *time.Timer // ends the state Open or HalfOpen
	lastFailure string      // last failure

	evidence rankEvidence

	eventRestart bool // its events have shown a new incarnation since the server's engine id was reported
}

const (
	maxBreakerTimeout = 30 * time.Second // longest time that an open breaker keeps a rank out
	halfOpenTimeout   = 10 * time.Second // longest time that a breaker stays half open
)

// ReportStatus reports that the engine answered a leg with a status. Any response is a sign of life
// of the server. For the rank's breaker 500, 502 and 504 are failures, 429 and 503 (queue full,
// paused) are ignored, and everything else is a success, including other 4xx, which are the
// client's errors. It is cheap and safe on the request path.
func (f *Fleet) ReportStatus(r *worker.Rank, status int) {
	t := f.breaker(r)
	if t == nil {
		return
	}
	t.server.recordAnswer()
	switch status {
	case 500, 502, 504:
		t.failed(func() string { return fmt.Sprintf("status %d", status) })
	case 429, 503:
	default:
		if t.fails.Load() != 0 {
			t.fails.Store(0)
		}
		if worker.BreakerState(r.Breaker.Load()) == worker.BreakerHalfOpen {
			t.close()
		}
	}
}

// ReportStreamStart reports that the engine began to answer with a stream, which may still fail: a
// sign of life of the server, but not a result for the breaker. Report the end by ReportStatus or
// ReportFailure.
func (f *Fleet) ReportStreamStart(r *worker.Rank) {
	if t := f.breaker(r); t != nil {
		t.server.recordAnswer()
	}
}

// recordAnswer records a response. It loads first, and stores the time no more often than the
// schedule needs: most responses write no shared cache line.
func (s *server) recordAnswer() {
	if s.trafficFails.Load() != 0 {
		s.trafficFails.Store(0)
	}
	now := int64(monotime.Uptime())
	if now-s.schedule.lastAnswer.Load() > int64(answerStep) {
		s.schedule.lastAnswer.Store(now)
	}
}

// answerStep is the precision of the time of the last response.
const answerStep = time.Millisecond

// Admissions counts how often the rank's server became live: it grows when an engine that was down,
// or has restarted, is in the pools again. It is cheap.
func (f *Fleet) Admissions(r *worker.Rank) uint32 {
	if t := f.breaker(r); t != nil {
		return t.server.admissions.Load()
	}
	return 0
}

// Incarnation counts how often the rank's engine was found to be another process than before: when
// it grows, the old process's blocks are gone. It is cheap.
func (f *Fleet) Incarnation(r *worker.Rank) uint32 {
	if t := f.breaker(r); t != nil {
		return t.server.restarts.Load()
	}
	return 0
}

// RefusesConnections reports whether the rank's server has refused a connection since it went down:
// nothing listens there, so the process is gone.
func (f *Fleet) RefusesConnections(r *worker.Rank) bool {
	t := f.breaker(r)
	return t != nil && t.server.refused.Load() && !t.server.up.Load()
}

// failed counts a failure of the rank. why is called only when its text is needed.
func (t *rankBreaker) failed(why func() string) {
	f := t.server.member.fleet
	n := int(t.fails.Add(1))
	if n < f.settings.Load().BreakerThreshold && worker.BreakerState(t.rank.Breaker.Load()) != worker.BreakerHalfOpen {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.server.member.removed || f.closed || worker.BreakerState(t.rank.Breaker.Load()) == worker.BreakerOpen {
		return
	}
	t.opens++
	wait := backoff.Delay(f.settings.Load().BreakerTimeout, maxBreakerTimeout, t.opens-1)
	t.lastFailure = fmt.Sprintf("rank %d: %d consecutive failures, the last: %s; excluded for %s", t.rank.ID.Rank, n, why(), wait)
	t.transition(worker.BreakerOpen, wait)
}

// close closes the breaker.
func (t *rankBreaker) close() {
	f := t.server.member.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	if worker.BreakerState(t.rank.Breaker.Load()) == worker.BreakerHalfOpen && !t.server.member.removed {
		t.opens = 0
		t.transition(worker.BreakerClosed, 0)
	}
}

// transition changes the breaker's state; after timeout the timer changes it again, 0: never.
// Called with mu.
func (t *rankBreaker) transition(to worker.BreakerState, timeout time.Duration) {
	f, m := t.server.member.fleet, t.server.member
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	from := worker.BreakerState(t.rank.Breaker.Swap(uint32(to)))
	t.fails.Store(0)
	if to == worker.BreakerHalfOpen {
		f.halfOpenCount.Add(1)
	}
	if from == worker.BreakerHalfOpen {
		f.halfOpenCount.Add(-1)
	}
	if to == worker.BreakerOpen {
		f.opt.Log.Warn("rank breaker open", "rank", t.rank.ID.String(), "reason", t.lastFailure)
	} else {
		f.opt.Log.Info("rank breaker "+to.String(), "rank", t.rank.ID.String())
	}
	if timeout > 0 {
		var clock *time.Timer
		clock = time.AfterFunc(timeout, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			if t.timer != clock || m.removed || f.closed {
				return // another transition came first
			}
			if to == worker.BreakerOpen {
				t.transition(worker.BreakerHalfOpen, halfOpenTimeout)
			} else {
				t.transition(worker.BreakerClosed, 0)
			}
		})
		t.timer = clock
	}
	m.updateState()
	f.publish()
}

// reset closes the breaker of a rank that leaves or whose server is a new one. Called with mu; the
// caller publishes.
func (t *rankBreaker) reset() {
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	t.opens = 0
	t.fails.Store(0)
	if worker.BreakerState(t.rank.Breaker.Swap(uint32(worker.BreakerClosed))) == worker.BreakerHalfOpen {
		t.server.member.fleet.halfOpenCount.Add(-1)
	}
}

func (t *rankBreaker) open() bool {
	return worker.BreakerState(t.rank.Breaker.Load()) == worker.BreakerOpen
}

// unavailableReason returns why ranks of live servers are not chosen, "" if all are. Called with
// mu.
func (m *member) unavailableReason() string {
	for _, s := range m.servers {
		if !s.live.Load() {
			continue
		}
		if i := slices.IndexFunc(s.breakers, (*rankBreaker).open); i >= 0 {
			return "breaker open, " + s.breakers[i].lastFailure
		}
	}
	return ""
}
