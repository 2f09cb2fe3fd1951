// Package reqbody reads from the body of a client's request what several parts of package pd decide by:
// its limits, its number of prompts and choices, and members without a jsonscan.Key. Its functions are
// pure.
package reqbody

import (
	"bytes"
	"math"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// MaxTokens returns the client's limit on the output, 0 if it set none.
func MaxTokens(doc *jsonscan.Doc, kind front.Kind) int {
	keys := [...]jsonscan.Key{jsonscan.KeyMaxCompletionTokens, jsonscan.KeyMaxTokens}
	switch kind {
	case front.ResponsesAPI:
		keys[0] = jsonscan.KeyMaxOutputTokens
	case front.Generate:
		keys[0] = jsonscan.KeySamplingMaxTokens
	case front.NativeGenerate:
		keys[0] = jsonscan.KeySamplingMaxNewTokens
	}
	for _, k := range keys {
		if n, ok := doc.Int(k); ok && n > 0 {
			return int(min(n, 1<<24))
		}
	}
	return 0
}

// DefaultMaxTokens is the default of max_tokens in completions.
const DefaultMaxTokens = 16

// DefaultMaxNewTokens is the default of max_new_tokens in SGLang's /generate.
const DefaultMaxNewTokens = 128

// CompletionsPath is the endpoint that takes a prompt as token ids.
const CompletionsPath = "/v1/completions"

// SeveralSequences returns why one hand-over cannot serve the request, or "" if it can.
func SeveralSequences(kind front.Kind, doc *jsonscan.Doc) string {
	switch {
	case kind == front.Completions && isMultiPrompt(doc.Raw(jsonscan.KeyPrompt)):
		// One handle names the blocks of one prompt.
		return "batch_prompt"
	case WantsSeveral(doc.Raw(jsonscan.KeyN)) || WantsSeveral(doc.Raw(jsonscan.KeySamplingN)) || WantsSeveral(doc.Raw(jsonscan.KeyBestOf)):
		// A handle allows one read. vLLM 0.32 reads it once per choice, and the prefill engine
		// frees the blocks after the first read.
		return "multiple_choices"
	case doc.Bool(jsonscan.KeyUseBeamSearch):
		// vLLM 0.32 ignores the handle in beam search, and the prefill engine leases the blocks until
		// the lease expires.
		return "beam_search"
	}
	return ""
}

// Choices returns how many choices the client asked for by n, 0 if it did not say. exact reports
// whether the answer has exactly that many: with several prompts it has as many for each, and with
// beam search or best_of it depends on the engine.
func Choices(kind front.Kind, doc *jsonscan.Doc) (n int, exact bool) {
	if v, ok := doc.Int(jsonscan.KeyN); ok {
		n = int(min(v, math.MaxInt32))
	}
	if kind != front.Chat && (kind != front.Completions || isMultiPrompt(doc.Raw(jsonscan.KeyPrompt))) ||
		WantsSeveral(doc.Raw(jsonscan.KeyBestOf)) || doc.Bool(jsonscan.KeyUseBeamSearch) {
		return n, false
	}
	if n == 0 && !WantsSeveral(doc.Raw(jsonscan.KeyN)) {
		n = 1
	}
	return n, n > 0
}

// WantsSeveral reports whether a value of n asks for anything but one choice. The engine refuses a
// value that is not a number.
func WantsSeveral(n []byte) bool {
	return len(n) > 0 && string(n) != "1" && string(n) != "null"
}

// isMultiPrompt reports whether a completions prompt holds more than one prompt: a list of two or
// more strings or lists. A list of ids is one prompt.
func isMultiPrompt(prompt []byte) bool { return IsPromptList(prompt) && CountElements(prompt) > 1 }

// IsPromptList reports whether a prompt is a list of prompts, possibly of only one.
func IsPromptList(prompt []byte) bool {
	if len(prompt) == 0 || prompt[0] != '[' {
		return false
	}
	inner := prompt[1:]
	for len(inner) > 0 && (inner[0] == ' ' || inner[0] == '\n' || inner[0] == '\t' || inner[0] == '\r') {
		inner = inner[1:]
	}
	return len(inner) > 0 && (inner[0] == '"' || inner[0] == '[')
}

// CountElements counts the elements of a well-formed JSON array.
func CountElements(array []byte) int {
	depth, commas, inString, any := 0, 0, false, false
	for i := 0; i < len(array); i++ {
		c := array[i]
		switch {
		case inString:
			if c == '\\' {
				i++
			} else if c == '"' {
				inString = false
			}
		case c == '"':
			inString, any = true, true
		case c == '[' || c == '{':
			if depth > 0 {
				any = true
			}
			depth++
		case c == ']' || c == '}':
			depth--
		case c == ',' && depth == 1:
			commas++
		case depth == 1 && c > ' ':
			any = true
		}
	}
	if !any {
		return 0
	}
	return commas + 1
}

// WantsUsage reports whether a streaming client asked for usage at the end of the stream.
func WantsUsage(doc *jsonscan.Doc) bool {
	options := doc.Raw(jsonscan.KeyStreamOptions)
	if len(options) == 0 || options[0] != '{' {
		return false
	}
	v, ok, _ := jsonscan.Find(options, "include_usage")
	return ok && v.Kind == jsonscan.Bool && options[v.Start] == 't'
}

// HasMedia reports whether a chat's messages contain anything but text.
func HasMedia(doc *jsonscan.Doc) bool {
	for it := jsonscan.Walk(doc.Raw(jsonscan.KeyMessages)); it.Next(); {
		content, ok, _ := jsonscan.Find(it.Raw(), "content")
		if !ok || content.Kind != jsonscan.Array {
			continue
		}
		for part := jsonscan.Walk(it.Raw()[content.Start:content.End]); part.Next(); {
			if part.Value.Kind != jsonscan.Object {
				continue
			}
			kind, ok, _ := jsonscan.Find(part.Raw(), "type")
			if !ok { // vLLM also accepts {"image_url":"…"}
				if _, text, _ := jsonscan.Find(part.Raw(), "text"); text {
					continue
				}
				return true
			}
			switch string(part.Raw()[kind.Start:kind.End]) {
			case `"text"`, `"input_text"`, `"output_text"`, `"refusal"`:
			default:
				return true
			}
		}
	}
	return false
}

// MemberName appends the unescaped key whose opening quote is at start to dst.
func MemberName(dst, body []byte, start int) []byte {
	for i := start + 1; i < len(body); i++ {
		switch body[i] {
		case '\\':
			i++
		case '"':
			return jsonscan.Unquote(dst, body[start:i+1])
		}
	}
	return dst
}

// Member returns the raw value of any top-level member of a request, nil if it is absent or
// null. If a member occurs twice, it returns the last one, as engines do. Members that affect
// access control use a jsonscan.Key instead, which may occur only once.
func Member(doc *jsonscan.Doc, name string) (raw []byte) {
	for it := jsonscan.Walk(doc.Body); it.Next(); {
		switch {
		case !it.IsKey(name):
		case it.Value.Kind > jsonscan.Null:
			raw = it.Raw()
		default:
			raw = nil
		}
	}
	return raw
}

// IsSet reports whether a raw value has an effect: it is not null, false, 0, "", [] or {}.
func IsSet(raw []byte) bool {
	switch string(bytes.Trim(raw, " \t\r\n")) {
	case "", "null", "false", `""`, "[]", "{}", "0", "0.0", "-0":
		return false
	}
	return true
}

// NumberArray returns raw if it is an array that starts with a number, else nil.
func NumberArray(raw []byte) []byte {
	for i, c := range raw {
		switch {
		case i == 0 && c == '[', i > 0 && (c == ' ' || c == '\t' || c == '\n' || c == '\r'):
		case i > 0 && '0' <= c && c <= '9':
			return raw
		default:
			return nil
		}
	}
	return nil
}
