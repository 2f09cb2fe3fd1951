// Package dl loads shared libraries at run time and protects Go's signal handlers
// from them.
//
// Its Go API is LoadCode, the outcome of a load by package nixl or ucx, and
// questions about the process: which library is mapped, which signal handler a
// library has replaced. Its C API (dl.h) is what the loaders of nixl, ucx and cuda
// share. It knows none of those libraries and links against none.
package dl

import "errors"

// ErrNoCgo is the error of every call that needs C code in a build without cgo.
var ErrNoCgo = errors.New("native: this binary was built without cgo")

// ReasonSize is the size in bytes of the buffer for a loader's reason.
const ReasonSize = 4096

// LoadCode is the outcome of loading a library.
type LoadCode int

// The outcomes of a load; they mirror enum sluice_load.
const (
	LoadOK       LoadCode = iota
	LoadAbsent            // no such file, at the path or on the loader's search path
	LoadBroken            // the loader rejects the file, or a library it needs is missing
	LoadSymbol            // a required symbol is missing
	LoadTooNew            // a major version that this code does not know
	LoadStub              // NIXL's stub, which aborts when called
	LoadOther             // another copy is loaded already; a process can use one
	LoadThread            // the loading thread cannot be started
	LoadNoNative          // this binary was built without cgo
)

var loadTexts = [...]string{"ok", "absent", "broken", "symbol missing", "too new", "stub", "another one loaded", "no thread", "built without cgo"}

// String returns the code in words, as sluice doctor prints it.
func (c LoadCode) String() string {
	if c < 0 || int(c) >= len(loadTexts) {
		return "unknown"
	}
	return loadTexts[c]
}
