package liveness

import (
	"fmt"
	"time"
)

// State is the verdict on one engine rank.
type State uint32

// The verdicts.
const (
	Alive State = iota
	// ProcessStopped: the kernel accepts connections, and nothing answers.
	ProcessStopped
	// CoreStalled: the API server answers, and the engine core behind it makes no progress with its
	// work.
	CoreStalled
	// HostVanished: packets to the host are dropped.
	HostVanished
	NumStates
)

var stateNames = [NumStates]string{"alive", "process", "core", "host"}

// String returns the state's name as it appears in metrics and logs.
func (s State) String() string {
	if s < NumStates {
		return stateNames[s]
	}
	return "unknown"
}

// Bounds are the silences after which the verdicts are reached; 0 or less disables a verdict.
type Bounds struct{ Process, Core, Host time.Duration }

// Evidence is the state of one engine server at one time. All counts are cumulative: only their
// changes matter.
type Evidence struct {
	At          time.Duration // on any monotonic clock
	Answered    uint64        // probes and readings of /metrics that were answered, with any status
	Hung        uint64        // probes that were sent and not answered in time
	Unreachable uint64        // probes for which no connection could be established in time; a refused one does not count
	Ranks       []Rank        // always the same number, in the same order
}

// Rank is the evidence of one data-parallel rank.
type Rank struct {
	Answered       uint64 // response heads
	Bytes          uint64 // parts of response bodies that only the engine core can have caused
	Events         uint64 // KV event batches and load messages
	Counters       uint64 // a digest of the counters and gauges that change when the core makes progress
	Reads          uint64 // how often Counters was read; while it does not change, Counters says nothing
	Calls          int    // running requests that this router has sent
	Overdue        int    // of these, requests without a byte of response body for Bounds.Core
	Running        int64  // requests that the engine reports as running; below 0: not reported
	HasComputed    bool   // the rank has computed tokens since it started: a cold engine may compile for minutes
	ProbesAnswered uint64 // probes that the core has answered; see Detector.NeedsProbe
	// ProbePending is how long the current probe has been unanswered; 0: there is none.
	ProbePending time.Duration
	// ProbeRefused: the engine refuses such probes.
	ProbeRefused bool
	// LongestPrefill is how long the longest running prompt is expected to take, from the times of
	// large prompts on this rank.
	LongestPrefill time.Duration
}

const (
	// minHung probes must have hung, and minReads readings must have shown the same counters, since
	// the last sign of life: without them the silence may only mean that nothing was asked.
	minHung  = 2
	minReads = 3
	// maxStep bounds what one call adds to a silence. A router that was itself stopped has received
	// nothing meanwhile, which says nothing about engines.
	maxStep = time.Second
	// prefillFactor is the multiple of LongestPrefill that is added to Bounds.Core: an engine may
	// compute a long prompt in one step, during which nothing else advances.
	prefillFactor = 3
)

// Detector decides on one engine server and its ranks. It is not safe for concurrent use. The zero
// value has seen nothing.
//
// Any sign of life of the server (an answered probe or reading of /metrics, a response head, a
// byte, an event) ends its silence. The core of a rank has its own signs: bytes of a running
// stream, events, counters that advance, and the answer to a probe (NeedsProbe). Its silence counts
// only while it has work from this router.
type Detector struct {
	begun    bool
	at       time.Duration
	answered uint64

	silent      time.Duration // of the server
	hung        uint64        // Evidence.Hung at its last sign of life
	unreachable uint64
	state       State // of the server: Alive, ProcessStopped or HostVanished
	ranks       []rank
}

// rank is a Detector's state of one rank.
type rank struct {
	last       Rank
	silent     time.Duration // of the core, while it has work
	reads      uint64        // Rank.Reads at its last sign of life
	stalled    bool
	needsProbe bool
}

// Observe processes the current evidence.
func (d *Detector) Observe(e *Evidence, b Bounds) {
	if len(d.ranks) != len(e.Ranks) || !d.begun {
		d.init(e)
		return
	}
	step := min(max(e.At-d.at, 0), maxStep)
	d.at = e.At
	sign := e.Answered != d.answered
	d.answered = e.Answered
	for i := range d.ranks {
		if d.ranks[i].observe(&e.Ranks[i], step, b.Core) {
			sign = true
		}
	}
	if sign {
		d.silent, d.hung, d.unreachable, d.state = 0, e.Hung, e.Unreachable, Alive
		return
	}
	d.silent += step
	if d.state != Alive {
		return
	}
	switch {
	case e.Unreachable-d.unreachable >= minHung:
		if b.Host > 0 && d.silent >= b.Host {
			d.state = HostVanished
		}
	case e.Hung-d.hung >= minHung:
		if b.Process > 0 && d.silent >= b.Process {
			d.state = ProcessStopped
		}
	}
}

// init uses the first evidence as that of a live server.
func (d *Detector) init(e *Evidence) {
	*d = Detector{begun: true, at: e.At, answered: e.Answered, hung: e.Hung, unreachable: e.Unreachable, ranks: make([]rank, len(e.Ranks))}
	for i := range d.ranks {
		d.ranks[i].last, d.ranks[i].reads = e.Ranks[i], e.Ranks[i].Reads
	}
}

// observe reports whether the rank has shown a sign of life.
func (r *rank) observe(now *Rank, step, bound time.Duration) (sign bool) {
	before := r.last
	r.last = *now
	// The first reading has no predecessor to compare with.
	advanced := now.Counters != before.Counters && before.Reads > 0
	progress := now.Bytes != before.Bytes || now.Events != before.Events || now.ProbesAnswered != before.ProbesAnswered || advanced
	switch {
	case progress:
		r.silent, r.reads, r.stalled, r.needsProbe = 0, now.Reads, false, false
	case r.stalled: // until it makes progress
	case now.Calls == 0 && before.Calls == 0:
		r.silent, r.reads, r.needsProbe = 0, now.Reads, false
	default:
		r.silent += step
		r.judge(bound)
	}
	return progress || now.Answered != before.Answered
}

// judge decides on a core that is silent while it has work.
func (r *rank) judge(bound time.Duration) {
	now := &r.last
	limit := bound + prefillFactor*now.LongestPrefill
	// Work that the engine counts as running must advance, and so must work that was sent long ago
	// and is not counted. Work that it counts as waiting may wait for another engine's KV.
	stuck := now.Running > 0 || now.Running == 0 && now.Overdue > 0
	if bound <= 0 || !stuck || !now.HasComputed || now.Reads-r.reads < minReads {
		r.needsProbe = false
		return
	}
	r.needsProbe = r.silent >= limit/2
	unanswered := !now.ProbeRefused && now.ProbePending >= limit/4 || now.ProbeRefused && now.Running > 0
	r.stalled = r.silent >= limit && unanswered
}

// NeedsProbe reports whether the core of a rank must be sent a probe that only the core can answer:
// a completion of one token. The core may only be waiting for others: for another engine's KV, or,
// with requests that its API server has not passed on, for media or tools.
func (d *Detector) NeedsProbe(i int) bool {
	return i < len(d.ranks) && (d.ranks[i].needsProbe || d.ranks[i].stalled)
}

// State returns the verdict on a rank. A verdict on the server applies to all its ranks.
func (d *Detector) State(i int) State {
	switch {
	case d.state != Alive:
		return d.state
	case i < len(d.ranks) && d.ranks[i].stalled:
		return CoreStalled
	}
	return Alive
}

// Reason describes the evidence for the verdict on a rank, "" for Alive.
func (d *Detector) Reason(i int) string {
	switch d.State(i) {
	case ProcessStopped:
		return fmt.Sprintf("process stopped: it accepts connections, but has not answered a probe or sent a byte or an event for %s", d.silent.Round(100*time.Millisecond))
	case HostVanished:
		return fmt.Sprintf("host vanished: no connection could be established and no byte or event was received for %s", d.silent.Round(100*time.Millisecond))
	case CoreStalled:
		r := &d.ranks[i]
		return fmt.Sprintf("engine core stalled: the API server answers, but for %s none of %d requests has advanced (the engine reports %d as running)",
			r.silent.Round(100*time.Millisecond), r.last.Calls, r.last.Running)
	}
	return ""
}
