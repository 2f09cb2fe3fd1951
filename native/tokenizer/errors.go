package tokenizer

import (
	"errors"
	"fmt"
	"strings"

	"sluice/native/dl"
)

// Code is the outcome of a call; the numbers are those of sluice_tokenizer.h.
type Code int

// The outcomes of a call that failed.
const (
	CodeArgument    Code = iota + 1 // a mistake of this package
	CodeNotFound                    // the folder or a file cannot be read
	CodeUnsupported                 // the files are not ones that the library understands
	CodeInput                       // not UTF-8, not JSON, or not a request
	CodeTemplate                    // the template failed
	CodeLimit                       // the input, the text or the template's steps exceed a bound
	CodeDeadline                    // the call took longer than LoadOptions.Timeout
	CodePanic                       // a defect of the library
	codeThread                      // internal: this thread may not encode
	CodeRefused                     // the template refused the request, as in the engines
)

var codeTexts = [...]string{"", "bad argument", "not found", "unsupported", "bad input", "template error", "over a limit", "timed out", "the library panicked", "unknown", "refused by the template"}

// String returns the code in words; "" for success.
func (c Code) String() string {
	if c < 0 || int(c) >= len(codeTexts) {
		return "unknown"
	}
	return codeTexts[c]
}

// Error is an error of the library.
type Error struct {
	Verb   string // what failed: "load", "render", "encode", "describe"
	Code   Code
	Reason string // for CodeTemplate and CodeRefused it can quote the request: show it to the client, never log it
}

// Error leaves out what may quote a request.
func (e *Error) Error() string {
	if e.Code == CodeTemplate || e.Code == CodeRefused || e.Reason == "" {
		return fmt.Sprintf("tokenizer: cannot %s: %s", e.Verb, e.Code)
	}
	return fmt.Sprintf("tokenizer: cannot %s: %s: %s", e.Verb, e.Code, e.Reason)
}

// Refused reports whether the template refused the request. An engine refuses it too.
func (e *Error) Refused() bool { return e.Code == CodeRefused }

// ErrClosed is the error of a call on a closed model.
var ErrClosed = errors.New("tokenizer: the model is closed")

// Attempt is one place where the library was looked for.
type Attempt struct {
	Path   string
	Code   dl.LoadCode
	Reason string
}

// LoadError says why there is no library.
type LoadError struct{ Attempts []Attempt }

// Absent reports whether no place has a library at all.
func (e *LoadError) Absent() bool {
	for _, a := range e.Attempts {
		if a.Code != dl.LoadAbsent && a.Code != dl.LoadNoNative {
			return false
		}
	}
	return true
}

// Error lists every file that was tried, each with the reason why it was not loaded.
func (e *LoadError) Error() string {
	var parts []string
	for _, a := range e.Attempts {
		parts = append(parts, fmt.Sprintf("%s: %s: %s", a.Path, a.Code, a.Reason))
	}
	return "tokenizer: no " + Name + ": " + strings.Join(parts, "; ")
}
