// Package routed makes the router an engine for callers who render and tokenize
// themselves: they hand over a preprocessed request and get a stream of token
// ids back. The shapes are those of docs/engine-api.md (Dynamo's PreprocessedRequest,
// LLMEngineOutput and Annotated).
//
// Engine is its main type; cmd/sluice builds it. It serves the framed socket
// (dataplane/wire) and POST /v1/routed/generate. For each request it checks every
// field, writes the body of an engine's own API (dialect.go), gives that to the
// disagg runner as any other request, and turns the engine's events into items.
//
// It chooses no worker, runs no leg and moves no bytes of an engine: scheduler,
// plans, retries, hand-over and migration are the runner's and the relay's.
package engineapi
