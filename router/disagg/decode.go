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
)

// decode runs the last leg: decode with q.handle, plain decode without one, or
// the whole request. With a handle it may try more than one rank, as long as no
// engine has seen the handle and the lease lasts.
func (q *request) decode(leg schedule.Leg, candidates []*worker.Rank) legEnd {
	opt := &q.r.opt
	for try := 1; ; try++ {
		if q.handle != nil && q.leaseOver() {
			q.fellBack("lease_expired", fmt.Sprintf("%s after prefill answered; its blocks may be gone", time.Since(q.handleAt).Round(time.Millisecond)))
			if q.attempt < q.pd.MaxAttempts {
				return legAgain
			}
			if !q.decodePlainly() {
				return legAnswered
			}
		}
		choice, ok := q.choose(leg, candidates)
		if !ok {
			q.refuse(front.UpstreamFailed, fmt.Sprintf("every %s worker tried has failed this request", legName(leg)), time.Second)
			return legAnswered
		}
		rank := choice.Rank
		opt.Observer.LegStarted(leg, rank.ID)
		call := new(upstream.Call)
		began := time.Now()
		resp, err := q.callDecode(rank, call, began)
		if err == nil {
			return q.answered(leg, &choice, call, resp, began, candidates)
		}
		choice.Reservation.Release()
		took := time.Since(began)
		if call.WasCut() {
			opt.Observer.LegEnded(leg, rank.ID, string(front.ClientGone), took)
			q.refuse(front.ClientGone, "the client closed the connection before the answer", 0)
			return legAnswered
		}
		f := q.failed(rank, legName(leg), err)
		opt.Observer.LegEnded(leg, rank.ID, string(f.reason), took)
		switch {
		case f.unsent && try < q.pd.DecodeTries && q.other(candidates):
			opt.Observer.Retried(leg) // same handle, same id: no engine has seen either
		case f.reason == front.UpstreamTimeout && !f.unsent, !q.mayRunAgain(candidates):
			q.refuse(f.reason, fmt.Sprintf("%s on %s failed: %v", legName(leg), rank.ID, err), 0)
			return legAnswered
		default:
			return legAgain
		}
	}
}

// leaseOver: decode sent after the prefill engine's lease reads freed memory
// and still answers 200, so the router keeps the lease itself.
func (q *request) leaseOver() bool {
	return time.Since(q.handleAt) > q.pd.Lease-q.pd.LeaseMargin
}

// callDecode sends the leg and waits for the response head, under the rule of
// "client gone" that fits it.
func (q *request) callDecode(rank *worker.Rank, call *upstream.Call, began time.Time) (*upstream.Response, error) {
	q.edits = q.edits[:0]
	if q.handle != nil {
		q.edits = q.plan.Family.DecodeEdits(q.edits, q.handle)
	}
	q.segments = q.x.Doc.Segments(q.segments[:0], q.edits...)
	q.x.OnGone(q.cutWhenGone(call, began))
	defer q.x.OnGone(nil)
	return q.r.opt.Fleet.Endpoint(rank).Do(&upstream.Request{
		Method:   "POST",
		Path:     q.x.Endpoint.Path,
		Fields:   q.headers(rank),
		Body:     q.segments,
		Deadline: began.Add(q.r.opt.Timeouts.Decode),
	}, call)
}

// cutWhenGone is what to do, before the response head, when the client leaves.
// A decode that holds a handle must be seen to be admitted before it is cut, or
// the prefill engine keeps the blocks until the lease ends: a streamed one has
// then sent its head (front cuts it from there on), any other is taken to be
// admitted after PD.CutAfter. Once the lease has ended there is nothing left to
// wait for: an engine that never sends its head must not hold the leg for long.
func (q *request) cutWhenGone(call *upstream.Call, began time.Time) func() {
	if q.handle == nil {
		return call.Cut
	}
	after := q.handleAt.Add(q.pd.Lease).Sub(began)
	if !q.stream {
		after = min(after, q.pd.CutAfter)
	}
	return func() {
		if left := after - time.Since(began); left > 0 {
			time.AfterFunc(left, call.Cut)
			return
		}
		call.Cut()
	}
}

// answered takes a response head: passes it on, or runs the attempt again.
func (q *request) answered(leg schedule.Leg, choice *schedule.Choice, call *upstream.Call, resp *upstream.Response, began time.Time, candidates []*worker.Rank) legEnd {
	opt := &q.r.opt
	rank := choice.Rank
	q.hold(false)
	opt.Fleet.Succeeded(rank)
	retry := worthRetry(resp.Status)
	if !retry && (resp.ContentLength < 0 || resp.ContentLength > maxAnswer) {
		q.nameWorkers(choice, q.handle != nil)
		q.relay(leg, choice, call, resp, began)
		return legAnswered
	}
	defer resp.Release()
	defer choice.Reservation.Release()
	handed := q.handle != nil // readAnswer reuses the memory it borrows
	q.x.OnGone(call.Cut)      // a head has come: the engine knows the request
	var err error
	q.answer, err = q.readAnswer(resp)
	q.x.OnGone(nil)
	took := time.Since(began)
	if err != nil {
		if call.WasCut() {
			opt.Observer.LegEnded(leg, rank.ID, string(front.ClientGone), took)
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
	opt.Observer.LegEnded(leg, rank.ID, statusClass(resp.Status), took)
	if retry {
		q.excluded = append(q.excluded, rank)
		opt.Scheduler.Note(q.x.RequestID, fmt.Sprintf("%s on %s answered %d", legName(leg), rank.ID, resp.Status))
		q.x.Log().Warn("leg refused", "leg", legName(leg), "worker", rank.ID.String(), "attempt", q.attempt, "status", resp.Status)
		if diedOf(resp.Status, q.answer) {
			q.suspects++
		}
		if q.mayRunAgain(candidates) {
			return legAgain
		}
	}
	q.nameWorkers(choice, handed)
	q.finish(choice, resp)
	return legAnswered
}

// readAnswer reads a whole answer behind the handle that q.answer may hold.
func (q *request) readAnswer(resp *upstream.Response) ([]byte, error) {
	q.handle = nil // it borrowed from q.answer and has been sent
	return resp.ReadAll(q.answer[:0], maxAnswer)
}

// finish passes a whole answer on and closes the books.
func (q *request) finish(choice *schedule.Choice, resp *upstream.Response) {
	opt := &q.r.opt
	out := schedule.Outcome{Status: resp.Status, CachedTokens: -1, Total: time.Since(q.x.Received)}
	if resp.Status == 200 {
		use := relay.UsageOf(q.answer)
		out.CachedTokens, out.PromptTokens, out.OutputTokens = use.Cached, use.Prompt, use.Completion
		if q.prefillRank != nil {
			// With a handle the decode engine computed nothing of the prompt:
			// what was cached is what prefill found.
			out.CachedTokens = q.prefillFound
		} else if q.x.Endpoint.Disaggregable {
			q.r.learn(choice.Rank, q.guessKeys(choice.Rank), q.prompt.Count, choice.CachedTokens, use.Cached)
		}
	} else {
		out.Reason = "engine_" + statusClass(resp.Status)
	}
	opt.Scheduler.End(q.x.RequestID, out)
	q.x.Reply(resp, withoutHandle(q.answer))
}

// end passes on an answer of the prefill engine, an error of the client's.
func (q *request) end(resp *upstream.Response, status int) {
	q.r.opt.Scheduler.End(q.x.RequestID, schedule.Outcome{
		Status: status, Reason: "engine_" + statusClass(status), CachedTokens: -1, Total: time.Since(q.x.Received),
	})
	q.x.Reply(resp, q.answer)
}

// nameWorkers puts the choice in the response headers; handed says that decode
// was given a prefill's handle.
func (q *request) nameWorkers(choice *schedule.Choice, handed bool) {
	cached := choice.CachedTokens
	if q.prefillRank != nil && handed {
		q.x.SetHeader("X-Sluice-Prefill-Worker", q.prefillRank.ID.Worker)
		cached = max(cached, q.prefillCached)
	} else {
		q.prefillRank = nil
	}
	q.x.SetHeader("X-Sluice-Worker", choice.Rank.ID.Worker)
	q.x.SetHeader("X-Sluice-Rank", strconv.Itoa(int(choice.Rank.ID.Rank)))
	q.x.SetHeader("X-Sluice-Cached-Tokens", strconv.Itoa(cached))
}

// withoutHandle blanks a handle in a decode engine's answer (a bidirectional
// engine sends one): it names hosts that are no client's business.
func withoutHandle(body []byte) []byte {
	if !bytes.Contains(body, kvTransferParams) {
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

func legName(leg schedule.Leg) string {
	switch leg {
	case schedule.PrefillLeg:
		return "prefill"
	case schedule.DecodeLeg:
		return "decode"
	}
	return "aggregated"
}
