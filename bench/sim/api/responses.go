package api

import (
	"encoding/json"
	"strconv"

	"sluice/bench/sim/textgen"
)

// responsesFormat implements Format for /v1/responses, which has named events and no [DONE].
type responsesFormat struct {
	openAIFailure
	r   *Response
	seq int // sequence_number of the next event
}

func newResponsesFormat(r *Response) Format {
	return &responsesFormat{openAIFailure: openAIFailure{r.Config}, r: r}
}

func (f *responsesFormat) Prefix() string  { return "resp_" }
func (f *responsesFormat) needsText() bool { return true }

func (f *responsesFormat) prompts(_ *Response, b *Body) ([][]uint32, error) {
	bad := Refuse(400, "body.input", "1 validation error:\n  {'type': 'missing', 'loc': 'body.input', 'msg': 'Field required: a string or a list of items'}")
	var msgs []message
	if b.Instructions != "" {
		text, _ := json.Marshal(b.Instructions)
		msgs = append(msgs, message{Role: "system", Content: text})
	}
	if len(b.Input) == 0 || string(b.Input) == "null" {
		return nil, bad
	}
	if b.Input[0] == '"' {
		msgs = append(msgs, message{Role: "user", Content: b.Input})
	} else {
		var items []struct {
			message
			Type      string          `json:"type"`
			Name      string          `json:"name"`
			Arguments string          `json:"arguments"`
			Output    json.RawMessage `json:"output"`
		}
		if json.Unmarshal(b.Input, &items) != nil || len(items) == 0 {
			return nil, bad
		}
		for _, it := range items {
			switch it.Type {
			case "function_call":
				text, _ := json.Marshal(it.Name + it.Arguments)
				msgs = append(msgs, message{Role: "assistant", Content: text})
			case "function_call_output":
				msgs = append(msgs, message{Role: "tool", Content: it.Output})
			default:
				msgs = append(msgs, it.message)
			}
		}
	}
	b.Messages = msgs
	text, err := RenderChat(msgs, b.Tools, true)
	if err != nil {
		return nil, err
	}
	return [][]uint32{textgen.Vocab().Append(nil, text)}, nil
}

// event starts an event of a type; the caller appends members and calls close.
func (f *responsesFormat) event(w *Chunker, kind string) []byte {
	b := append(w.Begin(), "event: "...)
	b = append(b, kind...)
	b = append(b, "\ndata: {\"type\":\""...)
	b = append(b, kind...)
	b = append(b, `","sequence_number":`...)
	b = strconv.AppendInt(b, int64(f.seq), 10)
	f.seq++
	return b
}

func (f *responsesFormat) close(w *Chunker, b []byte) { w.End(append(b, "}\n\n"...)) }

func (f *responsesFormat) itemID(s *Choice) string {
	if s.script != nil {
		return "fc_" + f.r.ID[len("resp_"):]
	}
	return "msg_" + f.r.ID[len("resp_"):]
}

// at appends the members that identify the item of an event.
func (f *responsesFormat) at(b []byte, s *Choice) []byte {
	b = append(b, `,"item_id":`...)
	b = AppendJSON(b, f.itemID(s))
	b = append(b, `,"output_index":0`...)
	if s.script == nil {
		b = append(b, `,"content_index":0`...)
	}
	return b
}

func (f *responsesFormat) First(w *Chunker, s *Choice) {
	for _, kind := range []string{"response.created", "response.in_progress"} {
		b := append(f.event(w, kind), `,"response":`...)
		f.close(w, f.response(b, "in_progress", false))
	}
	b := append(f.event(w, "response.output_item.added"), `,"output_index":0,"item":`...)
	f.close(w, f.item(b, s, "in_progress", false))
	if s.script == nil {
		b = f.at(f.event(w, "response.content_part.added"), s)
		b = append(b, `,"part":`...)
		f.close(w, f.part(b, ""))
	}
}

func (f *responsesFormat) Delta(w *Chunker, s *Choice, id uint32, text string) {
	if text == "" {
		return
	}
	kind := "response.output_text.delta"
	if s.script != nil {
		kind = "response.function_call_arguments.delta"
	}
	b := f.at(f.event(w, kind), s)
	b = append(b, `,"delta":"`...)
	b = appendEscaped(b, text)
	b = append(b, '"')
	if s.script == nil {
		b = append(b, `,"logprobs":[]`...)
	}
	f.close(w, b)
}

func (f *responsesFormat) Last(w *Chunker, r *Response) {
	s := r.choices[0]
	if s.script == nil {
		b := f.at(f.event(w, "response.output_text.done"), s)
		b = AppendJSON(append(b, `,"text":`...), string(s.text))
		f.close(w, append(b, `,"logprobs":[]`...))
		b = f.at(f.event(w, "response.content_part.done"), s)
		b = append(b, `,"part":`...)
		f.close(w, f.part(b, string(s.text)))
	} else {
		b := f.at(f.event(w, "response.function_call_arguments.done"), s)
		f.close(w, AppendJSON(append(b, `,"arguments":`...), string(s.text)))
	}
	b := append(f.event(w, "response.output_item.done"), `,"output_index":0,"item":`...)
	f.close(w, f.item(b, s, "completed", true))
	kind := "response.completed"
	if f.status() == "incomplete" {
		kind = "response.incomplete"
	}
	b = append(f.event(w, kind), `,"response":`...)
	f.close(w, f.response(b, f.status(), true))
}

func (f *responsesFormat) status() string {
	if f.r.choices[0].Reason == "length" {
		return "incomplete"
	}
	return "completed"
}

func (f *responsesFormat) part(b []byte, text string) []byte {
	b = append(b, `{"annotations":[],"text":`...)
	b = AppendJSON(b, text)
	return append(b, `,"type":"output_text","logprobs":[]}`...)
}

// item appends the one output item, with its text if full is true.
func (f *responsesFormat) item(b []byte, s *Choice, status string, full bool) []byte {
	text := ""
	if full {
		text = string(s.text)
	}
	b = append(b, `{"id":`...)
	b = AppendJSON(b, f.itemID(s))
	if s.script != nil {
		b = append(b, `,"arguments":`...)
		b = AppendJSON(b, text)
		b = append(b, `,"call_id":"call_`...)
		b = strconv.AppendUint(b, textgen.Mix(s.Gen.State), 16)
		b = append(b, `","name":`...)
		b = AppendJSON(b, f.r.Params.toolName)
		b = append(b, `,"type":"function_call","status":"`...)
		b = append(b, status...)
		return append(b, `"}`...)
	}
	b = append(b, `,"content":[`...)
	if full {
		b = f.part(b, text)
	}
	b = append(b, `],"role":"assistant","status":"`...)
	b = append(b, status...)
	return append(b, `","type":"message"}`...)
}

func (f *responsesFormat) response(b []byte, status string, full bool) []byte {
	r := f.r
	b = append(b, `{"id":`...)
	b = AppendJSON(b, r.ID)
	b = append(b, `,"created_at":`...)
	b = strconv.AppendInt(b, r.Created, 10)
	b = append(b, `,"incomplete_details":`...)
	if status == "incomplete" {
		b = append(b, `{"reason":"max_output_tokens"}`...)
	} else {
		b = append(b, "null"...)
	}
	b = append(b, `,"instructions":null,"metadata":null,"model":`...)
	b = AppendJSON(b, r.model)
	b = append(b, `,"object":"response","output":[`...)
	if full {
		b = f.item(b, r.choices[0], "completed", true)
	}
	b = append(b, `],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"auto","tools":[],"top_p":1.0,"background":false,"max_output_tokens":`...)
	b = strconv.AppendInt(b, int64(r.Params.MaxTokens), 10)
	b = append(b, `,"previous_response_id":null,"status":"`...)
	b = append(b, status...)
	b = append(b, `","text":null,"truncation":"disabled","usage":`...)
	if full {
		prompt, completion, cached := r.usage()
		b = append(b, `{"input_tokens":`...)
		b = strconv.AppendInt(b, int64(prompt), 10)
		b = append(b, `,"input_tokens_details":{"cached_tokens":`...)
		b = strconv.AppendInt(b, int64(cached), 10)
		b = append(b, `},"output_tokens":`...)
		b = strconv.AppendInt(b, int64(completion), 10)
		b = append(b, `,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":`...)
		b = strconv.AppendInt(b, int64(prompt+completion), 10)
		b = append(b, '}')
	} else {
		b = append(b, "null"...)
	}
	return append(b, `,"user":null}`...)
}

func (f *responsesFormat) Full(b []byte, r *Response) []byte {
	b = f.response(b, f.status(), true)
	b = append(b[:len(b)-1], `,"kv_transfer_params":`...)
	return append(r.Members.AppendHandle(b), '}')
}

// StreamError appends an error event; the stream ends without [DONE].
func (f *responsesFormat) StreamError(w *Chunker, r *Response, status int, msg string) {
	b := append(f.event(w, "error"), `,"code":"`...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = AppendJSON(append(b, `","message":`...), msg)
	f.close(w, append(b, `,"param":null`...))
}
