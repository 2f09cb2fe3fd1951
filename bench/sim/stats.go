package sim

import (
	"slices"
	"sync"
	"time"

	"sluice/bench/sim/httpconn"
)

// counters are those of one rank, owned by its goroutine.
type counters struct {
	requests, failed, aborted, incomplete       int64
	preempted, evicted, steps                   int64
	queries, hits                               int64
	prompt, localCompute, localHit, external    int64
	generated                                   int64
	stopped, length, toolCalls                  int64
	leased, released, expired, late, heartbeats int64
	transfers, transferBytes, descriptors       int64
	pullsFailed, garbage                        int64
	roomsReused, roomsFailed                    int64
	roomsTimedOut, roomsMismatched              int64
	delayedAnswers                              int64 // current number
	transferTime                                time.Duration
}

func (c *counters) finish(reason string) {
	switch reason {
	case "length":
		c.length++
	case "tool_calls":
		c.toolCalls++
	default:
		c.stopped++
	}
}

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

// RankStats is the part of one rank.
type RankStats struct {
	Requests, Failed, Aborted     int
	Running, Waiting              int // sequences; Waiting includes those whose KV is being pulled
	DelayedAnswers                int // requests whose response a fault holds back (Phase "answer")
	WaitingTokens                 int // prompt tokens that the waiting sequences still have to compute
	BlocksTotal                   int // without the null block
	BlocksFree                    int // cached or not
	BlocksCached                  int // with a hash, each copy counted, in use or free
	BlocksLeased                  int // leased
	Leases                        int
	Evictions, Preemptions        int
	Steps                         int
	PrefixQueries, PrefixHits     int // tokens
	PromptTokens                  int
	LocalCompute, LocalHit        int // of PromptTokens
	External                      int // of PromptTokens: read from a prefill
	GeneratedTokens               int
	LeasesCreated, LeasesReleased int // prefill side: handles returned; blocks fetched or released
	LeasesExpired                 int
	LateNotifications             int // "done" received for blocks that were not leased: after expiry, or a second time
	Heartbeats                    int // received
	Transfers                     int // decode side
	TransferBytes                 int
	TransfersFailed               int
	GarbageReads                  int // pulls whose lease had expired, or whose blocks were not written
	IncompleteHandles             int
	Rooms                         int // open rooms of a prefill with a request of its own
	Handshakes                    int // open rooms in which a decode waits for a request that has not arrived; they have no blocks
	RoomsReused                   int // a room or transfer id used a second time
	RoomsFailed                   int // on a prefill, for any reason
	RoomsTimedOut                 int // of these, because the other side never arrived
	RoomsMismatched               int // the prompts of the legs differed
	EventBatches                  int // batches numbered so far
	EventBytes                    int // sent live
}

func (r *rank) stats() (s RankStats) {
	if f := r.frozen.Load(); f != nil {
		return f.stats
	}
	waiting := 0
	r.do(func() {
		n := &r.counters
		for _, q := range r.waiting {
			waiting += max(0, len(q.Prompt)-q.computed)
		}
		s = RankStats{
			Requests: int(n.requests), Failed: int(n.failed), Aborted: int(n.aborted),
			Running: len(r.running), Waiting: len(r.waiting) + len(r.ready) + len(r.pulls) + len(r.heldLast),
			DelayedAnswers: int(n.delayedAnswers),
			BlocksTotal:    r.pool.Total(), BlocksFree: r.pool.Free, BlocksCached: r.pool.Copies,
			BlocksLeased: r.leases.blocks(), Leases: len(r.leases.byID),
			Evictions: int(n.evicted), Preemptions: int(n.preempted), Steps: int(n.steps),
			PrefixQueries: int(n.queries), PrefixHits: int(n.hits),
			PromptTokens: int(n.prompt), LocalCompute: int(n.localCompute), LocalHit: int(n.localHit), External: int(n.external),
			GeneratedTokens: int(n.generated),
			LeasesCreated:   int(n.leased), LeasesReleased: int(n.released), LeasesExpired: int(n.expired),
			LateNotifications: int(n.late), Heartbeats: int(n.heartbeats),
			Transfers: int(n.transfers), TransferBytes: int(n.transferBytes), TransfersFailed: int(n.pullsFailed),
			GarbageReads: int(n.garbage), IncompleteHandles: int(n.incomplete),
			Rooms: r.rooms.waiting(), Handshakes: len(r.rooms.open) - r.rooms.waiting(), RoomsReused: int(n.roomsReused), RoomsFailed: int(n.roomsFailed), RoomsTimedOut: int(n.roomsTimedOut), RoomsMismatched: int(n.roomsMismatched),
		}
	})
	s.WaitingTokens = waiting
	if r.pub != nil {
		s.EventBatches, s.EventBytes = r.pub.Sent()
	}
	return s
}

// Stats returns the current counters.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	l, alive := e.current, e.current != nil
	if l == nil {
		l = e.newest
	}
	e.mu.Unlock()
	s := Stats{EngineID: l.id, Alive: alive, Incarnations: int(e.incarnations.Load()), Crashes: int(e.crashes.Load()),
		AbortedEarly: int(l.abortedEarly.Load()), Rejected: int(l.rejected.Load()), IgnoredPD: int(l.ignoredPD.Load()), SlowReaders: int(l.slowReaders.Load())}
	s.Faults = e.faults.Hits()
	for _, r := range l.ranks {
		s.Ranks = append(s.Ranks, r.stats())
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
