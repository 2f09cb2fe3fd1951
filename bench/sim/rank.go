package sim

import (
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

	pool     *pool
	hash     hasher
	waiting  []*seq // admitted to the engine, not to the batch
	ready    []*seq // their pull is done, before all that wait
	running  []*seq
	pulls    map[*seq]struct{} // their blocks wait for a transfer
	received map[uint64]int    // LMCache: prompts whose KV was written here, by sum: tokens, negative where there is only room
	holds    map[*seq]struct{} // their last token waits for a leg's settle
	batch    []*seq            // scratch of emit
	leases   leases
	rooms    rooms
	offers   offers
	events   []event
	due      time.Time // when the step under way ends
	scratch  chunker
	dirty    []*job // with events held back
	n        counters

	frozen atomic.Pointer[frozenRank] // nil: it runs
}

func newRank(l *life, index int) *rank {
	r := &rank{l: l, e: l.e, o: &l.e.o, index: index, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	r.hash.sglang = r.o.Engine == "sglang"
	r.pool = newPool(r.o.Blocks, func(h *blockHash) {
		r.n.evicted++
		r.event(event{kind: removed, hashes: []blockHash{*h}})
	})
	r.pulls, r.holds = make(map[*seq]struct{}), make(map[*seq]struct{})
	r.received = make(map[uint64]int)
	r.leases.init()
	r.rooms.init()
	r.offers.init()
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

// maxLag is how far steps may run behind and still catch up, so that a hiccup of
// this machine does not slow the simulated one.
const maxLag = 50 * time.Millisecond

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
			r.due = time.Time{}
			r.sleep(timer, r.leases.untilNext(now))
			continue
		}
		if d = scaled(d, r.o.Speed); r.due.Before(now.Add(-max(d, maxLag))) {
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
	for s := range r.holds {
		r.fail(s.j, 500, deadMessage)
	}
	r.rooms.stop()
	close(r.ended)
}

const deadMessage = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// submit takes a job into the queue.
func (r *rank) submit(j *job) {
	r.n.requests++
	r.e.kept.keep(j.kept)
	if pd := j.params.pd; pd != nil {
		pd.submit(r, j)
		return
	}
	h := j.params.handle
	if h != nil && h.incomplete() {
		r.n.incomplete++
		j.params.handle = nil // there is nobody to notify
		switch r.o.Incomplete {
		case "crash":
			r.fail(j, 500, deadMessage)
			go r.e.die(r.l, false)
			return
		case "error":
			r.fail(j, 500, "Internal server error")
			return
		}
		h = nil
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
	if !j.finished { // else what it keeps is kept
		r.n.aborted++
		r.drop(j)
	}
	if h := j.params.handle; h != nil && !j.params.stream && r.o.release.cancelFrees() {
		r.l.wg.Go(func() { r.l.pull.call(h.peer(), "/done", h.wire.EngineID, []string{h.wire.RequestID}) })
	}
	r.end(j)
}

// drop takes the job's sequences out of the batch and frees their blocks.
func (r *rank) drop(j *job) {
	mine := func(s *seq) bool { return s.j == j }
	r.running = slices.DeleteFunc(r.running, mine)
	r.waiting = slices.DeleteFunc(r.waiting, mine)
	r.ready = slices.DeleteFunc(r.ready, mine)
	if j.params.pd != nil {
		j.params.pd.drop(r, j)
	}
	for _, s := range j.seqs {
		delete(r.holds, s)
		if !s.pulling { // a transfer under way frees them when it ends
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
	r.e.kept.letGo(j.kept)
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

// jobs are those taken and not answered, each once.
func (r *rank) jobs() []*job {
	seen := make(map[*job]bool)
	var list []*job
	add := func(s *seq) {
		if !s.j.over && !seen[s.j] {
			seen[s.j] = true
			list = append(list, s.j)
		}
	}
	for _, s := range slices.Concat(r.running, r.ready, r.waiting) {
		add(s)
	}
	for s := range r.pulls {
		add(s)
	}
	for s := range r.holds {
		add(s)
	}
	return list
}

// abortID ends requests by id as the abort endpoints do: they finish with reason
// "abort" and what they have.
func (r *rank) abortID(id string) {
	for _, j := range r.jobs() {
		if j.id == id {
			r.finishAborted(j)
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
