package pd

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxAnswer bounds a response that the runner reads whole before the client gets it, so that
// the request can run again when it breaks off. Longer responses and event streams are
// relayed, unless they are refusals.
const maxAnswer = 1 << 20

// handleAnswer decides what follows a response head: reply, relay, or run the attempt again.
func (q *request) handleAnswer(l *decodeLeg, resp *upstream.Response) legEnd {
	opt, rank := q.settings, l.rank
	q.whole = false
	if b := q.concurrent; b != nil && resp.Status != 200 && b.call.Cancelled() {
		// The client has disconnected and the prefill call was half-closed; the decode leg's end
		// reports that.
		resp.Release()
		return q.handleConcurrentFailure(l, upstream.ErrCancelled)
	}
	if resp.Status == 200 {
		opt.Fleet.ReportStreamStart(rank) // the response may still break off
	} else {
		opt.Fleet.ReportStatus(rank, resp.Status)
	}
	if !family.RetryableStatus(resp.Status) && q.shouldRelay(resp) {
		if end, whole := q.relayAnswer(l, resp); !whole {
			return end
		}
	}
	defer resp.Release()
	defer l.release()
	if !q.keepsAbortRule() {
		q.armAbort(abort.PhaseAnswer)
	}
	status, err := q.readAnswer(resp)
	q.disarmAbort()
	elapsed := l.elapsed()
	if err != nil {
		if q.concurrent != nil {
			return q.handleConcurrentFailure(l, err)
		}
		return q.handleBrokenAnswer(l, err)
	}
	if resp.Status == 200 {
		opt.Fleet.ReportStatus(rank, status)
	}
	if q.handoverLost(l, status) {
		return q.endLostHandover(l)
	}
	l.completeAfter(statusClass(status), elapsed)
	if q.handover.Trial && status == 200 {
		if declined, _ := q.plan.Family.(family.Decliner).Declined(q.reply); declined {
			return q.trialDeclined(rank)
		}
	}
	retry := family.RetryableStatus(status)
	if b := q.concurrent; b != nil && status != 200 {
		q.r.peerInfos.remove(b.rank)
		if q.endConcurrentPrefill(retry); retry && b.failed {
			return q.handlePrefillFailure(b) // decode failed because prefill did
		}
		if status == 500 && family.TransferFailed(q.reply) {
			return q.handleTransferFailure(b, rank)
		}
	}
	if retry {
		if q.excludeRefusing(l, status) {
			return legRetry
		}
		if (resp.Status == 429 || resp.Status == 503) && len(resp.Header("Retry-After")) == 0 {
			q.x.SetHeader("Retry-After", "1")
		}
	}
	q.setWorkerHeaders(l)
	q.replyAnswer(l, resp, l.began.Time().Add(elapsed))
	return legAnswered
}

// relayAnswer relays a response as it arrives and returns the leg's end. If the response turned out
// to be complete before its client got any of it, whole is true, and the caller reads the response,
// which is still open.
func (q *request) relayAnswer(l *decodeLeg, resp *upstream.Response) (end legEnd, whole bool) {
	if q.inspectsFirstEvent(l, resp) {
		if end, on := q.awaitFirstEvent(l, resp); !on {
			return end, false
		}
	}
	if q.whole {
		q.prefillLeg.onKV(abort.Decoded)
		return 0, true
	}
	if !q.acceptAnswer() {
		defer resp.Release()
		return q.endLostHandover(l), false
	}
	if !q.leasePrefillAnswer(resp) {
		l.call.Cancel()
		resp.Release()
		q.settings.Fleet.ReportStatus(l.rank, resp.Status)
		l.end(string(front.BudgetExhausted))
		q.refuseForMemory()
		return legAnswered, false
	}
	q.setWorkerHeaders(l)
	resp.SetDeadline(q.deadline) // until now the deadline acted like a disconnect
	q.relay(l, resp)
	return legAnswered, false
}

// readAnswer reads a whole response into q.reply. It also waits for prefill's response if that becomes
// a part of the client's. status is the status of the response, or the one that the body of a 200
// reports (family.AbortedStatus).
func (q *request) readAnswer(resp *upstream.Response) (status int, err error) {
	status = resp.Status
	if err := q.leaseReply(resp); err != nil {
		return status, err
	}
	q.reply, err = resp.ReadAllBudgeted(q.reply[:0], q.maxReplySize(), &q.derived)
	if err != nil || status != 200 {
		return status, err
	}
	if err := checkAnswer(resp, q.reply); err != nil {
		return status, err
	}
	if q.req.Endpoint.Kind == front.NativeGenerate {
		if n := family.AbortedStatus(q.reply); family.RetryableStatus(n) {
			return n, nil
		}
	}
	return status, q.awaitPrefillAnswer()
}

// handoverLost reports whether the KV was lost, or may have been freed before decode read it. The
// response must not be used then, and its status says nothing about the decode engine.
func (q *request) handoverLost(l *decodeLeg, status int) bool {
	retry := family.RetryableStatus(status)
	if retry && l.hasConnector && q.concurrent == nil && q.prefillLeg.transfer.AwaitLoss() {
		return true // the transfer failed, not the engine
	}
	if !q.acceptAnswer() && q.concurrent == nil {
		return true // even a 200 is invalid: the engine may have computed it from freed memory
	}
	return retry && q.handover.Handle != nil && q.prefillEngineLost() && !family.EngineDied(status, q.reply)
}

// excludeRefusing excludes the rank of a leg that was answered with a retryable status. It reports
// whether the leg runs again on another rank.
func (q *request) excludeRefusing(l *decodeLeg, status int) (again bool) {
	died := family.EngineDied(status, q.reply)
	q.exclude(l.rank, failure{down: died}.exclusionReason())
	q.unsent = false
	if q.concurrent != nil {
		q.releaseKVDetached(l.rank)
	}
	q.settings.Scheduler.AddNote(q.req.RequestID, fmt.Sprintf("%s on %s answered %d", legName(l.kind), l.rank.ID, status))
	q.x.Log().Warn("leg refused", "leg", legName(l.kind), "rank", l.rank.ID.String(), "attempt", q.attempt, "status", status)
	if died {
		q.suspects++
	}
	return q.mayRetry(l.kind, died)
}

// maxPooledReply bounds a response that is read into pooled memory, in bytes.
const maxPooledReply = 64 << 10

// leaseReply acquires memory for a long response with a Content-Length, for the lifetime of the
// request. It returns upstream.ErrMemory if the budget has no room.
func (q *request) leaseReply(resp *upstream.Response) error {
	n := resp.ContentLength
	if n <= maxPooledReply || n > int64(q.maxReplySize()) {
		return nil
	}
	var ok bool
	q.reply = nil
	q.replyLease.Release()
	if q.replyLease, ok = q.x.LeaseMemory(int(n)); !ok {
		return upstream.ErrMemory
	}
	q.reply = q.replyLease.Bytes()[:0]
	return nil
}

// shouldRelay reports whether a response is relayed as it arrives. The runner reads other responses
// whole: those that the family must change as a whole, and error responses, parts of which may have
// to be redacted.
func (q *request) shouldRelay(resp *upstream.Response) bool {
	if resp.Status >= 400 {
		return false
	}
	if q.answerRewriter() != nil && resp.Status == 200 {
		return isEventStream(resp)
	}
	return resp.ContentLength < 0 || resp.ContentLength > maxAnswer
}

// errEmpty: the engine answered 200 with an empty body.
var errEmpty = errors.New("the engine answered 200 with an empty body")

// checkAnswer returns an error if the body of a 200 is empty or the connection ended in the middle
// of its JSON.
func checkAnswer(resp *upstream.Response, body []byte) error {
	body = bytes.TrimSpace(body)
	switch {
	case len(body) == 0:
		return errEmpty
	case resp.ContentLength == upstream.LengthToClose && (body[0] == '{' || body[0] == '['):
		if _, _, err := jsonscan.Find(body, ""); body[0] == '{' && err != nil {
			return fmt.Errorf("the engine closed the connection before the end of its answer: %w", err)
		}
	}
	return nil
}

// mayHold reports whether a response without a Content-Length is read whole if it is at most
// maxAnswer long.
func (q *request) mayHold(resp *upstream.Response) bool {
	return resp.ContentLength < 0 && resp.Status < 400 && !isEventStream(resp) && q.resumption == nil
}

// holdWhole waits until a response for which mayHold is true is complete, and returns the body.
// complete is false if the response is longer than maxAnswer or the memory budget has no room; it
// is then relayed.
func (q *request) holdWhole(resp *upstream.Response) (seen []byte, complete bool, err error) {
	var chunks upstream.Chunks
	at, counted, idle := 0, 0, q.settings.Timeouts.StreamIdle
	for seen, err = resp.Peek(); err == nil; {
		for resp.ContentLength == upstream.LengthChunked && at < len(seen) && !chunks.Done() {
			n, _, err := chunks.Next(seen[at:])
			if err != nil {
				return seen, false, err
			}
			at += n
		}
		have := len(seen)
		switch {
		case chunks.Done() && have <= maxAnswer:
			return seen, true, nil
		case have >= maxAnswer:
			return seen, false, nil
		case 2*have > counted && have >= maxPooledReply:
			// the connection's buffer doubles when it grows
			if !q.derived.Acquire(2*have - counted) {
				return seen, false, nil
			}
			counted = 2 * have
		}
		_ = resp.SetReadDeadline(time.Now().Add(idle))
		if seen, err = resp.PeekMore(maxAnswer); err == nil && len(seen) == have {
			return seen, true, nil // the connection has ended, so the body is complete
		}
	}
	return seen, false, err
}

func (q *request) maxReplySize() int {
	if q.answerRewriter() != nil {
		return maxPrefillAnswer
	}
	return maxAnswer
}

func isEventStream(resp *upstream.Response) bool {
	return resp.ContentLength < 0 && sse.IsEventStream(resp.Header("Content-Type"))
}

// answerRewriter returns the rewriter of this leg's response, or nil if it needs none.
func (q *request) answerRewriter() family.AnswerRewriter {
	if !q.decodeByFamily {
		return nil
	}
	a, _ := q.plan.Family.(family.AnswerRewriter)
	if j, ok := a.(family.AnswerMerger); ok && !j.MergesAnswers(&q.handover) {
		return nil
	}
	return a
}

// trialDeclined ends a trial decode that declined.
func (q *request) trialDeclined(rank *worker.Rank) legEnd {
	q.settings.Scheduler.AddNote(q.req.RequestID, "declined: decode on "+rank.ID.String()+" has too few cached blocks of the prompt")
	q.settings.Observer.FallbackUsed("declined")
	return legDeclined
}

// tryDecode runs decode before prefill. declined means that prefill is needed.
func (q *request) tryDecode() (end legEnd, declined bool) {
	q.handover.Trial = true
	end = q.decode(schedule.DecodeLeg)
	q.handover.Trial = false
	return end, end == legDeclined
}
