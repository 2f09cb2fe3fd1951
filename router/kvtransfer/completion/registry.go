package completion

import (
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"
)

// Registry holds the waits that are open. All methods may be called from any
// goroutine. None takes a lock: a request's own goroutine and the tiers' meet at its
// Wait alone, which one of them holds for a few stores (Wait.hold).
type Registry struct {
	seed   maphash.Seed
	waits  table
	counts [events][2]atomic.Int64 // by event, failed or not

	unknown, malformed, atCapacity, refused atomic.Int64
}

// NewRegistry makes an empty Book.
func NewRegistry() *Registry { return &Registry{seed: maphash.MakeSeed()} }

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
	State           State
	Bytes           int64         // of all parts
	Duration        time.Duration // the longest part's, as the engine measured it
	Elapsed         time.Duration // from Open to the report that settled it
	PrefillReleased bool          // prefill has let go of the blocks
	LeaseExpired    bool          // prefill's lease ended before they were read
}

// Wait is one request's hand-over. The zero Wait is ready for Open, and may be
// opened again once it is closed: nothing holds on to it after that. Open, Number,
// Opened and Close are for one goroutine.
type Wait struct {
	// state is 0 while closed, else the number, and held while somebody reads or
	// writes what follows. Open's store of it and hold's swap order the rest.
	state         atomic.Uint64
	registry      *Registry // nil: closed, or there was no place
	index         uint32
	id            string
	number        uint64
	opened        time.Time
	failed        func()
	nonce         uint64 // of its ticket, 0 without one
	failedCalled  bool   // failed has been called, or is
	inCallback    bool   // failed is under way
	receivedParts uint64 // that have come, by TPRank
	res           Result
}

// A number names one opening of a wait: another one has the same by a chance of
// 2^-45 at most. From the lowest bit: held, place, a part of the id's hash, random
// bits, and one that is always set.
const (
	locked    = 1
	tagShift  = 1 + indexBits
	tagBits   = 22
	tagMask   = (1<<tagBits - 1) << tagShift
	indexMask = (1<<indexBits - 1) << 1
)

// tagMatches says whether a number may be of an id with this hash.
func tagMatches(number, hash uint64) bool {
	return number != 0 && (number^hash>>bucketBits<<tagShift)&tagMask == 0
}

// Open begins a wait for what is told of request id, which must be the one that
// the engines are sent as X-Request-Id. now is the time. failed is called once, from
// a tier's goroutine, when the transfer fails or prefill's lease ends before it was
// told done; it must not block, nor call the wait, and may be nil. A later Open of
// the same id takes the place of an earlier one. Close the wait. With MaxWaits
// open, or near it, a wait hears nothing (Crowded).
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

// Close ends the wait and answers what was told until now. After it, failed is
// not called any more: one that is under way is waited for. A Wait that is not open
// answers Pending.
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

// lock keeps others out of the wait while it is open under number; false when it is
// not any more. Whoever holds it does so for a few stores.
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

// Opened is when the wait was opened.
func (w *Wait) Opened() time.Time { return w.opened }

// Number names an open wait for a ticket of a completion board, whose records
// carry it (Landed); 0 where none can. It ends with Close.
func (w *Wait) Number() uint64 { return w.number }

// SetNonce says which ticket the decode leg goes out with. From then on a Received that
// does not name its nonce is of an earlier request with this id, or forged, and changes
// nothing (Refused); so is any report that names another. Sent and Expired come from
// prefill engines, which are given no ticket. What was said to be received before is
// forgotten: nothing was read yet.
func (w *Wait) SetNonce(nonce uint64) {
	if w.registry != nil && w.lock(w.number) {
		w.nonce = nonce
		w.receivedParts, w.res = 0, Result{PrefillReleased: w.res.PrefillReleased, LeaseExpired: w.res.LeaseExpired}
		w.unlock(w.number)
	}
}

// Complete books what a board's record tells of the wait with this number. It says
// whether there is one.
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

// Result is what has been told until now. It may be called from any goroutine
// until Close has begun.
func (w *Wait) Result() Result {
	number := w.state.Load() &^ locked
	if number == 0 || !w.lock(number) {
		return Result{}
	}
	defer w.unlock(number)
	return w.res
}

// Len is how many waits are open.
func (b *Registry) Len() int { return b.waits.len() }

// HandleReport takes a report as it came over a tier, and says whether it was one. What
// does not parse is counted.
func (b *Registry) HandleReport(line []byte) bool {
	r, err := Parse(line)
	if err != nil {
		b.malformed.Add(1)
		return false
	}
	b.Record(&r)
	return true
}

// Record books a report for the request that waits for it.
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

// deliver gives the report to the wait of id, if there is one.
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

// finish books a report in a wait that is held, lets go of it, and tells.
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
	w.lock(number) // Close waits for busy, so it is still open
	w.inCallback = false
	w.unlock(number)
}

// apply books a report and answers whom to tell.
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

// Count is how many reports of an event have come.
func (b *Registry) Count(e Event, failed bool) int64 {
	if e >= events {
		return 0
	}
	if failed {
		return b.counts[e][1].Load()
	}
	return b.counts[e][0].Load()
}

// Unknown counts reports of requests that nobody waits for; Malformed lines that
// are no reports; Crowded waits that found no place and heard nothing.
func (b *Registry) Unknown() int64 { return b.unknown.Load() }

// Refused counts reports that did not name the ticket that went out.
func (b *Registry) Refused() int64 { return b.refused.Load() }

// Malformed is described at Unknown.
func (b *Registry) Malformed() int64 { return b.malformed.Load() }

// AtCapacity is described at Unknown.
func (b *Registry) AtCapacity() int64 { return b.atCapacity.Load() }
