package transcript

import (
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

// APIFormat is the endpoint whose events a Transcript keeps.
type APIFormat uint8

// The formats. Chat completions and completions return token ids if the request asks for them
// (return_token_ids: vLLM 0.10.2, completions of SGLang 0.5.19). The generate endpoints always
// return ids. The other endpoints never do, so their streams are kept TextOnly.
const (
	CompletionsFormat APIFormat = iota
	ChatFormat
	GenerateFormat  // vLLM's /inference/v1/generate
	NativeFormat    // SGLang's /generate
	MessagesFormat  // Anthropic's /v1/messages
	ResponsesFormat // OpenAI's /v1/responses
)

// formatter handles the events of one APIFormat other than OpenAI's.
type formatter interface {
	// event records an event and appends what the client gets of it.
	event(dst, event []byte) []byte
	// nextEngine returns the Rewriter that turns the events of the next engine into the stream's
	// own.
	nextEngine() sse.Rewriter
	// appendEnd appends the missing end of a stream whose last token has been sent.
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

// maxText bounds the text that is kept of a stream, in bytes.
const maxText = 4 << 20

// appendSent records text, the inside of a JSON string, as sent.
func (t *Transcript) appendSent(text []byte) {
	if !t.keepText(text) {
		return
	}
	t.extras.eventEnds = append(t.extras.eventEnds, uint32(len(t.extras.text)))
	t.PartialRune = endsInPartialRune(text)
}

// engineFailed handles an error event of the engine. code is its HTTP status; 0: none. The event is
// held back, or passed on to the client if it is about the request.
func (t *Transcript) engineFailed(dst, event []byte, code int) []byte {
	if t.holdsFailure && (code < 400 || code >= 500 || code == 429) {
		t.ensureExtras().failure = append([]byte(nil), event...)
		return dst
	}
	t.blockOnce("refused")
	return append(dst, event...)
}

// codeOf reads "code" from a raw error object. A string of digits is accepted too.
func codeOf(raw []byte) int {
	value := jsonscan.MemberOf(raw, "code")
	if len(value) > 2 && value[0] == '"' {
		value = value[1 : len(value)-1]
	}
	w := jsonscan.Cursor{Data: value}
	return max(w.Unsigned(), 0)
}
