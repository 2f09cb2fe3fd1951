package pd

import (
	"sync"

	"sluice/router/pd/family"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// idRefusals remembers the engine processes that refused prompts as token ids.
type idRefusals struct {
	byRank sync.Map // *worker.Rank -> uint32, the incarnation
}

// has reports whether the rank's current process has refused ids.
func (f *idRefusals) has(r *worker.Rank, incarnation uint32) bool {
	v, ok := f.byRank.Load(r)
	return ok && v.(uint32) == incarnation
}

// remove forgets a rank.
func (f *idRefusals) remove(r *worker.Rank) { f.byRank.Delete(r) }

// How the prompt of a prefill leg was sent, for Observer.PromptSent.
const (
	promptIDs        = "ids"
	promptText       = "text"       // the request, the family or the engine allows no ids
	promptUnverified = "unverified" // text, because the ids have not been compared with this engine process
	promptRefused    = "refused"    // text, because the engine process has refused ids
)

// sendsPromptIDs reports whether the legs of the attempt carry the prompt as token ids
// (pd.prefill_by_ids), and counts that.
func (q *request) sendsPromptIDs(prefill *worker.Rank) bool {
	if q.pd.PrefillByIDs != "verified" {
		return false
	}
	form := q.promptForm(prefill)
	q.settings.Observer.PromptSent(form)
	return form == promptIDs
}

func (q *request) promptForm(prefill *worker.Rank) string {
	info := prefill.Worker.Info()
	if q.prompt.Source != tokenize.FromNative || len(q.prompt.Tokens) != q.prompt.Count || !q.plan.Traits.PromptIDs || info.Engine != "vllm" || !family.AcceptsIDs(&q.handover, prefill) {
		return promptText
	}
	incarnation := q.settings.Fleet.Incarnation(prefill)
	if q.refusedIDs != nil || q.r.idRefusals.has(prefill, incarnation) {
		return promptRefused
	}
	query := tokenize.NativeQuery{
		Model: q.pool.Model, Base: info.Base, Kind: tokenizeKind(q.req.Endpoint.Kind),
		Endpoint: q.settings.Fleet.Endpoint(prefill), Incarnation: incarnation,
	}
	if !q.settings.Tokenizer.IsVerified(q.prompt.Model, &query) {
		return promptUnverified
	}
	return promptIDs
}

// retryAsText prepares another attempt of a request whose prefill leg, with token ids, the engine has
// refused by a 4xx. The attempt sends the prompt as text. If it succeeds, the engine refused the ids and
// not the request (confirmIDRefusal).
func (q *request) retryAsText(prefill *worker.Rank) {
	q.refusedIDs, q.unsent = prefill, false
	q.freeTries++
}

// confirmIDRefusal is called when an engine has accepted as text a prompt that refused refused as ids,
// which may be nil. The process of refused gets no ids from then on.
func (s *settings) confirmIDRefusal(refused *worker.Rank) {
	if refused == nil {
		return
	}
	incarnation := s.Fleet.Incarnation(refused)
	if s.r.idRefusals.has(refused, incarnation) {
		return
	}
	s.r.idRefusals.byRank.Store(refused, incarnation)
	if refused.Removed() { // WorkerRemoved may have run before the store
		s.r.idRefusals.remove(refused)
	}
	s.Observer.FallbackUsed("prompt_ids_refused")
	s.Log.Warn("the engine refuses prompts as token ids: it gets text until it restarts (pd.prefill_by_ids)", "rank", refused.ID.String())
}
