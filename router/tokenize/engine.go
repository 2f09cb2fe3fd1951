package tokenize

import (
	"errors"
	"strconv"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
	"sluice/dataplane/upstream"
)

// forwardedMember is a member of a request that /tokenize takes.
type forwardedMember struct {
	key    jsonscan.Key
	splice []byte
	shapes [numShapes]bool
}

var (
	inMessages = [numShapes]bool{shapeMessages: true}
	inChats    = [numShapes]bool{shapeMessages: true, shapeInput: true}
)

// forwardedMembers are the members that affect the result of /tokenize, by engine.
var forwardedMembers = [...][]forwardedMember{
	// vLLM 0.33, TokenizeChatRequest and TokenizeCompletionRequest.
	VLLM: {
		{jsonscan.KeyTools, []byte(`,"tools":`), inChats},
		{jsonscan.KeyChatTemplate, []byte(`,"chat_template":`), inChats},
		{jsonscan.KeyChatTemplateKwargs, []byte(`,"chat_template_kwargs":`), inChats},
		{jsonscan.KeyAddGenerationPrompt, []byte(`,"add_generation_prompt":`), inChats},
		{jsonscan.KeyContinueFinalMessage, []byte(`,"continue_final_message":`), inChats},
		{jsonscan.KeyAddSpecialTokens, []byte(`,"add_special_tokens":`), [numShapes]bool{shapeMessages: true, shapePrompt: true}},
	},
	// SGLang 0.5.23, TokenizeRequest. Its chats have no add_generation_prompt, and neither chats nor
	// completions have add_special_tokens: of /tokenize they would change the result.
	SGLang: {
		{jsonscan.KeyTools, []byte(`,"tools":`), inMessages},
		{jsonscan.KeyToolChoice, []byte(`,"tool_choice":`), inMessages},
		{jsonscan.KeyReasoningEffort, []byte(`,"reasoning_effort":`), inMessages},
		{jsonscan.KeyReasoning, []byte(`,"reasoning":`), inMessages},
		{jsonscan.KeyThinking, []byte(`,"thinking":`), inMessages},
		{jsonscan.KeyContinueFinalMessage, []byte(`,"continue_final_message":`), inMessages},
		{jsonscan.KeyChatTemplateKwargs, []byte(`,"chat_template_kwargs":`), inChats},
	},
}

var (
	openModel    = []byte(`{"model":`)
	comma        = []byte(`,`)
	openObject   = []byte(`{`)
	closeObject  = []byte(`}`)
	promptKey    = []byte(`"prompt":`)
	messagesKey  = []byte(`"messages":`)
	openMessages = []byte(`"messages":[`)
	systemHead   = []byte(`{"role":"system","content":`)
	userHead     = []byte(`{"role":"user","content":`)
	closeArray   = []byte(`]`)
	// /v1/responses adds the tokenizer's special tokens to what the template renders, unlike
	// /tokenize and /v1/chat/completions (vLLM 0.32, ResponsesRequest.build_tok_params, which leaves
	// TokenizeParams.add_special_tokens as it is).
	addSpecialTokens = []byte(`,"add_special_tokens":true`)
)

// compose builds the /tokenize request from the body's own bytes.
func (w *promptWork) compose(doc *jsonscan.Doc) {
	if doc.Has(jsonscan.KeyModel) {
		w.add(openModel, doc.Raw(jsonscan.KeyModel), comma)
	} else {
		w.add(openObject)
	}
	switch {
	case w.shape == shapePrompt:
		w.add(promptKey, w.prompt)
	case w.shape == shapeInput:
		w.add(openMessages)
		if w.system != nil {
			w.add(systemHead, w.system, closeObject, comma)
		}
		w.add(userHead, w.prompt, closeObject, closeArray)
	case w.system != nil:
		w.add(openMessages, systemHead, w.system, closeObject)
		if len(w.text) > 0 {
			w.add(comma, w.text)
		}
		w.add(closeArray)
	default:
		w.add(messagesKey, doc.Raw(jsonscan.KeyMessages))
	}
	if w.shape == shapeInput && w.server == VLLM {
		w.add(addSpecialTokens)
	}
	members := forwardedMembers[w.server]
	for i := range members {
		if p := &members[i]; p.shapes[w.shape] && doc.Has(p.key) {
			w.add(p.splice, doc.Raw(p.key))
		}
	}
	w.add(closeObject)
}

func (w *promptWork) add(pieces ...[]byte) {
	for _, p := range pieces {
		w.segs = append(w.segs, p)
		w.size += len(p)
	}
}

var tokenizeFields = []upstream.Field{{Name: "Content-Type", Value: "application/json"}}

// Errors of post, by what they say about the engine.
var (
	errUnsupported = errors.New("it has no /tokenize")
	errRefused     = errors.New("it rejects this prompt")
	errBusy        = errors.New("it returned an error")
	errGarbage     = errors.New("its response contains no token ids")
)

// engineError is a failed lookup.
type engineError struct {
	url    string
	status int // 0: no complete response
	cause  error
}

func (e *engineError) Error() string {
	s := "tokenize: cannot ask " + strconv.Quote(e.url) + ": " + e.cause.Error()
	if e.status != 0 {
		s += " (status " + strconv.Itoa(e.status) + ")"
	}
	return s
}

func (e *engineError) Unwrap() error { return e.cause }

// post posts the composed request and appends the ids to dst. On an error dst's length is
// unchanged.
func (w *promptWork) post(dst []uint32, ep *upstream.Endpoint, call *upstream.Call, deadline time.Time) ([]uint32, error) {
	fail := func(status int, cause error) ([]uint32, error) {
		return dst, &engineError{url: ep.URL(), status: status, cause: cause}
	}
	req := upstream.Request{Method: "POST", Path: "/tokenize", Fields: tokenizeFields, Body: w.segs, Deadline: deadline}
	resp, err := ep.Do(&req, call)
	if err != nil {
		return fail(0, err)
	}
	defer resp.Release()
	// An id is at most 10 digits and a comma for at least one byte of text; a template adds little.
	most := 16*w.size + 64<<10
	capacity := membudget.Default.Get(answerCapacity(resp.ContentLength, w.size, most))
	defer membudget.Default.Put(capacity)
	answer, err := resp.ReadAll(capacity.B[:0], most)
	if err == nil {
		err = errorOf(resp.Status)
	}
	if err != nil {
		return fail(resp.Status, err)
	}
	ids, ok, err := jsonscan.FindTokenIDs(dst, answer, "tokens")
	if err != nil || !ok {
		return fail(resp.Status, errGarbage)
	}
	return ids, nil
}

// errorOf returns what a status other than 200 says.
func errorOf(status int) error {
	switch {
	case status == 200:
		return nil
	case lacksEndpoint(status):
		return errUnsupported
	case status >= 400 && status < 500 && status != 408 && status != 429:
		return errRefused
	}
	return errBusy
}

// lacksEndpoint reports whether a status says that the engine does not have the endpoint, or not for the router.
func lacksEndpoint(status int) bool {
	return status == 404 || status == 405 || status == 501 || status == 401 || status == 403
}

// answerCapacity returns the initial buffer size for a response: its Content-Length, up to limit.
// Without one it is two bytes per byte of the request, which is more than ids of ordinary text
// need.
func answerCapacity(announced int64, request, limit int) int {
	if announced >= 0 {
		return int(min(announced, int64(limit)))
	}
	return min(2*request+membudget.Page, limit)
}

func isUnsupported(err error) bool { return errors.Is(err, errUnsupported) }

func timedOut(err error) bool { return errors.Is(err, upstream.ErrTimeout) }

// count adds a failed lookup to its counter.
func (t *Tokenizer) count(err error) {
	switch {
	case errors.Is(err, errRefused), errors.Is(err, errUnsupported):
		t.refused.Add(1)
	default:
		t.failed.Add(1)
		if timedOut(err) {
			t.timeouts.Add(1)
		}
	}
}
