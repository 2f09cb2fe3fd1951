package fleet

import (
	"bytes"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// engineIDs are what the engine behind one server is called in hand-overs: vLLM's
// engine_id, which a process draws at random when it starts (kv_transfer_config; all
// its data-parallel ranks share it, each with an end of its own, "_dp0"), or is
// given by its operator and then keeps. So an id that was never told before is the
// sign of another process, and one that was is none: an answer that was late, or
// one of several engines behind one address.
type engineIDs struct {
	current atomic.Pointer[string] // nil: none was told of this life yet

	// Guarded by the fleet's mu.
	past          []string  // of lives before, and of other engines at this address; oldest first
	since         time.Time // when now was told first, or forgotten
	quickRestarts int       // lives in a row that were shorter than an engine takes to start
	ignoreUntil   time.Time // until then changes mean nothing
	restartReason string    // a new life was told of, and the server was not asked since
}

const (
	maxEngineID = 512 // bytes
	maxPastIDs  = 64
	// An address whose ids change maxQuickRestarts times in a row within minIncarnation each does
	// not give one id per process, whatever it is: it is left alone for engineIDBackoff.
	maxQuickRestarts = 3
	engineIDBackoff  = 10 * time.Minute
)

var minIncarnation = 10 * time.Second // tests make it longer

// ReportEngineID tells what the engine behind a rank called itself in answer to a
// question put at the time asked. An id that is new there is the sign of a restart:
// the rank's server is taken out of the choice, OnLeave and OnJoin are called, and
// what the old process held is dropped before the next request goes there. id is
// borrowed. Cheap where nothing has changed, and safe on the request path.
func (f *Fleet) ReportEngineID(r *worker.Rank, id []byte, sentAt time.Time) {
	t := f.breaker(r)
	if t == nil || len(id) == 0 || len(id) > maxEngineID {
		return
	}
	id = withoutRank(id)
	if now := t.server.engineIDs.current.Load(); now != nil && *now == string(id) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !t.server.member.removed && !f.closed {
		t.server.reportEngineID(string(id), sentAt)
	}
}

var rankMark = []byte("_dp")

// withoutRank takes off what vLLM adds to the id for a data-parallel rank.
func withoutRank(id []byte) []byte {
	i := len(id)
	for i > 0 && id[i-1]-'0' <= 9 {
		i--
	}
	if base, ok := bytes.CutSuffix(id[:i], rankMark); ok && i < len(id) && len(base) > 0 {
		return base
	}
	return id
}

// ReportEventRestart tells that a rank's events have shown a new life of its engine, and that
// what is believed of it was told since: the id that comes next is that life's, and
// no reason to drop it.
func (f *Fleet) ReportEventRestart(r *worker.Rank) {
	t := f.breaker(r)
	if t == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t.eventRestart = true
	for _, other := range t.server.breakers {
		if !other.eventRestart {
			return // of that one's old life something may still be believed
		}
	}
	t.server.forgetID()
}

// forgetID notes that the life the id was of has ended. Called with mu.
func (s *server) forgetID() {
	e := &s.engineIDs
	if now := e.current.Swap(nil); now != nil {
		e.remember(*now)
	}
	e.since = time.Now()
	for _, t := range s.breakers {
		t.eventRestart = false
	}
}

func (e *engineIDs) remember(id string) {
	if slices.Contains(e.past, id) {
		return
	}
	if len(e.past) == maxPastIDs {
		e.past = slices.Delete(e.past, 0, 1)
	}
	e.past = append(e.past, id)
}

// reportEngineID is Identified for an id that is not the present one. Called with mu.
func (s *server) reportEngineID(id string, sentAt time.Time) {
	e := &s.engineIDs
	now := e.current.Load()
	switch {
	case now != nil && *now == id:
		return
	case slices.Contains(e.past, id):
		// Asked since it was forgotten, the same process lives on: what was taken for a
		// restart was none.
		if now == nil && sentAt.After(e.since) {
			e.current.Store(&id)
		}
		return
	case now == nil:
		e.current.Store(&id)
		e.since = time.Now()
		return
	case sentAt.Before(e.since):
		e.remember(id) // the answer of a life that nobody had told of yet, and that has ended
		return
	}
	before := *now
	e.remember(before)
	e.current.Store(&id)
	if e.quickRestarts++; time.Since(e.since) >= minIncarnation {
		e.quickRestarts = 0
	}
	e.since = time.Now()
	switch {
	case e.since.Before(e.ignoreUntil):
		return
	case e.quickRestarts >= maxQuickRestarts:
		e.ignoreUntil, e.quickRestarts = e.since.Add(engineIDBackoff), 0
		s.member.fleet.opt.Log.Warn("engine ids change more often than an engine can start; they are not taken for restarts for a while",
			"worker", s.member.worker.Spec.ID, "url", s.url, "for", engineIDBackoff)
		return
	}
	e.restartReason = fmt.Sprintf("it calls itself %s in hand-overs, and was %s", id, before)
	s.downCount.Add(1) // an admission that is under way has not heard of this
	if s.live.Load() {
		s.member.lastFailure = "engine restarted: " + e.restartReason
		s.withdraw(s.member.lastFailure)
	}
	s.member.wakeUp()
}

// detectRestart takes in that a server was asked what it is: sign and why are what shows
// that it is another process than the one asked before, or "". It gives them, or
// what hand-overs have told.
func (s *server) detectRestart(sign, detail string) (string, string) {
	s.member.fleet.mu.Lock()
	defer s.member.fleet.mu.Unlock()
	switch reported := s.engineIDs.restartReason; {
	case reported != "":
		s.engineIDs.restartReason = ""
		for _, t := range s.breakers {
			t.eventRestart = false
		}
		return restartEngineID, reported
	case sign != "":
		s.forgetID()
	}
	return sign, detail
}
