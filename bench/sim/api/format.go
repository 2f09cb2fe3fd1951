package api

// VLLMFormats are the generating endpoints of vLLM and their formats.
var VLLMFormats = map[string]func(*Response) Format{
	"/v1/chat/completions":   newChatFormat,
	"/v1/completions":        newCompletionFormat,
	"/v1/responses":          newResponsesFormat,
	"/v1/messages":           newMessagesFormat,
	"/inference/v1/generate": newGenerateFormat,
}

// Format is the response format of one endpoint. Only ErrorBody may be called by any
// goroutine; the other methods belong to the one that owns the response.
type Format interface {
	prompts(r *Response, b *Body) ([][]uint32, error)                // of the request, one list for each item
	Prefix() string                                                  // of the response's id
	needsText() bool                                                 // whether a stream needs the whole text at its end
	First(w *Chunker, s *Choice)                                     // before a choice's first token
	Delta(w *Chunker, s *Choice, id uint32, text string)             // one token; s.Reason is set on the last
	Last(w *Chunker, r *Response)                                    // after all choices, to the end of the body
	Full(b []byte, r *Response) []byte                               // the non-streaming answer
	StreamError(w *Chunker, r *Response, status int, message string) // an error in the middle of a stream
	ErrorBody(status int, message string) []byte                     // an error instead of a response
}
