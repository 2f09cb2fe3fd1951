package abort

import (
	"sync"
	"sync/atomic"
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// Decode implements CancelAfterAdmission. It ends a decode leg whose client disconnected
// before the leg's response head arrived. The engine must have admitted a decode with a handle
// before the router cancels it. An engine that first sees the end of the connection drops the
// request without notifying prefill, and the blocks stay allocated until the lease ends (seen on vLLM
// 0.32).
//
// From its head on, a stream is cancelled by its current owner, and its connection closes a while
// later (see Rule.CloseGrace). The router considers any other leg admitted when PD.AbortDelay has passed
// since it was sent and its engine has answered a probe sent after it (see Probes). The delay
// alone fails for an engine that pauses for a moment; the probe alone reaches only one of an
// engine's API servers. The wait ends at deadline, when the lease has ended. If the router
// can release the blocks itself, the wait ends after maxReleaseWait, and the router reclaims every
// handle of a leg whose head has not arrived, because an engine may delay one request and answer
// all others.
//
// Some engines notify prefill of every cancelled leg, and so a second time if they have already
// read the blocks. Such a leg is not cancelled before PD.AbandonedDecodeTimeout has passed; see
// notifiesTwice.
type Decode struct {
	DecodeLeg
	drainUntil time.Time // when the leg is cancelled at the latest, if DrainTime is set; set by start

	onGone    func()      // the method start; allocated once
	started   atomic.Bool // Start was called, and its goroutine may still use this value
	callEnded atomic.Bool // the call has its response head or has failed
	uncertain atomic.Bool // the engine may not have received the leg; set before the cancel
}

// DecodeLeg is a decode leg whose client may disconnect.
type DecodeLeg struct {
	Rank   *worker.Rank
	Call   *upstream.Call
	Probes *Probes
	// Prefill is the prefill leg of a Concurrent pair, which is ended first. It is nil if there is
	// none.
	Prefill  PrefillLeg
	Streamed bool
	// Releasable says that the router can release the blocks itself.
	Releasable bool
	// Deadline is when the lease has ended.
	Deadline time.Time
	// KnownAt is when PD.AbortDelay has passed since the leg was sent.
	KnownAt time.Time
	// DrainTime is PD.AbandonedDecodeTimeout if NotifiesTwice is set: the engine may tell prefill twice to
	// free the blocks when the leg is cancelled.
	DrainTime     time.Duration
	NotifiesTwice bool
}

// PrefillLeg is the prefill leg of a Concurrent pair.
type PrefillLeg interface {
	// HalfClose half-closes the leg's call. The leg stays valid until Wait has returned.
	HalfClose()
	// Wait returns after the leg has ended.
	Wait()
}

// NewDecode returns a Decode for one leg at a time: see Arm. It may serve the next leg unless it was
// started (WasStarted), because its goroutine may still use it then.
func NewDecode() *Decode {
	l := new(Decode)
	l.onGone = l.start
	return l
}

// Arm prepares l for a leg and returns the function to call when the client disconnects. l must not
// have been started.
func (l *Decode) Arm(leg *DecodeLeg) (onGone func()) {
	*l = Decode{DecodeLeg: *leg, onGone: l.onGone}
	return l.onGone
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

// start is called when the client has disconnected. It does not block.
func (l *Decode) start() {
	l.started.Store(true)
	if l.Prefill != nil {
		l.Prefill.HalfClose()
	}
	now := time.Now()
	l.drainUntil = now.Add(l.DrainTime)
	if at := now.Add(maxReleaseWait); l.Releasable && at.Before(l.Deadline) {
		l.Deadline = at
		if l.NotifiesTwice { // an engine that shows in time that it has the leg frees the blocks itself
			l.Deadline = later(at, l.KnownAt.Add(maxGrace))
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

// WasStarted reports whether start was called. It works on nil.
func (l *Decode) WasStarted() bool { return l != nil && l.started.Load() }

// IsUncertain reports whether the leg was cancelled although its engine may not have received it.
func (l *Decode) IsUncertain() bool { return l != nil && l.uncertain.Load() }

// CanRelease reports whether the router can release the blocks of the leg itself. It works on nil.
func (l *Decode) CanRelease() bool { return l != nil && l.Releasable }

// MarkEnded records that the call has its head or has failed. Decode does nothing afterwards.
// It works on nil.
func (l *Decode) MarkEnded() {
	if l != nil {
		l.callEnded.Store(true)
	}
}

// run cancels the call by l.Deadline. In a Concurrent pair it waits for the end of prefill if that
// is later: prefill's blocks may be ready by then, and the engine keeps them for minutes if no
// decode asks for them.
func (l *Decode) run() {
	if l.Prefill != nil {
		l.Prefill.Wait()
	}
	admitted := l.awaitAdmission() && (!l.Releasable || l.NotifiesTwice)
	if admitted && l.NotifiesTwice {
		l.sleepUntil(l.drainUntil)
	}
	if !l.callEnded.Load() {
		l.uncertain.Store(!admitted)
		l.Call.Cancel()
	}
}

// awaitAdmission waits until the engine has admitted the leg. It returns false if l.Deadline or the
// end of the call comes first.
func (l *Decode) awaitAdmission() bool {
	if l.Streamed {
		return l.sleep(time.Until(l.Deadline) + 1) // always false: waits for the deadline or the end of the call
	}
	for !l.Call.Sent() {
		if !l.sleep(5 * time.Millisecond) {
			return false
		}
	}
	for answered := 0; ; {
		elapsed, ok := l.Probes.wait(l.Rank, l.Deadline)
		if answered++; !ok {
			if answered = 0; !l.sleep(probeRetry) {
				return false
			}
		} else if answered == minProbes {
			grace := min(max(2*elapsed, minGrace), maxGrace)
			return l.sleep(max(grace, time.Until(l.KnownAt)))
		}
	}
}

// sleep returns false if the call ends or l.Deadline passes before d is over.
func (l *Decode) sleep(d time.Duration) bool {
	at := time.Now().Add(d)
	truncated := at.After(l.Deadline)
	if truncated {
		at = l.Deadline
	}
	return l.sleepUntil(at) && !truncated
}

// sleepUntil returns false if the call has ended.
func (l *Decode) sleepUntil(at time.Time) bool {
	for remaining := time.Until(at); remaining > 0 && !l.callEnded.Load(); remaining = time.Until(at) {
		time.Sleep(min(remaining, abortPoll))
	}
	return !l.callEnded.Load()
}

// NewProbes returns Probes that send to ranks of f. The result must not be copied after its first use.
func NewProbes(f *fleet.Fleet) Probes { return Probes{fleet: f} }

// Probes sends engines a small request to learn that they have read what was sent before. API
// servers read requests in order. Each engine has at most one probe in flight, however many callers
// wait.
type Probes struct {
	fleet   *fleet.Fleet
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
	probePath      = "/health" // any response counts, whatever its status
	probeTimeout   = 2 * time.Second
	maxProbeAnswer = 1 << 20 // in bytes
)

// wait waits until the rank's engine has answered a probe sent after this call, and returns the
// probe's latency. It returns false if by passes first or the probe fails.
func (i *Probes) wait(rank *worker.Rank, by time.Time) (time.Duration, bool) {
	next := i.join(rank)
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
func (i *Probes) join(rank *worker.Rank) *probe {
	i.mu.Lock()
	defer i.mu.Unlock()
	at := i.running[rank]
	if at == nil {
		at = &probeLoop{next: &probe{done: make(chan struct{})}}
		if i.running == nil {
			i.running = make(map[*worker.Rank]*probeLoop)
		}
		i.running[rank] = at
		go i.run(rank, at)
		return at.next
	}
	if at.next == nil {
		at.next = &probe{done: make(chan struct{})}
	}
	return at.next
}

// run sends probes to rank until no caller waits for another one.
func (i *Probes) run(rank *worker.Rank, at *probeLoop) {
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
		_, _, err := i.fleet.Endpoint(rank).Get(probePath, probeTimeout, maxProbeAnswer)
		q.latency, q.ok = time.Since(began), err == nil
		close(q.done)
	}
}
