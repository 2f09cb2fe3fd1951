package worker

import (
	"math"
	"net/netip"
	"sync/atomic"
)

// Spec is what an operator or a discovery source says of a worker. It is
// immutable once given to the fleet; a change is a removal and a new Spec.
type Spec struct {
	// ID is unique in the fleet; empty means "made from role and address".
	ID string
	// URL is the base URL of the engine, without a trailing slash.
	URL string
	// Role is the leg the worker takes.
	Role Role
	// Models it serves; empty: asked from /v1/models.
	Models []string
	// Ranks are the data-parallel ranks served here; empty means {0}.
	Ranks []uint16
	// StartRank is the engine's own number of the first rank that the server at URL
	// serves, where it serves those of one node out of several; 0: what the engine tells.
	StartRank int
	// RankURLs, when set, gives each of Ranks a server of its own, in the same
	// order; the rank header is then not sent.
	RankURLs []string
	// Labels are free words that pools and requests select by.
	Labels []string
	// Engine is "vllm", "sglang", "trtllm"; empty: found out.
	Engine string
	// HealthPath is the path of health probes, beginning with a slash; empty: what the
	// fleet's options say, or the first of the usual ones that the engine has.
	HealthPath string
	// BlockSize in tokens; 0: found out from events or the engine's metrics.
	BlockSize int
	// KVEvents are ZMQ PUB endpoints: one base endpoint (rank r listens at
	// port+r) or one per rank. The single word "auto" asks the engine; "off"
	// or empty with no discovery means no events.
	KVEvents []string
	// KVReplay are the ZMQ ROUTER endpoints for replay, by the same rule.
	KVReplay []string
	// LoadEvents are ZMQ PUB endpoints of load messages, by the same rule; empty:
	// what the engine tells.
	LoadEvents []string
	// MaxRequests bounds the requests under way on all ranks together, RankRequests
	// and RankTokens those and the prompt tokens waiting to be computed on each rank,
	// all by the router's own count; 0: what limits says for every rank.
	MaxRequests, RankRequests, RankTokens int64
	// Options are family-specific keys (bootstrap_port, init_port, …), each
	// with one or more values, handed to the disagg family unread.
	Options map[string][]string
	// Networks, when set, are where the addresses that the engine itself tells
	// (of KV events) must lie: of workers that nobody vouches for but a token.
	Networks []netip.Prefix
	// Source says where the Spec came from: "flag", "config", "file", ….
	Source string
}

// Info is what the router has learned from the engine itself. The fleet
// replaces it as a whole; readers never modify it.
type Info struct {
	Models      []string // from /v1/models, or the Spec's
	Base        string   // the base model, first of them; salts the block hashes
	Adapters    []string // names among Models that are LoRA adapters of Base
	Engine      string   // "vllm", "sglang", "" when unknown
	Version     string
	BlockSize   int // tokens; 0 unknown
	MaxModelLen int // tokens; 0 unknown
	TotalBlocks int // KV blocks per rank; 0 unknown
	// BootstrapPort of an SGLang prefill engine, for its hand-over; 0 unknown.
	BootstrapPort int
	// Deltas: SGLang's own /generate streams what is new, not all so far; nil unknown.
	Deltas *bool
	// DPSize is how many data-parallel ranks the engine has, here or on other
	// nodes; 0 unknown.
	DPSize int
	// StartRank is the lowest rank that the engine showed here; above 0 on the second
	// node of a deployment that is balanced by node.
	StartRank int
}

// Rank is the live state of one (worker, rank). All of its mutable fields are
// atomics: the request path adds and subtracts, scrapers store, the scheduler
// and the console load. Loads of several fields are not a consistent snapshot,
// and need not be: each is a term of an estimate.
type Rank struct {
	ID     ID
	Slot   Slot
	Worker *Worker
	// URL of the server that takes this rank's requests.
	URL string
	// SendRank: the rank is addressed by the X-data-parallel-rank header.
	SendRank bool

	// Reserved by requests under way that this router placed.
	PrefillTokens atomic.Int64 // prompt tokens still to be computed
	DecodeBlocks  atomic.Int64 // KV blocks of requests being decoded
	DecodeWork    atomic.Int64 // those blocks, each times the steps it is expected to stay for
	Computed      atomic.Int64 // prompt tokens computed so far: a count that only grows
	Requests      atomic.Int64 // requests placed and not ended

	// Price is what work on this rank costs in ns per unit, by Work, as the
	// scheduler has learned it; 0: as everywhere.
	Price [NumWork]atomic.Int64

	// Reported by the engine (scraped or told); -1 when never seen.
	Running atomic.Int64
	Waiting atomic.Int64
	// QueuedTokens are the prompt tokens that its waiting requests have still to
	// compute, where it says so (load messages); -1 unknown.
	QueuedTokens atomic.Int64
	kvUsage      atomic.Uint64 // math.Float64bits, 0…1

	// Feed is a FeedState: what the KV event feed is worth.
	Feed atomic.Uint32 // FeedState
	// Events counts the KV event batches and load messages that have come: a sign that
	// the engine core lives.
	Events atomic.Uint64
	// EventBlockSize is the block size seen in events, in tokens; 0 unknown.
	EventBlockSize atomic.Int64
	// Orphans: the feed is live, and yields nothing but blocks whose parent is unknown.
	Orphans atomic.Bool
	// Breaker is a BreakerState; the fleet's to set.
	Breaker atomic.Uint32
	// Held is how many blocks the index holds for this rank.
	CachedBlocks atomic.Int64

	missedHits atomic.Int32 // hits in a row of which nothing was found: see Found
}

// KVUsage is the engine's reported share of KV blocks in use, 0…1.
func (r *Rank) KVUsage() float64 { return math.Float64frombits(r.kvUsage.Load()) }

// SetKVUsage stores the engine's reported share of KV blocks in use.
func (r *Rank) SetKVUsage(v float64) { r.kvUsage.Store(math.Float64bits(v)) }

// BlockSize is the tokens per KV block of this rank: seen in events, else
// learned from the engine, else the Spec's; 0 when nobody has said.
func (r *Rank) BlockSize() int {
	if n := r.EventBlockSize.Load(); n > 0 {
		return int(n)
	}
	if info := r.Worker.Info(); info.BlockSize > 0 {
		return info.BlockSize
	}
	return r.Worker.Spec.BlockSize
}

// FeedState says how far a rank's KV event feed can be trusted.
type FeedState uint8

// The feed's states.
const (
	FeedNone    FeedState = iota // no events for this rank: overlap is unknown
	FeedSyncing                  // connected, replay not finished
	FeedLive                     // contiguous
	FeedBroken                   // a gap that could not be filled, and blocks were dropped; or the connection is lost, and they may be a former life's
	// FeedSilent: the engine has no replay to ask and has said nothing yet, so
	// nobody knows whether it ever will: overlap is unknown.
	FeedSilent
)

var feedNames = [...]string{"none", "syncing", "live", "broken", "silent"}

// String gives the state's name as it stands in metrics and explain records.
func (f FeedState) String() string {
	if int(f) < len(feedNames) {
		return feedNames[f]
	}
	return "unknown"
}

// BreakerState says whether failures of its own keep a rank out of the choice.
type BreakerState uint32

// The states of a breaker.
const (
	BreakerClosed   BreakerState = iota // takes requests
	BreakerHalfOpen                     // takes one at a time, to see whether it is well again
	BreakerOpen                         // takes none
)

var breakerNames = [...]string{"closed", "half open", "open"}

// String gives the state's name as it stands in logs and the admin API.
func (b BreakerState) String() string {
	if int(b) < len(breakerNames) {
		return breakerNames[b]
	}
	return "unknown"
}

// Worker is one engine deployment: its Spec, its ranks, its state.
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

// New makes a worker in state Joining with one Rank per rank of the Spec.
// Slots are the fleet's to set before the worker is shown to anyone.
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

// Hash is a hash of the worker's id, the same in every router.
func (w *Worker) Hash() uint64 { return w.hash }

// fnv is FNV-1a, whose values may not change: sessions are placed by them.
func fnv(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

// State is the worker's state and why it is in it ("" when Ready).
func (w *Worker) State() (State, string) {
	s := State(w.state.Load())
	if p := w.reason.Load(); p != nil {
		return s, *p
	}
	return s, ""
}

// Removed says whether the rank's worker was taken out of the fleet, for good: who comes back
// under its id is another Worker. What is noted of the rank by its Slot is then to be
// dropped, for whoever clears up after workers may have been there before.
func (r *Rank) Removed() bool { return r.Worker != nil && State(r.Worker.state.Load()) == Gone }

// SetState is called by the fleet alone, which serialises transitions.
func (w *Worker) SetState(s State, reason string) {
	w.reason.Store(&reason)
	w.state.Store(uint32(s))
}

// Info is what the engine has said of itself; never nil, never modified.
func (w *Worker) Info() *Info { return w.info.Load() }

// SetInfo replaces what is known of the engine; the fleet's to call.
func (w *Worker) SetInfo(info *Info) { w.info.Store(info) }
