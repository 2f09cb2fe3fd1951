package disagg

import (
	"encoding/json"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// headerPrefillOnly asks that a prompt be computed and kept, and nothing generated.
const headerPrefillOnly = "X-Sluice-Prefill-Only"

// warmed is the answer to a prefill-only request.
type warmed struct {
	Object string `json:"object"` // "sluice.prefill"
	ID     string `json:"id"`     // X-Request-Id
	Model  string `json:"model"`
	Worker string `json:"worker"`
	Rank   uint16 `json:"rank"`
	Role   string `json:"role"` // of the worker: prefill, or aggregated or decode in pools without
	// PromptTokens as the engine counted them; else as the router did, 0 where
	// neither knows.
	PromptTokens int `json:"prompt_tokens"`
	// CachedBefore is what the engine found in its cache, null when it did not
	// say; Predicted what the router believed.
	CachedBefore *int `json:"cached_tokens_before"`
	Predicted    int  `json:"predicted_cached_tokens"`
	// Blocks are the full blocks of the prompt, which is what engines keep; 0 when
	// the block size is not known.
	Blocks    int     `json:"blocks"`
	BlockSize int     `json:"block_size"`
	TookMS    float64 `json:"took_ms"`
}

// warms says whether the request is to be prefilled only, and by what it asks for
// that; answered: it asks for what cannot be.
func (q *request) warms() (by string, answered bool) {
	mode := q.r.opt().Steering.PrefillOnly
	switch value := string(q.x.Header(headerPrefillOnly)); value {
	case "true", "1":
		switch {
		case mode == "off":
			return "", !q.steeredWrong(headerPrefillOnly, value, "steering.prefill_only is off")
		case !q.x.Endpoint.Disaggregable:
			return "", !q.steeredWrong(headerPrefillOnly, value, q.x.Endpoint.Path+" computes no prompt that could be kept")
		}
		by = "header"
	case "", "false", "0":
		if mode != "any" || !asksNothing(q.x.Endpoint.Kind, &q.x.Doc) {
			return "", false
		}
		by = "max_tokens"
	default:
		return "", !q.steeredWrong(headerPrefillOnly, value, "want true or false")
	}
	if len(q.plan.Prefill) > 0 && q.r.pdOf(q.pool.Model).traits.BoundPrefill {
		what := "a prefill worker of family " + q.pd.Family + " takes no prompt without a decode worker that fetches it: there are no prefill-only requests"
		if by == "header" {
			return "", !q.steeredWrong(headerPrefillOnly, "true", what)
		}
		q.refuse(front.BadField, "max_tokens: 0: "+what, 0)
		return "", true
	}
	return by, false
}

// asksPrefillOnly says whether the request is to be prefilled only, as far as that can be
// told before its workers are known; see warms.
func (q *request) asksPrefillOnly() bool {
	switch string(q.x.Header(headerPrefillOnly)) {
	case "true", "1":
		return true
	}
	return q.r.opt().Steering.PrefillOnly == "any" && asksNothing(q.x.Endpoint.Kind, &q.x.Doc)
}

// asksNothing says whether the body asks for no output at all: engines refuse
// that, but for clients that want the prompt's own scores (echo, logprobs), who
// are left to them. SGLang's own endpoint takes 0 and answers with scores.
func asksNothing(kind front.Kind, doc *jsonscan.Doc) bool {
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

// warm runs the prompt for one token, which nobody sees, on a prefill worker, or
// in pools without on one that does whole requests. The prefill leg of a hand-over
// would not do: its handle pins the blocks until a decode comes or the lease ends.
func (q *request) warm(by string) {
	q.warming = true
	q.planned = "prefill_only; reason=" + by
	for q.attempt = 1; ; q.attempt++ {
		planned := q.planned
		q.startPair()
		q.planned = planned
		candidates := q.candidates(schedule.PrefillLeg)
		choice, ok := q.choose(schedule.PrefillLeg, q.nextNamed(candidates))
		if !ok {
			if !q.refuseFull(schedule.PrefillLeg, candidates) {
				q.noneLeft(schedule.PrefillLeg)
			}
			return
		}
		if q.attempt == 1 {
			q.r.opt().Observer.Planned("prefill_only", by)
		}
		if !q.warmOn(choice) {
			return
		}
		q.r.opt().Observer.Retried(schedule.PrefillLeg)
	}
}

// warmOn runs one attempt; true: it failed and may run again elsewhere.
func (q *request) warmOn(choice schedule.Choice) (again bool) {
	opt, rank := q.r.opt(), choice.Rank
	defer choice.Reservation.Release()
	q.pair.Prefill = rank
	q.leg.reset()
	q.leg.warm(&q.pair)
	q.legStarted(schedule.PrefillLeg, rank)
	began := time.Now()
	var call upstream.Call
	q.engaged = true
	q.x.OnGone(call.Cut)
	status, resp, err := q.callPrefill(rank, &call, began)
	q.x.OnGone(nil)
	took := time.Since(began)
	if err != nil {
		if call.WasCut() {
			opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, q.whyGone(), took)
			q.refuse(front.ClientGone, "the client closed the connection during prefill", 0)
			return false
		}
		f := q.failed(rank, "prefill", err)
		opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, string(f.reason), took)
		if (f.reason != front.UpstreamTimeout || f.unsent) && q.mayRunAgain(schedule.PrefillLeg, f.down) {
			return true
		}
		if !q.goneWaiting() {
			q.refuse(f.reason, fmt.Sprintf("prefill on %s failed%s: %s", rank.ID, q.afterTries(schedule.PrefillLeg), upstream.Told(err)), 0)
		}
		return false
	}
	defer resp.Release()
	opt.Fleet.Answered(rank, status)
	opt.Observer.LegEnded(schedule.PrefillLeg, rank.ID, statusClass(status), took)
	q.nameWarmed(rank, choice.CachedTokens)
	if status != 200 {
		if worthRetry(status) {
			dies := diedOf(status, q.answer)
			q.note(rank, "prefill", failure{suspect: dies, down: dies}, fmt.Errorf("it answered %d", status))
			if q.mayRunAgain(schedule.PrefillLeg, dies) {
				return true
			}
		}
		q.end(resp, status)
		return false
	}
	use := relay.UsageOf(q.answer)
	choice.Reservation.Report(q.x.RequestID, use.Cached, 0)
	choice.Reservation.PrefillDone()
	q.r.learn(rank, q.guessKeys(rank), q.prompt.Count, choice.CachedTokens, use.Cached, took)
	q.replyWarmed(rank, choice.CachedTokens, &use, took)
	return false
}

func (q *request) nameWarmed(rank *worker.Rank, predicted int) {
	q.x.SetHeader(headerPlan, q.planned)
	q.x.SetHeader("X-Sluice-Worker", rank.ID.Worker)
	q.x.SetHeader("X-Sluice-Rank", fmt.Sprint(rank.ID.Rank))
	q.x.SetHeader("X-Sluice-Cached-Tokens", fmt.Sprint(predicted))
}

func (q *request) replyWarmed(rank *worker.Rank, predicted int, use *relay.Usage, took time.Duration) {
	out := warmed{Object: "sluice.prefill", ID: q.x.RequestID, Model: q.model, Worker: rank.ID.Worker, Rank: rank.ID.Rank, Role: rank.Worker.Spec.Role.String(),
		PromptTokens: use.Prompt, Predicted: predicted, BlockSize: max(0, rank.BlockSize()), TookMS: float64(took.Microseconds()) / 1000}
	if out.PromptTokens <= 0 {
		out.PromptTokens = q.prompt.Count
	}
	if use.Cached >= 0 {
		out.CachedBefore = &use.Cached
	}
	if out.BlockSize > 0 {
		out.Blocks = out.PromptTokens / out.BlockSize
	}
	q.chargeWarmed(use)
	q.endRecord(schedule.Outcome{
		Status: 200, CachedTokens: use.Cached, PromptTokens: out.PromptTokens, Total: time.Since(q.x.Received),
	})
	body, err := json.Marshal(&out)
	if err != nil { // plain strings and numbers always marshal
		q.x.Error(front.Internal, "", err.Error(), 0)
		return
	}
	q.x.ReplyJSON(200, body)
}

// warm asks for one token of one choice in one answer, with no handle.
func (l *Leg) warm(p *Pair) {
	l.oneToken(p)
	l.withoutBudget(p)
	l.notStreamed()
	for _, k := range [...]jsonscan.Key{jsonscan.KeyN, jsonscan.KeyBestOf, jsonscan.KeyUseBeamSearch, jsonscan.KeyEcho} {
		l.Remove(k)
	}
	switch p.Kind {
	case front.Generate:
		if p.Doc.Has(jsonscan.KeySamplingParams) {
			l.Remove(jsonscan.KeySamplingN)
		}
	case front.NativeGenerate:
		if raw := p.Doc.Raw(jsonscan.KeySamplingParams); len(raw) > 0 && raw[0] == '{' {
			l.Set(jsonscan.KeySamplingMaxNewTokens, jsonOne)
			l.Remove(jsonscan.KeySamplingN)
		} else {
			l.Set(jsonscan.KeySamplingParams, oneNewToken)
		}
	}
}

var oneNewToken = []byte(`{"max_new_tokens":1}`)
