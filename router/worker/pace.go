package worker

import (
	"runtime"
	"sync/atomic"
	"time"
)

// Pace learns how fast the engine of a rank starts the requests that it is given, and how many it runs
// at a time, from the first tokens that the router sees and from the load that the engine reports.
// Its methods may be called from any goroutine and, but for Forget, never wait: what meets another call in
// progress is dropped. The zero value has learned nothing.
type Pace struct {
	busy atomic.Bool

	// The fields below belong to the holder of busy.
	count, elapsed float64 // first tokens, and the ns that they took; both fade
	reports        int     // of recent
	recent         [8]int64
	probeAfter     time.Duration // pause before the next larger batch is tried
	probeAt        int64

	interval atomic.Int64 // mean ns between two first tokens while requests waited for theirs; 0: unknown
	alone    atomic.Int64 // mean ns until the first token of a request that met no other; 0: unknown
	delay    atomic.Int64 // mean ns from a request's dispatch to its first token, beyond those for its own prompt
	batch    atomic.Int64 // requests that the engine runs at a time; 0: unknown
}

const (
	paceFade       = 15.0 / 16 // of a first token's weight with each later one
	minProbeAfter  = 10 * time.Second
	maxProbeAfter  = 5 * time.Minute
	minFullReports = 2
)

// FirstToken adds a first token. took is the time since it was the turn of its request: since the first
// token before, or since the request was sent if no other waited then. wasAlone says that no other
// request waited for its first token when this one was sent, and whole is the time since then. own is the
// part of whole that the request's own prompt was expected to take. isAlone says that no other waits for its
// first token now.
//
// A request that met no other counts only until requests have met: an engine may be able to start many in
// the time that it takes for one.
func (p *Pace) FirstToken(took, whole, own time.Duration, wasAlone, isAlone bool) {
	if !p.busy.CompareAndSwap(false, true) {
		return
	}
	follow(&p.delay, max(whole-own, 0), 16)
	if wasAlone {
		follow(&p.alone, whole, 8)
	}
	switch {
	case !wasAlone || !isAlone:
		p.count, p.elapsed = p.count*paceFade+1, p.elapsed*paceFade+float64(max(took, 0))
		p.interval.Store(max(int64(p.elapsed/p.count), 1))
	case p.count == 0:
		p.interval.Store(p.alone.Load())
	}
	p.busy.Store(false)
}

// follow moves a mean towards d by one part in n.
func follow(mean *atomic.Int64, d time.Duration, n int64) {
	old := mean.Load()
	if old == 0 {
		old = int64(d)
	}
	mean.Store(max(old+(int64(d)-old)/n, 1))
}

// Wait returns how long a request that is given to the engine now is expected to wait beyond the time
// that it would take alone, by the pace of the first tokens so far. pending is the number of requests
// that wait for their first token, and since the time since the last first token, or since they wait.
func (p *Pace) Wait(pending int64, since time.Duration) time.Duration {
	interval, alone := time.Duration(p.interval.Load()), time.Duration(p.alone.Load())
	if interval == 0 || pending <= 0 {
		return 0
	}
	wait := since - 2*max(alone, interval) // an engine that has stopped does not become free by waiting for it
	if pending > 1 {                       // whether requests hold each other up shows only where two meet
		wait = max(wait, time.Duration(pending+1)*interval-min(max(since, 0), interval)-alone)
	}
	return max(wait, 0)
}

// Interval returns the mean time between two first tokens while requests waited for theirs, 0 if it is
// unknown.
func (p *Pace) Interval() time.Duration { return time.Duration(p.interval.Load()) }

// Alone returns the mean time to the first token of a request that met no other, 0 if it is unknown.
func (p *Pace) Alone() time.Duration { return time.Duration(p.alone.Load()) }

// Delay returns the mean time from a request's dispatch to its first token beyond what its own prompt takes, 0
// if it is unknown. It holds for prompts of any length: the time until the first token of long ones says
// nothing about short ones.
func (p *Pace) Delay() time.Duration { return time.Duration(p.delay.Load()) }

// Batch returns how many requests the engine runs at a time, 0 if it is unknown.
func (p *Pace) Batch() int64 { return p.batch.Load() }

// Report adds a load that the engine reports. inFlight is the number of requests that this router has
// there. isCongested says that the router has seen requests wait there for the others' end.
//
// The largest number that ran while others waited is the size of the engine's batch. It is tried from time to
// time whether it has grown, because memory may have been the bound.
func (p *Pace) Report(now time.Duration, running, waiting, inFlight int64, isCongested bool) {
	if running < 0 || waiting < 0 || !p.busy.CompareAndSwap(false, true) {
		return
	}
	defer p.busy.Store(false)
	batch := p.batch.Load()
	if batch > 0 && running > batch { // it was not a bound
		p.batch.Store(0)
		batch, p.reports, p.probeAfter = 0, 0, 0
	}
	switch {
	case waiting > 0 && running > 0 && (batch > 0 || isCongested):
		p.recent[p.reports%len(p.recent)] = running
		p.reports++
		if p.reports < minFullReports {
			return
		}
		largest := int64(0)
		for _, n := range p.recent[:min(p.reports, len(p.recent))] {
			largest = max(largest, n)
		}
		if largest < batch || p.probeAfter == 0 { // the larger batch that was tried does not exist
			p.probeAfter = min(max(2*p.probeAfter, minProbeAfter), maxProbeAfter)
			p.probeAt = int64(now + p.probeAfter)
		}
		p.batch.Store(largest)
	case batch > 0 && waiting == 0 && inFlight >= batch && int64(now) >= p.probeAt:
		p.batch.Store(batch + 1)
		p.probeAt = int64(now + minProbeAfter)
	}
}

// Forget drops what was learned, for an engine that has left or restarted. It waits for a call in progress.
func (p *Pace) Forget() {
	for !p.busy.CompareAndSwap(false, true) {
		runtime.Gosched()
	}
	p.count, p.elapsed, p.reports, p.recent, p.probeAfter, p.probeAt = 0, 0, 0, [8]int64{}, 0, 0
	for _, learned := range []*atomic.Int64{&p.interval, &p.alone, &p.delay, &p.batch} {
		learned.Store(0)
	}
	p.busy.Store(false)
}
