package pd

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/kvtransfer/sidechannel"
	"sluice/router/worker"
)

// decodeAbort takes a decode leg down for a client that left before the leg's head came.
// A decode that holds a handle must be in its engine's hands before it is cut: an
// engine that meets the end of the connection first drops the request and tells
// prefill nothing, and the blocks stay until the lease ends (seen on vLLM 0.32).
//
// A stream is cut from its head on, by whoever has it then, and its connection closed a
// while later (see grace). Of any other leg it is
// taken to be so when PD.AbortDelay has passed since it was sent and its engine has
// answered something that was asked after (see inquiries): the first alone is a guess
// that an engine which stands still for a moment makes wrong, the second alone speaks
// of one of an engine's API servers. Neither is waited for beyond by, when nothing is
// pinned any more. Where the router can have the blocks released it waits no longer
// than maxReleaseWait and has every handle reclaimed of a leg whose head has not come:
// one request may be held up in an engine that answers all others.
//
// An engine that tells prefill of every leg that is cut, and so a second time of one whose
// blocks it has read, is not cut before PD.AbandonedDecode: see notifiesTwice.
type decodeAbort struct {
	r                 *Runner
	rank              *worker.Rank
	call              *upstream.Call
	concurrent        *concurrentPrefill // of a Concurrent pair: prefill, which is cut first
	streamed          bool
	releasable        bool
	notifiesTwice     bool          // notifiesTwice
	drainTime         time.Duration // PD.AbandonedDecode, where twice
	deadline, knownAt time.Time     // known: by PD.AbortDelay
	drainUntil        time.Time     // the leg may go on, where twice; set by gone

	onGone    func()      // gone, made once
	started   atomic.Bool // that the client has left: what gone has started holds it yet
	callEnded atomic.Bool // the call has its head, or has failed
	uncertain atomic.Bool // the engine may not have known the leg; set before the cut
}

const (
	// maxReleaseWait is how long blocks that the router can have released wait for a
	// decode engine to show that it will do it.
	maxReleaseWait = 500 * time.Millisecond
	// minProbes must be answered one after the other: a long body is read in several
	// turns of an engine's event loop.
	minProbes = 2
	// abortPoll is how often a wait looks whether the call has ended.
	abortPoll = 100 * time.Millisecond
	// probeRetry is between two questions of which the first was not answered.
	probeRetry = 100 * time.Millisecond
	// minGrace and maxGrace bound how long after the last answer a leg is left alone:
	// twice what that took, for the leg may be a step behind it.
	minGrace, maxGrace = 20 * time.Millisecond, time.Second
)

// cutGrace is how long behind its head the connection of a decode that holds a handle
// outlives its cut, if nothing else comes: vLLM sends the head of a stream before its
// engine has the request, and one that is cut there leaves prefill's blocks to the lease.
// The first event shows that it has it. It counts for every way in which a stream ends
// before its end: its client's leaving or deadline, on whatever goroutine or loop.
func (q *request) cutGrace(l *leg) time.Duration {
	switch {
	case l.abort == nil:
		return 0
	case l.abort.releasable:
		return min(q.pd.AbortDelay, maxReleaseWait)
	}
	return q.pd.AbortDelay
}

// reclaimLeaseAfter has blocks released whose decode was given up with its head and before
// its first event, when its engine has heard of that: what it had taken in by then it
// tells prefill itself.
func reclaimLeaseAfter(h *sidechannel.Lease, grace time.Duration) {
	if !h.CanRelease() {
		h.HandOff()
		return
	}
	time.AfterFunc(grace, h.Reclaim)
}

// start is run when the client has left; it returns at once.
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
		if l.notifiesTwice { // an engine that shows in time that it has the leg needs no other's word
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

// wasStarted says that gone was called. A nil one takes it.
func (l *decodeAbort) wasStarted() bool { return l != nil && l.started.Load() }

// isUncertain says that the leg was cut and that its engine may not have known it.
func (l *decodeAbort) isUncertain() bool { return l != nil && l.uncertain.Load() }

// markEnded says that the call has its head, or has failed: what comes after is not
// leaving's. A nil one takes it.
func (l *decodeAbort) markEnded() {
	if l != nil {
		l.callEnded.Store(true)
	}
}

// run ends by l.by, and of a Concurrent pair when prefill has ended, if that is later:
// its blocks may be ready by then, answered or not, and are kept for minutes if no
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

// awaitAdmission waits until the engine has taken the leg in; false: l.by came first.
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

// sleep is false when the call has ended, or l.by came before the time was over.
func (l *decodeAbort) sleep(d time.Duration) bool {
	at := time.Now().Add(d)
	truncated := at.After(l.deadline)
	if truncated {
		at = l.deadline
	}
	return l.sleepUntil(at) && !truncated
}

// sleepUntil is false when the call has ended.
func (l *decodeAbort) sleepUntil(at time.Time) bool {
	for remaining := time.Until(at); remaining > 0 && !l.callEnded.Load(); remaining = time.Until(at) {
		time.Sleep(min(remaining, abortPoll))
	}
	return !l.callEnded.Load()
}

// notifiesTwice says whether a decode engine, cut while it answers a request that is not
// streamed, tells prefill that the blocks can go although it has told so before.
//
// vLLM does from 0.21 on: the API server takes the cancelled call for one that its engine
// never knew. Prefill logs "Potentially invalid KV blocks for unrecognized request" and
// counts a notification after expiry, which are the signs of a real fault. Sluice's
// connector keeps that second notification back.
func (q *request) notifiesTwice(rank *worker.Rank) bool {
	_, isPull := q.plan.Family.(nixlPull)
	return isPull && !q.stream && q.handover.Handle != nil && versionAtLeast(rank, 0, 21, 0) && workerOption(rank, "connector") != "true"
}

// engineProbes ask engines a small thing, to learn that what they were sent before has
// been read: API servers take requests as they come. Each engine is asked one thing
// at a time, however many want to know.
type engineProbes struct {
	mu      sync.Mutex
	running map[*worker.Rank]*probeLoop
}

// probeLoop is the question under way to one rank, and the one after it.
type probeLoop struct{ next *probe }

// probe is closed over done; what follows is set before.
type probe struct {
	done    chan struct{}
	latency time.Duration
	ok      bool
}

const (
	probePath    = "/health" // any answer will do, and any status
	probeTimeout = 2 * time.Second
)

// wait waits until the rank's engine has answered a question put after this call, and
// for what time that took; false when by came first or it was not answered.
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

// join gives the next question to be put to rank.
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

// run puts questions until nobody waits for another.
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
