package sim

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// rank is one data-parallel rank: a scheduler, its batch and its KV memory. All
// of it belongs to the goroutine of loop; others hand it functions with post.
type rank struct {
	l     *life
	e     *Engine
	o     *Options
	index int
	pub   *publisher // nil when events are off

	mu      sync.Mutex
	inbox   []func()
	shut    bool
	wake    chan struct{}
	started atomic.Bool
	ended   chan struct{}
	load    atomic.Int64 // jobs taken and not answered

	pool    *pool
	hash    hasher
	waiting []*seq // admitted to the engine, not to the batch
	ready   []*seq // their pull is done, before all that wait
	running []*seq
	pulls   map[*seq]struct{} // their blocks wait for a transfer
	batch   []*seq            // scratch of emit
	leases  leases
	events  []event
	due     time.Time // when the step under way ends
	scratch chunker
	dirty   []*job // with events held back
	n       counters
}

func newRank(l *life, index int) *rank {
	r := &rank{l: l, e: l.e, o: &l.e.o, index: index, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	r.hash.sglang = r.o.Engine == "sglang"
	r.pool = newPool(r.o.Blocks, func(h *blockHash) {
		r.n.evicted++
		r.event(event{kind: removed, hashes: []blockHash{*h}})
	})
	r.pulls = make(map[*seq]struct{})
	r.leases.init()
	r.scratch.coalesce = r.o.Coalesce
	return r
}

// post hands f to the rank's goroutine; it is false, and f lost, after its end.
func (r *rank) post(f func()) bool {
	r.mu.Lock()
	if r.shut {
		r.mu.Unlock()
		return false
	}
	r.inbox = append(r.inbox, f)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
	return true
}

// do runs f on the rank's goroutine and waits for it; after the rank's end it
// runs f here, when nobody else touches the rank any more.
func (r *rank) do(f func()) {
	done := make(chan struct{})
	if r.post(func() { f(); close(done) }) {
		<-done
		return
	}
	<-r.ended
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// take runs what was posted.
func (r *rank) take() {
	for {
		r.mu.Lock()
		list := r.inbox
		r.inbox = nil
		r.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for _, f := range list {
			f()
		}
	}
}

// loop is the engine core: steps while there is work, else sleep.
func (r *rank) loop() {
	defer r.l.wg.Done()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		r.take()
		now := time.Now()
		r.expire(now)
		if r.l.ending() {
			r.finish()
			return
		}
		d, work := r.plan(now)
		if !work {
			r.sleep(timer, r.leases.untilNext(now))
			continue
		}
		if d = scaled(d, r.o.Speed); r.due.Before(now.Add(-d)) {
			r.due = now
		}
		r.due = r.due.Add(d)
		for !r.l.ending() {
			wait := time.Until(r.due)
			if wait <= 0 {
				break
			}
			r.sleep(timer, wait)
			r.take()
		}
		r.emit()
		r.flushEvents()
		r.n.steps++
	}
}

// sleep waits for d, a post or the end.
func (r *rank) sleep(t *time.Timer, d time.Duration) {
	t.Reset(d)
	select {
	case <-t.C:
	case <-r.wake:
	case <-r.l.stopc:
	}
}

// finish fails what is left and lets go of everything.
func (r *rank) finish() {
	r.mu.Lock()
	r.shut = true
	r.mu.Unlock()
	r.take()
	for _, s := range slices.Concat(r.running, r.ready, r.waiting) {
		r.fail(s.j, 500, deadMessage)
	}
	for s := range r.pulls {
		r.fail(s.j, 500, deadMessage)
	}
	close(r.ended)
}

const deadMessage = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// submit takes a job into the queue.
func (r *rank) submit(j *job) {
	r.n.requests++
	h := j.params.handle
	if h != nil && h.incomplete() {
		r.n.incomplete++
		switch r.o.Incomplete {
		case "crash":
			r.fail(j, 500, deadMessage)
			go r.e.die(r.l, false)
			return
		case "error":
			r.fail(j, 500, "Internal server error")
			return
		}
		j.params.handle, h = nil, nil
	}
	if h != nil && !h.usable() {
		j.params.handle, h = nil, nil // vLLM warns and computes the prompt itself
	}
	if h == nil {
		r.waiting = append(r.waiting, j.seqs...)
		return
	}
	// The first sequence pulls; the others of n find its blocks in the cache.
	r.waiting = append(r.waiting, j.seqs[0])
	r.l.pull.track(h)
}

// abort drops a job whose client has gone.
func (r *rank) abort(j *job) {
	if j.over {
		return
	}
	r.n.aborted++
	r.drop(j)
	r.end(j)
}

// drop takes the job's sequences out of the batch and frees their blocks.
func (r *rank) drop(j *job) {
	mine := func(s *seq) bool { return s.j == j }
	r.running = slices.DeleteFunc(r.running, mine)
	r.waiting = slices.DeleteFunc(r.waiting, mine)
	r.ready = slices.DeleteFunc(r.ready, mine)
	for _, s := range j.seqs {
		if !s.pulling { // a pull under way frees them when it ends
			r.pool.release(s.blocks)
			s.blocks = nil
		}
	}
	if h := j.params.handle; h != nil {
		h.cancel.Do(func() { close(h.cancelled) })
		if !j.seqs[0].pulling && !j.seqs[0].pulled {
			r.l.pull.release(h) // never scheduled: vLLM notifies the prefill at once
		}
	}
}

// end marks the job answered.
func (r *rank) end(j *job) {
	if j.over {
		return
	}
	j.over = true
	r.load.Add(-1)
	close(j.done)
	if j.req.close {
		j.c.kick()
	}
}

// fail answers the job with an error, as far as its head is not out; mid-stream
// with an error event.
func (r *rank) fail(j *job, status int, msg string) {
	if j.over {
		return
	}
	r.n.failed++
	r.drop(j)
	if j.params.stream && j.headOut {
		r.scratch.open(j)
		j.format.broken(&r.scratch, j, status, msg)
		r.scratch.finish()
	} else {
		j.c.respond(j.req, status, "application/json", j.format.failure(status, msg))
	}
	r.end(j)
}

// plan makes the next step: which sequences run and how long it takes. It
// allocates their blocks and puts the sequences that compute into running.
func (r *rank) plan(now time.Time) (time.Duration, bool) {
	budget := r.o.MaxBatch
	prefill, decodes, context := 0, 0, 0
	for i := 0; i < len(r.running); i++ {
		s := r.running[i]
		s.chunk = 0
		if budget == 0 || s.heldTo.After(now) {
			continue
		}
		n := min(s.total()-s.computed, budget)
		if n == 0 {
			decodes++ // owed a token
			continue
		}
		if !r.grow(s, s.computed+n) {
			if len(r.running) == 1 {
				continue // what it needs is leased; leases end
			}
			victim := r.running[len(r.running)-1]
			r.preempt(victim)
			if victim != s {
				i--
			}
			continue
		}
		s.chunk = n
		budget -= n
		if n == 1 {
			decodes++
			context += s.computed
		} else {
			prefill += n
		}
	}
	for budget > 0 && len(r.running) < r.o.MaxSeqs {
		s := r.admit()
		if s == nil {
			break
		}
		r.running = append(r.running, s)
		s.chunk = min(s.total()-s.computed, budget)
		budget -= s.chunk
		prefill += s.chunk
	}
	for _, s := range r.running {
		if s.chunk > 0 {
			r.compute(s)
		}
	}
	if len(r.running) == 0 {
		return 0, false
	}
	d := r.o.Cost.step(prefill, decodes, context)
	if prefill+decodes == 0 {
		// All are held by faults or by blocks: look again soon, in real time.
		d = time.Millisecond
		if !math.IsInf(r.o.Speed, 1) {
			d = time.Duration(float64(d) * r.o.Speed)
		} else {
			r.due = now.Add(d)
		}
	}
	return d, true
}

// grow makes room for n tokens of s; false when there are no blocks.
func (r *rank) grow(s *seq, n int) bool {
	need := (n+r.o.BlockSize-1)/r.o.BlockSize - len(s.blocks)
	if need > r.pool.nfree {
		return false
	}
	for range need {
		s.blocks = append(s.blocks, r.pool.take())
	}
	return true
}

// preempt puts a running sequence back to the front of the queue; it is computed
// again, prompt and output, which the prefix cache may shorten.
func (r *rank) preempt(s *seq) {
	r.n.preempted++
	r.running = slices.DeleteFunc(r.running, func(x *seq) bool { return x == s })
	r.pool.release(s.blocks)
	s.blocks, s.computed, s.chunk = nil, 0, 0
	r.waiting = slices.Insert(r.waiting, 0, s)
}

// admit takes the next sequence that can start, with the blocks of its whole
// context; nil when there is none, or no room for the first in line.
func (r *rank) admit() *seq {
	if len(r.ready) > 0 {
		s := r.ready[0]
		r.ready = r.ready[1:]
		return s
	}
	for len(r.waiting) > 0 {
		s := r.waiting[0]
		total := s.total()
		size := r.o.BlockSize
		hits, idle := 0, 0
		// The last token is always computed: its logits are needed.
		for i := 0; i < (total-1)/size && !r.o.NoPrefixCache; i++ {
			s.hashTo(&r.hash, i+1, size)
			id, ok := r.pool.find(&s.hashes[i])
			if !ok {
				break
			}
			if r.pool.blocks[id].ref == 0 {
				idle++
			}
			hits++
		}
		if (total+size-1)/size-hits+idle > r.pool.nfree {
			return nil
		}
		for i := range hits {
			id, _ := r.pool.find(&s.hashes[i])
			r.pool.share(id)
			s.blocks = append(s.blocks, id)
		}
		r.grow(s, total)
		r.waiting = r.waiting[1:]
		s.computed = hits * size
		if len(s.out) == 0 {
			s.local, s.cached = s.computed, s.computed
			r.n.queries += int64(total)
			r.n.hits += int64(s.computed)
			if h := s.j.params.handle; h != nil && !s.pulled && r.pullNow(s, h) {
				continue
			}
			r.n.localHit += int64(s.computed)
			r.n.localCompute += int64(total - s.computed)
			r.n.prompt += int64(total)
		}
		return s
	}
	return nil
}

// compute advances s by its chunk and names the blocks that became full.
func (r *rank) compute(s *seq) {
	s.computed += s.chunk
	r.store(s, s.computed-s.chunk)
}

// store publishes the blocks of s filled since from tokens were there.
func (r *rank) store(s *seq, from int) {
	size := r.o.BlockSize
	first, full := from/size, s.computed/size
	if r.o.NoPrefixCache || first >= full {
		return
	}
	s.hashTo(&r.hash, full, size)
	for i := first; i < full; i++ {
		r.pool.store(s.blocks[i], &s.hashes[i])
	}
	ev := event{kind: stored, hashes: s.hashes[first:full:full], root: first == 0,
		tokens: s.slice(first*size, full*size), salt: s.j.params.salt, session: s.j.params.session}
	if first > 0 {
		ev.parent = s.hashes[first-1]
	}
	r.event(ev)
}

func (r *rank) event(ev event) {
	if r.pub != nil {
		r.events = append(r.events, ev)
	}
}

// flushEvents hands the step's events to the publisher, as one batch.
func (r *rank) flushEvents() {
	if len(r.events) == 0 {
		return
	}
	select {
	case r.pub.queue <- r.events:
	case <-r.l.stopc:
	}
	r.events = nil
}

// resetCache is /reset_prefix_cache. As in vLLM it fails while blocks are in use,
// and the event goes out with the next step that has work.
func (r *rank) resetCache() bool {
	if !r.pool.clear() {
		return false
	}
	r.event(event{kind: cleared})
	return true
}

// abortID ends requests by id as the abort endpoints do: they finish with reason
// "abort" and what they have.
func (r *rank) abortID(id string) {
	for _, s := range slices.Concat(r.running, r.ready, r.waiting) {
		if s.j.id == id && !s.j.over {
			r.finishAborted(s.j)
		}
	}
	for s := range r.pulls {
		if s.j.id == id && !s.j.over {
			r.finishAborted(s.j)
		}
	}
}

func (r *rank) finishAborted(j *job) {
	r.n.aborted++
	r.drop(j)
	w := &r.scratch
	w.open(j)
	for _, s := range j.seqs {
		if s.reason != "" {
			continue
		}
		s.reason = "abort"
		if j.params.stream {
			j.format.delta(w, s, tokEOS, "")
		}
	}
	if j.params.stream {
		j.format.last(w, j)
		w.finish()
	} else {
		j.c.respond(j.req, 200, "application/json", j.format.whole(nil, j))
	}
	r.end(j)
}
