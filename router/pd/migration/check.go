package migration

import (
	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/config"
	"sluice/router/worker"
)

// Request is what Check reads of a client's request.
type Request struct {
	Doc  *jsonscan.Doc
	Kind front.Kind
	// Migratable says that the response is a stream of an endpoint that computes a prompt.
	Migratable bool
	// ReturnsTokenIDs says that the body makes its engine return token ids by a member other than
	// return_token_ids.
	ReturnsTokenIDs bool
	ExactPrompt     bool // the prompt's token ids are known as the engine knows them
	ReasoningParser bool // the engines parse reasoning
	Alone           bool // no second worker could continue the stream
}

// WantsIDs reports whether the client itself asked for token ids.
func (r *Request) WantsIDs() bool {
	return r.ReturnsTokenIDs || r.Doc.Bool(jsonscan.KeyReturnTokenIDs)
}

// Check decides whether another engine could continue the stream of a request. reason is one word that
// says why none could, "" if one could; docs/migration.md lists the words.
func Check(r *Request, policy *config.Migration) (t Template, reason string) {
	kind := r.Kind
	switch alwaysIDs := kind == front.Generate || kind == front.NativeGenerate; {
	case policy.MaxAttempts == 0 || !r.Migratable:
		return t, "off"
	case policy.Tokens != "auto" && !r.WantsIDs() && !alwaysIDs:
		return t, "tokens"
	case r.ReasoningParser && (kind == front.Chat || kind == front.Messages || kind == front.ResponsesAPI):
		return t, "reasoning"
	case r.Alone:
		return t, "alone"
	case kind == front.Generate && !r.Doc.Has(jsonscan.KeySamplingMaxTokens):
		return t, "no_max_tokens" // without it, the limit that an engine applies depends on the release
	}
	t, reason = newTemplate(r.Doc, kind, policy, r.ReturnsTokenIDs)
	if reason == "" && kind != front.Chat && kind != front.Completions && !r.ExactPrompt {
		reason = "no_prompt_ids"
	}
	return t, reason
}

// CheckEngine decides whether a stream of a rank's engine may migrate whose request has passed Check.
// asksIDs says that the leg must ask the engine for token ids. reason is one word that says why the
// stream cannot migrate, "" if it can.
func CheckEngine(rank *worker.Rank, kind front.Kind, t *Template, exactPrompt bool) (asksIDs bool, reason string) {
	mode := tokenIDModeOf(rank, kind)
	switch {
	case mode == idsNever && t.choices > 1:
		return false, "multiple_choices" // only token ids carry the choice they belong to
	case mode == idsNever && t.logprobs:
		return false, "logprobs" // retokenized text may not give the tokens that the engine scored
	case mode == idsNever && (!exactPrompt || !CanRetokenize(rank)):
		return false, "engine"
	}
	return mode == idsOnRequest, ""
}

// tokenIDMode says how an engine reports the token ids of a stream.
type tokenIDMode uint8

const (
	idsNever     tokenIDMode = iota // the stream has text only
	idsOnRequest                    // with return_token_ids
	idsAlways
)

// tokenIDModeOf returns how a rank's engine reports token ids on streams of a kind. This was read
// in vLLM 0.8.5 … 0.32 and SGLang 0.5.10 … 0.5.23. SGLang's chat reports ids only in non-streaming
// responses. TensorRT-LLM reports ids instead of text.
func tokenIDModeOf(r *worker.Rank, kind front.Kind) tokenIDMode {
	engine := r.Worker.Info().Engine
	switch kind {
	case front.Generate, front.NativeGenerate:
		return idsAlways
	case front.Chat:
		if engine == "vllm" && r.VersionAtLeast(0, 10, 2) {
			return idsOnRequest
		}
	case front.Completions:
		if engine == "vllm" && r.VersionAtLeast(0, 10, 2) || engine == "sglang" && r.VersionAtLeast(0, 5, 19) {
			return idsOnRequest
		}
	}
	return idsNever
}
