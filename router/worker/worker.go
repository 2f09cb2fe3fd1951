package worker

import (
	"math"
	"net/netip"
	"sync/atomic"
)

// Spec is the description of a worker from an operator or a discovery source. It is immutable once
// the fleet has it; a change is a removal and a new Spec.
type Spec struct {
	// ID is unique in the fleet; if empty it is derived from role and address.
	ID string
	// URL is the base URL of the engine, without a trailing slash.
	URL string
	// Role is the set of legs that the worker serves.
	Role Role
	// Models are the served models; if empty, the engine's /v1/models is used.
	Models []string
	// Ranks are the data-parallel ranks served here; empty means {0}.
	Ranks []uint16
	// StartRank is the engine's own number of the first rank behind URL, for a server of one node
	// out of several; 0: as reported by the engine.
	StartRank int
	// RankURLs, if set, gives each of Ranks its own server, in the same order; the rank header is
	// then not sent.
	RankURLs []string
	// Labels are arbitrary words by which pools and requests select workers.
	Labels []string
	// Engine is "vllm", "sglang" or "trtllm"; empty: detected.
	Engine string
	// HealthPath is the path of health probes, with a leading slash; empty: from the fleet's
	// options, or the first of the usual paths that the engine has.
	HealthPath string
	// BlockSize is in tokens; 0: learned from events or the engine's metrics.
	BlockSize int
	// KVEvents are ZMQ PUB endpoints: one base endpoint (rank r listens at port+r) or one per rank.
	// The single word "auto" asks the engine; "off", or empty without discovery, means no events.
	KVEvents []string
	// KVReplay are the ZMQ ROUTER endpoints for replay, by the same rule.
	KVReplay []string
	// LoadEvents are ZMQ PUB endpoints of load messages, by the same rule; empty: as reported by
	// the engine.
	LoadEvents []string
	// MaxRequests bounds the running requests on all ranks together; RankRequests and RankTokens
	// bound the requests, and the prompt tokens waiting to be computed, on each rank. All count
	// this router's requests; 0: the limits configured for every rank.
	MaxRequests, RankRequests, RankTokens int64
	// Options are family-specific keys (bootstrap_port, init_port, …), each with one or more
	// values, passed to the P/D family uninterpreted.
	Options map[string][]string
	// Networks, if set, must contain the addresses that the engine itself reports (of KV events).
	// It is set for workers that only a token authenticates.
	Networks []netip.Prefix
	// Source is the origin of the Spec: "flag", "config", "file", ….
	Source string
}

// Info is what the router has learned from the engine itself. The fleet replaces it as a whole;
// readers never modify it.
type Info struct {
	Models      []string // from /v1/models, or the Spec's
	Base        string   // the first base model; part of the block hashes
	Adapters    []string // the LoRA adapters of Base among Models
	Root        string   // what a vLLM engine says it has loaded Base from: a folder there, or a name
	Engine      string   // "vllm", "sglang", "" if unknown
	Version     string
	BlockSize   int // tokens; 0 unknown
	MaxModelLen int // tokens; 0 unknown
	TotalBlocks int // KV blocks per rank; 0 unknown
	// BootstrapPort of an SGLang prefill engine, for its hand-over; 0 unknown.
	BootstrapPort int
	// Deltas: SGLang's /generate streams only new text instead of all text so far; nil unknown.
	Deltas *bool
	// DPSize is the number of data-parallel ranks of the engine, on all nodes; 0 unknown.
	DPSize int
	// StartRank is the lowest rank that the engine has shown here; above 0 on the second node of a
	// deployment that is balanced by node.
	StartRank int
}

// Rank is the live state of one (worker, rank). All mutable fields are atomics: the request path
// adds and subtracts, scrapers store, the scheduler and the console load. Loads of several fields
// are not a consistent snapshot, and need not be: each is a term of an estimate.
type Rank struct {
	ID     ID
	Slot   Slot
	Worker *Worker
	// URL of the server that accepts this rank's requests.
	URL string
	// SendRank: the rank is addressed by the X-data-parallel-rank header.
	SendRank bool

	// Reserved by running requests that this router has placed.
	PrefillTokens atomic.Int64 // prompt tokens still to be computed
	DecodeBlocks  atomic.Int64 // KV blocks of requests being decoded
	DecodeWork    atomic.Int64 // those blocks, each times its expected number of steps
	Computed      atomic.Int64 // prompt tokens computed so far; monotonic
	Requests      atomic.Int64 // requests placed and not ended

	// Requests of this router that wait for their first token: their number, their expected work in ns,
	// and when the first of them began, by the scheduler's clock. Unseen are those whose first token
	// the router does not see; their work is expected to be done at UnseenUntil.
	Pending     atomic.Int64
	PendingWork atomic.Int64
	HeadSince   atomic.Int64
	Unseen      atomic.Int64
	UnseenUntil atomic.Int64

	Pace Pace
	// Reports counts the loads that the engine has reported.
	Reports atomic.Uint32
	// Requests and PrefillTokens at the last report.
	reportedRequests, reportedTokens atomic.Int64
	// PacedReports is the count up to which they are in Pace.
	PacedReports atomic.Uint32

	// Price is the cost of work on this rank in ns per unit, by Work, as the scheduler has learned
	// it; 0: the fleet's.
	Price [NumWork]atomic.Int64

	// Reported by the engine (scraped or in load messages); -1 if never.
	Running atomic.Int64
	Waiting atomic.Int64
	// QueuedTokens are the prompt tokens that the waiting requests still have to compute, if the
	// engine reports them (load messages); -1 unknown.
	QueuedTokens atomic.Int64
	kvUsage      atomic.Uint64 // math.Float64bits, 0…1

	// Feed is a FeedState: how far the KV event feed can be trusted.
	Feed atomic.Uint32 // FeedState
	// Events counts received KV event batches and load messages: evidence that the engine core is
	// alive.
	Events atomic.Uint64
	// EventBlockSize is the block size seen in events, in tokens; 0 unknown.
	EventBlockSize atomic.Int64
	// Orphans: the feed is live, but contains only blocks whose parent is unknown.
	Orphans atomic.Bool
	// Breaker is a BreakerState, set by the fleet.
	Breaker atomic.Uint32
	// CachedBlocks is the number of blocks that the index has for this rank.
	CachedBlocks atomic.Int64
	// UnusedBlocks is how many of these only finished sessions have used, about.
	UnusedBlocks atomic.Int64

	missedHits atomic.Int32 // consecutive predicted hits of which nothing was found: see RecordCacheHit
}

// CountReport counts a load that the engine has reported and that has been stored in the fields for it.
func (r *Rank) CountReport() {
	r.reportedRequests.Store(r.Requests.Load())
	r.reportedTokens.Store(r.PrefillTokens.Load())
	r.Reports.Add(1)
}

// WaitingOfOthers returns how many waiting requests of the last report cannot be this router's: it had no more there at
// that time, whether or not these have ended since.
func (r *Rank) WaitingOfOthers() int64 {
	return max(r.Waiting.Load()-max(r.Requests.Load(), r.reportedRequests.Load()), 0)
}

// OthersTokens is WaitingOfOthers in prompt tokens that wait. ok is false if the engine does not report them.
func (r *Rank) OthersTokens() (n int64, ok bool) {
	q := r.QueuedTokens.Load()
	return max(q-max(r.PrefillTokens.Load(), r.reportedTokens.Load()), 0), q >= 0
}

// KVUsage returns the fraction of KV blocks in use that the engine reports, 0…1.
func (r *Rank) KVUsage() float64 { return math.Float64frombits(r.kvUsage.Load()) }

// SetKVUsage stores the fraction of KV blocks in use that the engine reports.
func (r *Rank) SetKVUsage(v float64) { r.kvUsage.Store(math.Float64bits(v)) }

// SetCachedBlocks stores the number of blocks in the index, and that some have been evicted since the last
// call. Engines evict what has not been used for longest, so unused blocks count as evicted first.
func (r *Rank) SetCachedBlocks(n, evicted int64) {
	r.CachedBlocks.Store(n)
	for {
		unused := r.UnusedBlocks.Load()
		if unused == 0 || r.UnusedBlocks.CompareAndSwap(unused, max(min(unused-evicted, n), 0)) {
			return
		}
	}
}

// BlockSize returns the tokens per KV block of this rank: from events, else from the engine, else
// from the Spec; 0 if unknown.
func (r *Rank) BlockSize() int {
	if n := r.EventBlockSize.Load(); n > 0 {
		return int(n)
	}
	if info := r.Worker.Info(); info.BlockSize > 0 {
		return info.BlockSize
	}
	return r.Worker.Spec.BlockSize
}

// FeedState is how far a rank's KV event feed can be trusted.
type FeedState uint8

// The states of a feed.
const (
	FeedNone    FeedState = iota // no events for this rank: overlap is unknown
	FeedSyncing                  // connected, replay not finished
	FeedLive                     // contiguous
	FeedBroken                   // blocks were dropped after a gap that could not be filled; or the connection is lost, and the blocks may belong to an earlier incarnation
	// FeedSilent: the engine has no replay and has published nothing yet, so it is unknown whether
	// it ever will: overlap is unknown.
	FeedSilent
)

var feedNames = [...]string{"none", "syncing", "live", "broken", "silent"}

// String returns the state's name as it appears in metrics and explain records.
func (f FeedState) String() string {
	if int(f) < len(feedNames) {
		return feedNames[f]
	}
	return "unknown"
}

// BreakerState is whether failures of its own exclude a rank from choices.
type BreakerState uint32

// The states of a breaker.
const (
	BreakerClosed   BreakerState = iota // accepts requests
	BreakerHalfOpen                     // accepts one at a time, to test whether the rank has recovered
	BreakerOpen                         // accepts none
)

var breakerNames = [...]string{"closed", "half open", "open"}

// String returns the state's name as it appears in logs and the admin API.
func (b BreakerState) String() string {
	if int(b) < len(breakerNames) {
		return breakerNames[b]
	}
	return "unknown"
}

// Worker is one engine deployment: its Spec, its ranks and its state.
type Worker struct {
	Spec  Spec
	Ranks []*Rank
	// Speed is what the scheduler learns of the worker's work.
	Speed Speed

	hash   uint64
	state  atomic.Uint32
	reason atomic.Pointer[string]
	info   atomic.Pointer[Info]
}

// New returns a worker in state Joining with one Rank per rank of the Spec. The fleet sets the
// slots before it publishes the worker.
func New(spec Spec) *Worker {
	w := &Worker{Spec: spec, hash: fnv(spec.ID)}
	ranks := spec.Ranks
	if len(ranks) == 0 {
		ranks = []uint16{0}
	}
	for i, n := range ranks {
		r := &Rank{ID: ID{Worker: spec.ID, Rank: n}, Worker: w, URL: spec.URL}
		if len(spec.RankURLs) == len(ranks) {
			r.URL = spec.RankURLs[i]
		} else {
			r.SendRank = len(ranks) > 1 || n != 0
		}
		r.Running.Store(-1)
		r.Waiting.Store(-1)
		r.QueuedTokens.Store(-1)
		w.Ranks = append(w.Ranks, r)
	}
	info := &Info{Models: spec.Models, Engine: spec.Engine, BlockSize: spec.BlockSize}
	if len(spec.Models) > 0 {
		info.Base = spec.Models[0]
	}
	w.info.Store(info)
	return w
}

// Hash returns a hash of the worker's id, the same in every router.
func (w *Worker) Hash() uint64 { return w.hash }

// fnv is FNV-1a. Its values must not change, because sessions are placed by them.
func fnv(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// State returns the worker's state and the reason for it ("" when Ready).
func (w *Worker) State() (State, string) {
	s := State(w.state.Load())
	if p := w.reason.Load(); p != nil {
		return s, *p
	}
	return s, ""
}

// Removed reports whether the rank's worker was removed from the fleet, permanently: a worker that
// returns with the same id is another Worker. The caller must then drop what it has stored under
// the rank's Slot, because the clean-up after workers may have run before.
func (r *Rank) Removed() bool { return r.Worker != nil && State(r.Worker.state.Load()) == Gone }

// SetState is called by the fleet alone, which serialises transitions.
func (w *Worker) SetState(s State, reason string) {
	w.reason.Store(&reason)
	w.state.Store(uint32(s))
}

// Info returns what the engine has reported of itself; never nil and never modified.
func (w *Worker) Info() *Info { return w.info.Load() }

// SetInfo replaces the engine's Info. Only the fleet calls it.
func (w *Worker) SetInfo(info *Info) { w.info.Store(info) }
