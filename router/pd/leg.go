package pd

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// legRecord is the account of one engine call: which rank has it, the reservation of that
// rank's load, and what the Observer learns of it. It starts, completes and releases its
// rank in one place each, whoever drives the call: a request's goroutine (leg), a stream
// that outlives the request (streamState), or a goroutine of the leg's own
// (concurrentPrefill, kvRelease).
type legRecord struct {
	r           *Runner
	rank        *worker.Rank
	reservation *schedule.Reservation // nil once it is released
	began       compactTime
	predicted   int32 // prompt tokens that the rank should have cached
	status      int16 // of the engine's answer; 0: none came
	kind        schedule.LegKind
	completed   bool
}

// start opens the account of a leg that is about to be sent.
func (l *legRecord) start() {
	l.began, l.completed = toCompactTime(time.Now()), false
	l.r.options().Observer.LegStarted(l.kind, l.rank.ID)
}

// complete tells the Observer how the leg went. A second call has no effect.
func (l *legRecord) complete(outcome string) { l.completeAfter(outcome, l.elapsed()) }

// completeAfter is complete for a leg whose answer came earlier than now.
func (l *legRecord) completeAfter(outcome string, took time.Duration) {
	if l.completed {
		return
	}
	l.completed = true
	l.r.options().Observer.LegEnded(l.kind, l.rank.ID, outcome, took)
}

// release takes the leg's load off its rank. A second call has no effect. The reservation
// may serve another request afterwards.
func (l *legRecord) release() {
	l.reservation.Release()
	l.reservation = nil
}

// end completes the leg and releases its rank.
func (l *legRecord) end(outcome string) {
	l.release()
	l.complete(outcome)
}

// elapsed is the time since the leg was sent.
func (l *legRecord) elapsed() time.Duration { return l.began.since() }

// leg is an engine call that a request's goroutine drives, with what it takes to end it
// early. Who receives a started leg either ends it or hands its record over.
type leg struct {
	legRecord
	call  *upstream.Call
	abort *decodeAbort // ends a decode leg whose client leaves before its head; nil: the call is cancelled at once
}

// startLeg opens the account of a leg on the rank of a choice, whose reservation the leg
// owns from then on. The request counts it among its tries.
func (q *request) startLeg(kind schedule.LegKind, choice *schedule.Choice, call *upstream.Call) leg {
	l := leg{legRecord: legRecord{r: q.r, rank: choice.Rank, reservation: choice.Reservation, predicted: int32(choice.CachedTokens), kind: kind}, call: call}
	q.tries[kind]++
	l.start()
	return l
}

// handOver gives the leg's account to a stream. The leg has nothing left to end.
func (l *leg) handOver(status int) legRecord {
	record := l.legRecord
	record.status = int16(status)
	l.reservation, l.completed = nil, true
	return record
}
