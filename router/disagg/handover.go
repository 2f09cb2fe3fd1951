package disagg

import (
	"strings"
	"time"

	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/nixl/completion"
	"sluice/router/schedule"
	"sluice/router/transfers"
	"sluice/router/worker"
)

// watch begins to listen for what engines tell of the hand-over: from prefill's
// answer on, or, of a Concurrent pair, before the legs are sent; now is that time.
func (q *request) watch(now time.Time) {
	if q.plan.Traits.Told {
		q.wait = q.r.opt().Transfers.Open(q.pair.RequestID, now)
	}
}

// unwatch ends the listening without an outcome for it.
func (q *request) unwatch() {
	if q.wait != nil {
		q.wait.Close()
		q.wait = nil
	}
	q.told = false
}

// lend gives decode a slot of the completion board, where its engine is known to
// run the connector. A stock engine gets its handle byte for byte.
func (q *request) lend(rank *worker.Rank) {
	q.told = q.wait != nil && (q.pair.Handle != nil || q.beside != nil) && option(rank, "connector") == "true"
	q.pair.Ticket = nil
	if !q.told {
		return
	}
	q.wait.Lend(q.r.opt().Timeouts.Decode)
	if q.ticket = q.wait.AppendTicket(q.ticket[:0]); len(q.ticket) > 0 {
		q.pair.Ticket = q.ticket
	}
}

// guard has the decode call cut when its hand-over is told lost, or the engine that
// holds the KV goes down.
func (q *request) guard(call *upstream.Call) {
	q.vigil.forget()
	if q.pair.Handle != nil && !q.plan.Traits.Unleased {
		q.guardOver(q.pair.Prefill, call)
	}
	if q.wait == nil || q.pair.Handle == nil && q.beside == nil {
		return
	}
	stall := time.Duration(0)
	if q.told {
		stall = q.r.opt().TransferStall
	}
	q.call = nil // the wait may cut it until it is closed
	q.wait.Guard(call, stall)
}

// lostOn ends a decode leg whose hand-over is lost, before the client has seen
// anything of it; the next attempt has another pair, or is plain.
func (q *request) lostOn(rank *worker.Rank, took time.Duration) legEnd {
	q.r.opt().Observer.LegEnded(schedule.DecodeLeg, rank.ID, relay.Cut.String(), took)
	why := q.wait.Lost()
	if why == "" {
		why = "prefill_down"
	}
	if q.handOverLost(why) == legPlain {
		q.plainly = true
	}
	return legAgain
}

// handOverLost takes in that decode cannot get this prefill's KV, and why (a kind
// for metrics, without its "transfer_"): legAgain has the pair run again with
// another prefill rank, and another decode rank where there is one; legPlain says
// that no tries are left and decode is to do the whole request.
func (q *request) handOverLost(why string) legEnd {
	prefill, decode := q.pair.Prefill, q.pair.Decode
	since := q.handleAt
	if q.pair.Handle == nil {
		since = q.x.Received
	}
	q.fellBack("transfer_"+why, "of the KV from "+prefill.ID.String()+", after "+time.Since(since).Round(time.Millisecond).String())
	q.hold(false)
	q.unwatch()
	q.vigil.forget()
	if why == "expired" {
		q.passOn() // there is nothing left to release
	} else {
		q.exclude(prefill, wentDown)
		if decode != nil && !q.isExcluded(decode) && q.others(q.plan.Decode, decode) {
			q.exclude(decode, answeredBadly)
		}
	}
	if q.triesLeft() && q.retryGranted() {
		return legAgain
	}
	return legPlain
}

// passOn says that the handle's blocks are decode's now, or may be.
func (q *request) passOn() {
	q.kept.Passed()
	q.given.Passed()
	q.kept, q.given = nil, nil
}

// reclaim says that a decode engine had the handle and has dropped its request, and
// may not have told prefill.
func (q *request) reclaim() {
	q.given.Reclaimed()
	q.given = nil
}

// abandon lets go of a handle that no decode engine has seen, nor will, and of one
// whose decode came to nothing.
func (q *request) abandon() {
	q.kept.Abandoned()
	q.kept = nil
	q.reclaim()
}

// others says whether a candidate but one is left that has not failed this request.
func (q *request) others(candidates []*worker.Rank, but *worker.Rank) bool {
	for _, c := range candidates {
		if c != but && !q.isExcluded(c) {
			return true
		}
	}
	return false
}

// transferred closes the wait of a request that was answered whole.
func (q *request) transferred(choice *schedule.Choice) schedule.Transfer {
	w := q.wait
	q.wait = nil
	return q.r.transferred(w, q.x.RequestID, q.pair.Prefill, choice.Rank, q.prompt.Count-choice.CachedTokens)
}

// leastMoved is how many tokens a transfer must have moved to tell of a rate.
const leastMoved = 64

// transferred closes a wait, books what the transfer took for the pair of ranks,
// and gives what explain shows of it. What is told a moment later is booked then.
func (r *Runner) transferred(w *transfers.Wait, requestID string, from, to *worker.Rank, tokens int) schedule.Transfer {
	if w == nil {
		return schedule.Transfer{}
	}
	if tokens < leastMoved {
		tokens = 0
	}
	if w.Pending() {
		id := strings.Clone(requestID)
		if w.Linger(func(res completion.Result) { r.opt().Scheduler.Late(id, r.moved(&res, from, to, tokens)) }) {
			return schedule.Transfer{State: "untold"}
		}
	}
	res := w.Close()
	return r.moved(&res, from, to, tokens)
}

func (r *Runner) moved(res *completion.Result, from, to *worker.Rank, tokens int) schedule.Transfer {
	r.opt().Transfers.Moved(from, to, tokens, res)
	t := schedule.Transfer{State: "untold", Bytes: res.Bytes, Took: res.Took, After: res.After}
	if res.State != completion.Pending {
		t.State = res.State.String()
	} else if res.Lost {
		t.State = "expired"
	}
	return t
}
