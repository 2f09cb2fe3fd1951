package recording

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Options configures a Recorder; zero values select the defaults.
type Options struct {
	Ranks   func() []*worker.Rank // returns the ranks that exist when a recording begins
	Policy  string
	Weights map[string]float64 // the scheduler's, by their names in the configuration
	Log     *slog.Logger
	// Contents calls yield for the blocks that the indexes hold for a rank, as kvindex.Exporter
	// does; exact is false for blocks of the approximate index. The recording's goroutine calls
	// it when the recording begins and when a rank joins. Nil: the recording begins as if the
	// ranks held no blocks.
	Contents         func(rank *worker.Rank, yield func(exact bool, x *kvindex.Exported) bool)
	MaxInitialBlocks int   // maximum blocks written at the beginning over all ranks, in equal shares [4 Mi]
	QueueBytes       int64 // maximum bytes of entries not yet written; further entries are dropped [64 MiB]
}

// Sink receives the frames of a recording in order. Its methods are called by the recording's
// goroutine.
type Sink interface {
	// Frame writes one frame. start means that a file may begin with it.
	Frame(start bool, frame []byte) error
	// Close is called once, after the last frame.
	Close() error
}

// ErrReaderClosed is a Sink's error when the client that read the recording has disconnected.
// Most recordings of a running router end this way.
var ErrReaderClosed = errors.New("its reader disconnected")

// ErrBusy means that a recording is already active; there is at most one.
var ErrBusy = errors.New("recording: another recording of this router is in progress; one at a time")

// Recorder writes events, choices and outcomes to the sink of the active recording. Its methods
// may be called from any goroutine. Those that record an entry never block: they cost an atomic
// load while no recording is active, and a copy into a queue otherwise.
type Recorder struct {
	opt     Options
	session atomic.Pointer[session]
	mu      sync.Mutex // serialises Start and Close
	closed  chan struct{}

	entries, dropped, bytes atomic.Uint64
}

// New returns a Recorder.
func New(opt Options) *Recorder {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.QueueBytes <= 0 {
		opt.QueueBytes = 64 << 20
	}
	if opt.MaxInitialBlocks <= 0 {
		opt.MaxInitialBlocks = 4 << 20
	}
	if opt.Ranks == nil {
		opt.Ranks = func() []*worker.Rank { return nil }
	}
	return &Recorder{opt: opt, closed: make(chan struct{})}
}

// Recording is one active recording.
type Recording struct{ s *session }

// Start begins a recording into sink. The recording continues until Stop or Close is called or
// the sink fails.
func (r *Recorder) Start(sink Sink) (*Recording, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.closed:
		return nil, ErrClosed
	default:
	}
	s := newSession(r, sink)
	if !r.session.CompareAndSwap(nil, s) {
		return nil, ErrBusy
	}
	go s.run()
	return &Recording{s}, nil
}

// Done is closed when the recording has ended and its sink is closed.
func (g *Recording) Done() <-chan struct{} { return g.s.done }

// Stop ends the recording, waits until it is written completely, and returns the recording's
// error.
func (g *Recording) Stop() error {
	g.s.r.session.CompareAndSwap(g.s, nil)
	return g.s.close()
}

// Close stops the active recording, if any, and prevents further ones.
func (r *Recorder) Close() error {
	r.mu.Lock()
	select {
	case <-r.closed:
	default:
		close(r.closed)
	}
	r.mu.Unlock()
	if s := r.session.Load(); s != nil {
		return (&Recording{s}).Stop()
	}
	return nil
}

// Active returns whether a recording is active.
func (r *Recorder) Active() bool { return r.session.Load() != nil }

// Counts returns the entries written, the entries dropped because the queue was full, and the
// bytes passed to sinks, since the router started.
func (r *Recorder) Counts() (entries, dropped, bytes uint64) {
	return r.entries.Load(), r.dropped.Load(), r.bytes.Load()
}

// RankAdded records a new rank. Later entries identify it by its slot.
func (r *Recorder) RankAdded(rank *worker.Rank) {
	if s := r.session.Load(); s != nil {
		s.enqueue(item{b: rankAddedEntry(s.hasSpace(), rank), joined: rank})
	}
}

// RankRemoved records the removal of a rank.
func (r *Recorder) RankRemoved(rank *worker.Rank) { r.slot(RankRemoved, rank) }

// Cleared implements kvevents.IndexObserver.
func (r *Recorder) Cleared(rank *worker.Rank) { r.slot(Cleared, rank) }

func (r *Recorder) slot(k Kind, rank *worker.Rank) {
	if s := r.session.Load(); s != nil {
		b := s.hasSpace()
		b.b = appendNumber(begin(b.b, k, time.Now()), int(rank.Slot))
		s.enqueue(item{b: b})
	}
}

// Stored implements kvevents.IndexObserver.
func (r *Recorder) Stored(rank *worker.Rank, ev *kvindex.Stored) {
	if s := r.session.Load(); s != nil {
		b := s.hasSpace()
		b.b = appendStored(begin(b.b, Stored, time.Now()), rank.Slot, ev.Tier, ev.Salt, ev.HasParent, ev.Parent, ev.Engine, ev.Local)
		s.enqueue(item{b: b})
	}
}

// Removed implements kvevents.IndexObserver.
func (r *Recorder) Removed(rank *worker.Rank, tier kvindex.Tier, engine []kvindex.EngineHash) {
	if s := r.session.Load(); s != nil {
		b := s.hasSpace()
		b.b = appendUint64s(append(appendNumber(begin(b.b, Removed, time.Now()), int(rank.Slot)), byte(tier)), engine)
		s.enqueue(item{b: b})
	}
}

// RecordChoice records one choice; c is the zero Choice when no rank could be chosen. seqs are
// the hashes of the prompt's blocks of blockSize tokens: those of the event-driven index if
// exact is set, else those of the approximate index. RecordChoice copies them.
func (r *Recorder) RecordChoice(q *schedule.Query, c schedule.Choice, seqs []blockhash.Seq, blockSize int, exact bool) {
	s := r.session.Load()
	if s == nil {
		return
	}
	e := Entry{Request: requestHash(q.RequestID), Leg: q.Leg, Attempt: q.Attempt, Prompt: q.PromptTokens, Output: q.MaxTokens,
		Predicted: c.CachedTokens, Overlap: c.OverlapBlocks, Cost: c.Cost, Exact: exact, BlockSize: blockSize, Seqs: seqs}
	if c.Rank != nil {
		e.Found, e.Slot = true, c.Rank.Slot
	}
	b := s.hasSpace()
	// The recording's goroutine numbers the pools and inserts the number at head.
	b.b = begin(b.b, Chosen, time.Now())
	b.head = len(b.b)
	b.b = appendChosen(b.b, &e)
	s.enqueue(item{b: b, pool: q.Candidates})
}

// RequestEnded records a request's outcome.
func (r *Recorder) RequestEnded(requestID string, o schedule.Outcome) {
	if s := r.session.Load(); s != nil {
		e := Entry{Kind: Ended, At: time.Now(), Request: requestHash(requestID), Status: o.Status, Cached: o.CachedTokens,
			PromptTokens: o.PromptTokens, OutputTokens: o.OutputTokens, TTFT: o.TTFT, Total: o.Total}
		b := s.hasSpace()
		b.b = e.Append(b.b)
		s.enqueue(item{b: b})
	}
}

func requestHash(id string) uint64 { return xxh3.HashString(id) }

func rankAddedEntry(b *buffer, rank *worker.Rank) *buffer {
	e := Entry{Kind: RankAdded, At: time.Now(), Slot: rank.Slot, Rank: rank.ID}
	if w := rank.Worker; w != nil {
		info := w.Info()
		e.Role, e.Model, e.TotalBlocks, e.WorkerRanks = w.Spec.Role, info.Base, info.TotalBlocks, len(w.Ranks)
		e.BlockSize = rank.BlockSize()
	}
	b.b = e.Append(b.b)
	return b
}

// poolEntry appends an entry that defines a pool's number.
func poolEntry(b []byte, at time.Time, n uint64, ranks []*worker.Rank) []byte {
	b = begin(b, Pool, at)
	b = binary.AppendUvarint(b, n)
	b = binary.AppendUvarint(b, uint64(len(ranks)))
	for _, r := range ranks {
		b = binary.AppendUvarint(b, uint64(r.Slot))
	}
	return b
}
