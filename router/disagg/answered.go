package disagg

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxAnswer bounds a response that is held whole before it goes to the client, so that it can
// be run again where it breaks off; longer ones and event streams are relayed where they are
// no refusals.
const maxAnswer = 1 << 20

// answered takes a response head: passes it on, or runs the attempt again.
func (q *request) answered(leg schedule.Leg, choice *schedule.Choice, call *upstream.Call, resp *upstream.Response, began time.Time) legEnd {
	opt := q.r.opt()
	rank := choice.Rank
	q.hold(false)
	q.whole = false
	if b := q.beside; b != nil && resp.Status != 200 && b.call.WasCut() {
		// The client has left and prefill was hung up: decode says that nothing came.
		resp.Release()
		return q.pairBroke(choice, call, upstream.ErrCut, time.Since(began))
	}
	retry := worthRetry(resp.Status)
	relays := !retry && q.relays(resp)
	if resp.Status == 200 {
		opt.Fleet.Began(rank) // the answer may still break off
	} else {
		opt.Fleet.Answered(rank, resp.Status)
	}
	if relays {
		if q.awaitsBeginning(leg, resp, rank) {
			if end, on := q.firstBytes(leg, choice, call, resp, began); !on {
				return end
			}
		}
	}
	if relays && q.whole {
		q.passOn() // the answer is there: decode is done
		relays = false
	}
	if relays {
		if !q.settle() {
			defer resp.Release()
			defer choice.Reservation.Release()
			return q.lostOn(rank, time.Since(began))
		}
		if !q.keepAnswer(resp) {
			call.Cut()
			resp.Release()
			choice.Reservation.Release()
			opt.Fleet.Answered(rank, resp.Status)
			opt.Observer.LegEnded(leg, rank.ID, string(front.BudgetSpent), time.Since(began))
			q.refuseForMemory()
			return legAnswered
		}
		q.nameWorkers(choice)
		resp.EndBy(q.deadline) // until here a caller whose time is over was as one who leaves
		q.relay(leg, choice, call, resp, began)
		return legAnswered
	}
	defer resp.Release()
	defer choice.Reservation.Release()
	if !q.cutsOn() {
		q.x.OnGone(q.cutBoth(call)) // a head has come: the engine knows the request
	}
	err := q.lendReply(resp)
	if err == nil {
		q.reply, err = resp.ReadCounted(q.reply[:0], q.maxReply(), &q.derived)
	}
	if err == nil && resp.Status == 200 {
		if err = checkAnswer(resp, q.reply); err == nil {
			err = q.join()
		}
	}
	q.x.OnGone(nil)
	took := time.Since(began)
	if err != nil {
		if q.beside != nil {
			return q.pairBroke(choice, call, err, took)
		}
		return q.brokeOff(leg, rank, call, err, took)
	}
	if resp.Status == 200 {
		opt.Fleet.Answered(rank, resp.Status)
	}
	if retry && q.told && q.beside == nil && q.wait.Await() {
		// It is not the engine that failed but what it was to be given.
		return q.lostOn(rank, took)
	}
	if !q.settle() && q.beside == nil {
		return q.lostOn(rank, took) // a 200 too: it may have been made from freed memory
	}
	if retry && q.pair.Handle != nil && q.prefillWentDown() && !diedOf(resp.Status, q.reply) {
		return q.lostOn(rank, took)
	}
	opt.Observer.LegEnded(leg, rank.ID, statusClass(resp.Status), took)
	if q.pair.Trial && resp.Status == 200 {
		if declined, _ := q.plan.Family.(Trier).Declined(q.reply); declined {
			return q.declined(rank)
		}
	}
	if b := q.beside; b != nil && resp.Status != 200 {
		q.r.facts.forget(b.rank)
		if q.endBeside(retry); retry && b.failed {
			return q.prefillBroke(b) // decode failed for want of it
		}
		if resp.Status == 500 && bytes.Contains(q.reply, transferError) {
			return q.transferFailed(b, rank)
		}
	}
	if retry {
		dies := diedOf(resp.Status, q.reply)
		q.exclude(rank, failure{down: dies}.setback())
		q.unsent = false
		if q.beside != nil {
			q.handBack(rank)
		}
		opt.Scheduler.Note(q.x.RequestID, fmt.Sprintf("%s on %s answered %d", legName(leg), rank.ID, resp.Status))
		q.x.Log().Warn("leg refused", "leg", legName(leg), "worker", rank.ID.String(), "attempt", q.attempt, "status", resp.Status)
		if dies {
			q.suspects++
		}
		if q.mayRunAgain(leg, dies) {
			return legAgain
		}
		if (resp.Status == 429 || resp.Status == 503) && len(resp.Header("Retry-After")) == 0 {
			q.x.SetHeader("Retry-After", "1")
		}
	}
	q.nameWorkers(choice)
	q.finish(choice, resp, began.Add(took))
	return legAnswered
}

// longReply is how long a whole answer may be to lie in scratch that later requests use.
const longReply = 64 << 10

// lendReply makes room for a long answer whose length the engine told, counted as bodies
// are; upstream.ErrMemory where there is none. It lasts as long as the request.
func (q *request) lendReply(resp *upstream.Response) error {
	n := resp.ContentLength
	if n <= longReply || n > int64(q.maxReply()) {
		return nil
	}
	var ok bool
	q.reply = nil
	q.replyRoom.Release()
	if q.replyRoom, ok = q.x.Lend(int(n)); !ok {
		return upstream.ErrMemory
	}
	q.reply = q.replyRoom.Bytes()[:0]
	return nil
}

// relays says whether an answer is passed on as it comes; others are held
// whole. One that the family must change whole is held whatever its length, and so is
// a refusal, whose words may have to be withheld (relay.Veil).
func (q *request) relays(resp *upstream.Response) bool {
	if resp.Status >= 400 {
		return false
	}
	if q.answerer() != nil && resp.Status == 200 {
		return isEvents(resp)
	}
	return resp.ContentLength < 0 || resp.ContentLength > maxAnswer
}

// errEmpty is that of an engine that answers 200 with nothing.
var errEmpty = errors.New("the engine answered 200 with an empty body")

// checkAnswer says what is wrong with the body of a 200: it is empty, or ends with the
// connection in the midst of its JSON.
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

// mayHold says whether an answer whose length the engine does not tell is held whole where it
// is no longer than maxAnswer.
func (q *request) mayHold(resp *upstream.Response) bool {
	return resp.ContentLength < 0 && resp.Status < 400 && !isEvents(resp) && q.taking == nil
}

// holdWhole waits until all of an answer that mayHold has come, and gives what has of it. The
// answer is not whole where it is longer than maxAnswer, or the memory for bodies is spent: it
// is relayed then.
func (q *request) holdWhole(resp *upstream.Response) (seen []byte, whole bool, err error) {
	var chunks upstream.Chunks
	at, counted, idle := 0, 0, q.r.opt().Timeouts.StreamIdle
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
		case 2*have > counted && have >= longReply:
			// The connection's buffer grows to twice its size.
			if !q.derived.Take(2*have - counted) {
				return seen, false, nil
			}
			counted = 2 * have
		}
		_ = resp.SetReadDeadline(time.Now().Add(idle))
		if seen, err = resp.PeekMore(maxAnswer); err == nil && len(seen) == have {
			return seen, true, nil // the connection has ended, and the body with it
		}
	}
	return seen, false, err
}

func (q *request) maxReply() int {
	if q.answerer() != nil {
		return maxPrefillAnswer
	}
	return maxAnswer
}

func isEvents(resp *upstream.Response) bool {
	return resp.ContentLength < 0 && relay.IsEventStream(resp.Header("Content-Type"))
}

// answerer is who changes the answer of this leg; nil: nobody.
func (q *request) answerer() Answerer {
	if !q.handed {
		return nil
	}
	a, _ := q.plan.Family.(Answerer)
	if j, ok := a.(Joiner); ok && !j.Joins(&q.pair) {
		return nil
	}
	return a
}

// declined ends a trial.
func (q *request) declined(rank *worker.Rank) legEnd {
	q.r.opt().Scheduler.Note(q.x.RequestID, "declined: decode on "+rank.ID.String()+" holds too little of the prompt")
	q.r.opt().Observer.FellBack("declined")
	return legDeclined
}

// try runs decode before prefill; declined says that prefill is needed.
func (q *request) try() (end legEnd, declined bool) {
	q.pair.Trial = true
	end = q.decode(schedule.DecodeLeg)
	q.pair.Trial = false
	return end, end == legDeclined
}
