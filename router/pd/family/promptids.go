package family

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// AcceptsIDs reports whether an engine accepts the prompt of h as token ids (Handover.ByIDs). From vLLM
// 0.32 on the ids are a member of kv_transfer_params in all APIs that render a chat
// (online_renderer.py, _reused_prompt_token_ids), also without a KV connector; a completion has always
// accepted ids as its prompt. The request keeps its API: nixl-push joins the legs by request ids that
// begin with the API's name.
func AcceptsIDs(h *Handover, engine *worker.Rank) bool {
	switch h.Kind {
	case front.Chat, front.Completions, front.ResponsesAPI, front.Messages:
		return engine.VersionAtLeast(0, 32, 0) && !answersPrompt(h.Doc)
	}
	return false
}

// answersPrompt reports whether the answer contains the prompt's text, which an engine does not have if it
// gets ids.
func answersPrompt(doc *jsonscan.Doc) bool {
	return doc.Has(jsonscan.KeyEcho) || doc.Has(jsonscan.KeyReturnPromptText)
}

// setPromptIDs adds the prompt's token ids to a leg for an engine if h.ByIDs says so: in place of a
// completion's text, else beside the text, which an engine that ignores the ids renders. params is the
// leg's kv_transfer_params, a JSON object that is not empty, or nil if it has none. The result replaces
// it.
func (l *LegRequest) setPromptIDs(h *Handover, engine *worker.Rank, params []byte) []byte {
	switch {
	case !h.ByIDs || !AcceptsIDs(h, engine):
		return params
	case h.Kind == front.Completions:
		l.Set(jsonscan.KeyPrompt, l.Render(func(dst []byte) []byte { return jsonscan.AppendTokenIDs(dst, h.Tokens) }))
		return params
	}
	return l.Render(func(dst []byte) []byte {
		if dst = append(dst, '{'); params != nil {
			dst = append(append(dst, params[1:len(params)-1]...), ',')
		}
		return append(jsonscan.AppendTokenIDs(append(dst, `"prompt_token_ids":`...), h.Tokens), '}')
	})
}

// setPromptIDsAlone is setPromptIDs for a leg without kv_transfer_params.
func (l *LegRequest) setPromptIDsAlone(h *Handover, engine *worker.Rank) {
	if params := l.setPromptIDs(h, engine, nil); params != nil {
		l.Set(jsonscan.KeyKVTransferParams, params)
	}
}
