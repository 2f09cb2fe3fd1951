package front

import "sluice/dataplane/sse"

// Endpoint is an inference route and the properties of its requests.
type Endpoint struct {
	Path string
	// FormerPath is served like Path for one release; "" if there is none.
	FormerPath string
	Protocol   sse.Protocol
	Kind       Kind
	// Disaggregable says that prefill and decode may run on different workers.
	Disaggregable bool
}

// Kind is the request shape of an endpoint.
type Kind uint8

// The kinds. Embeddings stands for every endpoint without KV affinity (embeddings, rerank,
// score, classify, pooling). The router routes its requests by load alone.
const (
	Chat Kind = iota
	Completions
	ResponsesAPI
	Messages
	Generate
	Embeddings
	Tokenize
	Detokenize
	NativeGenerate // /generate of SGLang
	Preprocessed   // a request from an external preprocessor; the Handler converts it to another kind
	CountTokens    // /v1/messages/count_tokens: the engine computes no prompt
	StoredResponse // a response that an engine has stored, see Exchange.Stored; no body
	SessionFinish  // the end of a session, see Exchange.SessionID; no body
)

// Endpoints is the route table of inference endpoints. All are POST with a JSON body. Add a
// route with an exact path here, and any other in routes.find.
var Endpoints = []Endpoint{
	{Path: "/v1/chat/completions", Kind: Chat, Protocol: sse.OpenAI, Disaggregable: true},
	{Path: "/v1/completions", Kind: Completions, Protocol: sse.OpenAI, Disaggregable: true},
	{Path: "/v1/responses", Kind: ResponsesAPI, Protocol: sse.Responses, Disaggregable: true},
	{Path: "/v1/messages", Kind: Messages, Protocol: sse.Anthropic, Disaggregable: true},
	{Path: "/inference/v1/generate", Kind: Generate, Protocol: sse.OpenAI, Disaggregable: true},
	{Path: "/generate", Kind: NativeGenerate, Protocol: sse.OpenAI, Disaggregable: true},
	{Path: "/v1/engine/generate", FormerPath: "/v1/routed/generate", Kind: Preprocessed, Protocol: sse.OpenAI},
	{Path: "/v1/embeddings", Kind: Embeddings, Protocol: sse.Opaque},
	{Path: "/v1/rerank", Kind: Embeddings, Protocol: sse.Opaque},
	{Path: "/v1/score", Kind: Embeddings, Protocol: sse.Opaque},
	{Path: "/tokenize", Kind: Tokenize, Protocol: sse.Opaque},
	{Path: "/detokenize", Kind: Detokenize, Protocol: sse.Opaque},
	{Path: "/v1/messages/count_tokens", Kind: CountTokens, Protocol: sse.Anthropic},
}

// SessionEndpoint is the endpoint of requests that end a session. Its path stands for all of them in
// metrics and logs.
var SessionEndpoint = Endpoint{Path: "/v1/sessions/{id}/finish", Kind: SessionFinish}

// StoredEndpoint is the endpoint of requests about a stored response. Its path stands for
// all of them in metrics and logs.
var StoredEndpoint = Endpoint{Path: "/v1/responses/{id}", Kind: StoredResponse, Protocol: sse.Responses}
