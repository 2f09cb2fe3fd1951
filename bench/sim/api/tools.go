package api

import (
	"encoding/json"
	"sort"
	"strconv"
	"strings"

	"sluice/bench/sim/textgen"
)

// chooseTool decides whether the response is a tool call, and of which function: if
// tool_choice requires or names one, or if the last user message contains the
// function's name.
func chooseTool(b *Body) (string, *tool) {
	if len(b.Tools) == 0 {
		return "", nil
	}
	var mode string
	var named struct {
		Type     string `json:"type"`
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	}
	if json.Unmarshal(b.ToolChoice, &mode) != nil {
		json.Unmarshal(b.ToolChoice, &named)
		mode = named.Type
	}
	if named.Function.Name != "" {
		named.Name = named.Function.Name
	}
	pick := func(name string) (string, *tool) {
		for i := range b.Tools {
			if b.Tools[i].Function.Name == name {
				return name, &b.Tools[i]
			}
		}
		return "", nil
	}
	switch mode {
	case "none":
		return "", nil
	case "required", "any":
		return pick(b.Tools[0].Function.Name)
	case "function", "tool":
		return pick(named.Name)
	}
	wanted := ""
	for _, m := range b.Messages {
		if m.Role == "user" {
			wanted, _ = contentText(m.Content)
		} else if m.Role == "tool" {
			wanted = ""
		}
	}
	for i := range b.Tools {
		if name := b.Tools[i].Function.Name; name != "" && strings.Contains(wanted, name) {
			return name, &b.Tools[i]
		}
	}
	return "", nil
}

// toolScript returns the output of a call: the tokens of arguments that match the
// function's JSON schema.
func toolScript(b *Body, name string, state uint64) []uint32 {
	_, t := chooseTool(b)
	args := []byte("{}")
	if t != nil {
		args = fitSchema(nil, t.Function.Parameters, textgen.Mix(state), 0)
	}
	return textgen.Vocab().Append(nil, string(args))
}

// fitSchema appends a value that matches a JSON schema; it considers types, enums,
// properties and items.
func fitSchema(b []byte, raw json.RawMessage, x uint64, depth int) []byte {
	var s struct {
		Type       json.RawMessage            `json:"type"`
		Enum       []json.RawMessage          `json:"enum"`
		Properties map[string]json.RawMessage `json:"properties"`
		Items      json.RawMessage            `json:"items"`
	}
	if json.Unmarshal(raw, &s) != nil || depth > 8 {
		return append(b, "{}"...)
	}
	if len(s.Enum) > 0 {
		return append(b, s.Enum[x%uint64(len(s.Enum))]...)
	}
	var kind string
	var kinds []string
	if json.Unmarshal(s.Type, &kind) != nil && json.Unmarshal(s.Type, &kinds) == nil && len(kinds) > 0 {
		kind = kinds[0]
	}
	switch kind {
	case "string":
		v := textgen.Vocab()
		return AppendJSON(b, v.Piece(uint32(textgen.WordBase)+4*uint32(x%uint64(v.Words))+3))
	case "integer", "number":
		return strconv.AppendUint(b, x%100, 10)
	case "boolean":
		return strconv.AppendBool(b, x&1 == 0)
	case "null":
		return append(b, "null"...)
	case "array":
		b = append(b, '[')
		if s.Items != nil {
			b = fitSchema(b, s.Items, textgen.Mix(x+1), depth+1)
		}
		return append(b, ']')
	}
	names := make([]string, 0, len(s.Properties))
	for n := range s.Properties {
		names = append(names, n)
	}
	sort.Strings(names)
	b = append(b, '{')
	for i, n := range names {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = AppendJSON(b, n)
		b = append(b, ": "...)
		b = fitSchema(b, s.Properties[n], textgen.Mix(x+uint64(i)+2), depth+1)
	}
	return append(b, '}')
}
