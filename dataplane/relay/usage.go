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
func readUsage(w *jsonscan.Cursor, u *Usage) {
	if !w.Enter('{') {
		return
	}
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			readCount(w, &u.Prompt)
		case "completion_tokens", "output_tokens":
			readCount(w, &u.Completion)
		case "cache_read_input_tokens", "cached_tokens":
			readCount(w, &u.Cached)
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
}

func readCount(w *jsonscan.Cursor, n *int) {
	if v := w.Number(); v >= 0 {
		*n = v
	}
}
