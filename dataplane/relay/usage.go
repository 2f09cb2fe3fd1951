package relay

import "sluice/dataplane/jsonscan"

// UsageOf reads the usage member of a whole JSON response of any protocol
// (usage.prompt_tokens / input_tokens, completion_tokens / output_tokens,
// prompt_tokens_details.cached_tokens / cache_read_input_tokens), or SGLang's
// meta_info.
func UsageOf(body []byte) Usage {
	u := noUsage
	w := jsonscan.Cursor{Data: body}
	if !w.Enter('{') {
		return u
	}
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "usage":
			if readUsage(&w, &u); u != noUsage {
				return u // a handle may follow, which has thousands of block ids
			}
		case "meta_info":
			readUsage(&w, &u)
		default:
			w.Skip()
		}
	}
	return u
}

// readUsage reads a usage object into u. Members that it lacks stay unchanged.
//
// In Anthropic's form input_tokens are those of the prompt that were neither read from the cache nor written to
// it (vLLM's entrypoints/anthropic/serving.py, _build_anthropic_usage); Usage.Prompt is the whole prompt.
func readUsage(w *jsonscan.Cursor, u *Usage) {
	if !w.Enter('{') {
		return
	}
	input, read, created := -1, -1, 0
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "prompt_tokens":
			readCount(w, &u.Prompt)
		case "input_tokens":
			readCount(w, &input)
		case "completion_tokens", "output_tokens":
			readCount(w, &u.Completion)
		case "cached_tokens":
			readCount(w, &u.Cached)
		case "cache_read_input_tokens":
			readCount(w, &read)
		case "cache_creation_input_tokens":
			readCount(w, &created)
		case "prompt_tokens_details", "input_tokens_details":
			if !w.Enter('{') {
				continue
			}
			for key, ok := w.Member(); ok; key, ok = w.Member() {
				if string(key) == "cached_tokens" {
					readCount(w, &u.Cached)
				} else {
					w.Skip()
				}
			}
		default:
			w.Skip()
		}
	}
	if input >= 0 {
		u.Prompt = input + max(read, 0) + created
	}
	if read >= 0 {
		u.Cached = read
	}
}

func readCount(w *jsonscan.Cursor, n *int) {
	if v := w.Number(); v >= 0 {
		*n = v
	}
}
