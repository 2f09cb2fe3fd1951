package pd

import (
	"strconv"
	"time"

	"sluice/dataplane/redact"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/session"
)

// replyAnswer sends a complete engine response to the client and records the outcome. at is when
// the response arrived.
func (q *request) replyAnswer(l *decodeLeg, resp *upstream.Response, at time.Time) {
	out := schedule.Outcome{Status: resp.Status, CachedTokens: -1, Total: at.Sub(q.req.Received)}
	body := q.reply
	if resp.Status == 200 {
		use := relay.UsageOf(q.reply)
		q.rememberResponse(q.reply, l.rank)
		q.recordUsage(&use, q.reply)
		q.turnResult = session.Result{OK: true, Prompt: use.Prompt, Output: use.Completion}
		l.reservation.Report(q.req.RequestID, use.Cached, max(use.Completion, 0))
		out.CachedTokens, out.PromptTokens, out.OutputTokens = use.Cached, use.Prompt, use.Completion
		q.encodedPrompt().compareCounts(q.settings, q.req.Endpoint.Kind, &use, l.rank, int(l.predicted), q.concurrent == nil && !q.usesPrefill())
		switch {
		case q.concurrent != nil:
			out.CachedTokens = q.concurrent.cachedTokens()
			q.concurrent.cancelSoon()
		case q.usesPrefill():
			// With a handle the decode engine computed no part of the prompt, so the cached tokens
			// are those that the prefill engine found.
			out.CachedTokens = q.handover.PrefillCached
		case q.req.Endpoint.Disaggregable:
			q.r.learnCached(l.rank, q.approxKeys(l.rank), q.prompt.Count, int(l.predicted), use.Cached, out.Total)
		}
		if a := q.answerRewriter(); a != nil {
			q.rewritten = a.Body(q.rewritten[:0], &q.handover, q.reply)
			body = q.rewritten
		}
	} else {
		out.Reason = "engine_" + statusClass(resp.Status)
	}
	q.turnResult.Cached = out.CachedTokens
	out.Transfer = q.finishTransfer(l)
	q.responseBytes = int64(len(body))
	q.endExplain(out)
	body = family.RedactHandle(body)
	redact.InPlace(body, resp.Status) // removes the members that describe the engine's choices
	q.x.Reply(resp, body)
}

// replyPrefillError forwards a prefill engine's response to the client if it reports an error that
// the client caused.
func (q *request) replyPrefillError(resp *upstream.Response, status int) {
	q.endExplain(schedule.Outcome{
		Status: status, Reason: "engine_" + statusClass(status), CachedTokens: -1, Total: time.Since(q.req.Received),
	})
	redact.InPlace(q.answer, status)
	q.x.Reply(resp, q.answer)
}

// setWorkerHeaders writes the chosen workers, the plan and the predicted cached tokens into the
// response headers. The prediction is that of the rank that computes the prompt.
func (q *request) setWorkerHeaders(l *decodeLeg) {
	cached := int(l.predicted)
	if q.usesPrefill() {
		q.x.SetHeader("X-Sluice-Prefill-Worker", q.handover.Prefill.ID.Worker)
		cached = q.prefillCached
		q.recordHandover()
	}
	if q.planHeader != "" {
		q.x.SetHeader(headerPlan, q.planHeader)
	}
	q.x.SetHeader("X-Sluice-Worker", l.rank.ID.Worker)
	q.x.SetHeader("X-Sluice-Rank", strconv.Itoa(int(l.rank.ID.Rank)))
	q.x.SetHeader("X-Sluice-Cached-Tokens", strconv.Itoa(cached))
}
