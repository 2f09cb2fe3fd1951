package sim

import (
	"slices"
	"sync"
	"time"
)

// counters are one rank's, owned by its goroutine.
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
	delayedAnswers                              int64 // of now
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

// Stats is what an engine did in its present life, the last one when it is dead.
type Stats struct {
	EngineID     string
	Alive        bool
	Incarnations int // this one counted
	Crashes      int
	Faults       int // requests and batches hit by a fault, all lives
	// AbortedEarly counts clients that left before the engine knew their request
	// (within Cost.Admit): nothing was told to a prefill about them.
	AbortedEarly int
	IgnoredPD    int // requests whose P/D members were incomplete: ignored, as vLLM does with a warning
	Rejected     int // requests refused with a 4xx or a full queue
	SlowReaders  int // connections cut because their buffer was full
	Ranks        []RankStats
}

// RankStats is the part of one rank.
type RankStats struct {
	Requests, Failed, Aborted     int
	Running, Waiting              int // sequences; Waiting includes those whose KV is being pulled
	DelayedAnswers                int // requests whose answer a fault holds back (Phase "answer")
	WaitingTokens                 int // prompt tokens that those in the queue have still to compute
	BlocksTotal                   int // without the null block
	BlocksFree                    int // cached or not
	BlocksCached                  int // with a hash, copies counted each, in use or free
	BlocksPinned                  int // under lease
	Leases                        int
	Evictions, Preemptions        int
	Steps                         int
	PrefixQueries, PrefixHits     int // tokens
	PromptTokens                  int
	LocalCompute, LocalHit        int // of PromptTokens
	External                      int // of PromptTokens: pulled from a prefill
	GeneratedTokens               int
	LeasesCreated, LeasesReleased int // prefill side: handles given, fetched or given back
	LeasesExpired                 int
	LateNotifications             int // done came for blocks that were not kept: after expiry, or a second time
	Heartbeats                    int // received
	Transfers                     int // decode side
	TransferBytes                 int
	TransfersFailed               int
	GarbageReads                  int // pulls that found the lease gone, or blocks that were not written
	IncompleteHandles             int
	Rooms                         int // open on a prefill that hold a request of its own
	Handshakes                    int // open ones in which a decode waits for a request that has not come; they hold no blocks
	RoomsReused                   int // a room or transfer id used a second time
	RoomsFailed                   int // on a prefill, for whatever reason
	RoomsTimedOut                 int // of these, the other side never came
	RoomsMismatched               int // the legs' prompts were not the same
	EventBatches                  int // numbered so far
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
			waiting += max(0, len(q.prompt)-q.computed)
		}
		s = RankStats{
			Requests: int(n.requests), Failed: int(n.failed), Aborted: int(n.aborted),
			Running: len(r.running), Waiting: len(r.waiting) + len(r.ready) + len(r.pulls) + len(r.heldLast),
			DelayedAnswers: int(n.delayedAnswers),
			BlocksTotal:    r.pool.Total(), BlocksFree: r.pool.Free, BlocksCached: r.pool.Copies,
			BlocksPinned: r.leases.pinned(), Leases: len(r.leases.byID),
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
		s.EventBatches, s.EventBytes = int(r.pub.sent.Load()), int(r.pub.bytes.Load())
	}
	return s
}

// Stats gives the counters of now.
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

// Sum adds up the ranks.
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
		t.BlocksPinned += r.BlocksPinned
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

// Record is one request as it came in on a client port.
type Record struct {
	Method, Path, Query string
	Headers             []Header // in order, names in their case
	Body                []byte   // exactly as received, chunking taken off; do not change it
	Rank                int      // that will serve it; -1 for calls no rank serves
	Arrived             time.Time
}

// Header is the value of the first header of that name, "" if there is none.
func (r Record) Header(name string) string {
	v, _ := (&httpRequest{headers: r.Headers}).get(name)
	return v
}

// recorder keeps the last requests, bounded in number and in body bytes.
type recorder struct {
	mu    sync.Mutex
	max   int
	bytes int
	list  []Record
}

const recordedBytes = 256 << 20

func newRecorder(n int) *recorder { return &recorder{max: max(n, 0)} }

func (rc *recorder) add(r *httpRequest, rank int) {
	if rc.max == 0 {
		return
	}
	rc.mu.Lock()
	defer rc.mu.Unlock()
	rc.list = append(rc.list, Record{r.method, r.path, r.query, r.headers, r.body, rank, r.headTime})
	rc.bytes += len(r.body)
	for len(rc.list) > rc.max || rc.bytes > recordedBytes && len(rc.list) > 1 {
		rc.bytes -= len(rc.list[0].Body)
		rc.list[0] = Record{}
		rc.list = rc.list[1:]
	}
}

// Requests gives the last requests received, oldest first, all lives.
func (e *Engine) Requests() []Record {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	return slices.Clone(e.log.list)
}

// ForgetRequests empties what Requests gives.
func (e *Engine) ForgetRequests() {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	e.log.list, e.log.bytes = nil, 0
}
