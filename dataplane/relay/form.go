package relay

// Form is the endpoint whose events a Transcript keeps.
type Form uint8

// The forms. Chat completions and completions tell ids where they were asked for
// (return_token_ids: vLLM 0.10.2, SGLang's completions 0.5.19); the generate
// endpoints always; the others never, so their streams are kept ByText.
const (
	CompletionsForm Form = iota
	ChatForm
	GenerateForm  // vLLM's /inference/v1/generate
	NativeForm    // SGLang's /generate
	MessagesForm  // Anthropic's
	ResponsesForm // OpenAI's
)

// speaker knows the events of one Form.
type speaker interface {
	// event takes an event in and appends what the client gets of it.
	event(dst, event []byte) []byte
	// turn makes the events of the next engine the stream's own.
	turn() Rewriter
	// end appends what a stream lacks whose last token is told.
	end(dst []byte, usage bool) []byte
}

func (t *Transcript) speaker() speaker {
	switch t.Form {
	case GenerateForm:
		return &generateStream{t: t}
	case NativeForm:
		return newNativeStream(t)
	case MessagesForm:
		return &messagesStream{t: t}
	case ResponsesForm:
		return &responsesStream{t: t}
	}
	return openAIStream{t}
}

// maxText bounds the text that is kept of a stream.
const maxText = 4 << 20

// keep notes text, the inside of a JSON string, as told.
func (t *Transcript) keep(text []byte) {
	if !t.keepText(text) {
		return
	}
	t.few.cuts = append(t.few.cuts, uint32(len(t.few.text)))
	t.Half = endsInHalf(text)
}

// broke takes in an event by which an engine says that it failed, with an HTTP
// status as code, 0 for none: it is held back, or, where it speaks of the request,
// the client's to see.
func (t *Transcript) broke(dst, event []byte, code int) []byte {
	if t.holds && (code < 400 || code >= 500 || code == 429) {
		t.rare().failed = append([]byte(nil), event...)
		return dst
	}
	t.stuck("refused")
	return append(dst, event...)
}

// codeOf reads "code" out of a raw error object; a string of digits is one too.
func codeOf(raw []byte) int {
	value := memberOf(raw, "code")
	if len(value) > 2 && value[0] == '"' {
		value = value[1 : len(value)-1]
	}
	w := walker{b: value}
	return max(w.digits(), 0)
}

// appendFailure appends what a stream ends with that no other engine took: the
// engine's own word, where it is of the client's protocol.
func (t *Transcript) appendFailure(dst []byte, p Protocol, number int64) []byte {
	if p == OpenAI {
		return append(append(dst, t.Failed()...), "data: [DONE]\n\n"...)
	}
	if t.next() == nil {
		return append(dst, t.Failed()...)
	}
	return failures[EngineClosed].appendEvent(dst, p, number)
}
