// Package tokenize finds the token ids of a request's prompt, so that it can be
// held against the engines' KV caches.
//
// Tokenizer.Prompt takes the first source that can: ids in the request itself;
// the bounded cache; the engine's own /tokenize, which knows the model's chat
// template; else text mode, in which the caller hashes the prompt's bytes. It
// cannot fail and never waits longer than Options.Timeout: an engine that
// stalls or refuses is left alone for a while. Called by router/pd, once a
// request. It never re-encodes what the client sent and chooses no worker.
//
// The cache knows whole prompts only, so every new turn of a chat is one call
// to an engine. A cache by message prefix would save most of them, but needs
// the template's boundaries between messages to be token boundaries, which the
// engine does not tell.
package tokenize
