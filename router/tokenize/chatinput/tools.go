package chatinput

import (
	"bytes"
	"encoding/json"

	"sluice/dataplane/jsonscan"
)

// writeToolCalls appends the tool calls with their arguments as objects.
func (in *Input) writeToolCalls(raw []byte, validated bool) {
	if isEmpty(raw) {
		return // the server drops an empty list
	}
	in.Chat = append(in.Chat, `,"tool_calls":[`...)
	n := 0
	var call, f object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; n++ {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		call.find(it.Raw(), "id", "function", "type")
		if it.Value.Kind != jsonscan.Object || call.kind(0) != jsonscan.String || call.kind(1) != jsonscan.Object || !call.isString(2, "function") {
			in.refuse("a tool call is not a function's")
			return
		}
		f.find(call.get(1), "arguments", "name")
		if f.kind(0) != jsonscan.String || f.kind(1) != jsonscan.String {
			in.refuse("a tool call's name or arguments are not strings")
			return
		}
		if in.parseArguments(f.get(0)); in.reason != "" {
			return
		}
		in.Chat = append(append(in.Chat, `{"id":`...), call.get(0)...)
		in.Chat = append(in.Chat, `,"function":{`...)
		if validated {
			in.Chat = append(append(in.Chat, `"arguments":`...), in.args...)
			in.Chat = append(append(in.Chat, `,"name":`...), f.get(1)...)
		} else {
			in.Chat = append(append(in.Chat, `"name":`...), f.get(1)...)
			in.Chat = append(append(in.Chat, `,"arguments":`...), in.args...)
		}
		in.writeExtra(call.get(1), "arguments", "name", "")
		in.Chat = append(in.Chat, `},"type":"function"`...)
		in.writeExtra(it.Raw(), "id", "function", "type")
		in.Chat = append(in.Chat, '}')
	}
	in.Chat = append(in.Chat, ']')
}

// writeExtra appends the members of an object besides three.
func (in *Input) writeExtra(object []byte, a, b, c string) {
	for it := jsonscan.Walk(object); it.Next(); {
		if !it.IsKey(a) && !it.IsKey(b) && (c == "" || !it.IsKey(c)) {
			in.Chat = append(in.Chat, ',')
			in.Chat = append(in.Chat, object[it.Value.KeyStart:it.Value.End]...)
		}
	}
}

// parseArguments sets in.args to the object in a tool call's arguments, a JSON string. What is not
// an object becomes an empty one, as in the server.
func (in *Input) parseArguments(quoted []byte) {
	// Python's JSON has no other white space: with any other the text is not an object.
	in.args = bytes.Trim(jsonscan.Unquote(in.args[:0], quoted), " \t\n\r")
	switch {
	case !json.Valid(in.args) && !validInPython(in.args), in.args[0] != '{':
		in.args = append(in.args[:0], "{}"...)
	case loneSurrogate(in.args):
		in.fail("a tool call's arguments have half of a surrogate pair")
	}
}

// validInPython reports whether Python reads text as JSON although it has numbers that are not JSON.
// The library reads them too.
func validInPython(text []byte) bool {
	if !bytes.Contains(text, []byte("NaN")) && !bytes.Contains(text, []byte("Infinity")) {
		return false
	}
	var plain []byte
	inString := false
	for i := 0; i < len(text); i++ {
		rest := text[i:]
		switch {
		case inString && text[i] == '\\' && len(rest) > 1:
			plain = append(plain, text[i], text[i+1])
			i++
			continue
		case text[i] == '"':
			inString = !inString
		case inString:
		default:
			found := false
			for _, word := range []string{"NaN", "Infinity", "-Infinity"} {
				if bytes.HasPrefix(rest, []byte(word)) {
					plain, found = append(plain, "true"...), true
					i += len(word) - 1
					break
				}
			}
			if found {
				continue
			}
		}
		plain = append(plain, text[i])
	}
	return json.Valid(plain)
}

// writeTools appends the tools of a chat request as the server's types print them.
func (in *Input) writeTools(raw []byte) {
	if raw[0] != '[' {
		in.refuse("tools is not a list")
		return
	}
	in.Chat = append(in.Chat, `,"tools":[`...)
	n := 0
	var tool object
	for it := jsonscan.Walk(raw); it.Next() && in.reason == ""; n++ {
		if n > 0 {
			in.Chat = append(in.Chat, ',')
		}
		tool.find(it.Raw(), "type", "function", "defer_loading")
		if tool.kind(1) != jsonscan.Object || tool.kind(0) != jsonscan.Absent && !tool.isString(0, "function") {
			in.refuse("a tool is not a function")
			return
		}
		var deferred []byte
		if tool.has(2) {
			if deferred = tool.get(2); tool.kind(2) != jsonscan.Bool {
				in.fail("a tool's defer_loading is not a boolean")
				return
			}
		}
		in.writeFunction(tool.get(1), "parameters", nil, deferred)
		if deferred != nil {
			in.Chat = append(append(in.Chat, `,"defer_loading":`...), deferred...)
		}
		in.Chat = append(in.Chat, '}')
	}
	if n == 0 {
		in.refuse("tools is empty")
	}
	in.Chat = append(in.Chat, ']')
}

// writeFunction appends a tool but for its closing brace. parameters is the name of the member with
// its schema; name, a JSON string, replaces its name unless it is nil; deferred is its defer_loading
// if it has none, or nil.
func (in *Input) writeFunction(f []byte, parameters string, name, deferred []byte) {
	var o object
	o.find(f, "name", "description", parameters, "strict", "defer_loading")
	switch {
	case o.kind(0) != jsonscan.String, o.has(1) && o.kind(1) != jsonscan.String, o.has(2) && o.kind(2) != jsonscan.Object:
		in.refuse("a tool's function has members of other types than expected")
		return
	case o.has(3) && o.kind(3) != jsonscan.Bool, o.has(4) && o.kind(4) != jsonscan.Bool:
		in.fail("an option of a tool is not a boolean")
		return
	}
	if name == nil {
		name = o.get(0)
	}
	in.Chat = append(append(in.Chat, `{"type":"function","function":{"name":`...), name...)
	in.Chat = append(in.Chat, `,"description":`...)
	in.writeOrNull(&o, 1)
	in.Chat = append(in.Chat, `,"parameters":`...)
	in.writeOrNull(&o, 2)
	if o.has(3) {
		in.Chat = append(append(in.Chat, `,"strict":`...), o.get(3)...)
	}
	if o.has(4) {
		deferred = o.get(4)
	}
	if deferred != nil {
		in.Chat = append(append(in.Chat, `,"defer_loading":`...), deferred...)
	}
	in.Chat = append(in.Chat, '}')
}

func (in *Input) writeOrNull(o *object, i int) {
	if o.has(i) {
		in.Chat = append(in.Chat, o.get(i)...)
	} else {
		in.Chat = append(in.Chat, "null"...)
	}
}
