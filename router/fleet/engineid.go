package fleet

import (
	"bytes"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"sluice/router/worker"
)

// engineIDs are the ids that the engine behind one server has used in hand-overs: vLLM's engine_id.
// A process draws it at random when it starts (kv_transfer_config; all data-parallel ranks share
// it, each with its own suffix, "_dp0"), or the operator sets it and it is constant. An id that was
// never seen before is therefore the sign of another process; an id that was seen before is not: it
// is a late response, or one of several engines behind one address.
type engineIDs struct {
	current atomic.Pointer[string] // nil: none was reported in this incarnation yet

	// Guarded by the fleet's mu.
	past          []string  // of earlier incarnations and of other engines at this address; oldest first
	since         time.Time // when current was first reported, or cleared
	quickRestarts int       // consecutive incarnations shorter than an engine takes to start
	ignoreUntil   time.Time // changes are ignored until then
	restartReason string    // another incarnation was reported, and the server was not inspected since
}

const (
	maxEngineID = 512 // bytes
	maxPastIDs  = 64
	// If the ids at an address change maxQuickRestarts times in a row within minIncarnation each,
	// it does not have one id per process; its ids are ignored for engineIDBackoff.
	maxQuickRestarts = 3
	engineIDBackoff  = 10 * time.Minute
)

var minIncarnation = 10 * time.Second // tests raise it

// ReportEngineID reports the id that the engine behind a rank used in the response to a request
// sent at sentAt. A new id is the sign of a restart: the rank's server is removed from the pools,
// OnLeave and OnJoin are called, and the old process's blocks are dropped before the next request
// is sent there. id is borrowed. It is cheap if nothing has changed, and safe on the request path.
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

// withoutRank removes the suffix that vLLM adds to the id for a data-parallel rank.
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

// ReportEventRestart reports that a rank's events have shown a new incarnation of its engine, and
// that the router's state of the rank was learned since. The next id is that incarnation's, and no
// reason to drop the state.
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
			return // state from that rank's previous incarnation may remain
		}
	}
	t.server.forgetID()
}

// forgetID records that the incarnation with the current id has ended. Called with mu.
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

// reportEngineID is ReportEngineID for an id that is not the current one. Called with mu.
func (s *server) reportEngineID(id string, sentAt time.Time) {
	e := &s.engineIDs
	now := e.current.Load()
	switch {
	case now != nil && *now == id:
		return
	case slices.Contains(e.past, id):
		// The request was sent after the id was cleared, so the same process is still running and
		// the presumed restart was none.
		if now == nil && sentAt.After(e.since) {
			e.current.Store(&id)
		}
		return
	case now == nil:
		e.current.Store(&id)
		e.since = time.Now()
		return
	case sentAt.Before(e.since):
		e.remember(id) // the response is from an incarnation that nothing had reported and that has ended
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
		s.member.fleet.opt.Log.Warn("engine ids change faster than an engine can restart; ignoring them",
			"worker", s.member.worker.Spec.ID, "url", s.url, "duration", engineIDBackoff)
		return
	}
	e.restartReason = fmt.Sprintf("engine id in hand-overs changed from %[2]s to %[1]s", id, before)
	s.downCount.Add(1) // an admission in progress does not know of this
	if s.live.Load() {
		s.member.lastFailure = "engine restarted: " + e.restartReason
		s.withdraw(s.member.lastFailure)
	}
	s.member.wakeUp()
}

// detectRestart handles the result of an inspection: sign and detail show that it is another
// process than the one inspected before, or are "". It returns them, or the evidence from
// hand-overs.
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
