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

	"sluice/router/tokenize"
)

// Bounds of one record; anything beyond is counted but not kept.
const (
	maxDecisions = 8
	maxNotes     = 16
	maxNoteBytes = 256
	maxIDBytes   = 128
)

// Outcome is the end of a request, added to its explain record.
type Outcome struct {
	Status       int
	Reason       string // front.Reason or relay.Cause, "" on success
	CachedTokens int    // as reported by the engine; -1 unknown
	PromptTokens int
	OutputTokens int
	TTFT         time.Duration // 0: there was no token
	Total        time.Duration
	Transfer     Transfer
}

// Transfer is the result of a request's KV transfer; the zero Transfer is one that was not
// observed.
type Transfer struct {
	State    string // done, failed, expired, stalled, unknown; a constant
	Bytes    int64
	Duration time.Duration // as measured by the engine
	Delay    time.Duration // from prefill's response to the report
}

// recordRing keeps the records of the last N requests: a ring of slots, used in the order in which
// requests first choose, and a table from id to slot. A slot keeps its buffers, so that a full ring
// does not allocate.
//
// The table is never locked and nothing is deleted from it. A cell is one word: 32 bits of the id's
// hash, and the low 32 bits of the record's number, which give its slot and whether the ring has
// overwritten it. A bucket is one cache line of cells, selected by other bits of the hash; the
// oldest cell is replaced. With at least four cells per record on average, about one bucket in a
// hundred thousand has more live records than cells: the oldest is then in Recent, but not found by
// its id. A cell is stored while the record's mutex is held, so a look-up waits for the record to
// be complete. Two concurrent stores to one bucket may use the same cell; one id is lost then too.
type recordRing struct {
	slots   []record
	ranks   *rankIDs
	next    atomic.Uint64
	buckets []bucket
	mask    uint64
}

// record is the record of one request. There are as many as streams, up to the capacity of the
// ring; what few requests need is in recordExtra.
type record struct {
	mu               sync.Mutex
	used             bool
	ended            bool
	idBytes          uint8
	decisions        uint8
	placed           uint8  // the legs, a bit each, for which a first attempt has found a rank
	droppedDecisions uint16 // decisions beyond the bound
	hash             uint64
	seq              uint64
	started          int64 // ns since the scheduler's start
	// The id, copied because ids may be borrowed from the connection's buffers, followed by the
	// decisions (encoding.go).
	data    []byte
	extra   *recordExtra // nil: none
	outcome storedOutcome
}

func (r *record) id() []byte { return r.data[:r.idBytes] }

// encodedDecisions returns the decisions.
func (r *record) encodedDecisions() []byte { return r.data[r.idBytes:] }

// append appends to data with little spare capacity: a ring's records seldom grow after their first
// decisions.
func (r *record) append(b []byte) {
	if n := len(r.data) + len(b); n > cap(r.data) {
		r.data = append(make([]byte, 0, n), r.data...)
	}
	r.data = append(r.data, b...)
}

// recordExtra is what few records need. The slot keeps it, as it keeps its buffers.
type recordExtra struct {
	joint     []jointRecord
	notes     []note
	lostNotes int
	transfer  Transfer
}

// storedOutcome is an Outcome as a record stores it, without its Transfer.
type storedOutcome struct {
	reason                         string
	status, cached, prompt, output int32
	ttft, total                    time.Duration
}

// ensureExtra returns the record's extra and creates it if there is none.
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

// clip32 clamps n to 32 bits: engines may report any number.
func clip32(n int) int32 { return int32(max(math.MinInt32, min(n, math.MaxInt32))) }

// decision is one choice.
type decision struct {
	at         time.Duration // since the start of the record
	attempt    int32
	prompt     int32
	output     int32
	candidates int32
	excluded   int32
	chosen     int32 // index in its terms, or -1
	races      int32
	session    uint32 // Query.SessionID
	leg        LegKind
	source     tokenize.Source
	atSession  bool // the session decided between ranks that were equally good
}

type note struct {
	at   time.Duration
	text string
}

func newRecordRing(n int) *recordRing {
	buckets := 1 << bits.Len(uint(n/2)) // at least n/2, of eight cells each
	return &recordRing{slots: make([]record, n), ranks: newRankIDs(), buckets: make([]bucket, buckets), mask: uint64(buckets - 1)}
}

func hashID(id string) uint64 { return xxh3.HashString(id) }

func clipID(id string) string {
	if len(id) > maxIDBytes {
		return id[:maxIDBytes]
	}
	return id
}

// find returns the newest record of a hash that the ring still has.
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

// at returns the slot of the record with a number.
func (b *recordRing) at(seq uint64) *record { return &b.slots[(seq-1)%uint64(len(b.slots))] }

// index points h to the record with number seq, replacing an older one of the same hash or the
// oldest cell.
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

// open returns the live record of id with its mutex held, or nil.
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

// acquire assigns the oldest slot to id and returns it with its mutex held; nil if the ring made a
// full turn meanwhile: the record is lost.
func (b *recordRing) acquire(id string, h uint64, now int64) *record {
	r := b.acquireFor(len(id), h, now)
	if r != nil {
		r.append(unsafe.Slice(unsafe.StringData(id), len(id)))
	}
	return r
}

// acquireFor is acquire without the id, which the caller appends before anything else.
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

// addDecision adds one choice. A first attempt without exclusions for a leg that the live record
// has already placed, or any choice after its end, belongs to another request with the same id: it
// gets its own record, and the id then names the newest.
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
		candidates: int32(len(q.Candidates)), excluded: int32(len(q.Candidates) - sc.usable), chosen: -1, races: int32(races),
		session: q.SessionID, atSession: sc.atSession, source: q.Source}
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

// AddNote adds a line of text to a request's record (a retry and its reason, a fall-back). If the
// request has made no choice yet, its record is created here.
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

// current returns the live record of a request and creates it if there is none.
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

// AddTransfer adds the result of a hand-over that is known after the request's end.
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
