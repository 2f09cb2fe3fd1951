package fleet

import (
	"bytes"
	"strconv"
)

// eachSample calls f for every well-formed sample of a Prometheus text page.
// Anything else on the page is passed over: it is an engine's, and may be
// garbage. name and labels are borrowed; labels is what stands in the braces.
func eachSample(page []byte, f func(name, labels []byte, value float64)) {
	for len(page) > 0 {
		line := page
		if i := bytes.IndexByte(page, '\n'); i >= 0 {
			line, page = page[:i], page[i+1:]
		} else {
			page = nil
		}
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		end := bytes.IndexAny(line, "{ \t")
		if end <= 0 {
			continue
		}
		name, rest := line[:end], line[end:]
		var labels []byte
		if rest[0] == '{' {
			end := labelsEnd(rest)
			if end < 0 {
				continue
			}
			labels, rest = rest[1:end], rest[end+1:]
		}
		fields := bytes.Fields(rest) // value, and perhaps a timestamp
		if len(fields) == 0 || len(fields) > 2 {
			continue
		}
		v, err := strconv.ParseFloat(string(fields[0]), 64)
		if err != nil {
			continue
		}
		f(name, labels, v)
	}
}

// labelsEnd is the index of the brace that closes s[0]; -1 when none does.
func labelsEnd(s []byte) int {
	quoted := false
	for i := 1; i < len(s); i++ {
		switch {
		case quoted && s[i] == '\\':
			i++
		case s[i] == '"':
			quoted = !quoted
		case s[i] == '}' && !quoted:
			return i
		}
	}
	return -1
}

// label finds one label's value, escapes left as they are: the values wanted
// here are numbers and plain words.
func label(labels []byte, want string) (string, bool) {
	for len(labels) > 0 {
		eq := bytes.IndexByte(labels, '=')
		if eq < 0 || eq+1 >= len(labels) || labels[eq+1] != '"' {
			return "", false
		}
		name := bytes.Trim(labels[:eq], ", \t")
		rest := labels[eq+2:]
		end := 0
		for end < len(rest) && rest[end] != '"' {
			if rest[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(rest) {
			return "", false
		}
		if string(name) == want {
			return string(rest[:end]), true
		}
		labels = rest[end+1:]
	}
	return "", false
}

// rankOf is the data-parallel rank a sample is of; -1 when it names none.
func rankOf(labels []byte) int {
	for _, name := range [...]string{"engine", "dp_rank"} {
		if v, ok := label(labels, name); ok {
			if n, err := strconv.ParseUint(v, 10, 16); err == nil {
				return int(n)
			}
		}
	}
	return -1
}
