package kvevents

import (
	"log/slog"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Source is where one rank's events come from.
type Source struct {
	Rank     *worker.Rank
	Model    string // salts the hashes
	Engine   string // "vllm", "sglang": chooses the decoder; "" is found out
	Endpoint string // PUB, "tcp://host:port"; "*" hosts replaced already
	Bind     bool   // the engine connects: the feed binds Endpoint
	Replay   string // ROUTER; "" when the engine has none
	Topic    string
}

// Options of a Feeds.
type Options struct {
	Index    kvindex.Index
	Log      *slog.Logger
	Observer Observer
	HWM      int           // ZMQ receive high-water mark [100_000]
	MaxFrame int           // bytes of one message; larger ones are dropped and counted [64 MiB]
	Linger   time.Duration // [0]
}

// Observer counts; methods must be safe for concurrent use.
type Observer interface {
	// FeedCounted adds n to a named counter of one rank: batches, stored,
	// removed, cleared, repeated, unknown_removed, orphans, gaps, replays,
	// replayed_batches, restarts, resets, garbage, oversize, wrong_rank.
	FeedCounted(id worker.ID, counter string, n int)
}

// Feeds runs the subscriptions of a fleet.
type Feeds struct {
	impl feeds
}

type feeds struct{}

// NewFeeds makes an empty set of feeds.
func NewFeeds(opt Options) *Feeds { panic("contract") }

// Start subscribes to one rank; a second Start of the same rank replaces the
// first. It returns an error for an endpoint ZMQ refuses.
func (f *Feeds) Start(src Source) error { panic("contract") }

// Stop ends a rank's feed and clears the rank in the index; it returns when
// the feed's goroutine has ended.
func (f *Feeds) Stop(id worker.ID) { panic("contract") }

// Close stops all feeds.
func (f *Feeds) Close() { panic("contract") }

// Event is one decoded KV event, whatever the encoding it came in. Slices are
// borrowed until the decoder's next call.
type Event struct {
	Kind      EventKind
	Hashes    []kvindex.EngineHash
	HasParent bool
	Parent    kvindex.EngineHash
	Tokens    []uint32 // empty for offload-tier stores
	BlockSize int
	Medium    string // as sent; "" when nil
	LoRA      string
	CacheSalt string
	Group     int
	Extra     bool // blocks carry extra keys beyond LoRA and salt (multimodal)
	Locals    []blockhash.Local
}

// EventKind tells the three KV events apart.
type EventKind uint8

// The kinds.
const (
	BlockStored EventKind = iota
	BlockRemoved
	AllBlocksCleared
)
