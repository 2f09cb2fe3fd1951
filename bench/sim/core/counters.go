package core

import "time"

// Counters are those of one rank, owned by its goroutine.
type Counters struct {
	Requests, Failed, Aborted, Incomplete       int64
	Preempted, Evicted, Steps                   int64
	Queries, Hits                               int64
	Prompt, LocalCompute, LocalHit, External    int64
	Generated                                   int64
	Stopped, Length, ToolCalls                  int64
	Leased, Released, Expired, Late, Heartbeats int64
	Transfers, TransferBytes, Descriptors       int64
	PullsFailed, Garbage                        int64
	RoomsReused, RoomsFailed                    int64
	RoomsTimedOut, RoomsMismatched              int64
	DelayedAnswers                              int64 // current number
	TransferTime                                time.Duration
}

func (c *Counters) finish(reason string) {
	switch reason {
	case "length":
		c.Length++
	case "tool_calls":
		c.ToolCalls++
	default:
		c.Stopped++
	}
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

// Stats returns the current counters of the rank, or of a frozen core those at its stop.
func (r *Rank) Stats() (s RankStats) {
	if f := r.frozen.Load(); f != nil {
		return f.stats
	}
	waiting := 0
	r.Do(func() {
		n := &r.Counters
		for _, q := range r.waiting {
			waiting += max(0, len(q.Prompt)-q.computed)
		}
		s = RankStats{
			Requests: int(n.Requests), Failed: int(n.Failed), Aborted: int(n.Aborted),
			Running: len(r.running), Waiting: len(r.waiting) + len(r.ready) + len(r.pulls) + len(r.heldLast),
			DelayedAnswers: int(n.DelayedAnswers),
			BlocksTotal:    r.pool.Total(), BlocksFree: r.pool.Free, BlocksCached: r.pool.Copies,
			BlocksLeased: r.leases.blocks(), Leases: len(r.leases.byKey),
			Evictions: int(n.Evicted), Preemptions: int(n.Preempted), Steps: int(n.Steps),
			PrefixQueries: int(n.Queries), PrefixHits: int(n.Hits),
			PromptTokens: int(n.Prompt), LocalCompute: int(n.LocalCompute), LocalHit: int(n.LocalHit), External: int(n.External),
			GeneratedTokens: int(n.Generated),
			LeasesCreated:   int(n.Leased), LeasesReleased: int(n.Released), LeasesExpired: int(n.Expired),
			LateNotifications: int(n.Late), Heartbeats: int(n.Heartbeats),
			Transfers: int(n.Transfers), TransferBytes: int(n.TransferBytes), TransfersFailed: int(n.PullsFailed),
			GarbageReads: int(n.Garbage), IncompleteHandles: int(n.Incomplete),
			RoomsReused: int(n.RoomsReused), RoomsFailed: int(n.RoomsFailed), RoomsTimedOut: int(n.RoomsTimedOut), RoomsMismatched: int(n.RoomsMismatched),
		}
		if r.Process.Rooms != nil {
			s.Rooms, s.Handshakes = r.Process.Rooms(r)
		}
	})
	s.WaitingTokens = waiting
	if r.Publisher != nil {
		s.EventBatches, s.EventBytes = r.Publisher.Sent()
	}
	return s
}
