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

// Options of a Recorder; zero values mean the default.
type Options struct {
	Ranks   func() []*worker.Rank // those there are when a recording begins
	Policy  string
	Weights map[string]float64 // of the scheduler, by their names in the configuration
	Log     *slog.Logger
	// Contents calls yield for what the indexes hold of a rank, as kvindex.Exporter
	// does; exact is false for what the approximate one holds. It is called on the
	// recording's goroutine, when the recording begins and when a rank joins. Nil:
	// a recording begins as if ranks held nothing.
	Contents         func(rank *worker.Rank, yield func(exact bool, x *kvindex.Exported) bool)
	MaxInitialBlocks int   // blocks written of all ranks at the beginning, each having its share [4 Mi]
	QueueBytes       int64 // of entries not yet written; what does not fit is dropped [64 MiB]
}

// Sink takes the frames of a recording, in order, on the recording's goroutine.
type Sink interface {
	// Frame writes one frame; start says that a file may begin with it.
	Frame(start bool, frame []byte) error
	// Close is called once, after the last frame.
	Close() error
}

// ErrReaderClosed is what a Sink says when whoever read the recording has gone, which
// is how most recordings of a running router end.
var ErrReaderClosed = errors.New("its reader has left")

// ErrBusy: somebody records already; there is one recording at a time.
var ErrBusy = errors.New("record: this router is being recorded already")

// Recorder is told what happens and writes it to the sink of the recording under
// way. Its methods may be called from any goroutine, cost an atomic load while
// nobody records, and else a copy into a queue; they never wait.
type Recorder struct {
	opt     Options
	session atomic.Pointer[session]
	mu      sync.Mutex // of Start and Close
	closed  chan struct{}

	entries, dropped, bytes atomic.Uint64
}

// New makes a Recorder.
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

// Recording is one recording under way.
type Recording struct{ s *session }

// Start begins a recording into sink; it goes on until it is stopped, or until
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

// Stop ends the recording, waits until all of it is written, and says how that
// went.
func (g *Recording) Stop() error {
	g.s.r.session.CompareAndSwap(g.s, nil)
	return g.s.close()
}

// Close stops the recording under way, if there is one, and no other begins after it.
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

// Active says whether a recording is under way.
func (r *Recorder) Active() bool { return r.session.Load() != nil }

// Counts are the entries written, those dropped for want of room, and the bytes
// given to sinks, since the start.
func (r *Recorder) Counts() (entries, dropped, bytes uint64) {
	return r.entries.Load(), r.dropped.Load(), r.bytes.Load()
}

// RankAdded notes a rank, by whose slot all else will name it.
func (r *Recorder) RankAdded(rank *worker.Rank) {
	if s := r.session.Load(); s != nil {
		s.enqueue(item{b: rankAddedEntry(s.hasSpace(), rank), joined: rank})
	}
}

// RankRemoved notes that a rank is gone.
func (r *Recorder) RankRemoved(rank *worker.Rank) { r.slot(RankRemoved, rank) }

// Cleared implements kvevents.Tap.
func (r *Recorder) Cleared(rank *worker.Rank) { r.slot(Cleared, rank) }

func (r *Recorder) slot(k Kind, rank *worker.Rank) {
	if s := r.session.Load(); s != nil {
		b := s.hasSpace()
		b.b = appendNumber(begin(b.b, k, time.Now()), int(rank.Slot))
		s.enqueue(item{b: b})
	}
}

// Stored implements kvevents.Tap.
func (r *Recorder) Stored(rank *worker.Rank, ev *kvindex.Stored) {
	if s := r.session.Load(); s != nil {
		b := s.hasSpace()
		b.b = appendStored(begin(b.b, Stored, time.Now()), rank.Slot, ev.Tier, ev.Salt, ev.HasParent, ev.Parent, ev.Engine, ev.Local)
		s.enqueue(item{b: b})
	}
}

// Removed implements kvevents.Tap.
func (r *Recorder) Removed(rank *worker.Rank, tier kvindex.Tier, engine []kvindex.EngineHash) {
	if s := r.session.Load(); s != nil {
		b := s.hasSpace()
		b.b = appendUint64s(append(appendNumber(begin(b.b, Removed, time.Now()), int(rank.Slot)), byte(tier)), engine)
		s.enqueue(item{b: b})
	}
}

// RecordChoice notes one choice; c is the zero Choice when there was none. seqs are the
// prompt's blocks of blockSize tokens, as the index knows them where exact is
// set, else as the approximate one does; they are copied.
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
	// The pool's number is put between by the writer, who gives them out.
	b.b = begin(b.b, Chosen, time.Now())
	b.head = len(b.b)
	b.b = appendChosen(b.b, &e)
	s.enqueue(item{b: b, pool: q.Candidates})
}

// RequestEnded notes how a request ended.
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

// poolEntry defines a pool's number.
func poolEntry(b []byte, at time.Time, n uint64, ranks []*worker.Rank) []byte {
	b = begin(b, Pool, at)
	b = binary.AppendUvarint(b, n)
	b = binary.AppendUvarint(b, uint64(len(ranks)))
	for _, r := range ranks {
		b = binary.AppendUvarint(b, uint64(r.Slot))
	}
	return b
}
