package jsonscan

// AppendQuoted appends s as a JSON string. Invalid UTF-8 is copied; a scan of the result rejects
// it.
func AppendQuoted[T string | []byte](dst []byte, s T) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		dst = append(append(dst, s[from:i]...), '\\')
		switch from = i + 1; c {
		case '"', '\\':
			dst = append(dst, c)
		case '\n':
			dst = append(dst, 'n')
		default:
			dst = append(dst, 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return append(append(dst, s[from:]...), '"')
}

// QuotedLen returns how many bytes AppendQuoted appends for s.
func QuotedLen[T string | []byte](s T) int {
	n := len(s) + 2
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\' || c == '\n':
			n++
		case c < ' ':
			n += 5
		}
	}
	return n
}
