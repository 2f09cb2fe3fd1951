package relay

// APIFormat is the endpoint whose events a Transcript keeps.
type APIFormat uint8

// The forms. Chat completions and completions tell ids where they were asked for
// (return_token_ids: vLLM 0.10.2, SGLang's completions 0.5.19); the generate
// endpoints always; the others never, so their streams are kept TextOnly.
const (
	CompletionsFormat APIFormat = iota
	ChatFormat
	GenerateFormat  // vLLM's /inference/v1/generate
	NativeFormat    // SGLang's /generate
	MessagesFormat  // Anthropic's
	ResponsesFormat // OpenAI's
)

// formatter knows the events of one Form.
type formatter interface {
	// event takes an event in and appends what the client gets of it.
	event(dst, event []byte) []byte
	// turn makes the events of the next engine the stream's own.
	nextEngine() Rewriter
	// end appends what a stream lacks whose last token is told.
	appendEnd(dst []byte, usage bool) []byte
}

func (t *Transcript) newFormatter() formatter {
	switch t.Format {
	case GenerateFormat:
		return &generateStream{t: t}
	case NativeFormat:
		return newNativeStream(t)
	case MessagesFormat:
		return &messagesStream{t: t}
	case ResponsesFormat:
		return &responsesStream{t: t}
	}
	return openAIFormatter{t}
}

// maxText bounds the text that is kept of a stream.
const maxText = 4 << 20

// appendSent notes text, the inside of a JSON string, as told.
func (t *Transcript) appendSent(text []byte) {
	if !t.keepText(text) {
		return
	}
	t.extras.eventEnds = append(t.extras.eventEnds, uint32(len(t.extras.text)))
	t.PartialRune = endsInPartialRune(text)
}

// engineFailed takes in an event by which an engine says that it failed, with an HTTP
// status as code, 0 for none: it is held back, or, where it speaks of the request,
// the client's to see.
func (t *Transcript) engineFailed(dst, event []byte, code int) []byte {
	if t.holdsFailure && (code < 400 || code >= 500 || code == 429) {
		t.ensureExtras().failure = append([]byte(nil), event...)
		return dst
	}
	t.blockOnce("refused")
	return append(dst, event...)
}

// codeOf reads "code" out of a raw error object; a string of digits is one too.
func codeOf(raw []byte) int {
	value := memberOf(raw, "code")
	if len(value) > 2 && value[0] == '"' {
		value = value[1 : len(value)-1]
	}
	w := jsonWalker{b: value}
	return max(w.unsigned(), 0)
}

// appendFailure appends what a stream ends with that no other engine took: the
// engine's own word, where it is of the client's protocol.
func (t *Transcript) appendFailure(dst []byte, p Protocol, number int64) []byte {
	if p == OpenAI {
		return append(append(dst, t.FailureEvent()...), "data: [DONE]\n\n"...)
	}
	if t.resumed() == nil {
		return append(dst, t.FailureEvent()...)
	}
	return failures[EngineClosed].appendEvent(dst, p, number)
}
