package sim

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/sim/api"
	"sluice/bench/sim/cost"
	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/eventpub"
	"sluice/bench/sim/kvcache"
	"sluice/bench/sim/textgen"
)

// rank is one data-parallel rank: a scheduler, its batch and its KV memory. All of it
// belongs to the goroutine of loop; other goroutines send it functions with post.
type rank struct {
	l          *incarnation
	e          *Engine
	o          *Options
	index      int
	pub        *eventpub.Publisher // nil if events are off
	loadSocket *zmq.Socket         // nil if loads are off; owned by publishLoads

	mu      sync.Mutex
	inbox   []func()
	closed  bool
	wake    chan struct{}
	started atomic.Bool
	stopped chan struct{}
	load    atomic.Int64 // jobs accepted and not served yet

	pool     *kvcache.Pool
	hash     kvcache.Hasher
	waiting  []*seq // accepted by the engine, not in the batch
	ready    []*seq // their pull is done; scheduled before waiting
	running  []*seq
	pulls    map[*seq]struct{} // sequences whose blocks wait for a transfer
	received map[uint64]int    // LMCache: tokens of the prompts whose KV was written here, by hash of the prompt; negative if only allocated
	heldLast map[*seq]struct{} // sequences whose last token waits until the leg calls finishHeld
	batch    []*seq            // scratch space of emit
	leases   leases
	rooms    rooms
	offers   offers
	events   []eventcodec.Event
	stepEnd  time.Time // when the current step ends
	scratch  api.Chunker
	dirty    []*job // jobs with events held back
	counters counters

	frozen atomic.Pointer[frozenRank] // nil unless frozen
}

func newRank(l *incarnation, index int) *rank {
	r := &rank{l: l, e: l.e, o: &l.e.o, index: index, wake: make(chan struct{}, 1), stopped: make(chan struct{})}
	r.hash.SGLang = r.o.Engine == "sglang"
	r.pool = kvcache.NewPool(r.o.Blocks, func(h *kvcache.BlockHash) {
		r.counters.evicted++
		r.event(eventcodec.Event{Kind: eventcodec.Removed, Hashes: []kvcache.BlockHash{*h}})
	})
	r.pulls, r.heldLast = make(map[*seq]struct{}), make(map[*seq]struct{})
	r.received = make(map[uint64]int)
	r.leases.init()
	r.rooms.init()
	r.offers.init()
	r.scratch.Coalesce = r.o.Coalesce
	return r
}

// post sends f to the rank's goroutine. After the rank's end it returns false and f
// does not run.
func (r *rank) post(f func()) bool {
	r.mu.Lock()
	if r.closed {
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

// do runs f on the rank's goroutine and waits for it. After the rank's end it runs f
// itself, when no other goroutine uses the rank.
func (r *rank) do(f func()) {
	done := make(chan struct{})
	if r.post(func() { f(); close(done) }) {
		<-done
		return
	}
	<-r.stopped
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// runPosted runs the functions that were posted.
func (r *rank) runPosted() {
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

// maxLag is how far steps may run behind and still catch up, so that a short stall of
// this machine does not slow the simulated one.
const maxLag = 50 * time.Millisecond

// loop is the engine core: it steps while there is work, else it sleeps.
func (r *rank) loop() {
	defer r.l.wg.Done()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		r.runPosted()
		now := time.Now()
		r.expire(now)
		if r.l.isStopping() {
			r.finish()
			return
		}
		d, work := r.planStep(now)
		if !work {
			r.stepEnd = time.Time{}
			r.sleep(timer, r.leases.untilNext(now))
			continue
		}
		if d = cost.Scale(d, r.o.Speed); r.stepEnd.Before(now.Add(-max(d, maxLag))) {
			r.stepEnd = now
		}
		r.stepEnd = r.stepEnd.Add(d)
		for !r.l.isStopping() {
			wait := time.Until(r.stepEnd)
			if wait <= 0 {
				break
			}
			r.sleep(timer, wait)
			r.runPosted()
		}
		r.emit()
		r.flushEvents()
		r.counters.steps++
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

// finish fails the remaining jobs and releases everything.
func (r *rank) finish() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.runPosted()
	for _, s := range slices.Concat(r.running, r.ready, r.waiting) {
		r.fail(s.j, 500, deadMessage)
	}
	for s := range r.pulls {
		r.fail(s.j, 500, deadMessage)
	}
	for s := range r.heldLast {
		r.fail(s.j, 500, deadMessage)
	}
	r.rooms.stop()
	close(r.stopped)
}

const deadMessage = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// submit queues a job.
func (r *rank) submit(j *job) {
	r.counters.requests++
	r.e.blockLog.acquire(j.blockLogID)
	if pd := j.pd; pd != nil {
		pd.submit(r, j)
		return
	}
	h := j.handle
	if h != nil && h.incomplete() {
		r.counters.incomplete++
		j.handle = nil // there is no prefill to notify
		switch r.o.Incomplete {
		case "crash":
			r.fail(j, 500, deadMessage)
			go r.e.crash(r.l, false)
			return
		case "error":
			r.fail(j, 500, "Internal server error")
			return
		}
		h = nil
	}
	if h != nil && !h.usable() {
		j.handle, h = nil, nil // vLLM logs a warning and computes the prompt itself
	}
	if h == nil {
		r.waiting = append(r.waiting, j.seqs...)
		return
	}
	// The first sequence pulls; the other sequences of n find its blocks in the cache.
	r.waiting = append(r.waiting, j.seqs[0])
	r.l.pull.track(h)
}

// abort drops a job whose client has disconnected.
func (r *rank) abort(j *job) {
	if j.ended {
		return
	}
	if !j.finished { // otherwise its leased blocks stay
		r.counters.aborted++
		r.drop(j)
	}
	if h := j.handle; h != nil && !j.Params.Stream && r.o.VLLM.CancelReleases() {
		r.l.wg.Go(func() { r.l.pull.call(h.peer(), "/done", h.wire.EngineID, []string{h.wire.RequestID}) })
	}
	r.markAnswered(j)
}

// drop removes the job's sequences from the batch and frees their blocks.
func (r *rank) drop(j *job) {
	mine := func(s *seq) bool { return s.j == j }
	r.running = slices.DeleteFunc(r.running, mine)
	r.waiting = slices.DeleteFunc(r.waiting, mine)
	r.ready = slices.DeleteFunc(r.ready, mine)
	if j.pd != nil {
		j.pd.cancel(r, j)
	}
	for _, s := range j.seqs {
		delete(r.heldLast, s)
		if !s.pulling { // a transfer in flight frees them when it ends
			r.pool.Release(s.blocks)
			s.blocks = nil
		}
	}
	if h := j.handle; h != nil {
		h.cancel.Do(func() { close(h.cancelled) })
		if !j.seqs[0].pulling && !j.seqs[0].pulled {
			r.l.pull.release(h) // never scheduled: vLLM notifies the prefill at once
		}
	}
}

// markAnswered marks the job as served.
func (r *rank) markAnswered(j *job) {
	if j.ended {
		return
	}
	j.ended = true
	r.load.Add(-1)
	r.e.blockLog.release(j.blockLogID)
	close(j.done)
	if j.req.Close {
		j.c.InterruptRead()
	}
}

// fail ends the job with an error response if its head is not sent, or else with an
// error event.
func (r *rank) fail(j *job, status int, msg string) {
	if j.ended {
		return
	}
	r.counters.failed++
	r.drop(j)
	if j.Params.Stream && j.headSent {
		r.scratch.Open(&j.Response)
		j.Format.StreamError(&r.scratch, &j.Response, status, msg)
		r.scratch.Finish()
	} else {
		j.c.Respond(j.req, status, "application/json", j.Format.ErrorBody(status, msg))
	}
	r.markAnswered(j)
}

// flushEvents sends the step's events to the publisher, as one batch.
func (r *rank) flushEvents() {
	if len(r.events) == 0 {
		return
	}
	r.pub.Publish(r.events)
	r.events = nil
}

// resetCache serves /reset_prefix_cache. As in vLLM it fails while blocks are in use,
// and the event is published with the next step that has work.
func (r *rank) resetCache() bool {
	if !r.pool.Clear() {
		return false
	}
	r.event(eventcodec.Event{Kind: eventcodec.Cleared})
	return true
}

// jobs returns the jobs accepted and not served yet, each once.
func (r *rank) jobs() []*job {
	seen := make(map[*job]bool)
	var list []*job
	add := func(s *seq) {
		if !s.j.ended && !seen[s.j] {
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
	for s := range r.heldLast {
		add(s)
	}
	return list
}

// abortID aborts requests by id as the abort endpoints do: they finish with reason
// "abort" and their output so far.
func (r *rank) abortID(id string) {
	for _, j := range r.jobs() {
		if j.ID == id {
			r.finishAborted(j)
		}
	}
}

func (r *rank) finishAborted(j *job) {
	r.counters.aborted++
	r.drop(j)
	w := &r.scratch
	w.Open(&j.Response)
	for _, s := range j.seqs {
		if s.Reason != "" {
			continue
		}
		s.Reason = "abort"
		if j.Params.Stream {
			j.Format.Delta(w, &s.Choice, textgen.EOS, "")
		}
	}
	if j.Params.Stream {
		j.Format.Last(w, &j.Response)
		w.Finish()
	} else {
		j.c.Respond(j.req, 200, "application/json", j.Format.Full(nil, &j.Response))
	}
	r.markAnswered(j)
}
