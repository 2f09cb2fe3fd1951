// Package tokenize finds the token ids of a request's prompt, so that it can be compared with the
// engines' KV caches.
//
// router/pd asks three functions in turn, once per request:
//
//   - Tokenizer.FromRequestIDs: ids in the request itself.
//   - Tokenizer.PromptInProcess: ids that are rendered and encoded in this process, for a model whose
//     tokenizer is loaded (SetNatives). Some of them are compared with the engine's; after a
//     difference the model's prompts go to its engines, until the engine that differed restarts.
//   - Tokenizer.Prompt: the bounded cache; the engine's own /tokenize, which knows the model's chat
//     template; otherwise text mode, in which the caller hashes the prompt's bytes. It cannot fail and
//     never waits longer than Options.Timeout: an engine that stalls or refuses is not asked again for
//     a while.
//
// The package changes no request and chooses no worker.
//
// The cache of engines' ids contains whole prompts only, so every new turn of a chat is one call to
// an engine: the engine does not report whether the template's boundaries between messages are token
// boundaries. In this process the vocabulary is known, and package incremental encodes only the part
// of a prompt that no earlier prompt began with. Options.CacheBytes bounds both.
package tokenize
