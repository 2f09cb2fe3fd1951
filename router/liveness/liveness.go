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
	// ProcessStopped: connections are accepted, by the kernel, and nothing answers.
	ProcessStopped
	// CoreStalled: the API server answers, and the engine core behind it makes no
	// progress with the work it has.
	CoreStalled
	// HostVanished: packets to the host are dropped.
	HostVanished
	NumStates
)

var stateNames = [NumStates]string{"alive", "process", "core", "host"}

// String gives the state's name as it stands in metrics and logs.
func (s State) String() string {
	if s < NumStates {
		return stateNames[s]
	}
	return "unknown"
}

// Bounds are how long an engine must have been silent for each verdict; 0 or less: that
// verdict is never given.
type Bounds struct{ Process, Core, Host time.Duration }

// Evidence is what is known of one engine server at one time. All counts are cumulative:
// only their changes mean anything.
type Evidence struct {
	At          time.Duration // on any monotonic clock
	Answered    uint64        // probes and readings of /metrics that were answered, whatever the answer
	Hung        uint64        // probes that were sent and not answered in time
	Unreachable uint64        // probes for which no connection could be made in time; a refused one is none
	Ranks       []Rank        // always as many, in one order
}

// Rank is the part of one data-parallel rank.
type Rank struct {
	Answered       uint64 // response heads
	Bytes          uint64 // parts of response bodies that only the engine core can have caused
	Events         uint64 // KV event batches and load messages
	Counters       uint64 // a digest of the counters and gauges that change when the core makes progress
	Reads          uint64 // how often Counters was read; while it does not change nothing is known of them
	Calls          int    // requests under way that this router sent
	Overdue        int    // of which no byte of an answer's body has come for Bounds.Core
	Running        int64  // requests that the engine says it computes; below 0: it does not say
	HasComputed    bool   // it has computed tokens in its life: a cold engine may compile for minutes
	ProbesAnswered uint64 // questions that the core has answered; see Detector.Doubts
	// Asked is how long the question under way has not been answered, 0: there is none;
	// Mute: the engine refuses such questions.
	ProbePending time.Duration
	ProbeRefused bool
	// Longest is how long the longest prompt under way is expected to take, by what large
	// prompts have taken here.
	LongestPrefill time.Duration
}

const (
	// minHung probes must have hung, and minReads readings have shown the same
	// counters, since the last sign of life: silence alone may be nobody asking.
	minHung  = 2
	minReads = 3
	// maxStep bounds what one look adds to a silence. A router that was stopped itself
	// has heard nothing meanwhile, and that says nothing of engines.
	maxStep = time.Second
	// prefillFactor is how many times Longest is added to Bounds.Core: an engine may compute a
	// long prompt in one step, in which nothing else advances.
	prefillFactor = 3
)

// Detector owns the verdict on one engine server and its ranks. It is not safe for
// concurrent use. The zero value has seen nothing.
//
// Any sign of life of the server (a probe or a reading of /metrics that was answered, a
// response head, a byte, an event) ends its silence. The core of a rank has signs of its
// own: bytes of a stream that was under way, events, counters that advance, and the answer to
// a question (Doubts). Its silence counts only while it has work from this router.
type Detector struct {
	begun    bool
	at       time.Duration
	answered uint64

	silent      time.Duration // of the server
	hung        uint64        // Evidence.Hung at its last sign
	unreachable uint64
	state       State // of the server: Alive, ProcessStopped or HostVanished
	ranks       []rank
}

// rank is what a Detector remembers of one rank.
type rank struct {
	last       Rank
	silent     time.Duration // of the core, while it has work
	reads      uint64        // Rank.Reads at its last sign
	stalled    bool
	needsProbe bool
}

// Observe takes in the evidence of now.
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

// init takes the first evidence as that of a server which is alive.
func (d *Detector) init(e *Evidence) {
	*d = Detector{begun: true, at: e.At, answered: e.Answered, hung: e.Hung, unreachable: e.Unreachable, ranks: make([]rank, len(e.Ranks))}
	for i := range d.ranks {
		d.ranks[i].last, d.ranks[i].reads = e.Ranks[i], e.Ranks[i].Reads
	}
}

// observe says whether the rank has shown a sign of life.
func (r *rank) observe(now *Rank, step, bound time.Duration) (sign bool) {
	before := r.last
	r.last = *now
	// The first reading has nothing to be compared with.
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

// judge gives the verdict on a core that is silent while it has work.
func (r *rank) judge(bound time.Duration) {
	now := &r.last
	limit := bound + prefillFactor*now.LongestPrefill
	// What the engine counts as running, or does not count though it was sent long ago,
	// must advance. What it counts as waiting may wait for another engine's KV.
	stuck := now.Running > 0 || now.Running == 0 && now.Overdue > 0
	if bound <= 0 || !stuck || !now.HasComputed || now.Reads-r.reads < minReads {
		r.needsProbe = false
		return
	}
	r.needsProbe = r.silent >= limit/2
	unanswered := !now.ProbeRefused && now.ProbePending >= limit/4 || now.ProbeRefused && now.Running > 0
	r.stalled = r.silent >= limit && unanswered
}

// NeedsProbe says whether the core of a rank is to be asked something that it alone can answer:
// a completion of one token. It may only be waiting for what others do: for another engine's
// KV, or, with requests that its API server holds, for media or tools.
func (d *Detector) NeedsProbe(i int) bool {
	return i < len(d.ranks) && (d.ranks[i].needsProbe || d.ranks[i].stalled)
}

// State is the verdict on a rank. That on the server holds for all its ranks.
func (d *Detector) State(i int) State {
	switch {
	case d.state != Alive:
		return d.state
	case i < len(d.ranks) && d.ranks[i].stalled:
		return CoreStalled
	}
	return Alive
}

// Reason says what the verdict on a rank rests on, "" for Alive.
func (d *Detector) Reason(i int) string {
	switch d.State(i) {
	case ProcessStopped:
		return fmt.Sprintf("its process is stopped: it accepts connections, and for %s it has answered no probe, sent no byte and no event", d.silent.Round(100*time.Millisecond))
	case HostVanished:
		return fmt.Sprintf("its host has vanished: for %s no connection could be made, and neither byte nor event has come", d.silent.Round(100*time.Millisecond))
	case CoreStalled:
		r := &d.ranks[i]
		return fmt.Sprintf("its engine core is stopped: its API server answers, but for %s none of %d requests has advanced, of which the engine says it runs %d",
			r.silent.Round(100*time.Millisecond), r.last.Calls, r.last.Running)
	}
	return ""
}
