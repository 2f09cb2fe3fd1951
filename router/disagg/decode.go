package disagg

import (
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

type legEnd int

const (
	legAnswered legEnd = iota // the client has its answer
	legAgain                  // failed before a byte went out: run the attempt again
	legDeclined               // a trial decode holds too little of the prompt
	legPlain                  // decode is to do the whole request
)

// decode runs the last leg: decode with the handle, plain decode without one, or
// the whole request. With a handle it may try more than one rank, as long as no
// engine has seen the handle and the lease lasts.
func (q *request) decode(leg schedule.Leg) legEnd {
	opt := q.r.opt()
	for try := 1; ; try++ {
		if q.pair.Handle != nil && q.leaseOver() {
			q.fellBack("lease_expired", fmt.Sprintf("%s after prefill answered; its blocks may be gone", time.Since(q.handleAt).Round(time.Millisecond)))
			if q.triesLeft() {
				return legAgain
			}
			if !q.decodePlainly() {
				return legAnswered
			}
		}
		if why := q.wait.Lost(); why != "" && q.pair.Handle != nil {
			if q.handOverLost(why) == legAgain {
				return legAgain
			}
			if !q.decodePlainly() {
				return legAnswered
			}
		}
		choice, ok := q.takeDecode(leg)
		if !ok {
			if q.refuseFull(leg, q.candidates(leg)) {
				return legAnswered
			}
			if try <= maxFree && q.anotherRank(leg) {
				continue // and look at the lease again
			}
			q.noneLeft(leg)
			return legAnswered
		}
		rank := choice.Rank
		q.pair.Decode = rank
		if leg == schedule.DecodeLeg && q.pair.Handle == nil {
			choice.Reservation.PullsNothing()
		}
		q.legStarted(leg, rank)
		call := q.newCall()
		began := time.Now()
		resp, err := q.callDecode(rank, call, began)
		q.settleHandle(resp, call, err)
		if err == nil {
			return q.answered(leg, &choice, call, resp, began)
		}
		choice.Reservation.Release()
		f, end, over := q.legFailed(leg, rank, call, err, time.Since(began))
		switch {
		case over:
			return end
		case q.mayOfferAgain(leg, f, try):
			opt.Observer.Retried(leg) // same handle, same id: no engine has seen either
		default:
			return q.againOr(f, leg, rank, err, f.reason != front.UpstreamTimeout || f.unsent || !q.overdue(began))
		}
	}
}

// mayOfferAgain says whether a leg that no engine has seen is to be sent once more as it is,
// in the same attempt; it may have waited for a rank.
func (q *request) mayOfferAgain(leg schedule.Leg, f failure, try int) bool {
	if !f.unsent || q.plan.Traits.NamesDecode || q.late() {
		return false
	}
	if q.renew(); q.other(q.candidates(leg)) {
		return try < q.pd.DecodeTries
	}
	return f.refused && try < maxFree && q.anotherRank(leg)
}

// noneLeft refuses a request whose leg no rank is left for.
func (q *request) noneLeft(leg schedule.Leg) {
	if q.goneWaiting() {
		return
	}
	n := q.tries[leg]
	if n == 0 {
		q.refuse(front.NoDecodeWorker, fmt.Sprintf("no healthy %s worker is left for model %q%s", legName(leg), q.pool.Model, q.waitedFor()), time.Second)
		return
	}
	q.refuse(front.UpstreamFailed, fmt.Sprintf("every %s worker tried has failed this request, after %s%s", legName(leg), counted(n, "try", "tries"), q.waitedFor()), time.Second)
}

// settleHandle says what becomes of the handle's blocks after the call. It stays
// q.kept when no engine has seen it, and is q.given while a stream has shown nothing.
func (q *request) settleHandle(resp *upstream.Response, call *upstream.Call, err error) {
	if q.kept == nil {
		return
	}
	f := sort(err)
	if err != nil && f.unsent {
		return
	}
	q.given, q.kept = q.kept, nil
	switch {
	case err == nil && resp.Status == 200 && q.relays(resp): // firstToken and what ends the stream
	case err == nil && resp.Status != 500, err != nil && f.reason == front.UpstreamTimeout && !call.WasCut():
		// It is done, or refused, which engines tell prefill; or it may be at work still,
		// and is told by the connection's end.
		q.passOn()
	case call.WasCut() && !q.leaves.inDoubt() && q.wait.Lost() != "failed":
		q.passOn()
	default:
		q.reclaim()
	}
}

// overdue says whether a decode leg's whole time is over; a head that does not come
// in timeouts.first_byte may be waited for elsewhere.
func (q *request) overdue(began time.Time) bool {
	return !q.stream || q.late() || time.Since(began) >= q.r.opt().Timeouts.Decode
}

// leaseOver: decode sent after the prefill engine's lease reads freed memory
// and still answers 200, so the router keeps the lease itself.
func (q *request) leaseOver() bool {
	return !q.plan.Traits.Unleased && time.Until(q.leaseEnd()) < q.pd.LeaseMargin
}

// leaseEnd is when the prefill engine lets go of the handle's blocks, by what is known
// of its releases: later than a lease from its answer where the router renews it.
func (q *request) leaseEnd() time.Time {
	return q.kept.Until(q.handleAt.Add(q.pd.Lease), q.pd.Lease)
}

// bookDecode chooses the decode rank before the prefill leg, which names it.
func (q *request) bookDecode() bool {
	if q.booked.Rank != nil {
		return true
	}
	var ok bool
	q.booked, ok = q.choose(schedule.DecodeLeg, q.plan.Decode)
	q.pair.Decode = q.booked.Rank
	return ok
}

// takeDecode is the choice booked before, once, or a new one: where there was
// none, and where its rank has left or failed meanwhile and no handle names it.
func (q *request) takeDecode(leg schedule.Leg) (schedule.Choice, bool) {
	candidates := q.candidates(leg)
	if c := q.booked; c.Rank != nil {
		q.booked = schedule.Choice{}
		if named := q.plan.Traits.NamesDecode && q.pair.Handle != nil; named || !q.leave(c.Rank, candidates) {
			c.Reservation.Start()
			return c, true
		}
		c.Reservation.Release()
	}
	return q.choose(leg, candidates)
}

// callDecode sends the leg and waits for the response head, under the rule of
// "client gone" that fits it.
func (q *request) callDecode(rank *worker.Rank, call *upstream.Call, began time.Time) (*upstream.Response, error) {
	q.leg.reset()
	q.lend(rank)
	q.handed = q.pair.Handle != nil || q.beside != nil || q.pair.Trial
	q.pair.IDs = q.asksIDs(rank)
	if q.handed {
		q.plan.Family.Decode(&q.leg, &q.pair)
	}
	if q.pair.IDs && q.leg.Body == nil {
		q.leg.Set(jsonscan.KeyReturnTokenIDs, jsonTrue)
	}
	head := time.Duration(0) // a whole answer's head comes with its end
	if q.stream {
		head = q.r.opt().Timeouts.FirstByte
	}
	q.x.OnGone(q.cutWhenGone(rank, call, began))
	q.guard(call)
	resp, err := q.r.opt().Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:      "POST",
		Path:        q.path(),
		Fields:      q.headers(rank),
		Body:        q.body(),
		HeadTimeout: head,
		Deadline:    q.decodeBy(began),
		Grace:       q.grace(),
		Group:       q.r.opt().Fleet.Calls(rank),
		Tokens:      q.toCompute(),
	}, call)
	q.leaves.ended()
	if err != nil || !q.cutsOn() || !worthRetry(resp.Status) && q.relays(resp) {
		q.x.OnGone(nil)
	}
	return resp, err
}

// toCompute is how many prompt tokens the decode leg may have to compute.
func (q *request) toCompute() int {
	if q.handed {
		return 0
	}
	return q.prompt.Count
}

// cutsOn says that a client's leaving cuts the decode leg in the same way before its head
// and behind it, while the answer is read whole.
func (q *request) cutsOn() bool { return q.leaves == nil && q.beside == nil }

// decodeBy is the end of a decode leg's time, which the caller's deadline does not cut
// short: an engine that meets the end of the connection first leaves blocks to the lease.
func (q *request) decodeBy(began time.Time) time.Time {
	if !q.by.IsZero() {
		return q.by // it counts on where the stream goes on elsewhere
	}
	return began.Add(q.r.opt().Timeouts.Decode)
}

// cutWhenGone is what to do, before the response head, when the client leaves: see
// leaving. A pair's lease is counted from where its legs began, for nobody knows yet
// when prefill answers.
func (q *request) cutWhenGone(rank *worker.Rank, call *upstream.Call, began time.Time) func() {
	q.leaves = nil
	if q.plan.Traits.Unleased || q.beside == nil && q.pair.Handle == nil {
		return q.cutBoth(call) // nothing is pinned that this does not free
	}
	by := began.Add(q.pd.Lease)
	if q.beside == nil {
		by = q.leaseEnd()
	}
	q.leaves = q.newLeaving()
	*q.leaves = leaving{
		r: q.r, rank: rank, call: call, beside: q.beside, streamed: q.stream, releases: q.kept.Releases(),
		by: by, known: began.Add(q.pd.CutAfter), begin: q.leaves.begin,
	}
	if q.tellsTwice(rank) {
		q.leaves.twice, q.leaves.finish = true, q.pd.AbandonedDecode
	}
	return q.leaves.begin
}

// cutBoth cuts a leg whose head has come, and the one beside it; its engine hears of it
// when it has taken the leg in (see grace).
func (q *request) cutBoth(call *upstream.Call) func() {
	switch b := q.beside; {
	case b == nil:
		return call.Cutter()
	case q.plan.Traits.Unleased:
		return b.cut
	default:
		return b.left
	}
}

func legName(leg schedule.Leg) string {
	switch leg {
	case schedule.PrefillLeg:
		return "prefill"
	case schedule.DecodeLeg:
		return "decode"
	}
	return "aggregated"
}
