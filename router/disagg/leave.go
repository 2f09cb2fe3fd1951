package disagg

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/sidechannel"
	"sluice/router/worker"
)

// leaving takes a decode leg down for a client that left before the leg's head came.
// A decode that holds a handle must be in its engine's hands before it is cut: an
// engine that meets the end of the connection first drops the request and tells
// prefill nothing, and the blocks stay until the lease ends (seen on vLLM 0.32).
//
// A stream is cut from its head on, by whoever has it then, and its connection closed a
// while later (see grace). Of any other leg it is
// taken to be so when PD.CutAfter has passed since it was sent and its engine has
// answered something that was asked after (see inquiries): the first alone is a guess
// that an engine which stands still for a moment makes wrong, the second alone speaks
// of one of an engine's API servers. Neither is waited for beyond by, when nothing is
// pinned any more. Where the router can have the blocks released it waits no longer
// than releaseAfter and has every handle reclaimed of a leg whose head has not come:
// one request may be held up in an engine that answers all others.
//
// An engine that tells prefill of every leg that is cut, and so a second time of one whose
// blocks it has read, is not cut before PD.AbandonedDecode: see tellsTwice.
type leaving struct {
	r         *Runner
	rank      *worker.Rank
	call      *upstream.Call
	beside    *beside // of a Concurrent pair: prefill, which is cut first
	streamed  bool
	releases  bool
	twice     bool          // tellsTwice
	finish    time.Duration // PD.AbandonedDecode, where twice
	by, known time.Time     // known: by PD.CutAfter
	until     time.Time     // the leg may go on, where twice; set by gone

	begin func()      // gone, made once
	told  atomic.Bool // that the client has left: what gone has started holds it yet
	over  atomic.Bool // the call has its head, or has failed
	doubt atomic.Bool // the engine may not have known the leg; set before the cut
}

const (
	// releaseAfter is how long blocks that the router can have released wait for a
	// decode engine to show that it will do it.
	releaseAfter = 500 * time.Millisecond
	// questions must be answered one after the other: a long body is read in several
	// turns of an engine's event loop.
	questions = 2
	// lookAgain is how often a wait looks whether the call has ended.
	lookAgain = 100 * time.Millisecond
	// askAgain is between two questions of which the first was not answered.
	askAgain = 100 * time.Millisecond
	// leastGrace and mostGrace bound how long after the last answer a leg is left alone:
	// twice what that took, for the leg may be a step behind it.
	leastGrace, mostGrace = 20 * time.Millisecond, time.Second
)

// grace is how long behind its head the connection of a decode that holds a handle
// outlives its cut, if nothing else comes: vLLM sends the head of a stream before its
// engine has the request, and one that is cut there leaves prefill's blocks to the lease.
// The first event shows that it has it. It counts for every way in which a stream ends
// before its end: its client's leaving or deadline, on whatever goroutine or loop.
func (q *request) grace() time.Duration {
	switch {
	case q.leaves == nil:
		return 0
	case q.leaves.releases:
		return min(q.pd.CutAfter, releaseAfter)
	}
	return q.pd.CutAfter
}

// reclaimBehind has blocks released whose decode was given up with its head and before
// its first event, when its engine has heard of that: what it had taken in by then it
// tells prefill itself.
func reclaimBehind(h *sidechannel.Hold, grace time.Duration) {
	if !h.Releases() {
		h.Passed()
		return
	}
	time.AfterFunc(grace, h.Reclaimed)
}

// gone is run when the client has left; it returns at once.
func (l *leaving) gone() {
	l.told.Store(true)
	if l.beside != nil {
		l.beside.keep()
		l.beside.call.HangUp()
	}
	now := time.Now()
	l.until = now.Add(l.finish)
	if at := now.Add(releaseAfter); l.releases && at.Before(l.by) {
		l.by = at
		if l.twice { // an engine that shows in time that it has the leg needs no other's word
			l.by = later(at, l.known.Add(mostGrace))
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

// wasTold says that gone was called. A nil one takes it.
func (l *leaving) wasTold() bool { return l != nil && l.told.Load() }

// inDoubt says that the leg was cut and that its engine may not have known it.
func (l *leaving) inDoubt() bool { return l != nil && l.doubt.Load() }

// ended says that the call has its head, or has failed: what comes after is not
// leaving's. A nil one takes it.
func (l *leaving) ended() {
	if l != nil {
		l.over.Store(true)
	}
}

// run ends by l.by, and of a Concurrent pair when prefill has ended, if that is later:
// its blocks may be ready by then, answered or not, and are kept for minutes if no
// decode asks for them.
func (l *leaving) run() {
	if l.beside != nil {
		l.beside.wait()
	}
	sure := l.admitted() && (!l.releases || l.twice)
	if sure && l.twice {
		l.sleepUntil(l.until)
	}
	if !l.over.Load() {
		l.doubt.Store(!sure)
		l.call.Cut()
	}
}

// admitted waits until the engine has taken the leg in; false: l.by came first.
func (l *leaving) admitted() bool {
	if l.streamed {
		return l.sleep(time.Until(l.by) + 1) // never
	}
	for !l.call.Sent() {
		if !l.sleep(5 * time.Millisecond) {
			return false
		}
	}
	for answered := 0; ; {
		took, ok := l.r.inquiries.ask(l.r, l.rank, l.by)
		if answered++; !ok {
			if answered = 0; !l.sleep(askAgain) {
				return false
			}
		} else if answered == questions {
			grace := min(max(2*took, leastGrace), mostGrace)
			return l.sleep(max(grace, time.Until(l.known)))
		}
	}
}

// sleep is false when the call has ended, or l.by came before the time was over.
func (l *leaving) sleep(d time.Duration) bool {
	at := time.Now().Add(d)
	late := at.After(l.by)
	if late {
		at = l.by
	}
	return l.sleepUntil(at) && !late
}

// sleepUntil is false when the call has ended.
func (l *leaving) sleepUntil(at time.Time) bool {
	for left := time.Until(at); left > 0 && !l.over.Load(); left = time.Until(at) {
		time.Sleep(min(left, lookAgain))
	}
	return !l.over.Load()
}

// tellsTwice says whether a decode engine, cut while it answers a request that is not
// streamed, tells prefill that the blocks can go although it has told so before.
//
// vLLM does from 0.21 on: the API server takes the cancelled call for one that its engine
// never knew. Prefill logs "Potentially invalid KV blocks for unrecognized request" and
// counts a notification after expiry, which are the signs of a real fault. Sluice's
// connector keeps that second notification back.
func (q *request) tellsTwice(rank *worker.Rank) bool {
	_, pulls := q.plan.Family.(nixlPull)
	return pulls && !q.stream && q.pair.Handle != nil && atLeast(rank, 0, 21, 0) && option(rank, "connector") != "true"
}

// inquiries ask engines a small thing, to learn that what they were sent before has
// been read: API servers take requests as they come. Each engine is asked one thing
// at a time, however many want to know.
type inquiries struct {
	mu    sync.Mutex
	under map[*worker.Rank]*inquiry
}

// inquiry is the question under way to one rank, and the one after it.
type inquiry struct{ next *question }

// question is closed over done; what follows is set before.
type question struct {
	done chan struct{}
	took time.Duration
	ok   bool
}

const (
	questionPath  = "/health" // any answer will do, and any status
	questionLimit = 2 * time.Second
)

// ask waits until the rank's engine has answered a question put after this call, and
// for what time that took; false when by came first or it was not answered.
func (i *inquiries) ask(r *Runner, rank *worker.Rank, by time.Time) (time.Duration, bool) {
	mine := i.join(r, rank)
	t := time.NewTimer(time.Until(by))
	defer t.Stop()
	select {
	case <-mine.done:
		return mine.took, mine.ok
	case <-t.C:
		return 0, false
	}
}

// join gives the next question to be put to rank.
func (i *inquiries) join(r *Runner, rank *worker.Rank) *question {
	i.mu.Lock()
	defer i.mu.Unlock()
	at := i.under[rank]
	if at == nil {
		at = &inquiry{next: &question{done: make(chan struct{})}}
		if i.under == nil {
			i.under = make(map[*worker.Rank]*inquiry)
		}
		i.under[rank] = at
		go i.put(r, rank, at)
		return at.next
	}
	if at.next == nil {
		at.next = &question{done: make(chan struct{})}
	}
	return at.next
}

// put puts questions until nobody waits for another.
func (i *inquiries) put(r *Runner, rank *worker.Rank, at *inquiry) {
	for {
		i.mu.Lock()
		q := at.next
		at.next = nil
		if q == nil {
			delete(i.under, rank)
		}
		i.mu.Unlock()
		if q == nil {
			return
		}
		began := time.Now()
		_, _, err := r.opt().Fleet.Endpoint(rank).Get(questionPath, questionLimit, maxAnswer)
		q.took, q.ok = time.Since(began), err == nil
		close(q.done)
	}
}
