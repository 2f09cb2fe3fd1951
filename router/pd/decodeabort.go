package pd

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/worker"
)

// decodeAbort carries cancelAfterAdmission out: it ends a decode leg whose client
// disconnected before the leg's response head came. The engine must have admitted a decode
// with a handle before the router cancels it. An engine that sees the end of the connection
// first drops the request and does not tell prefill, and the blocks stay until the lease
// ends (seen on vLLM 0.32).
//
// A stream is cancelled from its head on by its current owner, and its connection is closed
// a while later (see cutGrace). The router takes any other leg as admitted when
// PD.AbortDelay has passed since it was sent and its engine has answered a probe sent after
// it (see engineProbes). The delay alone is wrong for an engine that pauses for a moment;
// the probe alone concerns one of an engine's API servers. The wait ends at deadline, when
// nothing is pinned any more. Where the router can have the blocks released, the wait ends
// after maxReleaseWait, and the router reclaims every handle of a leg whose head has not
// come, because an engine may delay one request and answer all others.
//
// An engine that notifies prefill of every cancelled leg, and so a second time of one whose
// blocks it has read, is not cancelled before PD.AbandonedDecode: see notifiesTwice.
type decodeAbort struct {
	r                 *Runner
	rank              *worker.Rank
	call              *upstream.Call
	concurrent        *concurrentPrefill // the prefill leg of a Concurrent pair, which is cancelled first
	streamed          bool
	releasable        bool
	notifiesTwice     bool          // see request.notifiesTwice
	drainTime         time.Duration // PD.AbandonedDecode, if notifiesTwice
	deadline, knownAt time.Time     // knownAt: when PD.AbortDelay has passed
	drainUntil        time.Time     // how long the leg may go on, if notifiesTwice; set by start

	onGone    func()      // start; made once
	started   atomic.Bool // start was called, and its goroutine may still use this value
	callEnded atomic.Bool // the call has its head, or has failed
	uncertain atomic.Bool // the engine may not have had the leg; set before the cancel
}

const (
	// maxReleaseWait is how long the router waits for a decode engine to show that it will
	// free the blocks, where the router can have them released itself.
	maxReleaseWait = 500 * time.Millisecond
	// minProbes probes must be answered one after the other: an engine reads a long body in
	// several turns of its event loop.
	minProbes = 2
	// abortPoll is how often a wait checks whether the call has ended.
	abortPoll = 100 * time.Millisecond
	// probeRetry is the pause after a probe that was not answered.
	probeRetry = 100 * time.Millisecond
	// minGrace and maxGrace bound the pause between the last probe's answer and the cancel.
	// It is twice the probe's latency, because the leg may be a step behind the probe.
	minGrace, maxGrace = 20 * time.Millisecond, time.Second
)

// cutGrace is how long the connection of a decode with a handle stays open after the cancel
// when no event has come. vLLM sends the head of a stream before its engine core has the
// request; when the connection closes in between, prefill's blocks stay until the lease
// ends. The first event shows that the core has the request. The grace holds for every way
// in which a stream ends early, on a goroutine or a loop.
func (q *request) cutGrace(l *leg) time.Duration {
	switch {
	case l.abort == nil:
		return 0
	case l.abort.releasable:
		return min(q.pd.AbortDelay, maxReleaseWait)
	}
	return q.pd.AbortDelay
}

// reclaimLeaseAfter releases the blocks of a decode that the router gave up between its head
// and its first event. It waits until the engine has seen that: the engine tells prefill
// itself of a request that it had admitted by then.
func reclaimLeaseAfter(h *sidechannel.Lease, grace time.Duration) {
	if !h.CanRelease() {
		h.HandOff()
		return
	}
	time.AfterFunc(grace, h.Reclaim)
}

// start is called when the client has disconnected. It does not block.
func (l *decodeAbort) start() {
	l.started.Store(true)
	if l.concurrent != nil {
		l.concurrent.retain()
		l.concurrent.call.HalfClose()
	}
	now := time.Now()
	l.drainUntil = now.Add(l.drainTime)
	if at := now.Add(maxReleaseWait); l.releasable && at.Before(l.deadline) {
		l.deadline = at
		if l.notifiesTwice { // an engine that shows in time that it has the leg frees the blocks itself
			l.deadline = later(at, l.knownAt.Add(maxGrace))
		}
	}
	go l.run()
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// wasStarted reports whether start was called. It works on nil.
func (l *decodeAbort) wasStarted() bool { return l != nil && l.started.Load() }

// isUncertain reports whether the leg was cancelled and its engine may not have had it.
func (l *decodeAbort) isUncertain() bool { return l != nil && l.uncertain.Load() }

// markEnded records that the call has its head or has failed; decodeAbort does nothing
// afterwards. It works on nil.
func (l *decodeAbort) markEnded() {
	if l != nil {
		l.callEnded.Store(true)
	}
}

// run cancels the call by l.deadline. In a Concurrent pair it waits for the end of prefill,
// if that is later: prefill's blocks may be ready by then, and are kept for minutes if no
// decode asks for them.
func (l *decodeAbort) run() {
	if l.concurrent != nil {
		l.concurrent.wait()
	}
	admitted := l.awaitAdmission() && (!l.releasable || l.notifiesTwice)
	if admitted && l.notifiesTwice {
		l.sleepUntil(l.drainUntil)
	}
	if !l.callEnded.Load() {
		l.uncertain.Store(!admitted)
		l.call.Cancel()
	}
}

// awaitAdmission waits until the engine has admitted the leg. It returns false when
// l.deadline or the end of the call comes first.
func (l *decodeAbort) awaitAdmission() bool {
	if l.streamed {
		return l.sleep(time.Until(l.deadline) + 1) // never
	}
	for !l.call.Sent() {
		if !l.sleep(5 * time.Millisecond) {
			return false
		}
	}
	for answered := 0; ; {
		elapsed, ok := l.r.probes.wait(l.r, l.rank, l.deadline)
		if answered++; !ok {
			if answered = 0; !l.sleep(probeRetry) {
				return false
			}
		} else if answered == minProbes {
			grace := min(max(2*elapsed, minGrace), maxGrace)
			return l.sleep(max(grace, time.Until(l.knownAt)))
		}
	}
}

// sleep returns false when the call ends, or l.deadline comes, before d is over.
func (l *decodeAbort) sleep(d time.Duration) bool {
	at := time.Now().Add(d)
	truncated := at.After(l.deadline)
	if truncated {
		at = l.deadline
	}
	return l.sleepUntil(at) && !truncated
}

// sleepUntil returns false when the call has ended.
func (l *decodeAbort) sleepUntil(at time.Time) bool {
	for remaining := time.Until(at); remaining > 0 && !l.callEnded.Load(); remaining = time.Until(at) {
		time.Sleep(min(remaining, abortPoll))
	}
	return !l.callEnded.Load()
}

// notifiesTwice reports whether a decode engine that is cancelled during a request without a
// stream tells prefill to free the blocks although it has done so before.
//
// vLLM does from 0.21 on: the API server treats the cancelled call as one that the engine
// core never had. Prefill logs "Potentially invalid KV blocks for unrecognized request" and
// counts a notification after expiry, which are the signs of a real fault. Sluice's
// connector suppresses the second notification.
func (q *request) notifiesTwice(rank *worker.Rank) bool {
	_, isPull := q.plan.Family.(nixlPull)
	return isPull && !q.stream && q.handover.Handle != nil && versionAtLeast(rank, 0, 21, 0) && workerOption(rank, "connector") != "true"
}

// engineProbes send engines a small request, to learn that they have read what was sent
// before: API servers read requests in order. Each engine has one probe at a time, however
// many callers wait.
type engineProbes struct {
	mu      sync.Mutex
	running map[*worker.Rank]*probeLoop
}

// probeLoop is the probe under way to one rank, and the one after it.
type probeLoop struct{ next *probe }

// probe is one probe. Its result is set before done is closed.
type probe struct {
	done    chan struct{}
	latency time.Duration
	ok      bool
}

const (
	probePath    = "/health" // any answer with any status counts
	probeTimeout = 2 * time.Second
)

// wait waits until the rank's engine has answered a probe sent after this call, and returns
// the probe's latency. It returns false when by comes first or the probe fails.
func (i *engineProbes) wait(r *Runner, rank *worker.Rank, by time.Time) (time.Duration, bool) {
	next := i.join(r, rank)
	t := time.NewTimer(time.Until(by))
	defer t.Stop()
	select {
	case <-next.done:
		return next.latency, next.ok
	case <-t.C:
		return 0, false
	}
}

// join returns the next probe of rank, and starts its loop where none runs.
func (i *engineProbes) join(r *Runner, rank *worker.Rank) *probe {
	i.mu.Lock()
	defer i.mu.Unlock()
	at := i.running[rank]
	if at == nil {
		at = &probeLoop{next: &probe{done: make(chan struct{})}}
		if i.running == nil {
			i.running = make(map[*worker.Rank]*probeLoop)
		}
		i.running[rank] = at
		go i.run(r, rank, at)
		return at.next
	}
	if at.next == nil {
		at.next = &probe{done: make(chan struct{})}
	}
	return at.next
}

// run sends probes to rank until no caller waits for another.
func (i *engineProbes) run(r *Runner, rank *worker.Rank, at *probeLoop) {
	for {
		i.mu.Lock()
		q := at.next
		at.next = nil
		if q == nil {
			delete(i.running, rank)
		}
		i.mu.Unlock()
		if q == nil {
			return
		}
		began := time.Now()
		_, _, err := r.options().Fleet.Endpoint(rank).Get(probePath, probeTimeout, maxAnswer)
		q.latency, q.ok = time.Since(began), err == nil
		close(q.done)
	}
}
