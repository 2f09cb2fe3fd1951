package front

import "sluice/dataplane/relay"

// Endpoint is an inference route and the properties of its requests.
type Endpoint struct {
	Path string
	// FormerPath is served like Path for one release; "" if there is none.
	FormerPath string
	Protocol   relay.Protocol
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
)

// Endpoints is the route table of inference endpoints. All are POST with a JSON body. Add a
// route with an exact path here, and any other in routes.find.
var Endpoints = []Endpoint{
	{Path: "/v1/chat/completions", Kind: Chat, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/v1/completions", Kind: Completions, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/v1/responses", Kind: ResponsesAPI, Protocol: relay.Responses, Disaggregable: true},
	{Path: "/v1/messages", Kind: Messages, Protocol: relay.Anthropic, Disaggregable: true},
	{Path: "/inference/v1/generate", Kind: Generate, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/generate", Kind: NativeGenerate, Protocol: relay.OpenAI, Disaggregable: true},
	{Path: "/v1/engine/generate", FormerPath: "/v1/routed/generate", Kind: Preprocessed, Protocol: relay.OpenAI},
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
