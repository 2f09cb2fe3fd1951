package pd

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/worker"
)

// decodeAbort implements cancelAfterAdmission. It ends a decode leg whose client disconnected
// before the leg's response head arrived. The engine must have admitted a decode with a handle
// before the router cancels it. An engine that first sees the end of the connection drops the
// request without notifying prefill, and the blocks stay pinned until the lease ends (seen on vLLM
// 0.32).
//
// From its head on, a stream is cancelled by its current owner, and its connection closes a while
// later (see cutGrace). The router considers any other leg admitted when PD.AbortDelay has passed
// since it was sent and its engine has answered a probe sent after it (see engineProbes). The delay
// alone fails for an engine that pauses for a moment; the probe alone reaches only one of an
// engine's API servers. The wait ends at deadline, when nothing is pinned any more. If the router
// can release the blocks itself, the wait ends after maxReleaseWait, and the router reclaims every
// handle of a leg whose head has not arrived, because an engine may delay one request and answer
// all others.
//
// Some engines notify prefill of every cancelled leg, and so a second time if they have already
// read the blocks. Such a leg is not cancelled before PD.AbandonedDecode has passed; see
// notifiesTwice.
type decodeAbort struct {
	r                 *Runner
	rank              *worker.Rank
	call              *upstream.Call
	concurrent        *concurrentPrefill // the prefill leg of a Concurrent pair; it is cancelled first
	streamed          bool
	releasable        bool
	notifiesTwice     bool          // see request.notifiesTwice
	drainTime         time.Duration // PD.AbandonedDecode, if notifiesTwice
	deadline, knownAt time.Time     // knownAt is when PD.AbortDelay has passed
	drainUntil        time.Time     // when the leg is cancelled at the latest, if notifiesTwice; set by start

	onGone    func()      // the method start; allocated once
	started   atomic.Bool // start was called, and its goroutine may still use this value
	callEnded atomic.Bool // the call has its response head or has failed
	uncertain atomic.Bool // the engine may not have received the leg; set before the cancel
}

const (
	// maxReleaseWait is how long the router waits for a sign that the decode engine will free the
	// blocks, if the router could release them itself.
	maxReleaseWait = 500 * time.Millisecond
	// minProbes is the number of consecutive probes that must be answered: an engine reads a long
	// body in several turns of its event loop.
	minProbes = 2
	// abortPoll is the interval at which waits check whether the call has ended.
	abortPoll = 100 * time.Millisecond
	// probeRetry is the pause after an unanswered probe.
	probeRetry = 100 * time.Millisecond
	// minGrace and maxGrace bound the pause between the last probe's response and the cancel. The
	// pause is twice the probe's latency, because the engine may process the leg a step later than
	// the probe.
	minGrace, maxGrace = 20 * time.Millisecond, time.Second
)

// cutGrace returns how long the connection of a decode with a handle stays open after the cancel if
// no event has arrived. vLLM sends the head of a stream before its engine core has the request. If
// the connection closes in between, prefill's blocks stay pinned until the lease ends. The first
// event shows that the core has the request. The grace applies whenever a stream ends early, on a
// goroutine or an event loop.
func (q *request) cutGrace(l *leg) time.Duration {
	switch {
	case l.abort == nil:
		return 0
	case l.abort.releasable:
		return min(q.pd.AbortDelay, maxReleaseWait)
	}
	return q.pd.AbortDelay
}

// reclaimLeaseAfter releases the blocks of a decode that the router gave up between its head and
// its first event. It first waits until the engine has noticed the cancel: the engine notifies
// prefill itself if it had admitted the request by then.
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

// isUncertain reports whether the leg was cancelled although its engine may not have received it.
func (l *decodeAbort) isUncertain() bool { return l != nil && l.uncertain.Load() }

// markEnded records that the call has its head or has failed. decodeAbort does nothing afterwards.
// It works on nil.
func (l *decodeAbort) markEnded() {
	if l != nil {
		l.callEnded.Store(true)
	}
}

// run cancels the call by l.deadline. In a Concurrent pair it waits for the end of prefill if that
// is later: prefill's blocks may be ready by then, and the engine keeps them for minutes if no
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

// awaitAdmission waits until the engine has admitted the leg. It returns false if l.deadline or the
// end of the call comes first.
func (l *decodeAbort) awaitAdmission() bool {
	if l.streamed {
		return l.sleep(time.Until(l.deadline) + 1) // always false: waits for the deadline or the end of the call
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

// sleep returns false if the call ends or l.deadline passes before d is over.
func (l *decodeAbort) sleep(d time.Duration) bool {
	at := time.Now().Add(d)
	truncated := at.After(l.deadline)
	if truncated {
		at = l.deadline
	}
	return l.sleepUntil(at) && !truncated
}

// sleepUntil returns false if the call has ended.
func (l *decodeAbort) sleepUntil(at time.Time) bool {
	for remaining := time.Until(at); remaining > 0 && !l.callEnded.Load(); remaining = time.Until(at) {
		time.Sleep(min(remaining, abortPoll))
	}
	return !l.callEnded.Load()
}

// notifiesTwice reports whether a decode engine may tell prefill twice to free the blocks when its
// non-streaming request is cancelled.
//
// vLLM does so from 0.21 on: the API server treats the cancelled call like one that the engine core
// never received. Prefill logs "Potentially invalid KV blocks for unrecognized request" and counts
// a notification after expiry, which are also the signs of a real fault. Sluice's connector
// suppresses the second notification.
func (q *request) notifiesTwice(rank *worker.Rank) bool {
	return q.plan.Traits.Pulls && !q.stream && q.handover.Handle != nil && rank.VersionAtLeast(0, 21, 0) && rank.Option("connector") != "true"
}

// engineProbes sends engines a small request to learn that they have read what was sent before. API
// servers read requests in order. Each engine has at most one probe in flight, however many callers
// wait.
type engineProbes struct {
	mu      sync.Mutex
	running map[*worker.Rank]*probeLoop
}

// probeLoop is the goroutine that probes one rank. next is the probe after the current one.
type probeLoop struct{ next *probe }

// probe is one probe. Its result is set before done is closed.
type probe struct {
	done    chan struct{}
	latency time.Duration
	ok      bool
}

const (
	probePath    = "/health" // any response counts, whatever its status
	probeTimeout = 2 * time.Second
)

// wait waits until the rank's engine has answered a probe sent after this call, and returns the
// probe's latency. It returns false if by passes first or the probe fails.
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

// join returns the next probe of rank and starts the rank's loop if none runs.
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

// run sends probes to rank until no caller waits for another one.
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
