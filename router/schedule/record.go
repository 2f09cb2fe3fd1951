package schedule

import (
	"math"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

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
	State    string // done, failed, expired, stalled, untold; a constant
	Bytes    int64
	Duration time.Duration // as the engine measured it
	Delay    time.Duration // from prefill's answer to the report
}

// recordRing keeps the records of the last N requests: a ring of slots, taken in the
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
type recordRing struct {
	slots   []record
	ranks   *rankIDs
	next    atomic.Uint64
	buckets []bucket
	mask    uint64
}

// record is one request's. There are as many as streams, up to what the ring holds, and what
// few requests have stands elsewhere.
type record struct {
	mu               sync.Mutex
	used             bool
	ended            bool
	idBytes          uint8
	decisions        uint8
	placed           uint8  // the legs, a bit each, of which a first attempt has found a rank
	droppedDecisions uint16 // decisions beyond the bound
	hash             uint64
	seq              uint64
	started          int64 // ns since the scheduler's start
	// The id, copied: ids may be borrowed from the connection's buffers. Behind it the decisions
	// (packed.go).
	data    []byte
	extra   *recordExtra // nil: none of it
	outcome storedOutcome
}

func (r *record) id() []byte { return r.data[:r.idBytes] }

// encodedDecisions are the decisions.
func (r *record) encodedDecisions() []byte { return r.data[r.idBytes:] }

// append adds to told. A ring's records seldom need more than they have had room for: what is
// added is all there is to be, as far as is known.
func (r *record) append(b []byte) {
	if n := len(r.data) + len(b); n > cap(r.data) {
		r.data = append(make([]byte, 0, n), r.data...)
	}
	r.data = append(r.data, b...)
}

// recordExtra is what few records have. It stays with the slot, as its buffers do.
type recordExtra struct {
	joint     []jointRecord
	notes     []note
	lostNotes int
	transfer  Transfer
}

// storedOutcome is an Outcome as a record keeps it, but for its Transfer.
type storedOutcome struct {
	reason                         string
	status, cached, prompt, output int32
	ttft, total                    time.Duration
}

// ensureExtra gives the record's aside, made where there was none.
func (r *record) ensureExtra() *recordExtra {
	if r.extra == nil {
		r.extra = new(recordExtra)
	}
	return r.extra
}

// end completes the record.
func (r *record) end(out *Outcome) {
	r.outcome = storedOutcome{
		reason: out.Reason, status: int32(out.Status), cached: clip32(out.CachedTokens), prompt: clip32(out.PromptTokens), output: clip32(out.OutputTokens),
		ttft: out.TTFT, total: out.Total,
	}
	if r.ended = true; out.Transfer.State != "" || r.extra != nil {
		r.ensureExtra().transfer = out.Transfer
	}
}

// clip32 is n as far as 32 bits hold it: engines say what they like.
func clip32(n int) int32 { return int32(max(math.MinInt32, min(n, math.MaxInt32))) }

// decision is one choice.
type decision struct {
	at         time.Duration // since the record was begun
	attempt    int32
	prompt     int32
	output     int32
	candidates int32
	excluded   int32
	chosen     int32 // index in its terms, -1: none
	races      int32
	leg        LegKind
}

type note struct {
	at   time.Duration
	text string
}

func newRecordRing(n int) *recordRing {
	buckets := 1 << bits.Len(uint(n/2)) // n/2 or more, of eight cells each
	return &recordRing{slots: make([]record, n), ranks: newRankIDs(), buckets: make([]bucket, buckets), mask: uint64(buckets - 1)}
}

func hashID(id string) uint64 { return xxh3.HashString(id) }

func clipID(id string) string {
	if len(id) > maxIDBytes {
		return id[:maxIDBytes]
	}
	return id
}

// find gives the newest record of a hash that the ring still has.
func (b *recordRing) find(h uint64) (*record, bool) {
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
func (b *recordRing) at(seq uint64) *record { return &b.slots[(seq-1)%uint64(len(b.slots))] }

// index leads h to the record taken under seq, in place of the same hash's older
// one, or of the oldest cell.
func (b *recordRing) index(h, seq uint64) {
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
func (b *recordRing) open(id string, h uint64) *record {
	r, ok := b.find(h)
	if !ok {
		return nil
	}
	r.mu.Lock()
	if r.used && r.hash == h && string(r.id()) == id {
		return r
	}
	r.mu.Unlock()
	return nil
}

// acquire gives the oldest slot to id, with its mutex held; nil when the whole ring
// went round meanwhile: the record is lost.
func (b *recordRing) acquire(id string, h uint64, now int64) *record {
	r := b.acquireFor(len(id), h, now)
	if r != nil {
		r.append(unsafe.Slice(unsafe.StringData(id), len(id)))
	}
	return r
}

// acquireFor is take, but that the id is still to be told, first of all.
func (b *recordRing) acquireFor(idBytes int, h uint64, now int64) *record {
	seq := b.next.Add(1)
	r := b.at(seq)
	r.mu.Lock()
	if r.seq > seq {
		r.mu.Unlock()
		return nil
	}
	r.used, r.ended, r.hash, r.seq = true, false, h, seq
	r.data, r.idBytes, r.decisions, r.placed = r.data[:0], uint8(idBytes), 0, 0
	r.started = now
	if a := r.extra; a != nil {
		clear(a.joint)
		clear(a.notes)
		*a = recordExtra{joint: a.joint[:0], notes: a.notes[:0]}
	}
	r.droppedDecisions, r.outcome = 0, storedOutcome{}
	b.index(h, seq)
	return r
}

// addDecision adds one choice. A first attempt with nothing excluded for a leg that
// the live record has already placed, or any choice after its end, is another
// request of the same id: it gets a record of its own, and the newest answers
// to the id.
func (b *recordRing) addDecision(q *Query, f *choiceContext, sc *scratch, ok bool, races int) {
	id := clipID(q.RequestID)
	h := hashID(id)
	r := b.open(id, h)
	if r != nil && (r.ended || q.Attempt <= 1 && len(q.Excluded) == 0 && r.placed>>q.Leg&1 != 0) {
		r.mu.Unlock()
		r = nil
	}
	sc.encoded = sc.encoded[:0]
	if r == nil {
		if r = b.acquireFor(len(id), h, f.now); r == nil {
			return
		}
		sc.encoded = append(sc.encoded, id...)
	}
	if r.decisions == maxDecisions {
		r.droppedDecisions = min(r.droppedDecisions, math.MaxUint16-1) + 1
		r.mu.Unlock()
		return
	}
	d := decision{at: time.Duration(f.now - r.started), leg: q.Leg, attempt: int32(q.Attempt), prompt: int32(f.prompt), output: int32(f.output),
		candidates: int32(len(q.Candidates)), excluded: int32(len(q.Candidates) - sc.usable), chosen: -1, races: int32(races)}
	terms := sc.candidates
	if ok {
		for i := range terms {
			if terms[i].rank == sc.best.rank {
				d.chosen = int32(i)
			}
		}
		if d.chosen < 0 {
			d.chosen = int32(len(terms))
			terms = append(terms, sc.best)
		}
		if d.attempt <= 1 {
			r.placed |= 1 << q.Leg
		}
	}
	sc.encoded = encodeDecision(sc.encoded, &d, terms, b.ranks)
	r.append(sc.encoded)
	r.decisions++
	r.mu.Unlock()
	if b.ranks.sweepDue.Load() {
		b.sweepRankIDs()
	}
}

// AddNote adds a free line to a request's record (a retry and why, a fall-back).
// A request that has made no choice yet gets its record here.
func (s *Scheduler) AddNote(requestID, text string) {
	if s.records == nil || requestID == "" {
		return
	}
	r := s.records.current(requestID, s)
	if r == nil {
		return
	}
	defer r.mu.Unlock()
	a := r.ensureExtra()
	if len(a.notes) == maxNotes {
		a.lostNotes++
		return
	}
	if len(text) > maxNoteBytes {
		text = strings.ToValidUTF8(text[:maxNoteBytes], "") + "…"
	}
	a.notes = append(a.notes, note{at: time.Duration(s.now() - r.started), text: strings.Clone(text)})
}

// current is the record under way of a request, made where there is none.
func (b *recordRing) current(requestID string, s *Scheduler) *record {
	id := clipID(requestID)
	h := hashID(id)
	if r := b.open(id, h); r != nil {
		if !r.ended {
			return r
		}
		r.mu.Unlock()
	}
	return b.acquire(id, h, s.now())
}

// AddTransfer puts what was told of a hand-over after its request's End into the record.
func (s *Scheduler) AddTransfer(requestID string, t Transfer) {
	if s.records == nil || requestID == "" {
		return
	}
	id := clipID(requestID)
	if r := s.records.open(id, hashID(id)); r != nil {
		if r.ended {
			r.ensureExtra().transfer = t
		}
		r.mu.Unlock()
	}
}

// EndRecord completes a request's record.
func (s *Scheduler) EndRecord(requestID string, out Outcome) {
	if s.records != nil && requestID != "" {
		if r := s.records.current(requestID, s); r != nil {
			out.Reason = strings.Clone(out.Reason)
			r.end(&out)
			r.mu.Unlock()
		}
	}
	if s.ended != nil {
		s.ended(requestID, out)
	}
	if w := s.observer.Load(); w != nil {
		(*w)(&Event{Kind: "ended", At: time.Now(), RequestID: requestID, Outcome: out})
	}
}
