// Package engineapi makes the router an engine for callers that render and tokenize prompts
// themselves. A caller sends a preprocessed request and receives a stream of token ids.
// docs/engine-api.md specifies the formats (Dynamo's PreprocessedRequest, LLMEngineOutput and
// Annotated).
//
// Engine is the main type; router/app creates it. It serves the framed socket (dataplane/wire)
// and POST /v1/engine/generate. For each request it checks every field, writes the body of an
// engine's own API (dialect.go), passes it to pd.Runner like any other request, and converts
// the engine's events into items.
//
// The package chooses no worker, runs no leg and reads no engine connection. Choice, retries,
// hand-over and migration belong to the Runner, and the transport of streams to the relay.
package engineapi
