package disagg

import (
	"time"

	"sluice/dataplane/upstream"
	"sluice/router/schedule"
)

// giveBack has the blocks of a handle freed whose client left between the legs.
// There is no call for it: an engine lets go of them when decode has read them, or
// with the lease, which is minutes in some releases and never ends in vLLM 0.9. So
// decode is run all the same, for one token. Where the router may tell prefill
// itself (transfers.side_channel: release) it does that instead.
//
// It runs on the request's own goroutine, and ends by the lease or the decode
// time-out.
func (q *request) giveBack() {
	if q.plan.Traits.Unleased {
		return
	}
	if q.kept.Releases() {
		q.fellBack("abandoned_handle", "the client left between the legs; prefill is told to free its blocks")
		return // recycle tells
	}
	q.fellBack("abandoned_handle", "the client left between the legs; decode makes one token, so that the blocks are freed")
	opt := &q.r.opt
	for range q.pd.DecodeTries {
		if q.leaseOver() {
			return
		}
		choice, ok := q.takeDecode(schedule.DecodeLeg, q.plan.Decode)
		if !ok {
			return // nobody to read them: the lease ends
		}
		rank := choice.Rank
		q.pair.Decode = rank
		q.leg.reset()
		q.plan.Family.Decode(&q.leg, &q.pair)
		q.leg.notStreamed()
		q.leg.oneToken(&q.pair)
		opt.Observer.LegStarted(schedule.DecodeLeg, rank.ID)
		began := time.Now()
		by := began.Add(opt.Timeouts.Decode)
		if end := q.leaseEnd(); end.Before(by) {
			by = end
		}
		outcome, unsent := q.callGivingBack(&upstream.Request{
			Method: "POST", Path: q.path(), Fields: q.headers(rank), Body: q.body(), Deadline: by,
		}, &choice)
		choice.Reservation.Release()
		opt.Observer.LegEnded(schedule.DecodeLeg, rank.ID, outcome, time.Since(began))
		if !unsent {
			return
		}
	}
}

// callGivingBack sends the leg and reads its answer, which is for nobody; unsent says
// that no engine has seen the handle.
func (q *request) callGivingBack(req *upstream.Request, choice *schedule.Choice) (outcome string, unsent bool) {
	fleet := q.r.opt.Fleet
	resp, err := fleet.Endpoint(choice.Rank).Do(req, nil)
	if err == nil || !sort(err).unsent {
		q.passOn()
		q.hold(false)
	}
	status := 0
	if err == nil {
		status = resp.Status
		q.reply, err = resp.ReadAll(q.reply[:0], q.maxReply())
		resp.Release()
	}
	if err != nil {
		f := q.failed(choice.Rank, legName(schedule.DecodeLeg), err)
		return string(f.reason), f.unsent
	}
	fleet.Answered(choice.Rank, status)
	return statusClass(status), false
}
