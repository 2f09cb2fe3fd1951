package fleet

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// seat is one rank at its server, with its breaker: failures of one rank must
// not take the others of its server out of the choice.
//
// A closed breaker opens after BreakAfter failures in a row. Open, the rank is
// out of the pools for BreakFor, twice as long each time up to breakMost. Then
// it is half open: back in the pools for one request at a time, until one is
// answered (closed), one fails (open), or halfFor has gone by without either
// (closed). Each of these ends by a clock, so no lost answer keeps a rank out.
//
// fails and the rank's Breaker are atomics and read without a lock on the
// request path, where a healthy rank writes neither; they change from one state
// to another under the fleet's mu only.
type seat struct {
	s     *server
	rank  *worker.Rank
	fails atomic.Int32

	// Guarded by the fleet's mu.
	opens int         // since a success
	clock *time.Timer // ends the state Open or HalfOpen
	why   string      // last failure

	vital vital

	renewed bool // its events have shown a new life since the server's engine id was told
}

const (
	breakMost = 30 * time.Second // longest an open breaker keeps a rank out
	halfFor   = 10 * time.Second // longest that a breaker stays half open
)

// Answered reports that the engine answered a leg with a status. Any answer is
// a sign of the server's life. For the rank's breaker 500, 502 and 504 are
// failures, 429 and 503 (queue full, paused) count neither way, and everything
// else is a success, a 4xx too: that is the client's. Cheap, and safe on the
// request path.
func (f *Fleet) Answered(r *worker.Rank, status int) {
	t := f.seat(r)
	if t == nil {
		return
	}
	t.s.lives()
	switch status {
	case 500, 502, 504:
		t.failed(func() string { return fmt.Sprintf("it answered %d", status) })
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

// Began reports that the engine began to answer with a stream, which may still
// break: a sign of the server's life, and nothing yet for the breaker. Report the
// end by Answered or Failed.
func (f *Fleet) Began(r *worker.Rank) {
	if t := f.seat(r); t != nil {
		t.s.lives()
	}
}

// lives notes an answer. It loads first, and notes the time no more often than the
// schedule needs: most answers write no shared line.
func (s *server) lives() {
	if s.trafficFails.Load() != 0 {
		s.trafficFails.Store(0)
	}
	now := int64(sinceEpoch())
	if now-s.watch.heard.Load() > int64(heardEvery) {
		s.watch.heard.Store(now)
	}
}

// heardEvery is how exactly the time of the last answer is kept.
const heardEvery = time.Millisecond

// Admissions counts how often the rank's server was taken in: it grows when an engine that
// had gone down, or has restarted, is back in the choice. It is cheap.
func (f *Fleet) Admissions(r *worker.Rank) uint32 {
	if t := f.seat(r); t != nil {
		return t.s.admissions.Load()
	}
	return 0
}

// Lives counts how often the rank's engine was seen to be another process than before:
// what the old one held is gone when it grows. It is cheap.
func (f *Fleet) Lives(r *worker.Rank) uint32 {
	if t := f.seat(r); t != nil {
		return t.s.restarts.Load()
	}
	return 0
}

// Refuses says whether the rank's server has refused a connection since it fell:
// nothing listens there, so the process is gone.
func (f *Fleet) Refuses(r *worker.Rank) bool {
	t := f.seat(r)
	return t != nil && t.s.refused.Load() && !t.s.up.Load()
}

// failed counts a failure of the rank. why is called only when its text is
// wanted.
func (t *seat) failed(why func() string) {
	f := t.s.m.f
	n := int(t.fails.Add(1))
	if n < f.pace.Load().BreakAfter && worker.BreakerState(t.rank.Breaker.Load()) != worker.BreakerHalfOpen {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if t.s.m.gone || f.closed || worker.BreakerState(t.rank.Breaker.Load()) == worker.BreakerOpen {
		return
	}
	t.opens++
	wait := min(f.pace.Load().BreakFor<<min(t.opens-1, 16), breakMost)
	t.why = fmt.Sprintf("rank %d: %d failures in a row, the last: %s; out for %s", t.rank.ID.Rank, n, why(), wait)
	t.turn(worker.BreakerOpen, wait)
}

// close lets the rank in without limit.
func (t *seat) close() {
	f := t.s.m.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if worker.BreakerState(t.rank.Breaker.Load()) == worker.BreakerHalfOpen && !t.s.m.gone {
		t.opens = 0
		t.turn(worker.BreakerClosed, 0)
	}
}

// turn changes the breaker's state; lasts is how long until the clock moves it
// on, 0 for ever. Called with mu.
func (t *seat) turn(to worker.BreakerState, lasts time.Duration) {
	f, m := t.s.m.f, t.s.m
	if t.clock != nil {
		t.clock.Stop()
		t.clock = nil
	}
	from := worker.BreakerState(t.rank.Breaker.Swap(uint32(to)))
	t.fails.Store(0)
	if to == worker.BreakerHalfOpen {
		f.narrow.Add(1)
	}
	if from == worker.BreakerHalfOpen {
		f.narrow.Add(-1)
	}
	if to == worker.BreakerOpen {
		f.opt.Log.Warn("rank breaker open", "rank", t.rank.ID.String(), "reason", t.why)
	} else {
		f.opt.Log.Info("rank breaker "+to.String(), "rank", t.rank.ID.String())
	}
	if lasts > 0 {
		var clock *time.Timer
		clock = time.AfterFunc(lasts, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			if t.clock != clock || m.gone || f.closed {
				return // overtaken
			}
			if to == worker.BreakerOpen {
				t.turn(worker.BreakerHalfOpen, halfFor)
			} else {
				t.turn(worker.BreakerClosed, 0)
			}
		})
		t.clock = clock
	}
	m.settle()
	f.publish()
}

// reset closes the breaker of a rank that leaves or whose server is a new one.
// Called with mu; the caller publishes.
func (t *seat) reset() {
	if t.clock != nil {
		t.clock.Stop()
		t.clock = nil
	}
	t.opens = 0
	t.fails.Store(0)
	if worker.BreakerState(t.rank.Breaker.Swap(uint32(worker.BreakerClosed))) == worker.BreakerHalfOpen {
		t.s.m.f.narrow.Add(-1)
	}
}

func (t *seat) open() bool {
	return worker.BreakerState(t.rank.Breaker.Load()) == worker.BreakerOpen
}

// out says why ranks of live servers are not chosen, "" when all are. Called
// with mu.
func (m *member) out() string {
	for _, s := range m.servers {
		if !s.live.Load() {
			continue
		}
		if i := slices.IndexFunc(s.seats, (*seat).open); i >= 0 {
			return "breaker open, " + s.seats[i].why
		}
	}
	return ""
}
