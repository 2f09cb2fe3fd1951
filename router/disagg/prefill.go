package disagg

import (
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxPrefillAnswer bounds a prefill response: one token and a handle, but with
// the ids of every block of a long prompt, and prompt log-probabilities if the
// client asked for them.
const maxPrefillAnswer = 64 << 20

type prefillEnd int

const (
	prefillDone     prefillEnd = iota // q.handle is good
	prefillAgain                      // failed; another rank may be tried
	prefillNone                       // no handle to be had: decode plainly
	prefillAnswered                   // the request has been answered
	prefillLocal                      // the decode rank booked does it all
)

// prefill runs the prefill leg of one attempt on the rank chosen.
func (q *request) prefill(choice schedule.Choice) prefillEnd {
	opt := q.r.opt()
	defer choice.Reservation.Release()
	rank := choice.Rank
	if q.plan.Traits.NamesDecode && !q.bookDecode() {
		return prefillNone
	}
	awaited := q.expect()
	if awaited != nil {
		defer awaited.Forget()
	}
	q.leg.reset()
	q.plan.Family.Prefill(&q.leg, &q.pair)

	q.legStarted(schedule.PrefillLeg, rank)
	began := time.Now()
	call := q.newCall()
	if q.plan.Traits.Unleased {
		q.x.OnGone(call.Cutter()) // nothing is pinned
	} else {
		q.untilAnswered(call, choice.Reservation)
	}
	status, resp, err := q.callPrefill(rank, call, began)
	left := q.answerCame()
	took := time.Since(began)

	if err != nil {
		if left {
			return q.prefillLeft(rank, call, err, took)
		}
		return q.prefillFailed(rank, call, err, took)
	}
	defer resp.Release()
	opt.Fleet.Answered(rank, status)
	switch {
	case status == 200:
	case left:
		opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, statusClass(status), took)
		q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
		return prefillAnswered
	case worthRetry(status), status < 300: // of the 2xx only a 200 has an answer to go on with
		opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, statusClass(status), took)
		dies := diedOf(status, q.answer)
		q.exclude(rank, failure{down: dies}.setback())
		q.unsent = false
		opt.Scheduler.Note(q.x.RequestID, fmt.Sprintf("prefill on %s answered %d", rank.ID, status))
		q.x.Log().Warn("leg refused", "leg", "prefill", "worker", rank.ID.String(), "attempt", q.attempt, "status", status)
		if dies {
			if q.suspects++; q.suspects >= maxSuspects {
				q.end(resp, status)
				return prefillAnswered
			}
		}
		return q.anotherPrefill(dies)
	default:
		// What prefill refuses decode would refuse too: the client's to see.
		opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, statusClass(status), took)
		q.x.SetHeader("X-Sluice-Prefill-Worker", rank.ID.Worker)
		q.end(resp, status)
		return prefillAnswered
	}

	opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, "ok", took)
	q.handleAt = time.Now()
	q.pair.Answer = q.answer
	q.pair.PrefillCached = relay.UsageOf(q.answer).Cached
	choice.Reservation.Report(q.x.RequestID, q.pair.PrefillCached, 0)
	choice.Reservation.PrefillDone()
	q.r.learn(rank, q.guessKeys(rank), q.prompt.Count, choice.CachedTokens, q.pair.PrefillCached, took)
	q.pair.Handle, err = q.plan.Family.Handle(&q.pair, q.answer)
	switch {
	case errors.Is(err, ErrFinal):
		q.final(resp)
		return prefillAnswered
	case err != nil:
		q.pair.Handle = nil
		q.fellBack("incomplete_handle", fmt.Sprintf("%s: %v", rank.ID, err))
		return prefillNone
	}
	q.r.identified(&q.pair, began)
	if learner, ok := q.plan.Family.(Learner); ok {
		if q.learned = learner.Learn(q.learned[:0], &q.pair); len(q.learned) > 0 {
			q.r.facts.learn(rank, q.learned)
		}
	}
	q.prefilled = true
	q.hold(!q.plan.Traits.Unleased)
	q.watch(q.handleAt)
	if _, pulls := q.plan.Family.(nixlPull); pulls {
		q.kept = q.r.opt().SideChannel.Hold(rank, q.pair.Handle)
	}
	if awaited != nil {
		if end := q.await(awaited, began); end != prefillDone {
			return end
		}
	}
	if q.x.Gone() {
		q.giveBack()
		q.refuse(front.ClientGone, "the client closed the connection between prefill and decode", 0)
		return prefillAnswered
	}
	return prefillDone
}

// final gives the client prefill's answer, which is the whole answer.
func (q *request) final(resp *upstream.Response) {
	q.x.SetHeader("X-Sluice-Prefill-Worker", q.pair.Prefill.ID.Worker)
	use := relay.UsageOf(q.answer)
	q.charge(&use, q.answer)
	q.endRecord(schedule.Outcome{
		Status: resp.Status, CachedTokens: use.Cached, PromptTokens: use.Prompt, OutputTokens: use.Completion, Total: time.Since(q.x.Received),
	})
	finisher, _ := q.plan.Family.(Finisher)
	switch {
	case finisher == nil:
		q.answer = withoutHandle(q.answer)
		relay.Veil(q.answer, resp.Status)
		q.x.Reply(resp, q.answer)
	case q.stream:
		q.x.ReplyEvents(finisher.Final(nil, &q.pair, q.answer))
	default:
		q.x.Reply(resp, finisher.Body(nil, &q.pair, q.answer))
	}
}

// callPrefill sends the leg and reads the whole answer into q.answer.
func (q *request) callPrefill(rank *worker.Rank, call *upstream.Call, began time.Time) (int, *upstream.Response, error) {
	resp, err := q.r.opt().Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:   "POST",
		Path:     q.path(),
		Fields:   q.headers(rank),
		Body:     q.body(),
		Deadline: began.Add(q.r.opt().Timeouts.Prefill),
		Group:    q.r.opt().Fleet.Calls(rank),
		Tokens:   q.prompt.Count,
		Prefill:  true,
	}, call)
	if err != nil {
		return 0, nil, err
	}
	q.answer, err = resp.ReadCounted(q.answer[:0], maxPrefillAnswer, &q.derived)
	if err != nil {
		resp.Release()
		return 0, nil, err
	}
	return resp.Status, resp, nil
}

// prefillLeft ends a request whose client left while its prefill ran, and whose prefill
// failed then or was hung up. It is not run again.
func (q *request) prefillLeft(rank *worker.Rank, call *upstream.Call, err error, took time.Duration) prefillEnd {
	outcome := q.whyGone()
	if !call.WasCut() {
		outcome = string(q.failed(rank, "prefill", err).reason)
	}
	q.r.opt().Observer.LegEnded(schedule.PrefillLeg, rank.ID, outcome, took)
	q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
	return prefillAnswered
}

func (q *request) prefillFailed(rank *worker.Rank, call *upstream.Call, err error, took time.Duration) prefillEnd {
	opt := q.r.opt()
	if call.WasCut() {
		opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, q.whyGone(), took)
		q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
		return prefillAnswered
	}
	f := q.failed(rank, "prefill", err)
	opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, string(f.reason), took)
	if f.reason == front.BudgetSpent { // another engine's answer would find none either
		q.refuseForMemory()
		return prefillAnswered
	}
	if f.suspect && !q.taint(fmt.Sprintf("prefill on %s failed: %s", rank.ID, upstream.Told(err))) {
		return prefillAnswered
	}
	if q.suspects >= maxSuspects {
		q.refuse(f.reason, fmt.Sprintf("%d engines failed while they held this request; it is not tried on a third: %s", q.suspects, upstream.Told(err)), 0)
		return prefillAnswered
	}
	return q.anotherPrefill(f.down)
}

// anotherPrefill says what follows a prefill leg that failed: another one, for whose worker
// it waits where the engine went down and decode cannot do without, or none.
func (q *request) anotherPrefill(down bool) prefillEnd {
	leg := schedule.PrefillLeg
	q.renew()
	if q.triesLeft() && !q.late() && (q.other(q.candidates(leg)) || down && !q.decodesAlone() && q.anotherRank(leg)) && q.retryGranted() {
		return prefillAgain
	}
	q.fellBack("prefill_failed", "of the prefill workers that are ready none is left")
	return prefillNone
}

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
