package pd

import (
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/router/pd/family"
	"sluice/router/worker"
)

// expectCompletions registers for the completions that the family waits for. It returns nil if
// there are none.
func (q *request) expectCompletions() Expectation {
	waiter, ok := q.plan.Family.(family.CompletionWaiter)
	if !ok || q.settings.Completions == nil || q.pd.CompletionTimeout == 0 {
		return nil
	}
	id, count := waiter.ExpectedCompletions(&q.handover)
	if count <= 0 {
		return nil
	}
	return q.settings.Completions.Expect(id, count)
}

// peerCheckInterval is how often a wait between the legs checks that both engines of the
// transfer are ready.
const peerCheckInterval = 200 * time.Millisecond

// awaitCompletions waits between the legs until the engines report that the transfer is complete.
// If that takes longer than PD.CompletionTimeout, or one of the two engines is lost, the legs run again on
// other ranks, or another decode worker runs the whole request. Without another decode worker it
// refuses the request. It returns early if the client disconnects.
func (q *request) awaitCompletions(expectation Expectation, began time.Time) prefillEnd {
	select {
	case <-expectation.Done():
		q.r.notificationBreakers.RecordNotified(q.handover.Prefill, q.settings.Log)
		return prefillDone
	default:
	}
	until := q.prefillLeg.handleAt.Add(min(q.pd.CompletionTimeout, q.pd.Lease-q.pd.LeaseMargin))
	if by := began.Add(q.settings.Timeouts.Prefill); by.Before(until) {
		until = by
	}
	if q.completionTimer == nil {
		q.completionTimer = newCompletionTimer()
	}
	clientGone, timer := q.completionTimer.clientGone, q.completionTimer.timer
	q.x.OnClientGone(q.completionTimer.signalGone)
	defer q.x.OnClientGone(nil)
	timer.Reset(min(time.Until(until), peerCheckInterval))
	defer timer.Stop()
	for {
		select {
		case <-expectation.Done():
			q.r.notificationBreakers.RecordNotified(q.handover.Prefill, q.settings.Log)
			return prefillDone
		case now := <-timer.C:
			if unready := q.unreadyPeer(); unready != nil {
				return q.peerLost(unready)
			}
			if !now.Before(until) {
				q.r.notificationBreakers.RecordMiss(q.handover.Prefill, q.settings.Log)
				return q.completionTimedOut()
			}
			timer.Reset(min(until.Sub(now), peerCheckInterval))
		case <-clientGone:
			return prefillDone // the caller ends the request by the rule of abort.PhaseBetween
		}
	}
}

// completionTimer holds the timer and the channel for the waits between the legs; waits reuse them.
type completionTimer struct {
	timer      *time.Timer   // for the next check and for the end of the wait
	clientGone chan struct{} // receives once the client has disconnected
	signalGone func()        // sends to clientGone without blocking
}

func newCompletionTimer() *completionTimer {
	b := &completionTimer{timer: time.NewTimer(time.Hour), clientGone: make(chan struct{}, 1)}
	b.timer.Stop()
	b.signalGone = func() {
		select {
		case b.clientGone <- struct{}{}:
		default:
		}
	}
	return b
}

// completionTimedOut decides what follows when no engine has reported that the KV is written: the
// legs run again on other workers, or another decode worker runs the whole request.
func (q *request) completionTimedOut() prefillEnd {
	q.handover.Handle, q.unsent = nil, false
	detail := fmt.Sprintf("no completion of the transfer from %s within %s of prefill's answer", q.handover.Prefill.ID, time.Since(q.prefillLeg.handleAt).Round(time.Millisecond))
	q.noteFallback("not_completed", detail+"; "+q.handover.Decode.ID.String()+" may have blocks of it that were never written")
	q.exclude(q.handover.Prefill, excludedError)
	if !q.excludeTaintedDecode(detail + " (look at pd_proxy_host and pd_proxy_port of the worker, and at lmcache.networks; workers with pd_skip_proxy_notification need pd.completion_timeout 0)") {
		return prefillAnswered
	}
	if q.refreshCandidates(); q.triesLeft() && q.hasCandidate(q.plan.Prefill) && q.withdrawRetry() {
		return prefillRetry
	}
	return prefillUnavailable
}

// excludeTaintedDecode excludes the decode worker that a failed prefill leg named. LMCache's
// receiver lists blocks as cached from their allocation on, written or not. Its engine would
// therefore read stale memory for any request with this prompt. If there is no other decode worker,
// it refuses the request with reason and returns false.
func (q *request) excludeTaintedDecode(reason string) bool {
	d := q.handover.Decode
	switch {
	case d == nil || !q.plan.Traits.NamesDecode || q.isExcluded(d):
	case q.hasOtherCandidate(q.plan.Decode, d):
		q.exclude(d, excludedTainted)
	default:
		q.refuse(front.KVNotWritten, fmt.Sprintf("%s may hold blocks of this prompt that were never written, and no other decode worker is left: %s", d.ID, reason), 0)
		return false
	}
	return true
}

// unreadyPeer returns an engine of the transfer that is no longer ready, or nil.
func (q *request) unreadyPeer() *worker.Rank {
	for _, r := range [...]*worker.Rank{q.handover.Prefill, q.handover.Decode} {
		if r == nil {
			continue
		}
		if state, _ := r.Worker.State(); state != worker.Ready {
			return r
		}
	}
	return nil
}

// peerLost decides what follows when an engine of the transfer is lost.
func (q *request) peerLost(peer *worker.Rank) prefillEnd {
	q.handover.Handle = nil
	q.exclude(peer, excludedDown)
	q.noteFallback("transfer_lost", peer.ID.String()+" is no longer ready; prefill and decode run again")
	if !q.excludeTaintedDecode(peer.ID.String() + " is no longer ready and has not reported that it has written") {
		return prefillAnswered
	}
	if q.refreshCandidates(); q.triesLeft() && q.hasCandidate(q.plan.Prefill) && q.hasCandidate(q.plan.Decode) {
		return prefillRetry
	}
	return prefillUnavailable
}

// OpenNotificationBreakers returns the number of prefill ranks that get no hand-overs because they
// send no completion notifications.
func (r *Runner) OpenNotificationBreakers() int { return r.notificationBreakers.Open() }

// notifyingCandidates is notifying for candidates that are about to be used. If none is left, it notes why
// decode runs the whole request.
func (q *request) notifyingCandidates(candidates []*worker.Rank) []*worker.Rank {
	open := q.notifying(candidates)
	if len(open) == 0 && len(candidates) > 0 {
		q.noteFallback("notifications_missing", "no prefill worker sends notifications that its KV has been written")
	}
	return open
}

// notifying returns the candidates of a prefill leg without the ranks whose breaker is open. It returns all of
// them if the family does not wait for notifications or the configuration forbids that decode runs alone.
func (q *request) notifying(candidates []*worker.Rank) []*worker.Rank {
	if q.r.notificationBreakers.IsEmpty() || !q.pd.DecodeOnlyFallback || q.pd.CompletionTimeout == 0 {
		return candidates
	}
	if _, waits := q.plan.Family.(family.CompletionWaiter); !waits {
		return candidates
	}
	now := time.Now()
	open := make([]*worker.Rank, 0, len(candidates))
	for _, c := range candidates {
		if !q.r.notificationBreakers.IsOpen(c, now) {
			open = append(open, c)
		}
	}
	return open
}
