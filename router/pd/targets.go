package pd

import (
	"fmt"
	"math"
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/router/admission"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// targetMargin is the part of a target that a forecast leaves unused, because it is not exact.
const targetMargin = 0.1

// setDue sets the latest start by which the request meets its targets: that of the first token, and its
// deadline. A request without targets has its place among others as if it had to start after half of
// its longest wait.
func (q *request) setDue(w *admission.Waiter, rank *worker.Rank, todo, output int) {
	c := q.r.admission
	if q.settings.admission.Mode == "fifo" {
		w.Item.Due = c.Now()
		return
	}
	firstToken, left, delay := q.startsWithin(rank, todo, output)
	if q.engineDelay = delay; q.awaitsFirstToken() {
		q.startBy = c.Now() + int64(firstToken)
	}
	if left == math.MaxInt64 {
		w.Item.Due = c.Now() + int64(q.class.wait/2)
		return
	}
	w.Item.Due, w.Item.Firm = c.Now()+int64(left), true
}

// startsWithin returns within what time the request must be sent to a rank, which has to compute todo of its tokens, if
// it is to meet its target of the first token, and if it is to meet that and its deadline; math.MaxInt64 if it has
// neither. delay is that of Scheduler.FirstTokenTime. The rank may be nil: then no time is counted for what it computes.
func (q *request) startsWithin(rank *worker.Rank, todo, output int) (firstToken, all, delay time.Duration) {
	var prefill, decode time.Duration
	if rank != nil {
		prefill, delay = q.settings.Scheduler.FirstTokenTime(rank, todo)
		if !q.stream {
			decode = time.Duration(output) * q.settings.Scheduler.StepTime(rank, q.promptTokens()+output)
		}
	}
	firstToken = math.MaxInt64
	if q.awaitsFirstToken() {
		firstToken = q.firstTokenBudget() - prefill
	}
	all = firstToken
	if !q.deadline.IsZero() {
		total := q.deadline.Sub(q.req.Received)
		all = min(all, time.Duration((1-targetMargin)*float64(total))-prefill-decode-time.Since(q.req.Received))
	}
	return firstToken, all, delay
}

// meetsTarget reports whether the request may wait. If the forecast says that it cannot start in time,
// it is refused or marked late, as its class says.
//
// The delay in the engine counts only if others of its class or of higher ones go before it. It is learned
// from the first tokens of whatever the engine has been given: were a request refused for it alone, a class
// could be kept out by lower ones, and nothing would correct the delay.
func (q *request) meetsTarget(w *admission.Waiter) bool {
	c := q.r.admission
	if !w.Item.Firm {
		return true
	}
	wait := c.Forecast(w)
	left := time.Duration(w.Item.Due - c.Now())
	if delay := q.engineDelay; wait == 0 {
		if q.startBy > 0 {
			q.startBy += int64(delay)
		}
		if left < 0 {
			w.Item.Due += int64(delay)
			left += delay
		}
	}
	if max(wait, 0) <= left {
		return true
	}
	if q.late = true; !q.class.refuse {
		w.Item.Due = 0 // passed already
		return true
	}
	q.refuseUnmet("refused: its target cannot be met", fmt.Sprintf("the request would wait %s", roundWait(max(wait, 0))), wait, wait, wait-max(left, 0))
	return false
}

// refuseUnmet refuses a request whose target cannot be met any more.
func (q *request) refuseUnmet(note, what string, waited, forecast, retry time.Duration) {
	q.r.countRefusal(q.class.Name, q.tenant, front.TargetUnmet)
	q.noteAdmission(note, waited, forecast)
	q.refuse(front.TargetUnmet, fmt.Sprintf("%s (class %s), too long for its target of %s", what, q.class.Name, q.describeTarget()), q.class.retryAfter(retry))
}

// refuseEarly refuses a request whose target cannot be met, before its prompt is looked at: under overload
// most of the router's work would be for requests that it refuses. It returns false, without an answer,
// if the request may be in time as far as is known without its prompt.
func (q *request) refuseEarly() bool {
	c := q.r.admission
	if q.class == nil || !q.class.refuse || q.ttft == 0 || !q.stream || c.IsEmpty() || !q.waitsForAdmission() || q.wantsPrefillOnly() {
		return false
	}
	rank := q.firstRank()
	if rank == nil {
		return false
	}
	w := &admission.Waiter{Class: q.class.Name}
	w.Item = admission.Item{Pool: q.queuePool(), Group: q.rankGroup(), Tenant: q.tenant, Weight: q.weight, Cost: 1}
	q.setDue(w, rank, 0, 0)
	q.entry.SetClass(q.class.Name, q.tenant)
	return !q.meetsTarget(w)
}

// firstTokenBudget returns how much is left of the target of the first token, less targetMargin.
func (q *request) firstTokenBudget() time.Duration {
	return time.Duration((1-targetMargin)*float64(q.ttft)) - time.Since(q.req.Received)
}

// awaitsFirstToken reports whether the request has a target for its first token.
func (q *request) awaitsFirstToken() bool { return q.ttft > 0 && q.stream && !q.prefillOnly }

func (q *request) describeTarget() string {
	if q.awaitsFirstToken() {
		return q.ttft.String() + " for the first token"
	}
	return q.deadline.Sub(q.req.Received).String() + " for the response"
}

// retryAfter returns the time after which a refused request of the class may be sent again: the forecast, at
// least a second, and at most the longest wait of the class. A forecast beyond that says that the request would
// not start, not when another would.
func (c *admissionClass) retryAfter(forecast time.Duration) time.Duration {
	return max(min(forecast, c.wait), time.Second)
}

// hasTargets reports whether the targets of the request can decide a choice.
func (q *request) hasTargets(query *schedule.Query) bool {
	return len(query.Candidates) > 1 && (q.tpot > 0 && query.Leg != schedule.PrefillLeg || q.awaitsFirstToken() && query.Leg != schedule.DecodeLeg)
}

// LeftOutForTargets is in the note of an explain record, after the number of ranks, for ranks that a choice left
// out because of the request's targets. sluice explain reads it.
const LeftOutForTargets = "ranks were left out, because the request is expected to miss more of its targets there"

// skipSlowRanks leaves ranks out on which the request is expected to miss more of its targets than on others. It
// appends them to q.skipped and returns their number.
func (q *request) skipSlowRanks(query *schedule.Query) int {
	slow, usable, targets := q.appendSlowRanks(query)
	if slow > 0 {
		q.settings.Scheduler.AddNote(query.RequestID, fmt.Sprintf("%d of %d %s: %s", slow, usable, LeftOutForTargets, targets))
	}
	return slow
}

// appendSlowRanks is skipSlowRanks without its note, for which it also returns the number of ranks that were not
// skipped before, and the targets.
func (q *request) appendSlowRanks(query *schedule.Query) (slow, usable int, targets string) {
	before, s := len(q.skipped), q.settings.Scheduler
	misses := make([]int, len(query.Candidates))
	if q.awaitsFirstToken() && query.Leg != schedule.DecodeLeg {
		left := q.firstTokenBudget()
		for i, t := range s.FirstTokens(query) {
			if t > left {
				misses[i]++
			}
		}
		targets = "the first token within " + q.ttft.String()
	}
	if q.tpot > 0 && query.Leg != schedule.PrefillLeg {
		tokens := query.PromptTokens + schedule.ExpectedOutput(query.MaxTokens)
		for i, r := range query.Candidates {
			if s.StepTime(r, tokens) > q.tpot {
				misses[i]++
			}
		}
		if targets != "" {
			targets += ", "
		}
		targets += "each output token within " + q.tpot.String()
	}
	fewest := math.MaxInt
	for i, r := range query.Candidates {
		if !slices.Contains(q.skipped[:before], r) {
			fewest, usable = min(fewest, misses[i]), usable+1
		}
	}
	for i, r := range query.Candidates {
		if misses[i] > fewest && !slices.Contains(q.skipped[:before], r) {
			q.skipped = append(q.skipped, r)
		}
	}
	return len(q.skipped) - before, usable, targets
}
