package disagg

import (
	"bytes"
	"fmt"
	"strconv"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxAnswer bounds a response that is held whole before it goes to the client;
// longer ones, and those of unknown length, are relayed.
const maxAnswer = 1 << 20

var kvTransferParams = []byte(`"kv_transfer_params"`)

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
func (q *request) decode(leg schedule.Leg, candidates []*worker.Rank) legEnd {
	opt := q.r.opt()
	for try := 1; ; try++ {
		if q.pair.Handle != nil && q.leaseOver() {
			q.fellBack("lease_expired", fmt.Sprintf("%s after prefill answered; its blocks may be gone", time.Since(q.handleAt).Round(time.Millisecond)))
			if q.attempt < q.pd.MaxAttempts {
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
		choice, ok := q.takeDecode(leg, candidates)
		if !ok {
			if q.refuseFull(leg, candidates) {
				return legAnswered
			}
			q.refuse(front.UpstreamFailed, fmt.Sprintf("every %s worker tried has failed this request", legName(leg)), time.Second)
			return legAnswered
		}
		rank := choice.Rank
		q.pair.Decode = rank
		if leg == schedule.DecodeLeg && q.pair.Handle == nil {
			choice.Reservation.PullsNothing()
		}
		opt.Observer.LegStarted(leg, rank.ID)
		call := new(upstream.Call)
		began := time.Now()
		resp, err := q.callDecode(rank, call, began)
		q.settleHandle(resp, call, err)
		if err == nil {
			return q.answered(leg, &choice, call, resp, began, candidates)
		}
		choice.Reservation.Release()
		took := time.Since(began)
		if !q.settle() {
			return q.lostOn(rank, took)
		}
		if call.WasCut() {
			opt.Observer.LegEnded(leg, rank.ID, q.whyGone(), took)
			q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
			return legAnswered
		}
		f := q.failed(rank, legName(leg), err)
		opt.Observer.LegEnded(leg, rank.ID, string(f.reason), took)
		switch {
		case f.unsent && try < q.pd.DecodeTries && q.other(candidates) && !q.plan.Traits.NamesDecode:
			opt.Observer.Retried(leg) // same handle, same id: no engine has seen either
		case f.reason == front.UpstreamTimeout && !f.unsent && q.overdue(began), !q.mayRunAgain(candidates):
			q.refuse(f.reason, fmt.Sprintf("%s on %s failed: %v", legName(leg), rank.ID, err), 0)
			return legAnswered
		default:
			return legAgain
		}
	}
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
func (q *request) takeDecode(leg schedule.Leg, candidates []*worker.Rank) (schedule.Choice, bool) {
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
	defer func() {
		q.leaves.ended()
		q.x.OnGone(nil)
	}()
	q.guard(call)
	return q.r.opt().Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:      "POST",
		Path:        q.path(),
		Fields:      q.headers(rank),
		Body:        q.body(),
		HeadTimeout: head,
		Deadline:    q.decodeBy(began),
		Grace:       q.grace(),
	}, call)
}

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
	q.leaves = &leaving{
		r: q.r, rank: rank, call: call, beside: q.beside, streamed: q.stream, releases: q.kept.Releases(),
		by: by, known: began.Add(q.pd.CutAfter),
	}
	return q.leaves.gone
}

// answered takes a response head: passes it on, or runs the attempt again.
func (q *request) answered(leg schedule.Leg, choice *schedule.Choice, call *upstream.Call, resp *upstream.Response, began time.Time, candidates []*worker.Rank) legEnd {
	opt := q.r.opt()
	rank := choice.Rank
	q.hold(false)
	if b := q.beside; b != nil && resp.Status != 200 && b.call.WasCut() {
		// The client has left and prefill was hung up: decode says that nothing came.
		resp.Release()
		return q.pairBroke(choice, call, upstream.ErrCut, time.Since(began))
	}
	retry := worthRetry(resp.Status)
	relays := !retry && q.relays(resp)
	if relays && resp.Status == 200 {
		opt.Fleet.Began(rank) // streamEnd tells the rest
	} else {
		opt.Fleet.Answered(rank, resp.Status)
	}
	if relays {
		if q.awaitsBeginning(resp, rank, candidates) {
			if end, on := q.firstBytes(leg, candidates, choice, call, resp, began); !on {
				return end
			}
		}
		if !q.settle() {
			defer resp.Release()
			defer choice.Reservation.Release()
			return q.lostOn(rank, time.Since(began))
		}
		q.nameWorkers(choice)
		resp.EndBy(q.deadline) // until here a caller whose time is over was as one who leaves
		q.relay(leg, choice, call, resp, began)
		return legAnswered
	}
	defer resp.Release()
	defer choice.Reservation.Release()
	q.x.OnGone(q.cutBoth(call)) // a head has come: the engine knows the request
	var err error
	if q.reply, err = resp.ReadAll(q.reply[:0], q.maxReply()); err == nil && resp.Status == 200 {
		err = q.join()
	}
	q.x.OnGone(nil)
	took := time.Since(began)
	if err != nil {
		if q.beside != nil {
			return q.pairBroke(choice, call, err, took)
		}
		if !q.settle() {
			return q.lostOn(rank, took)
		}
		if call.WasCut() {
			opt.Observer.LegEnded(leg, rank.ID, q.whyGone(), took)
			q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
			return legAnswered
		}
		f := q.failed(rank, legName(leg), err)
		opt.Observer.LegEnded(leg, rank.ID, string(f.reason), took)
		if f.reason != front.UpstreamTimeout && q.mayRunAgain(candidates) {
			return legAgain
		}
		q.refuse(f.reason, fmt.Sprintf("%s on %s failed: %v", legName(leg), rank.ID, err), 0)
		return legAnswered
	}
	if retry && q.told && q.beside == nil && q.wait.Await() {
		// It is not the engine that failed but what it was to be given.
		return q.lostOn(rank, took)
	}
	if !q.settle() && q.beside == nil {
		return q.lostOn(rank, took) // a 200 too: it may have been made from freed memory
	}
	opt.Observer.LegEnded(leg, rank.ID, statusClass(resp.Status), took)
	if q.pair.Trial && resp.Status == 200 {
		if declined, _ := q.plan.Family.(Trier).Declined(q.reply); declined {
			return q.declined(rank)
		}
	}
	if b := q.beside; b != nil && resp.Status != 200 {
		q.r.facts.forget(b.rank)
		if q.endBeside(); retry && b.failed {
			return q.prefillBroke(b) // decode failed for want of it
		}
	}
	if retry {
		q.excluded = append(q.excluded, rank)
		q.unsent = false
		if q.beside != nil {
			q.handBack(rank)
		}
		opt.Scheduler.Note(q.x.RequestID, fmt.Sprintf("%s on %s answered %d", legName(leg), rank.ID, resp.Status))
		q.x.Log().Warn("leg refused", "leg", legName(leg), "worker", rank.ID.String(), "attempt", q.attempt, "status", resp.Status)
		if diedOf(resp.Status, q.reply) {
			q.suspects++
		}
		if q.mayRunAgain(candidates) {
			return legAgain
		}
		if (resp.Status == 429 || resp.Status == 503) && len(resp.Header("Retry-After")) == 0 {
			q.x.SetHeader("Retry-After", "1")
		}
	}
	q.nameWorkers(choice)
	q.finish(choice, resp)
	return legAnswered
}

// relays says whether an answer is passed on as it comes; others are held
// whole. One that the family must change whole is held whatever its length.
func (q *request) relays(resp *upstream.Response) bool {
	if q.answerer() != nil && resp.Status == 200 {
		return isEvents(resp)
	}
	return resp.ContentLength < 0 || resp.ContentLength > maxAnswer
}

func (q *request) maxReply() int {
	if q.answerer() != nil {
		return maxPrefillAnswer
	}
	return maxAnswer
}

func isEvents(resp *upstream.Response) bool {
	return resp.ContentLength < 0 && bytes.HasPrefix(resp.Header("Content-Type"), []byte("text/event-stream"))
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

// cutBoth cuts a leg whose head has come, and the one beside it; its engine hears of it
// when it has taken the leg in (see grace).
func (q *request) cutBoth(call *upstream.Call) func() {
	switch b := q.beside; {
	case b == nil:
		return call.Cut
	case q.plan.Traits.Unleased:
		return func() { b.call.Cut(); call.Cut() }
	default:
		return b.leave
	}
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
	end = q.decode(schedule.DecodeLeg, q.plan.Decode)
	q.pair.Trial = false
	return end, end == legDeclined
}

// finish passes a whole answer on and closes the books.
func (q *request) finish(choice *schedule.Choice, resp *upstream.Response) {
	out := schedule.Outcome{Status: resp.Status, CachedTokens: -1, Total: time.Since(q.x.Received)}
	body := q.reply
	if resp.Status == 200 {
		use := relay.UsageOf(q.reply)
		spend(q.x.Pass(), use.Prompt, use.Completion)
		choice.Reservation.Report(q.x.RequestID, use.Cached, max(use.Completion, 0))
		out.CachedTokens, out.PromptTokens, out.OutputTokens = use.Cached, use.Prompt, use.Completion
		switch {
		case q.beside != nil:
			out.CachedTokens = q.beside.found(use.Cached)
		case q.prefilled:
			// With a handle the decode engine computed nothing of the prompt:
			// what was cached is what prefill found.
			out.CachedTokens = q.pair.PrefillCached
		case q.x.Endpoint.Disaggregable:
			q.r.learn(choice.Rank, q.guessKeys(choice.Rank), q.prompt.Count, choice.CachedTokens, use.Cached)
		}
		if a := q.answerer(); a != nil {
			body = a.Body(nil, &q.pair, q.reply)
		}
	} else {
		out.Reason = "engine_" + statusClass(resp.Status)
	}
	out.Transfer = q.transferred(choice)
	q.endRecord(out)
	q.x.Reply(resp, withoutHandle(body))
}

// end passes on an answer of the prefill engine, an error of the client's.
func (q *request) end(resp *upstream.Response, status int) {
	q.endRecord(schedule.Outcome{
		Status: status, Reason: "engine_" + statusClass(status), CachedTokens: -1, Total: time.Since(q.x.Received),
	})
	q.x.Reply(resp, q.answer)
}

// nameWorkers puts the choice in the response headers.
func (q *request) nameWorkers(choice *schedule.Choice) {
	cached := choice.CachedTokens
	if q.prefilled = q.beside != nil || q.pair.Handle != nil; q.prefilled {
		q.x.SetHeader("X-Sluice-Prefill-Worker", q.pair.Prefill.ID.Worker)
		cached = max(cached, q.prefillCached)
	}
	if q.planned != "" {
		q.x.SetHeader(headerPlan, q.planned)
	}
	q.x.SetHeader("X-Sluice-Worker", choice.Rank.ID.Worker)
	q.x.SetHeader("X-Sluice-Rank", strconv.Itoa(int(choice.Rank.ID.Rank)))
	q.x.SetHeader("X-Sluice-Cached-Tokens", strconv.Itoa(cached))
}

// withoutHandle blanks a handle in a decode engine's answer (a bidirectional
// engine sends one): it names hosts that are no client's business.
func withoutHandle(body []byte) []byte {
	if !tellsHandle(body) {
		return body
	}
	v, ok, err := jsonscan.Find(body, "kv_transfer_params")
	if err != nil || !ok || v.Kind <= jsonscan.Null {
		return body
	}
	out := make([]byte, 0, len(body))
	out = append(out, body[:v.Start]...)
	out = append(out, "null"...)
	return append(out, body[v.End:]...)
}

// tellsHandle says whether a handle that is not null may stand in body: vLLM writes a null
// one into every answer, which need not be walked for that.
func tellsHandle(body []byte) bool {
	for {
		at := bytes.Index(body, kvTransferParams)
		if at < 0 {
			return false
		}
		body = body[at+len(kvTransferParams):]
		if !bytes.HasPrefix(body, []byte(":null")) {
			return true
		}
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
