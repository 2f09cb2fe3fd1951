package relay

// UsageOf reads the usage member of a whole JSON response of any protocol
// (usage.prompt_tokens / input_tokens, completion_tokens / output_tokens,
// prompt_tokens_details.cached_tokens / cache_read_input_tokens), or SGLang's
// meta_info.
func UsageOf(body []byte) Usage {
	u := noUsage
	w := jsonWalker{b: body}
	if !w.enter('{') {
		return u
	}
	for key, ok := w.member(); ok; key, ok = w.member() {
		switch string(key) {
		case "usage":
			if readUsage(&w, &u); u != noUsage {
				return u // a handle may follow, which has thousands of block ids
			}
		case "meta_info":
			readUsage(&w, &u)
		default:
			w.skip()
		}
	}
	return u
}

// readUsage reads a usage object into u. Members that it lacks stay unchanged.
func readUsage(w *jsonWalker, u *Usage) {
	if !w.enter('{') {
		return
	}
	for key, ok := w.member(); ok; key, ok = w.member() {
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			readCount(w, &u.Prompt)
		case "completion_tokens", "output_tokens":
			readCount(w, &u.Completion)
		case "cache_read_input_tokens", "cached_tokens":
			readCount(w, &u.Cached)
		case "prompt_tokens_details", "input_tokens_details":
			if !w.enter('{') {
				continue
			}
			for key, ok := w.member(); ok; key, ok = w.member() {
				if string(key) == "cached_tokens" {
					readCount(w, &u.Cached)
				} else {
					w.skip()
				}
			}
		default:
			w.skip()
		}
	}
}

func readCount(w *jsonWalker, n *int) {
	if v := w.number(); v >= 0 {
		*n = v
	}
}
