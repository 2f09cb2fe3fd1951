package pd

import (
	"encoding/json"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/pd/abort"
	"sluice/router/pd/family"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// headerPrefillOnly asks the router to compute and cache a prompt without generating output.
const headerPrefillOnly = "X-Sluice-Prefill-Only"

// prefillOnlyReply is the response to a prefill-only request.
type prefillOnlyReply struct {
	Object string `json:"object"` // "sluice.prefill"
	ID     string `json:"id"`     // X-Request-Id
	Model  string `json:"model"`
	Worker string `json:"worker"`
	Rank   uint16 `json:"rank"`
	Role   string `json:"role"` // role of the worker: prefill, or aggregated or decode in a pool without prefill workers
	// PromptTokens is the prompt length that the engine reported, else the router's count, else 0.
	PromptTokens int `json:"prompt_tokens"`
	// CachedBefore is the number of tokens that the engine found cached, null if it reported none.
	// Predicted is the router's prediction.
	CachedBefore *int `json:"cached_tokens_before"`
	Predicted    int  `json:"predicted_cached_tokens"`
	// Blocks is the number of full blocks of the prompt; engines cache only full blocks. It is 0 if
	// the block size is unknown.
	Blocks    int     `json:"blocks"`
	BlockSize int     `json:"block_size"`
	TookMS    float64 `json:"took_ms"`
}

// checkPrefillOnly reports by which means the request asks for prefill only: "header",
// "max_tokens", or "" if it does not. answered is true if the request is invalid and has been
// refused.
func (q *request) checkPrefillOnly() (by string, answered bool) {
	mode := q.settings.Steering.PrefillOnly
	switch value := string(q.x.Header(headerPrefillOnly)); value {
	case "true", "1":
		switch {
		case mode == "off":
			return "", !q.refuseSteering(headerPrefillOnly, value, "steering.prefill_only is off")
		case !q.req.Endpoint.Disaggregable:
			return "", !q.refuseSteering(headerPrefillOnly, value, q.req.Endpoint.Path+" computes no prompt that could be kept")
		}
		by = "header"
	case "", "false", "0":
		if mode != "any" || !wantsNoOutput(q.req.Endpoint.Kind, &q.req.Doc) {
			return "", false
		}
		by = "max_tokens"
	default:
		return "", !q.refuseSteering(headerPrefillOnly, value, "want true or false")
	}
	if len(q.plan.Prefill) > 0 && q.settings.pdOf(q.pool.Model).traits.PrefillNeedsDecode {
		what := "a prefill worker of family " + q.pd.Family + " takes no prompt without a decode worker that fetches it: there are no prefill-only requests"
		if by == "header" {
			return "", !q.refuseSteering(headerPrefillOnly, "true", what)
		}
		q.refuse(front.BadField, "max_tokens: 0: "+what, 0)
		return "", true
	}
	return by, false
}

// wantsPrefillOnly reports whether the request asks for prefill only. It runs before the workers
// are known; checkPrefillOnly makes the final decision.
func (q *request) wantsPrefillOnly() bool {
	switch string(q.x.Header(headerPrefillOnly)) {
	case "true", "1":
		return true
	}
	return q.settings.Steering.PrefillOnly == "any" && wantsNoOutput(q.req.Endpoint.Kind, &q.req.Doc)
}

// wantsNoOutput reports whether the body asks for no output tokens. Engines refuse such a request
// unless it asks for log-probabilities of the prompt (echo, logprobs); wantsNoOutput returns false
// for those and for SGLang's own endpoint, which accepts 0 and returns log-probabilities.
func wantsNoOutput(kind front.Kind, doc *jsonscan.Doc) bool {
	var keys [2]jsonscan.Key
	switch kind {
	case front.Chat:
		keys = [2]jsonscan.Key{jsonscan.KeyMaxCompletionTokens, jsonscan.KeyMaxTokens}
	case front.Completions, front.Messages:
		keys = [2]jsonscan.Key{jsonscan.KeyMaxTokens, jsonscan.KeyMaxTokens}
	case front.ResponsesAPI:
		keys = [2]jsonscan.Key{jsonscan.KeyMaxOutputTokens, jsonscan.KeyMaxOutputTokens}
	case front.Generate:
		keys = [2]jsonscan.Key{jsonscan.KeySamplingMaxTokens, jsonscan.KeySamplingMaxTokens}
	default:
		return false
	}
	at := keys[0]
	if !doc.Has(at) {
		at = keys[1]
	}
	if n, ok := doc.Int(at); !ok || n != 0 || doc.Bool(jsonscan.KeyEcho) {
		return false
	}
	for _, name := range [...]string{"logprobs", "prompt_logprobs"} {
		if v, ok, err := jsonscan.Find(doc.Body, name); err != nil || ok && v.Kind > jsonscan.Null && string(doc.Body[v.Start:v.End]) != "false" {
			return false
		}
	}
	return true
}

// runPrefillOnly runs the prompt with one output token, which it discards, on a prefill worker. In
// a pool without prefill workers it uses a worker that runs whole requests. It cannot use the
// prefill leg of a hand-over, because its handle would lease the blocks until a decode fetches them
// or the lease ends. The request has been admitted, and takes no part in preemption: it computes for later.
func (q *request) runPrefillOnly(by string) {
	q.entry.SetPlan("prefill_only", "")
	q.planHeader = "prefill_only; reason=" + by
	for q.attempt = 1; ; q.attempt++ {
		planned := q.planHeader
		q.resetHandover()
		q.planHeader = planned
		candidates := q.candidates(schedule.PrefillLeg)
		choice, ok := q.takeReservedPrefill()
		if !ok {
			choice, ok = q.choose(schedule.PrefillLeg, q.nextSelected(candidates))
		}
		if !ok {
			if !q.refuseAtCapacity(schedule.PrefillLeg, candidates) {
				q.refuseNoRank(schedule.PrefillLeg)
			}
			return
		}
		if q.attempt == 1 {
			q.settings.Observer.Planned("prefill_only", by)
		}
		if !q.runPrefillOnlyOn(choice) {
			return
		}
		q.countRetry(schedule.PrefillLeg)
	}
}

// runPrefillOnlyOn runs one attempt. retry is true if the attempt failed and may run again on
// another rank.
func (q *request) runPrefillOnlyOn(choice schedule.Choice) (retry bool) {
	opt, rank := q.settings, choice.Rank
	q.handover.Prefill = rank
	q.legRequest.Reset()
	q.legRequest.LimitToPrefillOnly(&q.handover)
	l := q.startPrefill(&choice)
	defer l.release()
	q.armAbort(abort.PhasePrefill)
	status, resp, err := q.callPrefill(l)
	q.disarmAbort()
	elapsed := l.elapsed()
	if err != nil {
		if l.call.Cancelled() {
			l.end(q.abortReason())
			q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
			return false
		}
		f := q.recordFailure(rank, "prefill", err)
		l.end(string(f.reason))
		if (f.reason != front.UpstreamTimeout || f.unsent) && q.mayRetry(schedule.PrefillLeg, f.down) {
			return true
		}
		if !q.refuseIfGone() {
			q.refuse(f.reason, fmt.Sprintf("prefill on %s failed%s: %s", rank.ID, q.triesSuffix(schedule.PrefillLeg), upstream.ClientMessage(err)), 0)
		}
		return false
	}
	defer resp.Release()
	opt.Fleet.ReportStatus(rank, status)
	l.complete(statusClass(status))
	q.setPrefillOnlyHeaders(rank, choice.CachedTokens)
	if status != 200 {
		if family.RetryableStatus(status) {
			died := family.EngineDied(status, q.answer)
			q.applyFailure(rank, "prefill", failure{suspect: died, down: died}, fmt.Errorf("it answered %d", status))
			if q.mayRetry(schedule.PrefillLeg, died) {
				return true
			}
		}
		q.replyPrefillError(resp, status)
		return false
	}
	use := relay.UsageOf(q.answer)
	l.reservation.Report(q.req.RequestID, use.Cached, 0)
	l.reservation.PrefillDone()
	q.r.learnCached(rank, q.approxKeys(rank), q.prompt.Count, choice.CachedTokens, use.Cached, elapsed)
	q.replyPrefillOnly(rank, choice.CachedTokens, &use, elapsed)
	return false
}

func (q *request) setPrefillOnlyHeaders(rank *worker.Rank, predicted int) {
	q.x.SetHeader(headerPlan, q.planHeader)
	q.x.SetHeader("X-Sluice-Worker", rank.ID.Worker)
	q.x.SetHeader("X-Sluice-Rank", fmt.Sprint(rank.ID.Rank))
	q.x.SetHeader("X-Sluice-Cached-Tokens", fmt.Sprint(predicted))
}

func (q *request) replyPrefillOnly(rank *worker.Rank, predicted int, use *relay.Usage, elapsed time.Duration) {
	out := prefillOnlyReply{Object: "sluice.prefill", ID: q.req.RequestID, Model: q.model, Worker: rank.ID.Worker, Rank: rank.ID.Rank, Role: rank.Worker.Spec.Role.String(),
		PromptTokens: use.Prompt, Predicted: predicted, BlockSize: max(0, rank.BlockSize()), TookMS: float64(elapsed.Microseconds()) / 1000}
	if out.PromptTokens <= 0 {
		out.PromptTokens = q.prompt.Count
	}
	if use.Cached >= 0 {
		out.CachedBefore = &use.Cached
	}
	if out.BlockSize > 0 {
		out.Blocks = out.PromptTokens / out.BlockSize
	}
	q.recordPrefillOnlyUsage(use)
	q.endExplain(schedule.Outcome{
		Status: 200, CachedTokens: use.Cached, PromptTokens: out.PromptTokens, Total: time.Since(q.req.Received),
	})
	body, err := json.Marshal(&out)
	if err != nil { // cannot happen: strings and numbers always marshal
		q.x.Error(front.Internal, "", err.Error(), 0)
		return
	}
	q.x.ReplyJSON(200, body)
}
