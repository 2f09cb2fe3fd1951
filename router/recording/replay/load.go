package replay

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"sluice/router/blockhash"
	"sluice/router/kvindex"
	"sluice/router/recording"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// MaxBlocks bounds the prompt blocks kept in memory, at 8 bytes each.
const MaxBlocks = 1 << 27

// Trace is a recording in memory.
type Trace struct {
	Policy   string
	Weights  map[string]float64
	Requests []Request
	Ranks    []Rank
	pools    [][]int // by number; indexes into Ranks

	Events         int           // recorded changes of the index
	IndexTime      time.Duration // time to apply the events to an index
	Compared       int           // choices whose overlap could be compared with that index
	Agreed         int           // of these, choices whose overlap was equal
	Dropped        uint64        // entries dropped because the recorder's queue was full
	Skipped        int           // requests beyond MaxBlocks
	InitialBlocks  int           // blocks that ranks held when the recording began or when they joined
	InitialSkipped uint64        // initial blocks that the recorder did not write, or beyond MaxBlocks
	initialChains  []initialChain
	Retries        int // choices after the first attempt, which the replay omits
	Span           time.Duration
}

// Rank is one rank of the trace.
type Rank struct {
	ID                worker.ID
	Role              worker.Role
	Capacity          int // blocks
	CapacityEstimated bool
	removed           bool // the rank was removed at least once
}

// initialChain is a chain of blocks that a rank's cache contains at the beginning.
type initialChain struct {
	rank      int
	hasParent bool
	parent    blockhash.Seq
	seqs      []blockhash.Seq
}

// Request is one request with its first choice for each leg and its outcome.
type Request struct {
	At           time.Duration    // since the first request
	Leg          schedule.LegKind // Whole or PrefillLeg
	Pool         int
	Chosen       int // index into Trace.Ranks; -1: none
	DecodePool   int // -1: no decode leg
	DecodeChosen int
	Prompt       int // tokens
	MaxTokens    int
	BlockSize    int
	Seqs         []blockhash.Seq
	Ended        bool
	Cached       int // tokens, as the engine reported; -1: unknown
	TTFT, Decode time.Duration
	Status       int
}

// loader is the state of Load.
type loader struct {
	t         *Trace
	current   [worker.MaxSlots]int // rank by slot; -1: none
	ids       map[worker.ID]int
	pools     map[uint64]int
	open      map[uint64]int // request by the hash of its id, until it ends
	index     kvindex.Index
	overlap   kvindex.Overlap
	lastDepth []int
	maxDepth  []int
	first     time.Time
	last      time.Time
	blocks    int
}

// Load reads the files of one recording (recording.GroupByRecording) in the order of their
// names. It uses a file that ends too early (the router was killed, the disk was full) as far
// as possible and passes the reader's error to unfinished. Any other damage is an error.
func Load(paths []string, unfinished func(err error)) (*Trace, error) {
	l := &loader{t: &Trace{}, ids: map[worker.ID]int{}, pools: map[uint64]int{}, open: map[uint64]int{},
		index: kvindex.New(kvindex.Options{MaxBytes: 16 << 30})}
	for i := range l.current {
		l.current[i] = -1
	}
	paths = slices.Clone(paths)
	slices.Sort(paths)
	for _, path := range paths {
		if err := l.file(path, unfinished); err != nil {
			return nil, err
		}
	}
	l.t.Span = l.last.Sub(l.first)
	for i := range l.t.Ranks {
		if r := &l.t.Ranks[i]; r.Capacity <= 0 {
			// The engine did not report its capacity: use the maximum it was observed to hold.
			r.Capacity, r.CapacityEstimated = max(l.maxDepth[i], 1024), true
		}
	}
	return l.t, nil
}

func (l *loader) file(path string, unfinished func(error)) error {
	r, err := recording.Open(path)
	if err != nil {
		return err
	}
	defer r.Close()
	clear(l.pools)
	var e recording.Entry
	for {
		switch err := r.Next(&e); {
		case err == io.EOF:
			return nil
		case errors.Is(err, recording.ErrUnfinished), errors.Is(err, recording.ErrTruncated):
			unfinished(err)
			return nil
		case err != nil:
			return err
		}
		l.entry(&e)
	}
}

func (l *loader) entry(e *recording.Entry) {
	t := l.t
	if e.Kind == recording.RecordingInfo {
		return // every file has one, with the time of the recording's beginning
	}
	if l.last = e.At; l.first.IsZero() {
		l.first = e.At
	}
	switch e.Kind {
	case recording.Settings:
		t.Policy, t.Weights = e.Policy, e.Weights
	case recording.RankAdded:
		l.joined(e)
	case recording.RankRemoved, recording.Cleared:
		l.index.Clear(e.Slot)
		if i := l.current[e.Slot]; i >= 0 {
			l.lastDepth[i] = 0
			t.Ranks[i].removed = t.Ranks[i].removed || e.Kind == recording.RankRemoved
		}
		if e.Kind == recording.RankRemoved {
			l.current[e.Slot] = -1
		}
	case recording.Stored, recording.Removed:
		l.event(e)
	case recording.Pool:
		var ranks []int
		for _, s := range e.Slots {
			if i := l.current[s]; i >= 0 {
				ranks = append(ranks, i)
			}
		}
		l.pools[e.Pool] = len(t.pools)
		t.pools = append(t.pools, ranks)
	case recording.Chosen:
		l.chosen(e)
	case recording.Ended:
		l.ended(e)
	case recording.InitialBlocks:
		l.addInitialChain(e)
	case recording.InitialSkipped:
		t.InitialSkipped += e.Count
	case recording.DroppedEntries:
		t.Dropped += e.Count
	}
}

func (l *loader) joined(e *recording.Entry) {
	i, ok := l.ids[e.Rank]
	if !ok {
		i = len(l.t.Ranks)
		l.ids[e.Rank] = i
		l.t.Ranks = append(l.t.Ranks, Rank{ID: e.Rank, Role: e.Role})
		l.lastDepth, l.maxDepth = append(l.lastDepth, 0), append(l.maxDepth, 0)
	}
	l.t.Ranks[i].Capacity = max(l.t.Ranks[i].Capacity, e.TotalBlocks)
	l.current[e.Slot] = i
}

func (l *loader) event(e *recording.Entry) {
	began := time.Now()
	l.t.Events++
	i := l.current[e.Slot]
	if e.Kind == recording.Stored {
		res := l.index.Store(&kvindex.Stored{Slot: e.Slot, Tier: e.Tier, Salt: e.Salt, HasParent: e.HasParent, Parent: e.Parent, Engine: e.Engine, Local: e.Local})
		if i >= 0 {
			l.lastDepth[i] += res.Added
			l.maxDepth[i] = max(l.maxDepth[i], l.lastDepth[i])
		}
	} else {
		removed, _ := l.index.Remove(e.Slot, e.Tier, e.Engine)
		if i >= 0 {
			l.lastDepth[i] -= removed
		}
	}
	l.t.IndexTime += time.Since(began)
}

// addInitialChain adds a chain to the index and to the initial contents of the model's caches.
// The model ignores the removal of a rank, and therefore also the blocks with which it returns.
func (l *loader) addInitialChain(e *recording.Entry) {
	t, i := l.t, l.current[e.Slot]
	added := len(e.Seqs)
	if e.Exact {
		added = l.index.(kvindex.Importer).Import(e.Slot, &kvindex.Exported{Tier: e.Tier, HasParent: e.HasParent, Parent: e.Parent, ParentSeq: e.ParentSeq,
			Engine: e.Engine, Seqs: e.Seqs}).Added
	}
	if i < 0 {
		return
	}
	l.lastDepth[i] += added
	l.maxDepth[i] = max(l.maxDepth[i], l.lastDepth[i])
	if e.Tier != kvindex.Device || t.Ranks[i].removed {
		return
	}
	if l.blocks+len(e.Seqs) > MaxBlocks {
		t.InitialSkipped += uint64(len(e.Seqs))
		return
	}
	l.blocks += len(e.Seqs)
	t.InitialBlocks += len(e.Seqs)
	t.initialChains = append(t.initialChains, initialChain{rank: i, hasParent: e.HasParent, parent: e.ParentSeq, seqs: slices.Clone(e.Seqs)})
}

func (l *loader) chosen(e *recording.Entry) {
	t := l.t
	pool, ok := l.pools[e.Pool]
	if !ok {
		return
	}
	if e.Attempt > 1 {
		t.Retries++
		return
	}
	rank := -1
	if e.Found {
		rank = l.current[e.Slot]
	}
	if e.Leg == schedule.DecodeLeg {
		if i, under := l.open[e.Request]; under && t.Requests[i].DecodePool < 0 {
			t.Requests[i].DecodePool, t.Requests[i].DecodeChosen = pool, rank
		}
		return
	}
	if rank < 0 || len(t.pools[pool]) == 0 {
		return
	}
	if l.blocks+len(e.Seqs) > MaxBlocks {
		t.Skipped++
		return
	}
	l.blocks += len(e.Seqs)
	if e.Exact && len(e.Seqs) > 0 {
		l.index.Find(e.Seqs, &l.overlap)
		t.Compared++
		if l.overlap.Depth(e.Slot) == e.Overlap {
			t.Agreed++
		}
	}
	size := e.BlockSize
	if size <= 0 {
		size = 16
	}
	l.open[e.Request] = len(t.Requests)
	t.Requests = append(t.Requests, Request{At: e.At.Sub(l.first), Leg: e.Leg, Pool: pool, Chosen: rank, DecodePool: -1, DecodeChosen: -1,
		Prompt: e.Prompt, MaxTokens: e.Output, BlockSize: size, Seqs: slices.Clone(e.Seqs), Cached: -1})
}

func (l *loader) ended(e *recording.Entry) {
	i, ok := l.open[e.Request]
	if !ok {
		return
	}
	delete(l.open, e.Request)
	q := &l.t.Requests[i]
	q.Ended, q.Status, q.Cached, q.TTFT = true, e.Status, e.Cached, e.TTFT
	if q.Decode = e.Total - e.TTFT; e.TTFT <= 0 || q.Decode < 0 {
		q.Decode = time.Duration(max(e.OutputTokens, 1)) * assumedStepTime
	}
	if e.PromptTokens > 0 {
		q.Prompt = e.PromptTokens // as the engine counted
	}
}

// assumedStepTime is the duration of a decode step if the recording does not contain it.
const assumedStepTime = 20 * time.Millisecond

// String summarises the Trace.
func (t *Trace) String() string {
	s := fmt.Sprintf("%d requests on %d ranks in %v, %d changes of the index", len(t.Requests), len(t.Ranks), t.Span.Round(time.Second), t.Events)
	if t.InitialBlocks > 0 {
		s += fmt.Sprintf(", %d blocks held before", t.InitialBlocks)
	}
	if t.InitialSkipped > 0 {
		s += fmt.Sprintf(" (%d more could not be kept)", t.InitialSkipped)
	}
	return s
}
