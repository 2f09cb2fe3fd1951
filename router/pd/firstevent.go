package pd

import (
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxFirstEvent bounds how much of a stream the runner reads to learn how it begins, in bytes.
const maxFirstEvent = 32 << 10

// commentHold is how long, at most, the comments that precede the first event are kept from the
// client. An engine that fails until then is replaced by another one. Later comments pass, because
// a client or a proxy before it may count on them.
const commentHold = 10 * time.Second

// errNoOutput reports that the engine ended a well-framed stream without any output.
var errNoOutput = errors.New("the engine ended the stream before the first event")

// inspectsFirstEvent reports whether the runner waits for the first event of a stream before the
// client gets anything: if a hand-over may be lost, if later events repeat the first, or if the
// request could run again now but the stream could not migrate later. The last does not apply if
// keep-alive comments start with the engine's head.
func (q *request) inspectsFirstEvent(l *decodeLeg, resp *upstream.Response) bool {
	switch {
	case q.concurrent != nil, q.handover.Trial, l.hasConnector, q.resumption != nil, q.decodeLeg.monitor.InUse(), q.repeatsFirstEvent(), q.mayHold(resp):
		return true
	}
	return resp.Status == 200 && isEventStream(resp) && !q.isResumable(resp) && !q.x.SendsComments() && q.triesLeft() && q.hasAlternative(l.kind, l.rank)
}

// hasAlternative reports whether a leg could run on a rank other than except that is ready or may
// become ready in time.
func (q *request) hasAlternative(leg schedule.LegKind, except *worker.Rank) bool {
	if q.hasOtherCandidate(q.candidates(leg), except) {
		return true
	}
	workers := 0
	for role, n := range q.pool.Members {
		if q.roleServes(leg, worker.Role(role)) {
			workers += n
		}
	}
	return workers > 1
}

// isResumable reports whether the stream can migrate from its first byte on (see
// newMigration), so that a failure needs no retry here. A stream whose first event must bring
// the prompt's ids cannot migrate before that event.
func (q *request) isResumable(resp *upstream.Response) bool {
	return q.unmigratable == "" && q.hasExactPrompt() && (q.legUnmigratable == "" || q.legUnmigratable == "engine" && q.clientWantsIDs()) && resp.ContentLength == upstream.LengthChunked
}

// readFirstEvent waits until it is clear how a stream begins. declined reports that a trial decode
// declined. It reads a response that is not an event stream whole (holdWhole), or else only its first
// bytes.
func (q *request) readFirstEvent(resp *upstream.Response) (prefix []byte, declined bool, err error) {
	events := isEventStream(resp)
	if q.mayHold(resp) {
		if prefix, q.whole, err = q.holdWhole(resp); q.whole || err != nil || !q.handover.Trial {
			return prefix, false, err
		}
	}
	began, idle := time.Now(), q.settings.Timeouts.StreamIdle
	prefix, err = resp.Peek()
	for err == nil && len(prefix) < maxFirstEvent {
		more := false
		if q.handover.Trial {
			declined, more = q.plan.Family.(family.Decliner).Declined(prefix)
		} else if events {
			_, complete := family.FirstEvent(prefix)
			if more = !complete; more && family.BeginsWithComment(prefix) {
				more = time.Since(began) < min(commentHold, idle)
				_ = resp.SetReadDeadline(time.Now().Add(idle)) // a comment is a sign of life
			}
		}
		if !more {
			break
		}
		have := len(prefix)
		if prefix, err = resp.PeekMore(maxFirstEvent); len(prefix) == have {
			if err == nil && resp.ContentLength == upstream.LengthToClose && resp.Status == 200 && !family.SaysDone(prefix) {
				err = errNoOutput // the connection has ended
			}
			break
		}
	}
	return prefix, declined, err
}

// awaitFirstEvent waits for the beginning of a stream before the client gets any of it. Until then
// a pair that fails can run again, and a trial can decline. on reports that the caller must relay
// the stream.
func (q *request) awaitFirstEvent(l *decodeLeg, resp *upstream.Response) (end legEnd, on bool) {
	q.armAbort(abort.PhaseAnswer)
	defer q.disarmAbort()
	_ = resp.SetReadDeadline(time.Now().Add(q.settings.Timeouts.StreamIdle))
	prefix, declined, err := q.readFirstEvent(resp)
	if !isEventStream(resp) {
		prefix = nil // there are no events to look for
	}
	if err == nil && !declined && resp.Status == 200 && isEventStream(resp) && resp.ContentLength == upstream.LengthChunked && family.EndsWithoutOutput(prefix) {
		err = errNoOutput
	}
	if err == nil && !declined && q.concurrent == nil && l.hasConnector && family.InitialErrorStatus(prefix) > 0 && q.prefillLeg.transfer.AwaitLoss() {
		defer resp.Release()
		return q.endLostHandover(l), false
	}
	if b := q.concurrent; err == nil && b != nil {
		if status := family.InitialErrorStatus(prefix); family.RetryableStatus(status) {
			if err = fmt.Errorf("its stream begins with an error of status %d", status); family.TransferFailed(prefix) {
				err = errTransfer
			}
		} else if family.HasEvent(prefix) && !b.completeHandover() {
			err = upstream.ErrCancelled
		} else if resp.Status == 200 {
			err = q.awaitPrefillAnswer()
		}
	}
	if err == nil && !declined && q.concurrent == nil && q.retriesInitialError(l, prefix) {
		defer resp.Release()
		q.reclaimKV(abort.PhaseAnswer, true)
		l.end(string(front.UpstreamFailed))
		return legRetry, false
	}
	if err == nil && !declined && q.acceptAnswer() {
		return legAnswered, true
	}
	defer resp.Release()
	if err != nil {
		q.reclaimKV(abort.PhaseAnswer, true)
	}
	switch {
	case declined:
		l.end("ok")
		return q.trialDeclined(l.rank), false
	case q.concurrent != nil:
		return q.handleConcurrentFailure(l, err), false
	}
	return q.handleBrokenAnswer(l, err), false
}

// retriesInitialError reports whether a request runs again whose stream begins with an error. If
// not, the client gets the engine's error.
func (q *request) retriesInitialError(l *decodeLeg, prefix []byte) bool {
	status := family.InitialErrorStatus(prefix)
	if !family.RetryableStatus(status) || !q.acceptAnswer() {
		return false
	}
	q.settings.Fleet.ReportStatus(l.rank, status)
	died := family.EngineDied(status, prefix)
	q.applyFailure(l.rank, legName(l.kind), failure{reason: front.UpstreamFailed, suspect: died, down: died}, fmt.Errorf("its stream begins with an error of status %d", status))
	return q.mayRetry(l.kind, died)
}
