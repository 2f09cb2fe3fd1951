package sim

import (
	"slices"
	"sync"
	"time"

	"sluice/bench/sim/httpconn"
)

// Stats is what an engine did in its current incarnation, or in the last one after a
// crash.
type Stats struct {
	EngineID     string
	Alive        bool
	Incarnations int // including this one
	Crashes      int
	Faults       int // requests and batches hit by a fault, in all incarnations
	// AbortedEarly counts clients that disconnected before the engine scheduled their
	// request (within Cost.Admit); no prefill is notified of them.
	AbortedEarly int
	IgnoredPD    int // requests whose P/D members were incomplete: ignored with a warning, as vLLM does
	Rejected     int // requests rejected with a 4xx or because of a full queue
	SlowReaders  int // connections closed because their buffer was full
	Ranks        []RankStats
}

// Stats returns the current counters.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	l, alive := e.current, e.current != nil
	if l == nil {
		l = e.newest
	}
	e.mu.Unlock()
	s := Stats{EngineID: l.ID, Alive: alive, Incarnations: int(e.incarnations.Load()), Crashes: int(e.crashes.Load()),
		AbortedEarly: int(l.abortedEarly.Load()), Rejected: int(l.rejected.Load()), IgnoredPD: int(l.IgnoredPD.Load()), SlowReaders: int(l.slowReaders.Load())}
	s.Faults = e.faults.Hits()
	for _, r := range l.Ranks {
		s.Ranks = append(s.Ranks, r.Stats())
	}
	return s
}

// Sum returns the sum over all ranks.
func (s Stats) Sum() (t RankStats) {
	for _, r := range s.Ranks {
		t.Requests += r.Requests
		t.Failed += r.Failed
		t.Aborted += r.Aborted
		t.Running += r.Running
		t.DelayedAnswers += r.DelayedAnswers
		t.Waiting += r.Waiting
		t.WaitingTokens += r.WaitingTokens
		t.BlocksTotal += r.BlocksTotal
		t.BlocksFree += r.BlocksFree
		t.BlocksCached += r.BlocksCached
		t.BlocksLeased += r.BlocksLeased
		t.Leases += r.Leases
		t.Evictions += r.Evictions
		t.Preemptions += r.Preemptions
		t.Steps += r.Steps
		t.PrefixQueries += r.PrefixQueries
		t.PrefixHits += r.PrefixHits
		t.PromptTokens += r.PromptTokens
		t.LocalCompute += r.LocalCompute
		t.LocalHit += r.LocalHit
		t.External += r.External
		t.GeneratedTokens += r.GeneratedTokens
		t.LeasesCreated += r.LeasesCreated
		t.LeasesReleased += r.LeasesReleased
		t.LeasesExpired += r.LeasesExpired
		t.LateNotifications += r.LateNotifications
		t.Heartbeats += r.Heartbeats
		t.Transfers += r.Transfers
		t.TransferBytes += r.TransferBytes
		t.TransfersFailed += r.TransfersFailed
		t.GarbageReads += r.GarbageReads
		t.IncompleteHandles += r.IncompleteHandles
		t.Rooms += r.Rooms
		t.Handshakes += r.Handshakes
		t.RoomsReused += r.RoomsReused
		t.RoomsFailed += r.RoomsFailed
		t.RoomsTimedOut += r.RoomsTimedOut
		t.RoomsMismatched += r.RoomsMismatched
		t.EventBatches += r.EventBatches
		t.EventBytes += r.EventBytes
	}
	return t
}

// Record is one request as received on a client port.
type Record struct {
	Method, Path, Query string
	Headers             []httpconn.Header // in order, with the case of their names
	Body                []byte            // exactly as received, without chunking; do not change it
	Rank                int               // rank that serves it; -1 for calls that no rank serves
	Arrived             time.Time
}

// Header returns the first value of the header name, or "".
func (r Record) Header(name string) string {
	v, _ := (&httpconn.Request{Headers: r.Headers}).Get(name)
	return v
}

// recorder stores the last requests, limited in number and in bytes of bodies.
type recorder struct {
	mu    sync.Mutex
	max   int
	bytes int
	list  []Record
}

const recordedBytes = 256 << 20

func newRecorder(n int) *recorder { return &recorder{max: max(n, 0)} }

func (rc *recorder) add(r *httpconn.Request, rank int) {
	if rc.max == 0 {
		return
	}
	rc.mu.Lock()
	defer rc.mu.Unlock()
	rc.list = append(rc.list, Record{r.Method, r.Path, r.Query, r.Headers, r.Body, rank, r.HeadTime})
	rc.bytes += len(r.Body)
	for len(rc.list) > rc.max || rc.bytes > recordedBytes && len(rc.list) > 1 {
		rc.bytes -= len(rc.list[0].Body)
		rc.list[0] = Record{}
		rc.list = rc.list[1:]
	}
}

// Requests returns the last requests received, oldest first, of all incarnations.
func (e *Engine) Requests() []Record {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	return slices.Clone(e.log.list)
}

// ForgetRequests deletes the requests that Requests returns.
func (e *Engine) ForgetRequests() {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	e.log.list, e.log.bytes = nil, 0
}
