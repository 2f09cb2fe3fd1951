package sim

// The generating endpoints of vLLM and their formats.
var vllmInference = map[string]func(*response) format{
	"/v1/chat/completions":   newChatFormat,
	"/v1/completions":        newCompletionFormat,
	"/v1/responses":          newResponsesFormat,
	"/v1/messages":           newMessagesFormat,
	"/inference/v1/generate": newGenerateFormat,
}

// format is the response format of one endpoint. Its methods run on the rank's
// goroutine, except errorBody, which any goroutine calls.
type format interface {
	prompts(r *response, b *body) ([][]uint32, error)                // of the request, one list for each item
	prefix() string                                                  // of the response's id
	needsText() bool                                                 // whether a stream needs the whole text at its end
	first(w *chunker, s *choice)                                     // before a choice's first token
	delta(w *chunker, s *choice, id uint32, text string)             // one token; s.reason is set on the last
	last(w *chunker, r *response)                                    // after all choices, to the end of the body
	full(b []byte, r *response) []byte                               // the non-streaming answer
	streamError(w *chunker, r *response, status int, message string) // an error in the middle of a stream
	errorBody(status int, message string) []byte                     // an error instead of a response
}
