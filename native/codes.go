package native

import "time"

// LoadCode is the outcome of Load.
type LoadCode int

// The outcomes of a load; they mirror enum sluice_load.
const (
	LoadOK       LoadCode = iota
	LoadAbsent            // no such file, here or on the loader's path
	LoadBroken            // a file the loader refuses, or that needs what is not here
	LoadSymbol            // a required symbol is missing
	LoadTooNew            // a major version this code does not know
	LoadStub              // NIXL's stub, which aborts when called
	LoadOther             // another copy is loaded already; one per process
	LoadThread            // no thread to load it in
	LoadNoNative          // this binary was built without the C surface
)

var loadTexts = [...]string{"ok", "absent", "broken", "symbol missing", "too new", "stub", "another one loaded", "no thread", "built without cgo"}

func (c LoadCode) String() string {
	if c < 0 || int(c) >= len(loadTexts) {
		return "unknown"
	}
	return loadTexts[c]
}

// Pace is how an agent's thread waits.
type Pace struct {
	Spin time.Duration // stay awake this long after the last event while a transfer of ours is under way
	Busy time.Duration // then sleep this long between looks
	Idle time.Duration // longest sleep while nothing is outstanding
}

// UCXNext is what a UCX worker wants after a step; it mirrors enum sluice_ucx_next.
type UCXNext int

// What is to be done after a step.
const (
	UCXStopped   UCXNext = iota // nothing: the worker is gone
	UCXMore                     // step again
	UCXWait                     // wait for its descriptor, or a command
	UCXRetrySoon                // step again in a moment
)
