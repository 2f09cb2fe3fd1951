// Package tokenize finds the token ids of a request's prompt, so that it can be compared with the
// engines' KV caches.
//
// Tokenizer.Prompt uses the first source that has them: ids in the request itself; the bounded
// cache; the engine's own /tokenize, which knows the model's chat template; otherwise text mode, in
// which the caller hashes the prompt's bytes. It cannot fail and never waits longer than
// Options.Timeout: an engine that stalls or refuses is not asked again for a while. router/pd calls
// it once per request. The package never re-encodes what the client sent and chooses no worker.
//
// The cache contains whole prompts only, so every new turn of a chat is one call to an engine. A
// cache by message prefix would save most of these calls, but requires that the template's
// boundaries between messages are token boundaries, which the engine does not report.
package tokenize
