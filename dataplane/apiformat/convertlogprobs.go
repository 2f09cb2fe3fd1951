package apiformat

import (
	"sluice/dataplane/jsonscan"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

func appendInt(dst []byte, n int) []byte { return strconv.AppendInt(dst, int64(n), 10) }

// logprobs appends a completions logprobs object in chat's format.
func (c *Conversion) logprobs(dst, raw []byte) []byte {
	if !IsObject(raw) {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"content":[`...)
	dst, _ = c.logprobItems(dst, raw, false)
	return append(dst, "]}"...)
}

// logprobItems appends the items of chat's logprobs.content from the parallel lists tokens,
// token_logprobs and top_logprobs. A token without a log-probability (an echoed first one) has no
// item. more reports whether items precede; the result whether there are items now.
func (c *Conversion) logprobItems(dst, raw []byte, more bool) ([]byte, bool) {
	var tokens, values, tops jsonscan.Cursor
	w := jsonscan.Cursor{Data: raw}
	w.Enter('{')
	for key, ok := w.Member(); ok; key, ok = w.Member() {
		switch string(key) {
		case "tokens":
			tokens = jsonscan.Cursor{Data: w.Raw()}
		case "token_logprobs":
			values = jsonscan.Cursor{Data: w.Raw()}
		case "top_logprobs":
			tops = jsonscan.Cursor{Data: w.Raw()}
		default:
			w.Skip()
		}
	}
	if len(tokens.Data) == 0 || !tokens.Enter('[') || len(values.Data) == 0 || !values.Enter('[') {
		return dst, more
	}
	haveTops := len(tops.Data) > 0 && tops.Enter('[')
	for tokens.Element() && values.Element() {
		token := tokens.Text()
		value := values.Raw()
		haveTops = haveTops && tops.Element()
		var top []byte
		if haveTops {
			top = tops.Raw()
		}
		if string(value) == "null" {
			continue
		}
		if more {
			dst = append(dst, ',')
		}
		more = true
		dst = appendToken(dst, token, value)
		dst = append(dst, `,"top_logprobs":[`...)
		dst = c.alternatives(dst, top)
		dst = append(dst, "]}"...)
	}
	return dst, more
}

// alternatives appends the first TopLogprobs members of {"token": logprob, …}.
func (c *Conversion) alternatives(dst, top []byte) []byte {
	w := jsonscan.Cursor{Data: top}
	if !IsObject(top) || !w.Enter('{') {
		return dst
	}
	n := 0
	for key, ok := w.Member(); ok && n < c.TopLogprobs; key, ok = w.Member() {
		value := w.Raw()
		if string(value) == "null" {
			continue
		}
		if n++; n > 1 {
			dst = append(dst, ',')
		}
		dst = append(appendToken(dst, key, value), '}')
	}
	return dst
}

func appendToken(dst, token, logprob []byte) []byte {
	dst = append(append(dst, `{"token":"`...), token...)
	dst = append(append(dst, `","logprob":`...), logprob...)
	dst = append(dst, `,"bytes":`...)
	return appendBytes(dst, token)
}

// appendBytes appends the UTF-8 bytes of a string, whose inside is quoted, as a list of numbers;
// null if the engine did not know them (it writes a partial character as U+FFFD).
func appendBytes(dst, quoted []byte) []byte {
	mark := len(dst)
	dst = append(dst, '[')
	for i := 0; i < len(quoted); {
		r, n := nextRune(quoted[i:])
		if r == utf8.RuneError {
			return append(dst[:mark], "null"...)
		}
		i += n
		var b [utf8.UTFMax]byte
		for _, c := range b[:utf8.EncodeRune(b[:], r)] {
			if len(dst) > mark+1 {
				dst = append(dst, ',')
			}
			dst = appendInt(dst, int(c))
		}
	}
	return append(dst, ']')
}

// nextRune decodes one character of the inside of a JSON string.
func nextRune(b []byte) (r rune, n int) {
	if b[0] != '\\' {
		return utf8.DecodeRune(b)
	}
	if len(b) < 2 {
		return utf8.RuneError, len(b)
	}
	switch b[1] {
	case 'n':
		return '\n', 2
	case 't':
		return '\t', 2
	case 'r':
		return '\r', 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'u':
		r, ok := hex4(b[2:])
		if !ok {
			return utf8.RuneError, len(b)
		}
		if !utf16.IsSurrogate(r) {
			return r, 6
		}
		if len(b) >= 12 && b[6] == '\\' && b[7] == 'u' {
			if low, ok := hex4(b[8:]); ok {
				return utf16.DecodeRune(r, low), 12
			}
		}
		return utf8.RuneError, 6
	}
	return rune(b[1]), 2
}

func hex4(b []byte) (r rune, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	for _, c := range b[:4] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return r, true
}
