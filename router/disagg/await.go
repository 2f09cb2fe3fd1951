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
// than PD.NotifyWait the pair is run again with others, or another decode worker does it all;
// so it is too when one of the two engines is lost meanwhile. Where there is no other decode
// worker the request is refused. It answers when the client leaves.
func (q *request) await(awaited Expectation, began time.Time) prefillEnd {
	select {
	case <-awaited.Done():
		q.r.silences.told(q.pair.Prefill, q.r.opt().Log)
		return prefillDone
	default:
	}
	until := q.handleAt.Add(min(q.pd.NotifyWait, q.pd.Lease-q.pd.LeaseMargin))
	if by := began.Add(q.r.opt().Timeouts.Prefill); by.Before(until) {
		until = by
	}
	if q.between == nil {
		q.between = newBetween()
	}
	gone, clock := q.between.gone, q.between.clock
	q.x.OnGone(q.between.left)
	defer q.x.OnGone(nil)
	clock.Reset(min(time.Until(until), partyCheck))
	defer clock.Stop()
	for {
		select {
		case <-awaited.Done():
			q.r.silences.told(q.pair.Prefill, q.r.opt().Log)
			return prefillDone
		case now := <-clock.C:
			if lost := q.lostParty(); lost != nil {
				return q.transferLost(lost)
			}
			if !now.Before(until) {
				q.r.silences.missed(q.pair.Prefill, q.r.opt().Log)
				return q.notWritten()
			}
			clock.Reset(min(until.Sub(now), partyCheck))
		case <-gone:
			q.refuse(front.ClientGone, "the client closed the connection between prefill and decode", 0)
			return prefillAnswered
		}
	}
}

// between is what a wait between the legs needs, for one after the other.
type between struct {
	clock *time.Timer   // for both times that are looked at
	gone  chan struct{} // told of a client that left
	left  func()        // tells it, and waits for nobody
}

func newBetween() *between {
	b := &between{clock: time.NewTimer(time.Hour), gone: make(chan struct{}, 1)}
	b.clock.Stop()
	b.left = func() {
		select {
		case b.gone <- struct{}{}:
		default:
		}
	}
	return b
}

// notWritten takes in that nobody told that the KV has been written: the pair is run again
// with other workers, or another decode worker does it all.
func (q *request) notWritten() prefillEnd {
	q.pair.Handle, q.prefilled, q.unsent = nil, false, false
	silent := fmt.Sprintf("no completion of the transfer from %s within %s of prefill's answer", q.pair.Prefill.ID, time.Since(q.handleAt).Round(time.Millisecond))
	q.fellBack("not_completed", silent+"; "+q.pair.Decode.ID.String()+" may have blocks of it that were never written")
	q.exclude(q.pair.Prefill, answeredBadly)
	if !q.taint(silent + " (look at pd_proxy_host and pd_proxy_port of the worker, and at lmcache.networks; workers with pd_skip_proxy_notification need pd.notify_wait 0)") {
		return prefillAnswered
	}
	if q.renew(); q.triesLeft() && q.other(q.plan.Prefill) && q.retryGranted() {
		return prefillAgain
	}
	return prefillNone
}

// taint passes over the decode worker that a prefill leg named which broke: LMCache's
// receiver shows blocks from when it has made room for them, written or not, and would
// read, and not ask for again, what was in that memory before. It would whatever it is sent
// of this prompt, a plain request too; so where there is no other the request is refused, why
// being what befell the leg, and false returned.
func (q *request) taint(why string) bool {
	d := q.pair.Decode
	switch {
	case d == nil || !q.plan.Traits.NamesDecode || q.isExcluded(d):
	case q.others(q.plan.Decode, d):
		q.exclude(d, spoiled)
	default:
		q.refuse(front.KVNotWritten, fmt.Sprintf("%s may hold blocks of this prompt that were never written, and no other decode worker is left: %s", d.ID, why), 0)
		return false
	}
	return true
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
	q.exclude(lost, wentDown)
	q.fellBack("transfer_lost", lost.ID.String()+" is not ready any more; the pair is run again")
	if !q.taint(lost.ID.String() + " is not ready any more, and has not told that it has written") {
		return prefillAnswered
	}
	if q.renew(); q.triesLeft() && q.other(q.plan.Prefill) && q.other(q.plan.Decode) {
		return prefillAgain
	}
	return prefillNone
}
