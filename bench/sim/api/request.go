package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"sluice/bench/sim/textgen"
)

// Body is the union of the request bodies of all inference endpoints. Fields that the
// simulated engine does not use are ignored, as unknown ones are.
type Body struct {
	Model         string          `json:"model"`
	Stream        bool            `json:"stream"`
	StreamOptions *streamOptions  `json:"stream_options"`
	Messages      []message       `json:"messages"`
	Prompt        json.RawMessage `json:"prompt"`
	Input         json.RawMessage `json:"input"`
	Instructions  string          `json:"instructions"`
	System        json.RawMessage `json:"system"`
	TokenIDs      json.RawMessage `json:"token_ids"`
	Sampling      *sampling       `json:"sampling_params"`
	Tools         []tool          `json:"tools"`
	ToolChoice    json.RawMessage `json:"tool_choice"`
	StopSequences []string        `json:"stop_sequences"`
	Thinking      *thinking       `json:"thinking"`
	KVTransfer    json.RawMessage `json:"kv_transfer_params"`
	RequestID     string          `json:"request_id"`
	CacheSalt     string          `json:"cache_salt"`
	Priority      float64         `json:"priority"`
	Echo          bool            `json:"echo"`
	ReturnIDs     bool            `json:"return_token_ids"`
	MaxCompletion *int            `json:"max_completion_tokens"`
	MaxOutput     *int            `json:"max_output_tokens"`
	DPRank        *int            `json:"data_parallel_rank"`
	RoutedRank    *int            `json:"routed_dp_rank"`         // SGLang, as are the next five
	PrefillRank   *int            `json:"disagg_prefill_dp_rank"` //
	RID           json.RawMessage `json:"rid"`
	Host          json.RawMessage `json:"bootstrap_host"`
	Port          json.RawMessage `json:"bootstrap_port"`
	Room          json.RawMessage `json:"bootstrap_room"`
	AddGeneration *bool           `json:"add_generation_prompt"`
	TokenStrings  bool            `json:"return_token_strs"`
	Tokens        json.RawMessage `json:"tokens"`
	Dimensions    int             `json:"dimensions"`
	Encoding      string          `json:"encoding_format"`
	TopLogprobs   int             `json:"top_logprobs"`
	GuidedChoice  []string        `json:"guided_choice"`
	sampling

	native       []nativeSampling // of SGLang's /generate: one for all prompts, or one for each
	samplingList bool
	logprobs     []*logprobOptions
}

type streamOptions struct {
	IncludeUsage    bool `json:"include_usage"`
	ContinuousUsage bool `json:"continuous_usage_stats"`
}

type sampling struct {
	MaxTokens   *int               `json:"max_tokens"`
	MinTokens   int                `json:"min_tokens"`
	N           *int               `json:"n"`
	Seed        int64              `json:"seed"`
	Stop        json.RawMessage    `json:"stop"`
	IncludeStop bool               `json:"include_stop_str_in_output"`
	IgnoreEOS   bool               `json:"ignore_eos"`
	Logprobs    json.RawMessage    `json:"logprobs"` // chat: a boolean, elsewhere a number
	Structured  *structuredOutputs `json:"structured_outputs"`
}

type message struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCalls  json.RawMessage `json:"tool_calls"`
	ToolCallID string          `json:"tool_call_id"`
}

// tool is an OpenAI tool, or an Anthropic or Responses tool, which are flat.
type tool struct {
	Type     string `json:"type"`
	Name     string `json:"name"`
	Function struct {
		Name       string          `json:"name"`
		Parameters json.RawMessage `json:"parameters"`
	} `json:"function"`
	Parameters  json.RawMessage `json:"parameters"`
	InputSchema json.RawMessage `json:"input_schema"`
	raw         json.RawMessage
}

// UnmarshalJSON reads a tool of any API: the forms of chat completions, of responses and of messages
// differ in where they have the name and the schema.
func (t *tool) UnmarshalJSON(b []byte) error {
	type plain tool
	if err := json.Unmarshal(b, (*plain)(t)); err != nil {
		return err
	}
	t.raw = append(json.RawMessage(nil), b...)
	if t.Function.Name == "" {
		t.Function.Name = t.Name
	}
	if t.Function.Parameters == nil {
		if t.Function.Parameters = t.Parameters; t.Parameters == nil {
			t.Function.Parameters = t.InputSchema
		}
	}
	return nil
}

// Refusal is a response other than 200, decided before the engine schedules a request.
type Refusal struct {
	Status     int
	Msg, Param string
}

func (r *Refusal) Error() string { return r.Msg }

// Refuse returns a refusal with a formatted message; param is the member at fault, or "".
func Refuse(status int, param, format string, args ...any) error {
	return &Refusal{status, fmt.Sprintf(format, args...), param}
}

// AsRefusal returns err as a refusal; an error of another kind has status 400.
func AsRefusal(err error) *Refusal {
	ref := &Refusal{Status: 400, Msg: err.Error()}
	errors.As(err, &ref)
	return ref
}

// ReadBody decodes a request body.
func ReadBody(raw []byte) (*Body, error) {
	var b Body
	err := json.Unmarshal(raw, &b)
	if err == nil {
		return &b, nil
	}
	var te *json.UnmarshalTypeError
	var se *json.SyntaxError
	switch {
	case errors.As(err, &te):
		want := "dictionary"
		switch te.Type.Kind() {
		case reflect.Slice:
			want = "list"
		case reflect.String:
			want = "string"
		case reflect.Bool:
			want = "boolean"
		case reflect.Int, reflect.Int64:
			want = "integer"
		}
		return &b, Refuse(400, "body."+te.Field, "1 validation error:\n  {'type': '%s_type', 'loc': 'body.%s', 'msg': 'Input should be a valid %s'}", want, te.Field, want)
	case errors.As(err, &se):
		return &b, Refuse(400, "", "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.%d', 'msg': 'JSON decode error'}", se.Offset)
	}
	return &b, Refuse(400, "", "%s", err)
}

// ParseIDs parses a JSON array of token ids; ok is false for anything else. It uses no
// reflection, because prompts of a quarter of a million ids come this way.
func ParseIDs(raw json.RawMessage) (ids []uint32, ok bool) {
	i := 0
	space := func() {
		for i < len(raw) && (raw[i] == ' ' || raw[i] == '\n' || raw[i] == '\t' || raw[i] == '\r') {
			i++
		}
	}
	if space(); i == len(raw) || raw[i] != '[' {
		return nil, false
	}
	i++
	if space(); i < len(raw) && raw[i] == ']' {
		return nil, true
	}
	ids = make([]uint32, 0, len(raw)/5)
	for i < len(raw) {
		space()
		from, n := i, uint64(0)
		for i < len(raw) && raw[i] >= '0' && raw[i] <= '9' && n < 1<<32 {
			n = n*10 + uint64(raw[i]-'0')
			i++
		}
		if i == from || n >= 1<<32 {
			return nil, false
		}
		ids = append(ids, uint32(n))
		space()
		if i == len(raw) {
			return nil, false
		}
		switch raw[i] {
		case ',':
			i++
		case ']':
			return ids, true
		default:
			return nil, false
		}
	}
	return nil, false
}

// ParsePrompts parses the prompt of completions: a text, ids, or a list of either.
func ParsePrompts(raw json.RawMessage) ([][]uint32, error) {
	bad := Refuse(400, "prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	if ids, ok := ParseIDs(raw); ok {
		if len(ids) == 0 {
			return nil, bad
		}
		return [][]uint32{ids}, nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil && string(raw) != "null" {
		if text == "" {
			return nil, bad
		}
		return [][]uint32{textgen.Vocab().Append(nil, text)}, nil
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return nil, bad
	}
	var out [][]uint32
	for _, item := range list {
		if len(item) > 0 && item[0] == '[' {
			ids, ok := ParseIDs(item)
			if !ok || len(ids) == 0 {
				return nil, bad
			}
			out = append(out, ids)
			continue
		}
		one, err := ParsePrompts(item)
		if err != nil {
			return nil, err
		}
		out = append(out, one...)
	}
	return out, nil
}

// RenderChat renders a chat for the simulated models, similar to ChatML.
func RenderChat(msgs []message, tools []tool, generation bool) (string, error) {
	var b strings.Builder
	if len(tools) > 0 {
		b.WriteString("<|im_start|>system\n# Tools\n")
		for _, t := range tools {
			b.Write(t.raw)
			b.WriteByte('\n')
		}
		b.WriteString("<|im_end|>\n")
	}
	for i, m := range msgs {
		if m.Role == "" {
			return "", Refuse(400, "body.messages", "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages.%d.role', 'msg': 'Field required'}", i)
		}
		text, err := contentText(m.Content)
		if err != nil {
			return "", err
		}
		b.WriteString("<|im_start|>")
		b.WriteString(m.Role)
		b.WriteByte('\n')
		b.WriteString(text)
		if len(m.ToolCalls) > 0 && string(m.ToolCalls) != "null" {
			b.WriteByte('\n')
			b.Write(m.ToolCalls)
		}
		b.WriteString("<|im_end|>\n")
	}
	if generation {
		b.WriteString("<|im_start|>assistant\n")
	}
	return b.String(), nil
}

// contentText returns the text of a message: a string, or parts. An image becomes a
// placeholder and the hash of its URL, so that different images give different ids.
func contentText(raw json.RawMessage) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	if raw[0] == '"' {
		var s string
		err := json.Unmarshal(raw, &s)
		return s, err
	}
	var parts []struct {
		Type     string          `json:"type"`
		Text     string          `json:"text"`
		Content  json.RawMessage `json:"content"`
		ImageURL struct {
			URL string `json:"url"`
		} `json:"image_url"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", Refuse(400, "body.messages", "1 validation error:\n  {'type': 'string_type', 'loc': 'body.messages.content', 'msg': 'Input should be a valid string'}")
	}
	var b strings.Builder
	for _, p := range parts {
		switch p.Type {
		case "text", "input_text", "output_text":
			b.WriteString(p.Text)
		case "image_url", "image":
			b.WriteString("<|image|>")
			b.WriteString(strconv.FormatUint(xxh3.HashString(p.ImageURL.URL), 16))
		case "tool_result":
			s, err := contentText(p.Content)
			if err != nil {
				return "", err
			}
			b.WriteString(s)
		}
	}
	return b.String(), nil
}

// stops parses stop: a string, a list, or null.
func stops(raw json.RawMessage) ([]string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		if one == "" {
			return nil, nil
		}
		return []string{one}, nil
	}
	var list []string
	if json.Unmarshal(raw, &list) != nil {
		return nil, Refuse(400, "stop", "1 validation error:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string or list'}")
	}
	out := list[:0]
	for _, s := range list {
		if s != "" {
			out = append(out, s)
		}
	}
	return out, nil
}
