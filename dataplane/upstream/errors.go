package upstream

import (
	"errors"
	"fmt"
)

// Sentinels a caller decides on (errors.Is).
var (
	ErrCut          = errors.New("the call was cut")
	ErrTooManyConns = errors.New("too many connections to the engine")
	// ErrWanting: no descriptor, memory or port was left here for a connection. It
	// says nothing of the engine.
	ErrWanting  = errors.New("no means left for another connection")
	ErrTimeout  = errors.New("the engine did not answer in time")
	ErrProtocol = errors.New("the engine broke HTTP")
	ErrTooLarge = errors.New("the body is over the limit")
)

// Phase says how far a failed call had come.
type Phase uint8

// The phases of a call.
const (
	PhaseDial  Phase = iota // no byte was sent: always safe to run elsewhere
	PhaseWrite              // part or all of the request was sent
	PhaseHead               // sent, no whole response head came
	PhaseBody               // the head came, the body did not end well
)

var phaseVerbs = [...]string{"connect to", "send to", "get an answer from", "read the body of"}

// String says what was being done, as a verb: "connect to", "send to", ….
func (p Phase) String() string {
	if int(p) < len(phaseVerbs) {
		return phaseVerbs[p]
	}
	return "call"
}

// Error is what Do and the Response's methods fail with.
type Error struct {
	Endpoint string
	Phase    Phase
	Err      error
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("upstream: cannot %s %q: %v", e.Phase, e.Endpoint, e.Err)
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// protocolError says what the engine sent and is an ErrProtocol.
func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// badRequest says what is wrong with a Request; nothing was sent.
func badRequest(format string, args ...any) error {
	return fmt.Errorf("the request has a bad "+format, args...)
}
