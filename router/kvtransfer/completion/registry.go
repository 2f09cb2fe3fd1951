package completion

import (
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"
)

// Registry holds the open waits. All methods may be called from any goroutine and none blocks
// on a mutex: a request's goroutine and the tiers' goroutines share nothing but the request's
// Wait, which one of them locks for a few stores (Wait.lock).
type Registry struct {
	seed   maphash.Seed
	waits  table
	counts [events][2]atomic.Int64 // by event, failed or not

	unknown, malformed, atCapacity, refused atomic.Int64
}

// NewRegistry returns an empty Registry.
func NewRegistry() *Registry { return &Registry{seed: maphash.MakeSeed()} }

// State is the state of a transfer according to the reports received.
type State uint8

// The states of a transfer.
const (
	Pending State = iota
	Done          // the decode engine has received every part
	Failed        // a part could not be read
)

var stateNames = [...]string{"pending", "done", "failed"}

// String returns the state's name.
func (s State) String() string { return stateNames[min(int(s), len(stateNames)-1)] }

// Result summarises the reports received for a transfer.
type Result struct {
	State           State
	Bytes           int64         // sum over all parts
	Duration        time.Duration // of the slowest part, as the engine measured it
	Elapsed         time.Duration // from Open to the report that decided State
	PrefillReleased bool          // the prefill engine has freed the blocks
	LeaseExpired    bool          // the prefill engine's lease ended before the blocks were read
}

// Wait is the wait for one request's hand-over. The zero Wait is ready for Open, and it may be
// opened again after Close, which leaves no reference to it. Open, Number, Opened, SetNonce and
// Close are for one goroutine.
type Wait struct {
	// state is 0 while the wait is closed, else its number, with the bit locked set while a
	// goroutine reads or writes the fields below. The store in Open and the swap in lock order
	// the other accesses.
	state         atomic.Uint64
	registry      *Registry // nil: closed, or the table had no free place
	index         uint32
	id            string
	number        uint64
	opened        time.Time
	failed        func()
	nonce         uint64 // of the request's completion slot; 0: it has none
	failedCalled  bool   // failed has been called or is being called
	inCallback    bool   // failed is running
	receivedParts uint64 // bit set of the parts reported, by TPRank
	res           Result
}

// A number identifies one opening of a wait. Two openings have the same number with a
// probability of at most 2^-45. From the lowest bit: locked, the place in the table, a part of
// the id's hash, random bits, and one bit that is always set.
const (
	locked    = 1
	tagShift  = 1 + indexBits
	tagBits   = 22
	tagMask   = (1<<tagBits - 1) << tagShift
	indexMask = (1<<indexBits - 1) << 1
)

// tagMatches returns whether number may belong to an id with this hash.
func tagMatches(number, hash uint64) bool {
	return number != 0 && (number^hash>>bucketBits<<tagShift)&tagMask == 0
}

// Open starts to wait for the reports of request id, which must be the X-Request-Id that the
// engines receive. now is the current time.
//
// failed may be nil. A tier's goroutine calls it once, when the transfer fails or the prefill
// engine's lease ends before the transfer is reported complete. It must not block and must not
// call the Wait.
//
// A later Open of the same id takes precedence over an earlier one. When the table is full or
// nearly full (MaxWaits), the Wait receives no reports and AtCapacity counts it. The caller
// must Close the Wait.
func (b *Registry) Open(w *Wait, id string, now time.Time, failed func()) {
	hash := maphash.String(b.seed, id)
	index, ok := b.waits.insert(hash, w)
	w.id, w.opened, w.failed, w.nonce, w.failedCalled, w.receivedParts, w.res = id, now, failed, 0, false, 0, Result{}
	if !ok {
		b.atCapacity.Add(1)
		w.registry, w.number = nil, 0
		return
	}
	w.registry, w.index = b, index
	w.number = 1<<63 | rand.Uint64()&^(tagMask|indexMask|locked) | hash>>bucketBits<<tagShift&tagMask | uint64(index)<<1
	w.state.Store(w.number)
}

// Close ends the wait and returns the result so far. It waits for a call of failed that is
// running; failed is not called afterwards. For a Wait that is not open the result is Pending.
func (w *Wait) Close() Result {
	if w.registry == nil {
		return Result{}
	}
	for w.lock(w.number); w.inCallback; w.lock(w.number) {
		w.unlock(w.number)
		runtime.Gosched()
	}
	w.state.Store(0)
	w.registry.waits.at(w.index).Store(nil)
	w.registry = nil
	return w.res
}

// lock locks the wait while it is open under number; it returns false when it no longer is. A
// goroutine holds the lock for a few stores only.
func (w *Wait) lock(number uint64) bool {
	for !w.state.CompareAndSwap(number, number|locked) {
		if w.state.Load()&^locked != number {
			return false
		}
		runtime.Gosched()
	}
	return true
}

func (w *Wait) unlock(number uint64) { w.state.Store(number) }

// Opened returns when the wait was opened.
func (w *Wait) Opened() time.Time { return w.opened }

// Number identifies an open wait. A slot of a completion board carries it, and Complete finds
// the wait by it. It is 0 when the table had no free place, and invalid after Close.
func (w *Wait) Number() uint64 { return w.number }

// SetNonce sets the nonce of the completion slot that is sent with the decode request. From
// then on a Received report with another nonce, or none, is ignored and counted as Refused,
// because it belongs to an earlier request with this id or is forged. The same holds for any
// report that names another nonce; Sent and Expired reports come from prefill engines, which
// receive no slot. SetNonce discards earlier Received reports, because no decode engine has
// read anything yet.
func (w *Wait) SetNonce(nonce uint64) {
	if w.registry != nil && w.lock(w.number) {
		w.nonce = nonce
		w.receivedParts, w.res = 0, Result{PrefillReleased: w.res.PrefillReleased, LeaseExpired: w.res.LeaseExpired}
		w.unlock(w.number)
	}
}

// Complete applies a record of a completion board to the wait with this number. It returns
// whether that wait is open.
func (b *Registry) Complete(number uint64, failed bool, bytes int64, took time.Duration) bool {
	r := Report{Event: Received, Failed: failed, Bytes: bytes, Duration: took, TPSize: 1}
	b.count(&r)
	w := b.waits.at(uint32(number & indexMask >> 1)).Load()
	if w == nil || number&locked != 0 || !w.lock(number) {
		b.unknown.Add(1)
		return false
	}
	w.finish(&r)
	return true
}

// Result returns the result so far. Any goroutine may call it until Close begins.
func (w *Wait) Result() Result {
	number := w.state.Load() &^ locked
	if number == 0 || !w.lock(number) {
		return Result{}
	}
	defer w.unlock(number)
	return w.res
}

// Len returns the number of open waits.
func (b *Registry) Len() int { return b.waits.len() }

// HandleReport parses and records a report as a tier received it. It returns false and counts
// line as malformed when line is not a report.
func (b *Registry) HandleReport(line []byte) bool {
	r, err := Parse(line)
	if err != nil {
		b.malformed.Add(1)
		return false
	}
	b.Record(&r)
	return true
}

// Record applies a report to the wait of its request.
func (b *Registry) Record(r *Report) {
	b.count(r)
	first, second := engineRequestIDs(r.Request)
	if first != nil && b.deliver(first, r) || second != nil && b.deliver(second, r) {
		return
	}
	b.unknown.Add(1)
}

func (b *Registry) count(r *Report) {
	failed := 0
	if r.Failed {
		failed = 1
	}
	b.counts[r.Event][failed].Add(1)
}

// deliver applies the report to the wait of id. It returns whether there is one.
func (b *Registry) deliver(id []byte, r *Report) bool {
	w := b.waits.find(maphash.Bytes(b.seed, id), id)
	switch {
	case w == nil:
		return false
	case r.Nonce != w.nonce && (r.Nonce != 0 || r.Event == Received):
		w.unlock(w.number)
		b.refused.Add(1)
	default:
		w.finish(r)
	}
	return true
}

// finish applies a report to a locked wait, unlocks the wait and calls failed if the report
// makes it necessary.
func (w *Wait) finish(r *Report) {
	number := w.number
	failed := w.apply(r)
	if failed == nil || w.failedCalled {
		w.unlock(number)
		return
	}
	w.failedCalled, w.inCallback = true, true
	w.unlock(number)
	failed()
	w.lock(number) // still open: Close waits for inCallback
	w.inCallback = false
	w.unlock(number)
}

// apply updates the result from a report and returns the callback to call, if any.
func (w *Wait) apply(r *Report) (failed func()) {
	switch r.Event {
	case Sent:
		w.res.PrefillReleased = true
	case Expired:
		w.res.PrefillReleased = true
		if w.res.State == Pending {
			w.res.LeaseExpired, failed = true, w.failed
		}
	case Received:
		bit := uint64(1) << r.TPRank
		if w.res.State != Pending || w.receivedParts&bit != 0 {
			return nil
		}
		w.receivedParts |= bit
		w.res.Bytes += r.Bytes
		w.res.Duration = max(w.res.Duration, r.Duration)
		if r.Failed {
			w.res.State, failed = Failed, w.failed
		} else if w.receivedParts == 1<<r.TPSize-1 {
			w.res.State = Done
		}
		if w.res.State != Pending {
			w.res.Elapsed = time.Since(w.opened)
		}
	}
	return failed
}

// Count returns the number of reports of an event.
func (b *Registry) Count(e Event, failed bool) int64 {
	if e >= events {
		return 0
	}
	if failed {
		return b.counts[e][1].Load()
	}
	return b.counts[e][0].Load()
}

// Unknown counts reports of requests for which no wait is open.
func (b *Registry) Unknown() int64 { return b.unknown.Load() }

// Refused counts reports that do not name the nonce of the wait's completion slot.
func (b *Registry) Refused() int64 { return b.refused.Load() }

// Malformed counts lines that are not reports.
func (b *Registry) Malformed() int64 { return b.malformed.Load() }

// AtCapacity counts waits that receive no reports because the table had no free place.
func (b *Registry) AtCapacity() int64 { return b.atCapacity.Load() }
