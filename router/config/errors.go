package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// origin is where a value was set: a place in a file, an environment variable, or a flag.
type origin struct {
	file      string
	line, col int
	from      string // "SLUICE_LISTEN", "--listen"; "" for a file
}

func (o origin) String() string {
	if o.from != "" || o.file == "" {
		return o.from
	}
	return o.file + ":" + strconv.Itoa(o.line) + ":" + strconv.Itoa(o.col)
}

// Error is one error in a configuration.
type Error struct {
	File      string // "" if the value was not set in a file
	Line, Col int    // from 1; 0 if the value was not set in a file
	From      string // the environment variable or flag; "" for a file
	Field     string // "timeouts.prefill", "workers[2].url"; "" for the file itself
	Msg       string // what is wrong, the value quoted, and what would be accepted
}

// Error implements error.
func (e *Error) Error() string {
	var parts []string
	if at := (origin{e.File, e.Line, e.Col, e.From}).String(); at != "" {
		parts = append(parts, at)
	}
	if e.Field != "" {
		parts = append(parts, printable(e.Field))
	}
	return strings.Join(append(parts, e.Msg), ": ")
}

// printable replaces what a terminal would interpret in a text of a file.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '\uFFFD'
		}
		return r
	}, text)
}

// Errors are all errors of a configuration, in the order of the file.
type Errors []*Error

// Error implements error. The text has one line for each error.
func (es Errors) Error() string {
	if len(es) == 1 {
		return "config: cannot use the configuration: " + es[0].Error()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "config: cannot use the configuration, %d errors:", len(es))
	for _, e := range es {
		b.WriteString("\n  " + e.Error())
	}
	return b.String()
}

// Unwrap returns the list, so that errors.As finds each Error.
func (es Errors) Unwrap() []error {
	list := make([]error, len(es))
	for i, e := range es {
		list[i] = e
	}
	return list
}

// errorList collects errors. It keeps the first maxErrors and counts the others, so that the report
// about a file that is not a configuration at all stays readable.
type errorList struct {
	list Errors
	more int
}

const maxErrors = 50

func (f *errorList) add(at origin, field, format string, args ...any) {
	if len(f.list) >= maxErrors {
		f.more++
		return
	}
	f.list = append(f.list, &Error{at.file, at.line, at.col, at.from, field, fmt.Sprintf(format, args...)})
}

// err returns the collected errors as Errors, or nil if there are none.
func (f *errorList) err() error {
	if len(f.list) == 0 {
		return nil
	}
	slices.SortStableFunc(f.list, func(a, b *Error) int {
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Col - b.Col
	})
	if f.more > 0 {
		last := f.list[len(f.list)-1]
		f.list = append(f.list, &Error{File: last.File, Line: last.Line, Col: last.Col, Msg: fmt.Sprintf("and %d more", f.more)})
	}
	return f.list
}

// quoted quotes a value for an error message. It shortens long values and removes the user name and
// password of a URL.
func quoted(v string) string {
	if i := strings.Index(v, "://"); i >= 0 {
		rest := v[i+3:]
		host, _, _ := strings.Cut(rest, "/")
		if at := strings.LastIndexByte(host, '@'); at >= 0 {
			v = v[:i+3] + "…" + rest[at:]
		}
		if address, _, hasQuery := strings.Cut(v, "?"); hasQuery {
			v = address + "?…"
		}
	}
	if r := []rune(v); len(r) > 100 {
		v = string(r[:100]) + "…"
	}
	return strconv.Quote(v)
}

// Suggestion returns " (did you mean …?)" with the known word that is nearest to got, or "" if none is
// similar enough.
func Suggestion(got string, known []string) string { return suggestion(got, known) }

// suggestion implements Suggestion.
func suggestion(got string, known []string) string {
	if best := nearest(got, known); best != "" {
		return fmt.Sprintf(" (did you mean %q?)", best)
	}
	return ""
}

// nearestOrAll returns the known name that is probably meant by a wrong one, as suggestion does, or else
// all of them after an introduction.
func nearestOrAll(got string, known []string, introduction string) string {
	if s := suggestion(got, known); s != "" {
		return s
	}
	return introduction + strings.Join(known, ", ")
}

func nearest(got string, known []string) string {
	best, bestAt := "", max(len(got)/3, 2)+1
	for _, k := range known {
		if d := distance(got, k); d < bestAt && d < max(len(got), len(k)) { // a word that shares nothing is not near
			best, bestAt = k, d
		}
	}
	return best
}

// distance returns the edit distance of two words, in which a swap of neighbouring letters counts as
// one edit. Words longer than any name of a configuration are at a great distance from all others, so
// that the cost is bounded.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	var d [65][65]int
	for i := range len(a) + 1 {
		d[i][0] = i
	}
	for j := range len(b) + 1 {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
