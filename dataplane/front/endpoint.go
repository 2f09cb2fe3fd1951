package front

import "sluice/dataplane/relay"

// Endpoint is one inference route and how its requests are treated.
type Endpoint struct {
	Path     string
	Protocol relay.Protocol
	Kind     Kind
	// Disaggregable: prefill and decode may run on different workers.
	Disaggregable bool
}

// Kind is the request shape of an endpoint.
type Kind uint8

// The kinds. Embeddings covers every endpoint without KV affinity
// (embeddings, rerank, score, classify, pooling): routed by load alone.
const (
	Chat Kind = iota
	Completions
	ResponsesAPI
	Messages
	Generate
	Embeddings
	Tokenize
	Detokenize
	NativeGenerate // SGLang's own /generate
	Preprocessed   // a preprocessed request, of which the Handler makes one of the others
	CountTokens    // /v1/messages/count_tokens: no prompt is computed
	StoredResponse // a response that an engine keeps, named by Exchange.Stored; no body
)

// Endpoints is the route table of inference endpoints, all POST with a JSON
// body. A route with an exact path is added here, another one in routes.find.
var Endpoints = []Endpoint{
	{Path: "/v1/chat/completions", Kind: Chat, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/v1/completions", Kind: Completions, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/v1/responses", Kind: ResponsesAPI, Protocol: relay.Responses, Disaggregable: true},
	{Path: "/v1/messages", Kind: Messages, Protocol: relay.Anthropic, Disaggregable: true},
	{Path: "/inference/v1/generate", Kind: Generate, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/generate", Kind: NativeGenerate, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/v1/routed/generate", Kind: Preprocessed, Protocol: relay.OpenAI},
	{Path: "/v1/embeddings", Kind: Embeddings, Protocol: relay.Opaque},
	{Path: "/v1/rerank", Kind: Embeddings, Protocol: relay.Opaque},
	{Path: "/v1/score", Kind: Embeddings, Protocol: relay.Opaque},
	{Path: "/tokenize", Kind: Tokenize, Protocol: relay.Opaque},
	{Path: "/detokenize", Kind: Detokenize, Protocol: relay.Opaque},
	{Path: "/v1/messages/count_tokens", Kind: CountTokens, Protocol: relay.Anthropic},
}

// StoredEndpoint is the endpoint of requests about a stored response. Its path stands for
// all of them in metrics and logs.
var StoredEndpoint = Endpoint{Path: "/v1/responses/{id}", Kind: StoredResponse, Protocol: relay.Responses}
