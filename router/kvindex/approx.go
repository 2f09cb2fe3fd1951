package kvindex

import (
	"sync"
	"time"
	"unsafe"

	"sluice/router/blockhash"
	"sluice/router/worker"
)

// ApproxOptions of an Approx; zero values mean the default.
type ApproxOptions struct {
	MaxBytes int64         // [256 MiB]; at the bound what was seen longest ago goes first
	TTL      time.Duration // [2m]; what has not been seen for so long is forgotten
}

// Approx guesses what ranks hold where no events tell: in text mode and with
// engines that publish none. It believes what the router itself has sent where
// (Observe) until the engine says otherwise (Confirm) or time passes. All
// methods may be called from any goroutine.
type Approx struct {
	mu      sync.RWMutex
	graph   graph
	max     int64
	ttl     time.Duration
	start   time.Time
	evicted uint64

	// seen runs beside graph.entries, by the same numbers, as a list from the
	// entry seen longest ago to the latest.
	seen        []sighting
	first, last uint32
}

type sighting struct {
	older, newer uint32
	at           time.Duration // since Approx.start
	// fresh: brought by one request, so never yet counted on by another.
	fresh bool
}

// NewApprox makes an empty Approx.
func NewApprox(opt ApproxOptions) *Approx {
	if opt.MaxBytes <= 0 {
		opt.MaxBytes = 256 << 20
	}
	if opt.TTL <= 0 {
		opt.TTL = 2 * time.Minute
	}
	return &Approx{max: opt.MaxBytes, ttl: opt.TTL, start: time.Now(), seen: make([]sighting, 1)}
}

// Observe notes that a prompt with these blocks was sent to a rank, which will
// hold them once it has computed them. Call it when the choice is made.
func (a *Approx) Observe(slot worker.Slot, seqs []blockhash.Seq) {
	if slot >= worker.MaxSlots {
		return
	}
	now := time.Since(a.start)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	a.observe(slot, seqs, now, true)
}

func (a *Approx) observe(slot worker.Slot, seqs []blockhash.Seq, now time.Duration, fresh bool) {
	a.observeAfter(0, slot, seqs, now, fresh)
}

// observeAfter is observe for blocks that follow a node, 0 at the start of a prompt.
func (a *Approx) observeAfter(parent uint32, slot worker.Slot, seqs []blockhash.Seq, now time.Duration, fresh bool) {
	var before uint32 // the list goes on in front of this entry
	for _, seq := range seqs {
		parent = a.graph.nodeFor(seq, parent)
		e := a.graph.entryOf(slot, Device, EngineHash(seq))
		if e == 0 {
			e, _ = a.graph.add(slot, Device, EngineHash(seq), parent)
			for int(e) >= len(a.seen) {
				a.seen = append(a.seen, sighting{})
			}
			a.seen[e] = sighting{fresh: fresh}
		} else {
			a.unlink(e)
			a.seen[e].fresh = false
		}
		// A block is put behind its successors' age, so that a prompt is
		// forgotten from its end on and never with a hole in it.
		a.linkBefore(e, before)
		a.seen[e].at = now
		before = e
	}
	for a.bytes() > a.max && a.first != 0 {
		a.forget(a.first)
		a.evicted++
	}
}

// Confirm tells how many leading blocks of a prompt the engine found in its
// cache when it began. Those are held for sure. Of the rest, what had been
// counted on from earlier requests is withdrawn: the engine had dropped it, or
// does not cache. What only this request brought stays, for it has just been
// computed. Call it once a request, with the blocks given to Observe.
func (a *Approx) Confirm(slot worker.Slot, seqs []blockhash.Seq, cachedBlocks int) {
	if slot >= worker.MaxSlots {
		return
	}
	now := time.Since(a.start)
	cachedBlocks = min(max(cachedBlocks, 0), len(seqs))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	for _, seq := range seqs[cachedBlocks:] {
		if e := a.graph.entryOf(slot, Device, EngineHash(seq)); e != 0 && !a.seen[e].fresh {
			a.forget(e)
		}
	}
	a.observe(slot, seqs[:cachedBlocks], now, false)
}

// Find is as Index.Find.
func (a *Approx) Find(seqs []blockhash.Seq, o *Overlap) {
	now := time.Since(a.start)
	a.mu.RLock()
	if a.stale(now) {
		a.mu.RUnlock()
		a.mu.Lock()
		a.expire(now)
		a.mu.Unlock()
		a.mu.RLock()
	}
	a.graph.find(seqs, o)
	a.mu.RUnlock()
}

// Clear forgets everything of a rank and returns how many blocks it held.
func (a *Approx) Clear(slot worker.Slot) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if int(slot) >= len(a.graph.ranks) {
		return 0
	}
	for _, c := range a.graph.ranks[slot].byHash[Device].cells {
		if c.ref != 0 {
			a.unlink(c.ref)
		}
	}
	return a.graph.clear(slot)
}

// Len is the number of (rank, block) entries; Bytes what they take.
func (a *Approx) Len() int {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.graph.len
}

// Bytes is the memory the entries take.
func (a *Approx) Bytes() int64 {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.bytes()
}

// Evicted is how many entries the bound on memory has cost so far.
func (a *Approx) Evicted() uint64 {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.evicted
}

func (a *Approx) bytes() int64 {
	return a.graph.bytes() + int64(a.graph.entries.live())*int64(unsafe.Sizeof(sighting{}))
}

func (a *Approx) stale(now time.Duration) bool {
	return a.first != 0 && now-a.seen[a.first].at > a.ttl
}

func (a *Approx) expire(now time.Duration) {
	for a.stale(now) {
		a.forget(a.first)
	}
}

func (a *Approx) forget(e uint32) {
	a.unlink(e)
	a.graph.drop(e)
}

// linkBefore puts e next to newer on its older side; 0 means the latest end.
func (a *Approx) linkBefore(e, newer uint32) {
	older := a.last
	if newer != 0 {
		older = a.seen[newer].older
		a.seen[newer].older = e
	} else {
		a.last = e
	}
	if older != 0 {
		a.seen[older].newer = e
	} else {
		a.first = e
	}
	a.seen[e].older, a.seen[e].newer = older, newer
}

func (a *Approx) unlink(e uint32) {
	s := &a.seen[e]
	if s.older != 0 {
		a.seen[s.older].newer = s.newer
	} else {
		a.first = s.newer
	}
	if s.newer != 0 {
		a.seen[s.newer].older = s.older
	} else {
		a.last = s.older
	}
	s.older, s.newer = 0, 0
}
