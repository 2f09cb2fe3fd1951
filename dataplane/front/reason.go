package front

import "github.com/valyala/fasthttp"

// Reason says why a request was refused or a leg failed. The X-Sluice-Reason header, error
// bodies, logs, metric labels and the docs use the same words.
type Reason string

// The reasons. reasonTable has the status and the OpenAI error type of each.
const (
	BadHTTP            Reason = "bad_http"
	BadTLS             Reason = "bad_tls"          // only in metrics: the client gets no response
	BadProxyHeader     Reason = "bad_proxy_header" // likewise
	Pipelined          Reason = "pipelined"
	BadJSON            Reason = "bad_json"
	BadField           Reason = "bad_field"
	BadHeader          Reason = "bad_header"
	ForbiddenField     Reason = "forbidden_field"
	ContextLength      Reason = "context_length" // the prompt or max_tokens exceeds the engines' context length
	BodyTooLarge       Reason = "body_too_large"
	RequestTimeout     Reason = "request_timeout"
	HeadTooLarge       Reason = "head_too_large"
	BudgetExhausted    Reason = "memory_budget"
	DecodersBusy       Reason = "decompression_busy" // too many compressed bodies at once
	UnknownRoute       Reason = "unknown_route"
	WrongMethod        Reason = "wrong_method"
	WrongContentType   Reason = "wrong_content_type"
	OriginRefused      Reason = "origin_refused"
	MissingKey         Reason = "missing_api_key"
	UnknownKey         Reason = "unknown_api_key"
	ModelNotAllowed    Reason = "key_model"
	KeyLimitReached    Reason = "key_limit"
	UnknownModel       Reason = "unknown_model"
	UnknownResponse    Reason = "unknown_response" // no response with this id is stored, or it belongs to another client
	NoPrefillWorker    Reason = "no_prefill_worker"
	NoDecodeWorker     Reason = "no_decode_worker"
	NoWorker           Reason = "no_worker"
	PoolOverloaded     Reason = "pool_overloaded"
	PoolQueueFull      Reason = "pool_queue_full"
	AdmissionFull      Reason = "admission_queue_full" // no rank can start the request soon, and no more may wait
	AdmissionTimeout   Reason = "admission_timeout"    // no rank could start the request in time
	TargetUnmet        Reason = "target_unmet"         // the forecast says that the request's target or deadline cannot be met
	UpstreamFailed     Reason = "upstream_failed"
	UpstreamTimeout    Reason = "upstream_timeout"
	UpstreamInvalid    Reason = "upstream_invalid_response"
	TooManyConnections Reason = "too_many_connections"
	EngineConnLimit    Reason = "engine_connections" // limits.engine_conns is reached
	KVNotWritten       Reason = "kv_not_written"     // and the only decode worker might use it as if it were written
	Draining           Reason = "draining"
	Drained            Reason = "drained" // the drain's deadline came before the response began
	ClientGone         Reason = "client_gone"
	Deadline           Reason = "deadline"      // the request's own deadline has passed
	LoopDetected       Reason = "loop_detected" // the request has passed through this router already, or through too many routers
	Internal           Reason = "internal"
)

// reasonInfo is what a refusal for a reason says to the client.
type reasonInfo struct {
	status int
	typ    string // OpenAI error type
	code   string // OpenAI error code, "" for null
}

var reasonTable = map[Reason]reasonInfo{
	BadTLS:             {400, "invalid_request_error", ""},
	BadProxyHeader:     {400, "invalid_request_error", ""},
	OriginRefused:      {403, "invalid_request_error", ""},
	BadHTTP:            {400, "invalid_request_error", ""},
	Pipelined:          {400, "invalid_request_error", ""},
	BadJSON:            {400, "invalid_request_error", ""},
	BadField:           {400, "invalid_request_error", ""},
	BadHeader:          {400, "invalid_request_error", ""},
	ForbiddenField:     {400, "invalid_request_error", ""},
	ContextLength:      {400, "BadRequestError", ""}, // as vLLM's
	BodyTooLarge:       {413, "invalid_request_error", ""},
	RequestTimeout:     {408, "invalid_request_error", ""},
	HeadTooLarge:       {431, "invalid_request_error", ""},
	BudgetExhausted:    {503, "server_overloaded", ""},
	DecodersBusy:       {503, "server_overloaded", ""},
	UnknownRoute:       {404, "invalid_request_error", "unknown_url"},
	WrongMethod:        {405, "invalid_request_error", ""},
	WrongContentType:   {415, "invalid_request_error", ""},
	MissingKey:         {401, "invalid_request_error", "invalid_api_key"},
	UnknownKey:         {401, "invalid_request_error", "invalid_api_key"},
	ModelNotAllowed:    {403, "invalid_request_error", "model_not_found"},
	KeyLimitReached:    {429, "rate_limit_error", "rate_limit_exceeded"},
	UnknownModel:       {404, "invalid_request_error", "model_not_found"},
	UnknownResponse:    {404, "invalid_request_error", "response_not_found"},
	NoPrefillWorker:    {503, "service_unavailable", ""},
	NoDecodeWorker:     {503, "service_unavailable", ""},
	NoWorker:           {503, "service_unavailable", ""},
	PoolOverloaded:     {429, "server_overloaded", ""},
	PoolQueueFull:      {503, "server_overloaded", ""},
	AdmissionFull:      {429, "server_overloaded", ""},
	AdmissionTimeout:   {429, "server_overloaded", ""},
	TargetUnmet:        {429, "server_overloaded", ""},
	UpstreamFailed:     {502, "upstream_error", ""},
	UpstreamTimeout:    {504, "upstream_error", ""},
	UpstreamInvalid:    {502, "upstream_error", ""},
	TooManyConnections: {503, "server_overloaded", ""},
	EngineConnLimit:    {503, "server_overloaded", ""},
	KVNotWritten:       {503, "service_unavailable", ""},
	Draining:           {503, "service_unavailable", ""},
	Drained:            {503, "service_unavailable", ""},
	ClientGone:         {499, "client_closed_request", ""},
	Deadline:           {504, "upstream_error", ""},
	LoopDetected:       {508, "invalid_request_error", ""},
	Internal:           {500, "internal_error", ""},
}

// Status returns the HTTP status of a refusal for this reason.
func (r Reason) Status() int {
	if row, ok := reasonTable[r]; ok {
		return row.status
	}
	return 500
}

// reasonPhrase returns the reason phrase of a status line.
func reasonPhrase(status int) string {
	if status == 499 { // defined by nginx, not by an RFC
		return "Client Closed Request"
	}
	return fasthttp.StatusMessage(status)
}

// Type returns the OpenAI error type of a refusal for this reason.
func (r Reason) Type() string {
	if row, ok := reasonTable[r]; ok {
		return row.typ
	}
	return reasonTable[Internal].typ
}
