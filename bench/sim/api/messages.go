package api

import (
	"encoding/json"
	"strconv"

	"sluice/bench/sim/textgen"
)

// messagesFormat implements Format for Anthropic's /v1/messages, which has named events, no [DONE],
// and errors in a format of its own.
type messagesFormat struct{ r *Response }

func newMessagesFormat(r *Response) Format { return &messagesFormat{r: r} }

func (f *messagesFormat) Prefix() string  { return "chatcmpl-" }
func (f *messagesFormat) needsText() bool { return false }

func (f *messagesFormat) prompts(_ *Response, b *Body) ([][]uint32, error) {
	if len(b.Messages) == 0 || b.MaxTokens == nil {
		return nil, Refuse(400, "", "messages and max_tokens: Field required")
	}
	if len(b.System) > 0 && string(b.System) != "null" {
		b.Messages = append([]message{{Role: "system", Content: b.System}}, b.Messages...)
	}
	text, err := RenderChat(b.Messages, b.Tools, true)
	if err != nil {
		return nil, err
	}
	return [][]uint32{textgen.Vocab().Append(nil, text)}, nil
}

func (f *messagesFormat) event(w *Chunker, kind string) []byte {
	b := append(w.Begin(), "event: "...)
	b = append(b, kind...)
	b = append(b, "\ndata: {\"type\":\""...)
	b = append(b, kind...)
	return append(b, '"')
}

func (f *messagesFormat) close(w *Chunker, b []byte) { w.End(append(b, "}\n\n"...)) }

// openMessage appends the members before the content.
func (f *messagesFormat) openMessage(b []byte) []byte {
	b = append(b, `{"id":`...)
	b = AppendJSON(b, f.r.ID)
	b = append(b, `,"type":"message","role":"assistant","model":`...)
	b = AppendJSON(b, f.r.model)
	return append(b, `,"content":[`...)
}

func (f *messagesFormat) usage(b []byte, output int) []byte {
	prompt, _, cached := f.r.usage()
	if !f.r.Config.HideCached {
		prompt -= cached // what was read from the cache is counted apart, as vLLM does
	}
	b = append(b, `{"input_tokens":`...)
	b = strconv.AppendInt(b, int64(prompt), 10)
	b = append(b, `,"output_tokens":`...)
	b = strconv.AppendInt(b, int64(output), 10)
	if !f.r.Config.HideCached {
		b = append(b, `,"cache_read_input_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
	}
	return append(b, '}')
}

// tool starts a tool_use block, up to its input.
func (f *messagesFormat) tool(b []byte, s *Choice) []byte {
	b = append(b, `{"type":"tool_use","id":"call_`...)
	b = strconv.AppendUint(b, textgen.Mix(s.Gen.State), 16)
	b = append(b, `","name":`...)
	b = AppendJSON(b, f.r.Params.toolName)
	return append(b, `,"input":`...)
}

func (f *messagesFormat) First(w *Chunker, s *Choice) {
	b := append(f.event(w, "message_start"), `,"message":`...)
	b = append(f.openMessage(b), `],"stop_reason":null,"stop_sequence":null,"usage":`...)
	f.close(w, append(f.usage(b, 0), '}'))
	b = append(f.event(w, "content_block_start"), `,"index":0,"content_block":`...)
	if s.script != nil {
		b = append(f.tool(b, s), "{}}"...)
	} else {
		b = append(b, `{"type":"text","text":""}`...)
	}
	f.close(w, b)
}

func (f *messagesFormat) Delta(w *Chunker, s *Choice, id uint32, text string) {
	if text == "" {
		return
	}
	b := append(f.event(w, "content_block_delta"), `,"index":0,"delta":{"type":"`...)
	if s.script != nil {
		b = append(b, `input_json_delta","partial_json":"`...)
	} else {
		b = append(b, `text_delta","text":"`...)
	}
	b = appendEscaped(b, text)
	f.close(w, append(b, `"}`...))
}

// stopReason appends stop_reason and stop_sequence.
func (f *messagesFormat) stopReason(b []byte, s *Choice) []byte {
	reason := "end_turn"
	switch {
	case s.Reason == "length":
		reason = "max_tokens"
	case s.Reason == "tool_calls":
		reason = "tool_use"
	case s.stopped != "":
		reason = "stop_sequence"
	}
	b = append(b, `"stop_reason":"`...)
	b = append(b, reason...)
	b = append(b, `","stop_sequence":`...)
	return appendStopped(b, s)
}

func (f *messagesFormat) Last(w *Chunker, r *Response) {
	s := r.choices[0]
	f.close(w, append(f.event(w, "content_block_stop"), `,"index":0`...))
	b := append(f.event(w, "message_delta"), `,"delta":{`...)
	b = append(f.stopReason(b, s), `},"usage":`...)
	f.close(w, f.usage(b, len(s.Out)))
	f.close(w, f.event(w, "message_stop"))
}

func (f *messagesFormat) Full(b []byte, r *Response) []byte {
	s := r.choices[0]
	b = f.openMessage(b)
	if s.script != nil {
		b = f.tool(b, s)
		if s.Reason == "tool_calls" {
			b = append(b, s.text...)
		} else {
			b = append(b, "{}"...)
		}
	} else {
		b = AppendJSON(append(b, `{"type":"text","text":`...), string(s.text))
	}
	b = append(b, `}],`...)
	b = append(f.stopReason(b, s), `,"usage":`...)
	b = f.usage(b, len(s.Out))
	b = append(b, `,"kv_transfer_params":`...)
	return append(r.Members.AppendHandle(b), '}')
}

// anthropicType returns Anthropic's name of an error status.
func anthropicType(status int) string {
	switch status {
	case 400:
		return "invalid_request_error"
	case 404:
		return "not_found_error"
	case 503:
		return "overloaded_error"
	}
	return "api_error"
}

func (f *messagesFormat) ErrorBody(status int, msg string) []byte {
	return anthropicError(anthropicType(status), msg)
}

func (f *messagesFormat) StreamError(w *Chunker, r *Response, status int, msg string) {
	b := append(w.Begin(), "event: error\ndata: "...)
	b = append(b, anthropicError(anthropicType(status), msg)...)
	w.End(append(b, "\n\n"...))
}

// CheckBudget is vLLM's validation of AnthropicMessagesRequest (0.32), which does not
// apply to the prefill leg of a hand-over by handle.
func (b *Body) CheckBudget() error {
	t := b.Thinking
	if t == nil || t.Type != "enabled" || b.MaxTokens == nil || t.Budget < *b.MaxTokens {
		return nil
	}
	var leg struct {
		Prefill bool `json:"do_remote_decode"`
	}
	if len(b.KVTransfer) > 0 && json.Unmarshal(b.KVTransfer, &leg) == nil && leg.Prefill {
		return nil
	}
	return Refuse(400, "thinking", "thinking.budget_tokens (%d) must be less than max_tokens (%d).", t.Budget, *b.MaxTokens)
}

type thinking struct {
	Type   string `json:"type"`
	Budget int    `json:"budget_tokens"`
}
