package pd

import (
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
)

// legEnd says what follows a leg.
type legEnd int

const (
	legAnswered   legEnd = iota // the client has its response
	legRetry                    // failed before the client received a byte: run the attempt again
	legDeclined                 // a trial decode has too few blocks of the prompt cached
	legDecodeOnly               // decode runs the whole request
	legWaited                   // not sent: the request has waited for capacity, and begins its attempt again
)

// decode runs the last leg: decode with the handle, decode alone, or the whole request. With a
// handle it may try several ranks as long as no engine has seen the handle and the lease lasts.
func (q *request) decode(kind schedule.LegKind) legEnd {
	for try := 1; ; try++ {
		if q.handover.Handle != nil && q.leaseExpired() {
			q.noteFallback("lease_expired", fmt.Sprintf("%s after prefill answered; its blocks may be gone", time.Since(q.prefillLeg.handleAt).Round(time.Millisecond)))
			if q.triesLeft() {
				return legRetry
			}
			if !q.fallBackToDecodeOnly() {
				return legAnswered
			}
		}
		if reason := q.prefillLeg.transfer.LostReason(); reason != "" && q.handover.Handle != nil {
			if q.handleLostHandover(reason) == legRetry {
				return legRetry
			}
			if !q.fallBackToDecodeOnly() {
				return legAnswered
			}
		}
		choice, ok := q.acquireDecode(kind)
		if !ok {
			if waited, answered := q.awaitLimits(q.candidates(kind)); waited {
				continue
			} else if answered {
				return legAnswered
			}
			if q.refuseAtCapacity(kind, q.candidates(kind)) {
				return legAnswered
			}
			if try <= maxFreeTries && q.awaitCandidate(kind) {
				continue // the lease may have expired
			}
			q.refuseNoRank(kind)
			return legAnswered
		}
		q.handover.Decode = choice.Rank
		if kind == schedule.DecodeLeg && q.handover.Handle == nil {
			choice.Reservation.SetNoPull()
		}
		l := q.startDecode(kind, &choice, nil)
		resp, err := q.callDecode(l)
		q.updateKV(l, resp, err)
		if err == nil {
			return q.handleAnswer(l, resp)
		}
		l.release()
		f, end, done := q.endFailedLeg(l, err)
		switch {
		case done:
			return end
		case q.mayResend(kind, f, try):
			q.countRetry(kind) // same handle and id, because no engine has seen them
		default:
			return q.retryOrRefuse(f, l, err, f.reason != front.UpstreamTimeout || f.unsent || !q.decodeTimedOut(l.began.Time()))
		}
	}
}

// mayResend reports whether a leg that no engine has seen may be sent again unchanged in the same
// attempt. It may wait for a rank.
func (q *request) mayResend(leg schedule.LegKind, f failure, try int) bool {
	if !f.unsent || q.plan.Traits.NamesDecode || q.pastDeadline() {
		return false
	}
	if q.refreshCandidates(); q.hasCandidate(q.candidates(leg)) {
		return try < q.pd.DecodeAttempts
	}
	return f.refused && try < maxFreeTries && q.awaitCandidate(leg)
}

// refuseNoRank refuses a request that has no candidate left for a leg.
func (q *request) refuseNoRank(leg schedule.LegKind) {
	if q.refuseIfGone() {
		return
	}
	n := q.tries[leg]
	if n == 0 {
		q.refuse(front.NoDecodeWorker, fmt.Sprintf("no healthy %s worker is left for model %q%s", legName(leg), q.pool.Model, q.waitedSuffix()), time.Second)
		return
	}
	q.refuse(front.UpstreamFailed, fmt.Sprintf("every %s worker that was tried failed this request, after %s%s", legName(leg), pluralize(n, "try", "tries"), q.waitedSuffix()), time.Second)
}

// updateKV updates the state of the handle's blocks after a decode leg's response head or failure.
func (q *request) updateKV(l *decodeLeg, resp *upstream.Response, err error) {
	f := classify(err)
	switch {
	case err != nil && f.unsent:
		q.prefillLeg.onKV(abort.Unsent)
	case err == nil && resp.Status == 200 && q.shouldRelay(resp):
		q.prefillLeg.onKV(abort.HeadCame)
	case err == nil && resp.Status != 500, err != nil && f.reason == front.UpstreamTimeout && !l.call.Cancelled():
		// The engine no longer needs the handle, or it refused the request and notifies prefill of
		// that. After a timeout it may still be working; the end of its connection tells it that
		// nobody waits.
		q.prefillLeg.onKV(abort.Decoded)
	case l.call.Cancelled() && q.prefillLeg.transfer.LostReason() != "failed":
		q.reclaimKV(abort.PhaseDecode, !l.abort.IsUncertain())
	default:
		q.prefillLeg.onKV(abort.Dropped)
	}
}

// decodeTimedOut reports whether a decode leg has used up timeouts.decode. If only
// timeouts.first_byte has passed without a head, another rank may be tried.
func (q *request) decodeTimedOut(began time.Time) bool {
	return !q.stream || q.pastDeadline() || time.Since(began) >= q.settings.Timeouts.Decode
}

// leaseExpired reports whether it is too late to send decode. A decode engine that gets the handle
// after prefill's lease has expired reads freed memory and still answers 200, so the router watches
// the lease itself.
func (q *request) leaseExpired() bool {
	return !q.plan.Traits.NoLease && time.Until(q.leaseDeadline()) < q.pd.LeaseMargin
}

// leaseDeadline returns when the prefill engine frees the handle's blocks: one lease after its
// response, or later if the router renews the lease.
func (q *request) leaseDeadline() time.Time {
	return q.prefillLeg.kv.Held().Until(q.prefillLeg.handleAt.Add(q.pd.Lease), q.pd.Lease)
}

// reserveDecode chooses the decode rank before the prefill leg, for families whose prefill leg
// names it.
func (q *request) reserveDecode() bool {
	if q.reservedDecode.Rank != nil {
		return true
	}
	var ok bool
	q.reservedDecode, ok = q.chooseDecode(schedule.DecodeLeg, q.plan.Decode)
	q.endUndecided()
	q.handover.Decode = q.reservedDecode.Rank
	return ok
}

// acquireDecode returns the reserved choice once. It makes a new choice if there is none, or if the
// reserved rank was removed or has failed and no handle names it.
func (q *request) acquireDecode(leg schedule.LegKind) (schedule.Choice, bool) {
	defer q.endUndecided()
	candidates := q.candidates(leg)
	if c := q.reservedDecode; c.Rank != nil {
		q.reservedDecode, q.startsAtDecode = schedule.Choice{}, false
		if named := q.plan.Traits.NamesDecode && q.handover.Handle != nil; named || !q.replaceReserved(c.Rank, candidates) {
			c.Reservation.Start()
			return c, true
		}
		c.Reservation.Release()
	}
	return q.chooseDecode(leg, candidates)
}

// callDecode sends the leg and waits for the response head. The abort rule of abort.PhaseDecode is armed
// during that time.
func (q *request) callDecode(l *decodeLeg) (*upstream.Response, error) {
	rank, call, began := l.rank, l.call, l.began.Time()
	q.legRequest.Reset()
	q.acquireSlot(l)
	q.decodeByFamily = q.handover.Handle != nil || q.concurrent != nil || q.handover.Trial
	q.handover.WantTokenIDs = q.needsTokenIDs(rank)
	if q.decodeByFamily {
		q.plan.Family.Decode(&q.legRequest, &q.handover)
	}
	if q.handover.WantTokenIDs {
		q.legRequest.AskTokenIDs()
	}
	head := time.Duration(0) // the head of a non-streaming response arrives at its end
	if q.stream {
		head = q.settings.Timeouts.FirstByte
	}
	q.armAbort(abort.PhaseDecode)
	q.guardDecode(l)
	resp, err := q.settings.Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:      "POST",
		Path:        q.legPath(),
		Fields:      q.legHeaders(&l.legRecord),
		Body:        q.legBody(),
		HeadTimeout: head,
		Deadline:    q.decodeDeadline(began),
		Grace:       q.closeGrace(),
		Group:       q.settings.Fleet.Calls(rank),
		Tokens:      q.tokensToCompute(),
	}, call)
	l.abort.MarkEnded()
	if err != nil || !q.keepsAbortRule() || !family.RetryableStatus(resp.Status) && q.shouldRelay(resp) {
		q.disarmAbort()
	}
	return resp, err
}

// tokensToCompute returns the number of prompt tokens that the decode leg may have to compute.
func (q *request) tokensToCompute() int {
	if q.decodeByFamily {
		return 0
	}
	return q.prompt.Count
}

// decodeDeadline returns the deadline of a decode leg. The caller's deadline does not shorten it:
// at that time the abort rule ends the leg, so that no blocks stay allocated until the lease ends.
func (q *request) decodeDeadline(began time.Time) time.Time {
	if !q.legDeadline.IsZero() {
		return q.legDeadline // a stream that migrates keeps the deadline of its first leg
	}
	return began.Add(q.settings.Timeouts.Decode)
}

func legName(leg schedule.LegKind) string {
	switch leg {
	case schedule.PrefillLeg:
		return "prefill"
	case schedule.DecodeLeg:
		return "decode"
	}
	return "aggregated"
}
