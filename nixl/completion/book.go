package completion

import (
	"hash/maphash"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Book holds the waits that are open. All methods may be called from any
// goroutine. Open and Close take a lock for one map operation in one of many
// shards; a report does the same.
type Book struct {
	seed   maphash.Seed
	table  [shards]shard
	counts [events][2]atomic.Int64 // by event, failed or not

	unknown, malformed atomic.Int64
	next               atomic.Uint64
}

const (
	shardBits = 6
	shards    = 1 << shardBits
)

type shard struct {
	mu    sync.Mutex
	waits map[string]*Wait
	byNum map[uint64]*Wait
	_     [40]byte // one cache line each
}

// NewBook makes an empty Book.
func NewBook() *Book {
	b := &Book{seed: maphash.MakeSeed()}
	for i := range b.table {
		b.table[i].waits, b.table[i].byNum = make(map[string]*Wait), make(map[uint64]*Wait)
	}
	return b
}

// State of a transfer, as far as it has been told.
type State uint8

// The states.
const (
	Pending State = iota
	Done          // the decode engine has all of it
	Failed        // a part did not come
)

var stateNames = [...]string{"pending", "done", "failed"}

// String gives the state's name.
func (s State) String() string { return stateNames[min(int(s), len(stateNames)-1)] }

// Result is what has been told of a transfer.
type Result struct {
	State State
	Bytes int64         // of all parts
	Took  time.Duration // the longest part's, as the engine measured it
	After time.Duration // from Open to the report that settled it
	Freed bool          // prefill has let go of the blocks
	Lost  bool          // prefill's lease ended before they were read
}

// Wait is one request's hand-over. The zero Wait is ready for Open, and may be
// opened again once it is closed: nothing holds on to it after that.
type Wait struct {
	book   *Book
	shard  *shard // whose lock guards what follows
	id     string
	number uint64 // 0: none was asked for
	opened time.Time
	failed func()
	told   bool   // failed has been called, or is
	busy   bool   // failed is under way
	parts  uint64 // that have come, by TPRank
	res    Result
}

// Open begins a wait for what is told of request id, which must be the one that
// the engines are sent as X-Request-Id. failed is called once, from a tier's
// goroutine, when the transfer fails or prefill's lease ends before it was told
// done; it must not block, nor call the wait, and may be nil. A later Open of the
// same id takes the place of an earlier one. Close the wait.
func (b *Book) Open(w *Wait, id string, failed func()) {
	s := &b.table[maphash.String(b.seed, id)%shards]
	*w = Wait{book: b, shard: s, id: id, opened: time.Now(), failed: failed}
	s.mu.Lock()
	s.waits[id] = w
	s.mu.Unlock()
}

// Close ends the wait and answers what was told until now. After it, failed is
// not called any more: one that is under way is waited for. A Wait that was never
// opened answers Pending.
func (w *Wait) Close() Result {
	if w.book == nil {
		return Result{}
	}
	w.shard.mu.Lock()
	defer w.shard.mu.Unlock()
	for w.busy {
		w.shard.mu.Unlock()
		runtime.Gosched()
		w.shard.mu.Lock()
	}
	if w.shard.waits[w.id] == w {
		delete(w.shard.waits, w.id)
	}
	if w.number != 0 {
		delete(w.shard.byNum, w.number)
		w.number = 0
	}
	return w.res
}

// Opened is when the wait was opened.
func (w *Wait) Opened() time.Time { return w.opened }

// Number names an open wait for a ticket of a completion board, whose records
// carry it (Landed). It ends with Close and is not used again.
func (b *Book) Number(w *Wait) uint64 {
	s := w.shard
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.number == 0 {
		w.number = b.next.Add(1)<<shardBits | uint64(maphash.String(b.seed, w.id)%shards)
		s.byNum[w.number] = w
	}
	return w.number
}

// Landed books what a board's record tells of the wait with this number. It says
// whether there is one.
func (b *Book) Landed(number uint64, failed bool, bytes int64, took time.Duration) bool {
	r := Report{Event: Received, Failed: failed, Bytes: bytes, Took: took, TPSize: 1}
	b.counted(&r)
	s := &b.table[number%shards]
	s.mu.Lock()
	if !b.finish(s, s.byNum[number], &r) {
		b.unknown.Add(1)
		return false
	}
	return true
}

// Result is what has been told until now.
func (w *Wait) Result() Result {
	if w.book == nil {
		return Result{}
	}
	w.shard.mu.Lock()
	defer w.shard.mu.Unlock()
	return w.res
}

// Len is how many waits are open.
func (b *Book) Len() int {
	n := 0
	for i := range b.table {
		s := &b.table[i]
		s.mu.Lock()
		n += len(s.waits)
		s.mu.Unlock()
	}
	return n
}

// Line takes a report as it came over a tier, and says whether it was one. What
// does not parse is counted.
func (b *Book) Line(line []byte) bool {
	r, err := Parse(line)
	if err != nil {
		b.malformed.Add(1)
		return false
	}
	b.Report(&r)
	return true
}

// Report books a report for the request that waits for it.
func (b *Book) Report(r *Report) {
	b.counted(r)
	id := bare(r.Request)
	for range maxSuffixes + 1 {
		if b.take(id, r) {
			return
		}
		if id = shorter(id); id == nil {
			break
		}
	}
	b.unknown.Add(1)
}

func (b *Book) counted(r *Report) {
	failed := 0
	if r.Failed {
		failed = 1
	}
	b.counts[r.Event][failed].Add(1)
}

// take gives the report to the wait of id, if there is one.
func (b *Book) take(id []byte, r *Report) bool {
	s := &b.table[maphash.Bytes(b.seed, id)%shards]
	s.mu.Lock()
	return b.finish(s, s.waits[string(id)], r)
}

// finish gives the report to w, which may be nil, and unlocks s.
func (b *Book) finish(s *shard, w *Wait, r *Report) bool {
	if w == nil {
		s.mu.Unlock()
		return false
	}
	failed := w.take(r)
	if failed == nil || w.told {
		s.mu.Unlock()
		return true
	}
	w.told, w.busy = true, true
	s.mu.Unlock()
	failed()
	s.mu.Lock()
	w.busy = false
	s.mu.Unlock()
	return true
}

// take books a report under the shard's lock and answers whom to tell.
func (w *Wait) take(r *Report) (failed func()) {
	switch r.Event {
	case Sent:
		w.res.Freed = true
	case Expired:
		w.res.Freed = true
		if w.res.State == Pending {
			w.res.Lost, failed = true, w.failed
		}
	case Received:
		bit := uint64(1) << r.TPRank
		if w.res.State != Pending || w.parts&bit != 0 {
			return nil
		}
		w.parts |= bit
		w.res.Bytes += r.Bytes
		w.res.Took = max(w.res.Took, r.Took)
		if r.Failed {
			w.res.State, failed = Failed, w.failed
		} else if w.parts == 1<<r.TPSize-1 {
			w.res.State = Done
		}
		if w.res.State != Pending {
			w.res.After = time.Since(w.opened)
		}
	}
	return failed
}

// Count is how many reports of an event have come.
func (b *Book) Count(e Event, failed bool) int64 {
	if e >= events {
		return 0
	}
	if failed {
		return b.counts[e][1].Load()
	}
	return b.counts[e][0].Load()
}

// Unknown counts reports of requests that nobody waits for; Malformed lines that
// are no reports.
func (b *Book) Unknown() int64 { return b.unknown.Load() }

// Malformed is described at Unknown.
func (b *Book) Malformed() int64 { return b.malformed.Load() }
