package schedule

import (
	"math"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"
)

// Bounds of one record; what comes beyond is counted, not kept.
const (
	maxDecisions = 8
	maxNotes     = 16
	maxNoteBytes = 256
	maxIDBytes   = 128
)

// Outcome is how a request ended, added to its explain record.
type Outcome struct {
	Status       int
	Reason       string // front.Reason or relay.Cause, "" when well
	CachedTokens int    // as the engine reported; -1 unknown
	PromptTokens int
	OutputTokens int
	TTFT         time.Duration // 0: no token came
	Total        time.Duration
	Transfer     Transfer
}

// Transfer is what was told of a request's KV transfer; the zero Transfer is one
// that was not watched.
type Transfer struct {
	State string // done, failed, expired, stalled, untold; a constant
	Bytes int64
	Took  time.Duration // as the engine measured it
	After time.Duration // from prefill's answer to the report
}

// book keeps the records of the last N requests: a ring of slots, taken in the
// order requests first choose, and a table from id to slot. A slot's buffers stay
// with it, so that a full ring allocates no more.
//
// The table is never locked and nothing is deleted from it. A cell is one word: 32
// bits of the id's hash, and the low 32 bits of the number under which the record
// was taken, from which its slot follows, and whether the ring has gone over it. A
// bucket is one cache line of cells, chosen by other bits of the hash; the oldest
// cell gives way. With at least four cells a record on average some one bucket in a
// hundred thousand has more live ones than room: the oldest is then in Recent, but
// not found by its id. A cell is stored while the record's mutex is held, so who
// finds it waits for the record to be complete; two that store to one bucket at
// once may take the same cell, and one id is lost likewise.
type book struct {
	slots   []record
	next    atomic.Uint64
	buckets []bucket
	mask    uint64
}

// record is one request's. There are as many as streams, up to what the ring holds, and what
// few requests have stands elsewhere.
type record struct {
	mu        sync.Mutex
	used      bool
	ended     bool
	lost      uint16 // decisions beyond the bound
	hash      uint64
	id        []byte // copied: ids may be borrowed from the connection's buffers
	seq       uint64
	begun     int64 // ns since the scheduler's start
	decisions []decision
	terms     []term // of all decisions, one after the other
	aside     *aside // nil: none of it
	outcome   ended
}

// aside is what few records have. It stays with the slot, as its buffers do.
type aside struct {
	pairs     []paired
	notes     []note
	lostNotes int
	transfer  Transfer
}

// ended is an Outcome as a record keeps it, but for its Transfer.
type ended struct {
	reason                         string
	status, cached, prompt, output int32
	ttft, total                    time.Duration
}

// rest gives the record's aside, made where there was none.
func (r *record) rest() *aside {
	if r.aside == nil {
		r.aside = new(aside)
	}
	return r.aside
}

// end completes the record.
func (r *record) end(out *Outcome) {
	r.outcome = ended{
		reason: out.Reason, status: int32(out.Status), cached: clip32(out.CachedTokens), prompt: clip32(out.PromptTokens), output: clip32(out.OutputTokens),
		ttft: out.TTFT, total: out.Total,
	}
	if r.ended = true; out.Transfer.State != "" || r.aside != nil {
		r.rest().transfer = out.Transfer
	}
}

// clip32 is n as far as 32 bits hold it: engines say what they like.
func clip32(n int) int32 { return int32(max(math.MinInt32, min(n, math.MaxInt32))) }

// decision is one choice. There are as many as streams and more: it fills a size class of 48
// bytes.
type decision struct {
	at         time.Duration // since begun
	attempt    int32
	prompt     int32
	output     int32
	candidates int32
	excluded   int32
	from, to   int32 // of record.terms
	chosen     int32 // index in terms, -1: none
	races      int32
	leg        Leg
}

type note struct {
	at   time.Duration
	text string
}

func newBook(n int) *book {
	buckets := 1 << bits.Len(uint(n/2)) // n/2 or more, of eight cells each
	return &book{slots: make([]record, n), buckets: make([]bucket, buckets), mask: uint64(buckets - 1)}
}

func hashID(id string) uint64 { return xxh3.HashString(id) }

func clipID(id string) string {
	if len(id) > maxIDBytes {
		return id[:maxIDBytes]
	}
	return id
}

// find gives the newest record of a hash that the ring still has.
func (b *book) find(h uint64) (*record, bool) {
	now := b.next.Load()
	newest, found := uint32(0), false
	for i, cells := 0, &b.buckets[h&b.mask]; i < len(cells); i++ {
		w := cells[i].Load()
		if w == 0 || w>>32 != h>>32 {
			continue
		}
		if age := uint32(now) - uint32(w); age < uint32(len(b.slots)) && (!found || age < newest) {
			newest, found = age, true
		}
	}
	if !found {
		return nil, false
	}
	return b.at(now - uint64(newest)), true
}

// at is the slot of the record taken under a number.
func (b *book) at(seq uint64) *record { return &b.slots[(seq-1)%uint64(len(b.slots))] }

// enter leads h to the record taken under seq, in place of the same hash's older
// one, or of the oldest cell.
func (b *book) enter(h, seq uint64) {
	cells := &b.buckets[h&b.mask]
	victim, oldest := 0, uint32(0)
	for i := range cells {
		w := cells[i].Load()
		if w == 0 || w>>32 == h>>32 {
			victim = i
			break
		}
		if age := uint32(seq) - uint32(w); age > oldest && age < 1<<31 {
			victim, oldest = i, age
		}
	}
	cells[victim].Store(h>>32<<32 | uint64(uint32(seq)))
}

// open gives the live record of id with its mutex held, or nil.
func (b *book) open(id string, h uint64) *record {
	r, ok := b.find(h)
	if !ok {
		return nil
	}
	r.mu.Lock()
	if r.used && r.hash == h && string(r.id) == id {
		return r
	}
	r.mu.Unlock()
	return nil
}

// take gives the oldest slot to id, with its mutex held; nil when the whole ring
// went round meanwhile: the record is lost.
func (b *book) take(id string, h uint64, now int64) *record {
	seq := b.next.Add(1)
	r := b.at(seq)
	r.mu.Lock()
	if r.seq > seq {
		r.mu.Unlock()
		return nil
	}
	r.used, r.ended, r.hash, r.seq = true, false, h, seq
	r.id = append(r.id[:0], id...)
	r.begun = now
	r.decisions = r.decisions[:0]
	clear(r.terms) // lets go of ranks that have left
	r.terms = r.terms[:0]
	if a := r.aside; a != nil {
		clear(a.pairs)
		clear(a.notes)
		*a = aside{pairs: a.pairs[:0], notes: a.notes[:0]}
	}
	r.lost, r.outcome = 0, ended{}
	b.enter(h, seq)
	return r
}

// decide adds one choice. A first attempt with nothing excluded for a leg that
// the live record has already placed, or any choice after its end, is another
// request of the same id: it gets a record of its own, and the newest answers
// to the id.
func (b *book) decide(q *Query, f *frame, sc *scratch, ok bool, races int) {
	id := clipID(q.RequestID)
	h := hashID(id)
	r := b.open(id, h)
	if r != nil && (r.ended || q.Attempt <= 1 && len(q.Excluded) == 0 && r.placed(q.Leg)) {
		r.mu.Unlock()
		r = nil
	}
	if r == nil {
		if r = b.take(id, h, f.now); r == nil {
			return
		}
	}
	defer r.mu.Unlock()
	if len(r.decisions) == maxDecisions {
		r.lost = min(r.lost, math.MaxUint16-1) + 1
		return
	}
	d := decision{at: time.Duration(f.now - r.begun), leg: q.Leg, attempt: int32(q.Attempt), prompt: int32(f.prompt), output: int32(f.output),
		candidates: int32(len(q.Candidates)), excluded: int32(len(q.Candidates) - sc.usable), from: int32(len(r.terms)), chosen: -1, races: int32(races)}
	r.terms = append(r.terms, sc.kept...)
	if ok {
		for i := int(d.from); i < len(r.terms); i++ {
			if r.terms[i].rank == sc.best.rank {
				d.chosen = int32(i)
			}
		}
		if d.chosen < 0 {
			d.chosen = int32(len(r.terms))
			r.terms = append(r.terms, sc.best)
		}
	}
	d.to = int32(len(r.terms))
	r.decisions = append(r.decisions, d)
}

// placed says whether the record holds a first attempt of a leg that found a
// rank; one that found none is made again when there is one.
func (r *record) placed(l Leg) bool {
	for i := range r.decisions {
		if d := &r.decisions[i]; d.leg == l && d.attempt <= 1 && d.chosen >= 0 {
			return true
		}
	}
	return false
}

// Note adds a free line to a request's record (a retry and why, a fall-back).
// A request that has made no choice yet gets its record here.
func (s *Scheduler) Note(requestID, text string) {
	if s.book == nil || requestID == "" {
		return
	}
	r := s.book.current(requestID, s)
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	a := r.rest()
	if len(a.notes) == maxNotes {
		a.lostNotes++
		return
	}
	if len(text) > maxNoteBytes {
		text = strings.ToValidUTF8(text[:maxNoteBytes], "") + "…"
	}
	a.notes = append(a.notes, note{at: time.Duration(s.now() - r.begun), text: strings.Clone(text)})
}

// current is the record under way of a request, made where there is none.
func (b *book) current(requestID string, s *Scheduler) *record {
	id := clipID(requestID)
	h := hashID(id)
	if r := b.open(id, h); r != nil {
		if !r.ended {
			return r
		}
		r.mu.Unlock()
	}
	return b.take(id, h, s.now())
}

// Late puts what was told of a hand-over after its request's End into the record.
func (s *Scheduler) Late(requestID string, t Transfer) {
	if s.book == nil || requestID == "" {
		return
	}
	id := clipID(requestID)
	if r := s.book.open(id, hashID(id)); r != nil {
		if r.ended {
			r.rest().transfer = t
		}
		r.mu.Unlock()
	}
}

// End completes a request's record.
func (s *Scheduler) End(requestID string, out Outcome) {
	if s.book != nil && requestID != "" {
		if r := s.book.current(requestID, s); r != nil {
			out.Reason = strings.Clone(out.Reason)
			r.end(&out)
			r.mu.Unlock()
		}
	}
	if s.ended != nil {
		s.ended(requestID, out)
	}
	if w := s.watch.Load(); w != nil {
		(*w)(&Event{Kind: "ended", At: time.Now(), RequestID: requestID, Outcome: out})
	}
}
