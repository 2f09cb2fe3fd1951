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
	status := resp.Status // or the status that a 200's body reports, see family.AbortedStatus
	retry := family.RetryableStatus(status)
	relayed := !retry && q.shouldRelay(resp)
	if resp.Status == 200 {
		opt.Fleet.ReportStreamStart(rank) // the response may still break off
	} else {
		opt.Fleet.ReportStatus(rank, resp.Status)
	}
	if relayed {
		if q.inspectsFirstEvent(l, resp) {
			if end, on := q.awaitFirstEvent(l, resp); !on {
				return end
			}
		}
	}
	if relayed && q.whole {
		q.prefillLeg.onKV(abort.Decoded)
		relayed = false
	}
	if relayed {
		if !q.acceptAnswer() {
			defer resp.Release()
			return q.endLostHandover(l)
		}
		if !q.leasePrefillAnswer(resp) {
			l.call.Cancel()
			resp.Release()
			opt.Fleet.ReportStatus(rank, resp.Status)
			l.end(string(front.BudgetExhausted))
			q.refuseForMemory()
			return legAnswered
		}
		q.setWorkerHeaders(l)
		resp.SetDeadline(q.deadline) // until now the deadline acted like a disconnect
		q.relay(l, resp)
		return legAnswered
	}
	defer resp.Release()
	defer l.release()
	if !q.keepsAbortRule() {
		q.armAbort(abort.PhaseAnswer)
	}
	err := q.leaseReply(resp)
	if err == nil {
		q.reply, err = resp.ReadAllBudgeted(q.reply[:0], q.maxReplySize(), &q.derived)
	}
	if err == nil && resp.Status == 200 {
		if err = checkAnswer(resp, q.reply); err == nil && q.req.Endpoint.Kind == front.NativeGenerate {
			if n := family.AbortedStatus(q.reply); family.RetryableStatus(n) {
				status, retry = n, true
			}
		}
		if err == nil && !retry {
			err = q.awaitPrefillAnswer()
		}
	}
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
	if retry && l.hasConnector && q.concurrent == nil && q.prefillLeg.transfer.AwaitLoss() {
		// The transfer failed, not the engine.
		return q.endLostHandover(l)
	}
	if !q.acceptAnswer() && q.concurrent == nil {
		return q.endLostHandover(l) // even a 200 is invalid: the engine may have computed it from freed memory
	}
	if retry && q.handover.Handle != nil && q.prefillEngineLost() && !family.EngineDied(status, q.reply) {
		return q.endLostHandover(l)
	}
	l.completeAfter(statusClass(status), elapsed)
	if q.handover.Trial && status == 200 {
		if declined, _ := q.plan.Family.(family.Decliner).Declined(q.reply); declined {
			return q.trialDeclined(rank)
		}
	}
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
		died := family.EngineDied(status, q.reply)
		q.exclude(rank, failure{down: died}.exclusionReason())
		q.unsent = false
		if q.concurrent != nil {
			q.releaseKVDetached(rank)
		}
		opt.Scheduler.AddNote(q.req.RequestID, fmt.Sprintf("%s on %s answered %d", legName(l.kind), rank.ID, status))
		q.x.Log().Warn("leg refused", "leg", legName(l.kind), "rank", rank.ID.String(), "attempt", q.attempt, "status", status)
		if died {
			q.suspects++
		}
		if q.mayRetry(l.kind, died) {
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
			return fmt.Errorf("the engine closed the connection in the midst of its answer: %w", err)
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
	q.settings.Scheduler.AddNote(q.req.RequestID, "declined: decode on "+rank.ID.String()+" holds too little of the prompt")
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
