package pd

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// legRecord is the account of one engine call: its rank, the reservation of load on that rank, and
// what the Observer learns about it. All drivers of a call share its methods to start, complete and
// release it: a request's goroutine (leg), a stream that outlives the request (streamState), and a
// goroutine of the leg's own (concurrentPrefill, kvRelease).
type legRecord struct {
	settings    *settings // of the request for which the call is made
	rank        *worker.Rank
	reservation *schedule.Reservation // nil after release
	began       compactTime
	predicted   int32 // number of prompt tokens that the rank should have cached
	status      int16 // HTTP status of the engine's response; 0 if none arrived
	kind        schedule.LegKind
	completed   bool
}

// start opens the account of a leg that is about to be sent.
func (l *legRecord) start() {
	l.began, l.completed = toCompactTime(time.Now()), false
	l.settings.Observer.LegStarted(l.kind, l.rank.ID)
}

// complete reports the leg's outcome to the Observer. Only the first call has an effect.
func (l *legRecord) complete(outcome string) { l.completeAfter(outcome, l.elapsed()) }

// completeAfter is complete for a leg whose response arrived before now.
func (l *legRecord) completeAfter(outcome string, took time.Duration) {
	if l.completed {
		return
	}
	l.completed = true
	l.settings.Observer.LegEnded(l.kind, l.rank.ID, outcome, took)
}

// release releases the leg's reservation on its rank. Only the first call has an effect. The
// Reservation may serve another request afterwards.
func (l *legRecord) release() {
	l.reservation.Release()
	l.reservation = nil
}

// end completes the leg and releases its reservation.
func (l *legRecord) end(outcome string) {
	l.release()
	l.complete(outcome)
}

// elapsed returns the time since the leg was sent.
func (l *legRecord) elapsed() time.Duration { return l.began.since() }

// leg is an engine call that a request's goroutine drives, with the means to end it early. The
// owner of a started leg either ends it or hands its record over.
type leg struct {
	legRecord
	call  *upstream.Call
	abort *abort.Decode // ends a decode leg whose client disconnects before its head; nil: the call is cancelled at once
	// hasConnector says that the engine of a decode leg reports the leg's transfer by Sluice's connector.
	hasConnector bool
}

// startLeg opens the account of a leg on the rank of a choice. The leg takes over the choice's
// reservation. The request counts the leg as a try.
func (q *request) startLeg(kind schedule.LegKind, choice *schedule.Choice, call *upstream.Call) leg {
	l := leg{legRecord: legRecord{settings: q.settings, rank: choice.Rank, reservation: choice.Reservation, predicted: int32(choice.CachedTokens), kind: kind}, call: call}
	q.tries[kind]++
	l.start()
	return l
}

// handOver transfers the leg's account to a stream and leaves nothing to end in the leg.
func (l *leg) handOver(status int) legRecord {
	record := l.legRecord
	record.status = int16(status)
	l.reservation, l.completed = nil, true
	return record
}
