package disagg

import (
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/router/worker"
)

// expect registers for the completions that the family waits for; nil: none.
func (q *request) expect() Expectation {
	awaiter, ok := q.plan.Family.(Awaiter)
	if !ok || q.r.opt().Completions == nil || q.pd.NotifyWait == 0 {
		return nil
	}
	id, count := awaiter.Expects(&q.pair)
	if count <= 0 {
		return nil
	}
	return q.r.opt().Completions.Expect(id, count)
}

// partyCheck is how often a wait between the legs looks whether both engines of
// the transfer are still there.
const partyCheck = 200 * time.Millisecond

// await waits between the legs until the transfer is told complete. When that takes longer
// than PD.NotifyWait the pair is run again with others; where there is no other decode worker
// the wait goes on to the end of the lease, and then decode runs all the same. So it is too,
// with others, when one of the two engines is lost meanwhile. It answers when the client leaves.
func (q *request) await(awaited Expectation, began time.Time) prefillEnd {
	select {
	case <-awaited.Done():
		q.r.silences.told(q.pair.Prefill, q.r.opt().Log)
		return prefillDone
	default:
	}
	gone := make(chan struct{})
	q.x.OnGone(func() { close(gone) })
	defer q.x.OnGone(nil)
	limit := q.handleAt.Add(q.pd.Lease - q.pd.LeaseMargin)
	if by := began.Add(q.r.opt().Timeouts.Prefill); by.Before(limit) {
		limit = by
	}
	until, missed := q.handleAt.Add(q.pd.NotifyWait), false
	if limit.Before(until) {
		until = limit
	}
	timer, check := time.NewTimer(time.Until(until)), time.NewTicker(partyCheck)
	defer timer.Stop()
	defer check.Stop()
	for {
		select {
		case <-awaited.Done():
			q.r.silences.told(q.pair.Prefill, q.r.opt().Log)
			return prefillDone
		case <-check.C:
			if lost := q.lostParty(); lost != nil {
				return q.transferLost(lost)
			}
		case <-timer.C:
			if !missed {
				missed = true
				q.r.silences.missed(q.pair.Prefill, q.r.opt().Log)
			}
			if q.others(q.plan.Decode, q.pair.Decode) {
				return q.notWritten()
			}
			if left := time.Until(limit); left > 0 {
				timer.Reset(left)
				continue
			}
			q.fellBack("not_completed", q.silentFor())
			return prefillDone
		case <-gone:
			q.refuse(front.ClientGone, "the client closed the connection between prefill and decode", 0)
			return prefillAnswered
		}
	}
}

func (q *request) silentFor() string {
	return fmt.Sprintf("no completion of the transfer from %s within %s of prefill's answer", q.pair.Prefill.ID, time.Since(q.handleAt).Round(time.Millisecond))
}

// notWritten takes in that nobody told that the KV has been written: the pair is run again
// with other workers, or another decode worker does it all.
func (q *request) notWritten() prefillEnd {
	q.pair.Handle, q.prefilled, q.unsent = nil, false, false
	q.fellBack("not_completed", q.silentFor()+"; "+q.pair.Decode.ID.String()+" may have blocks of it that were never written, and is passed over")
	q.excluded = append(q.excluded, q.pair.Prefill)
	q.taint()
	if q.attempt < q.pd.MaxAttempts && q.other(q.plan.Prefill) && q.retryGranted() {
		return prefillAgain
	}
	return prefillNone
}

// taint passes over the decode worker that a prefill leg named which broke, where there is
// another: LMCache's receiver shows blocks from when it has made room for them, written or
// not, and would read, and not ask for again, what was in that memory before.
func (q *request) taint() {
	if d := q.pair.Decode; d != nil && q.plan.Traits.NamesDecode && !q.isExcluded(d) && q.others(q.plan.Decode, d) {
		q.excluded = append(q.excluded, d)
	}
}

// lostParty is an engine of the transfer that is no longer ready; nil: none.
func (q *request) lostParty() *worker.Rank {
	for _, r := range [...]*worker.Rank{q.pair.Prefill, q.pair.Decode} {
		if r == nil {
			continue
		}
		if state, _ := r.Worker.State(); state != worker.Ready {
			return r
		}
	}
	return nil
}

// transferLost takes in that a transfer will not end.
func (q *request) transferLost(lost *worker.Rank) prefillEnd {
	q.pair.Handle, q.prefilled = nil, false
	q.excluded = append(q.excluded, lost)
	q.taint()
	q.fellBack("transfer_lost", lost.ID.String()+" is not ready any more; the pair is run again")
	if q.other(q.plan.Prefill) && q.other(q.plan.Decode) {
		return prefillAgain
	}
	return prefillNone
}
