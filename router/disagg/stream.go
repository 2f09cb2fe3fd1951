package disagg

import (
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// streamEnd is what a relayed stream still needs when its request's scratch has
// gone back to the pool.
type streamEnd struct {
	r           *Runner
	leg         schedule.Leg
	id          worker.ID
	requestID   string
	endpoint    string
	reservation *schedule.Reservation
	status      int
	received    time.Time
	began       time.Time
	tokens      int // of the prompt
	predicted   int
	comparable  bool // the engine's cached tokens can be held against the prediction
}

// relay hands the stream to the front; it goes on after the handler returned.
func (q *request) relay(leg schedule.Leg, choice *schedule.Choice, call *upstream.Call, resp *upstream.Response, began time.Time) {
	s := &streamEnd{
		r: q.r, leg: leg, id: choice.Rank.ID, requestID: q.x.RequestID, endpoint: q.x.Endpoint.Path,
		reservation: choice.Reservation, status: resp.Status, received: q.x.Received, began: began,
		tokens: q.prompt.Count, predicted: choice.CachedTokens,
		comparable: q.prefillRank == nil && q.x.Endpoint.Disaggregable,
	}
	q.x.Relay(resp, call, front.RelayHooks{OnFirstToken: s.firstToken, OnEnd: s.end})
}

// firstToken takes the prefill work off the rank.
func (s *streamEnd) firstToken() {
	s.reservation.PrefillDone()
	s.r.opt.Observer.FirstToken(s.endpoint, time.Since(s.received))
}

func (s *streamEnd) end(res relay.Result) {
	opt := &s.r.opt
	s.reservation.Release()
	outcome := "ok"
	if res.Cause != relay.Completed {
		outcome = res.Cause.String()
	} else if res.EngineErr {
		outcome = "engine_error"
	}
	opt.Observer.LegEnded(s.leg, s.id, outcome, time.Since(s.began))
	opt.Observer.Streamed(s.endpoint, &res)
	out := schedule.Outcome{
		Status: s.status, CachedTokens: res.Usage.Cached, PromptTokens: max(res.Usage.Prompt, 0),
		OutputTokens: max(res.Usage.Completion, 0), Total: time.Since(s.received),
	}
	if outcome != "ok" {
		out.Reason = outcome
	}
	if !res.FirstToken.IsZero() {
		out.TTFT = res.FirstToken.Sub(s.received)
	}
	if s.comparable && res.Cause == relay.Completed {
		opt.Observer.Cached(s.id, s.tokens, s.predicted, res.Usage.Cached)
	}
	opt.Scheduler.End(s.requestID, out)
	if outcome != "ok" {
		opt.Log.Warn("stream ended early", "request_id", s.requestID, "worker", s.id.String(), "cause", outcome, "err", res.Err)
	}
}
