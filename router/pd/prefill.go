package pd

import (
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/redact"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxPrefillAnswer bounds a prefill response, in bytes. It contains one token, a handle with the
// ids of every block of a long prompt, and prompt log-probabilities if the client asks for them.
const maxPrefillAnswer = 64 << 20

type prefillEnd int

const (
	prefillDone        prefillEnd = iota // q.handover.Handle is usable
	prefillRetry                         // failed; another rank may be tried
	prefillUnavailable                   // there is no handle; decode runs the whole request
	prefillAnswered                      // the request has been answered
	prefillLocal                         // the reserved decode rank runs the whole request
)

// prefill runs the prefill leg of one attempt on the chosen rank.
func (q *request) prefill(choice schedule.Choice) prefillEnd {
	if q.plan.Traits.NamesDecode && !q.reserveDecode() {
		choice.Reservation.Release()
		return prefillUnavailable
	}
	expectation := q.expectCompletions()
	if expectation != nil {
		defer expectation.Cancel()
	}
	q.legRequest.Reset()
	q.plan.Family.Prefill(&q.legRequest, &q.handover)

	l := q.startPrefill(&choice)
	defer l.release()
	began := l.began.Time()
	q.armAbort(abort.PhasePrefill)
	status, resp, err := q.callPrefill(l)
	q.disarmAbort()
	clientGone := l.disarmAbort()
	elapsed := l.elapsed()
	if err != nil {
		if clientGone {
			return q.endAbortedPrefill(l, err)
		}
		return q.endFailedPrefill(l, err)
	}
	defer resp.Release()
	var handle []byte
	var handleErr error
	if status == 200 {
		q.handover.Answer = q.answer
		if handle, handleErr = q.plan.Family.Handle(&q.handover, q.answer); errors.Is(handleErr, family.ErrPrefillFailed) {
			status = 500
		}
	}
	q.settings.Fleet.ReportStatus(choice.Rank, status)
	if status != 200 {
		return q.endRefusedPrefill(l, resp, status, handleErr, clientGone)
	}

	l.complete("ok")
	q.learnFromPrefill(l, &choice, elapsed)
	switch {
	case errors.Is(handleErr, family.ErrFinal):
		q.replyFinal(resp)
		return prefillAnswered
	case handleErr != nil:
		q.noteFallback("incomplete_handle", fmt.Sprintf("%s: %v", choice.Rank.ID, handleErr))
		return prefillUnavailable
	}
	q.startHandover(choice.Rank, handle, began)
	if expectation != nil {
		if end := q.awaitCompletions(expectation, began); end != prefillDone {
			return end
		}
	}
	if q.x.ClientGone() {
		phase := abort.PhaseBetween
		if clientGone {
			phase = abort.PhasePrefill
		}
		q.reclaimKV(phase, false) // no decode engine has seen the handle
		q.refuse(front.ClientGone, "the client closed the connection between prefill and decode", 0)
		return prefillAnswered
	}
	return prefillDone
}

// learnFromPrefill reports the response of a prefill to what predicts the next ones: the times and
// the cached tokens of the rank, and whether the engine accepts token ids.
func (q *request) learnFromPrefill(l *prefillLeg, choice *schedule.Choice, elapsed time.Duration) {
	q.settings.confirmIDRefusal(q.refusedIDs)
	l.handleAt = time.Now()
	q.handover.PrefillCached = relay.UsageOf(q.answer).Cached
	l.reservation.Report(q.req.RequestID, q.handover.PrefillCached, 0)
	l.reservation.PrefillDone()
	q.r.learnCached(choice.Rank, q.approxKeys(choice.Rank), q.prompt.Count, choice.CachedTokens, q.handover.PrefillCached, elapsed)
}

// startHandover stores the handle for decode. From here on the router watches the transfer and must
// have prefill free its blocks, unless the family leases none.
func (q *request) startHandover(rank *worker.Rank, handle []byte, began time.Time) {
	q.handover.Handle = handle
	q.r.reportEngineID(&q.handover, began)
	if learner, ok := q.plan.Family.(family.PeerInfoLearner); ok {
		if q.peerInfoBuf = learner.LearnPeerInfo(q.peerInfoBuf[:0], &q.handover); len(q.peerInfoBuf) > 0 {
			q.r.peerInfos.store(rank, q.peerInfoBuf)
		}
	}
	q.watchTransfer(q.prefillLeg.handleAt)
	if q.plan.Traits.Pulls {
		q.prefillLeg.acquireKV(q.settings.SideChannel.Acquire(rank, q.handover.Handle))
	} else if !q.plan.Traits.NoLease {
		q.prefillLeg.acquireKV(nil)
	}
}

// endRefusedPrefill ends a prefill leg that was answered with another status than 200, and decides
// what follows. A 200 that reports a failure counts as 500; handleErr then says what it reports.
func (q *request) endRefusedPrefill(l *prefillLeg, resp *upstream.Response, status int, handleErr error, clientGone bool) prefillEnd {
	l.complete(statusClass(status))
	switch {
	case clientGone:
		q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
		return prefillAnswered
	case family.RetryableStatus(status), status < 300: // of the 2xx statuses only 200 has a handle
		return q.failOverPrefill(l, resp, status, handleErr)
	case q.handover.ByIDs && status/100 == 4:
		q.retryAsText(l.rank)
		return prefillRetry
	}
	// Decode would refuse the request too, so the client gets prefill's error response.
	q.x.SetHeader("X-Sluice-Prefill-Worker", l.rank.ID.Worker)
	q.replyPrefillError(resp, status)
	return prefillAnswered
}

// failOverPrefill excludes the rank of a prefill leg whose status another rank may not have, and
// decides whether the prefill runs again.
func (q *request) failOverPrefill(l *prefillLeg, resp *upstream.Response, status int, handleErr error) prefillEnd {
	died := family.EngineDied(status, q.answer)
	q.exclude(l.rank, failure{down: died}.exclusionReason())
	q.unsent = false
	note := fmt.Sprintf("prefill on %s answered %d", l.rank.ID, resp.Status)
	if handleErr != nil {
		note += ", but " + handleErr.Error()
	}
	q.settings.Scheduler.AddNote(q.req.RequestID, note)
	q.x.Log().Warn("leg refused", "leg", "prefill", "rank", l.rank.ID.String(), "attempt", q.attempt, "status", status)
	// An engine that answers 429 or 503 has not computed the prompt. After any other failure it
	// may have begun to write the KV.
	if refused := status == 429 || status == 503; !refused && !q.excludeTaintedDecode(note) {
		return prefillAnswered
	}
	if died {
		if q.suspects++; q.suspects >= maxSuspects {
			q.replyPrefillError(resp, status)
			return prefillAnswered
		}
	}
	return q.nextPrefill(died)
}

// replyFinal sends the client a prefill response that is the whole response (ErrFinal).
func (q *request) replyFinal(resp *upstream.Response) {
	q.x.SetHeader("X-Sluice-Prefill-Worker", q.handover.Prefill.ID.Worker)
	use := relay.UsageOf(q.answer)
	q.recordUsage(&use, q.answer)
	q.endExplain(schedule.Outcome{
		Status: resp.Status, CachedTokens: use.Cached, PromptTokens: use.Prompt, OutputTokens: use.Completion, Total: time.Since(q.req.Received),
	})
	finisher, _ := q.plan.Family.(family.FinalAnswerer)
	switch {
	case finisher == nil:
		q.answer = family.RedactHandle(q.answer)
		redact.InPlace(q.answer, resp.Status)
		q.x.Reply(resp, q.answer)
	case q.stream:
		q.x.ReplyEvents(finisher.Final(nil, &q.handover, q.answer))
	default:
		q.x.Reply(resp, finisher.Body(nil, &q.handover, q.answer))
	}
}

// callPrefill sends the leg and reads the whole response into q.answer.
func (q *request) callPrefill(l *prefillLeg) (int, *upstream.Response, error) {
	resp, err := q.settings.Fleet.Endpoint(l.rank).Do(&upstream.Request{
		Method:   "POST",
		Path:     q.legPath(),
		Fields:   q.legHeaders(&l.legRecord),
		Body:     q.legBody(),
		Deadline: l.began.Time().Add(q.settings.Timeouts.Prefill),
		Group:    q.settings.Fleet.Calls(l.rank),
		Tokens:   q.prompt.Count,
		Prefill:  true,
	}, l.call)
	if err != nil {
		return 0, nil, err
	}
	q.answer, err = resp.ReadAllBudgeted(q.answer[:0], maxPrefillAnswer, &q.derived)
	if err != nil {
		resp.Release()
		return 0, nil, err
	}
	return resp.Status, resp, nil
}

// endAbortedPrefill ends a request whose client disconnected during prefill and whose prefill then
// failed or was cancelled. The request does not run again.
func (q *request) endAbortedPrefill(l *prefillLeg, err error) prefillEnd {
	outcome := q.abortReason()
	if !l.call.Cancelled() {
		outcome = string(q.recordFailure(l.rank, "prefill", err).reason)
	}
	l.end(outcome)
	q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
	return prefillAnswered
}

// endFailedPrefill ends a failed prefill leg and decides what follows.
func (q *request) endFailedPrefill(l *prefillLeg, err error) prefillEnd {
	if l.call.Cancelled() {
		l.end(q.abortReason())
		q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
		return prefillAnswered
	}
	f := q.recordFailure(l.rank, "prefill", err)
	l.end(string(f.reason))
	if f.reason == front.BudgetExhausted { // another engine's response would not fit either
		q.refuseForMemory()
		return prefillAnswered
	}
	if f.suspect && !q.excludeTaintedDecode(fmt.Sprintf("prefill on %s failed: %s", l.rank.ID, upstream.ClientMessage(err))) {
		return prefillAnswered
	}
	if q.suspects >= maxSuspects {
		q.refuse(f.reason, fmt.Sprintf("%d engines failed while they served this request; it is not sent to a third: %s", q.suspects, upstream.ClientMessage(err)), 0)
		return prefillAnswered
	}
	return q.nextPrefill(f.down)
}

// nextPrefill decides whether another prefill leg follows a failed one. It waits for a worker if
// the engine went down and decode cannot run the whole request.
func (q *request) nextPrefill(down bool) prefillEnd {
	leg := schedule.PrefillLeg
	q.refreshCandidates()
	if q.triesLeft() && !q.pastDeadline() && (q.hasCandidate(q.candidates(leg)) || down && !q.mayDecodeOnly() && q.awaitCandidate(leg)) && q.withdrawRetry() {
		return prefillRetry
	}
	q.noteFallback("prefill_failed", "no ready prefill worker is left")
	return prefillUnavailable
}

// statusClass returns the outcome of a leg whose engine answered with status.
func statusClass(status int) string {
	switch status / 100 {
	case 2:
		return "ok"
	case 4:
		return "4xx"
	case 5:
		return "5xx"
	}
	return "other"
}
