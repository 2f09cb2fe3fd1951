package upstream

import (
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Sentinels a caller decides on (errors.Is).
var (
	ErrCancelled = errors.New("the call was cut")
	// ErrFrozen: the engine neither answers nor closes its connections (Group.Abandon).
	ErrFrozen       = errors.New("the engine is frozen")
	ErrTooManyConns = errors.New("too many connections to the engine")
	// ErrLocalResources: no descriptor, memory or port was left here for a connection. It
	// says nothing of the engine.
	ErrLocalResources = errors.New("no means left for another connection")
	ErrTimeout        = errors.New("the engine did not answer in time")
	ErrProtocol       = errors.New("the engine broke HTTP")
	ErrTooLarge       = errors.New("the body is over the limit")
	// ErrMemory: the router has no memory for the answer, see ReadAllBudgeted. It says nothing
	// of the engine.
	ErrMemory = errors.New("the memory for bodies (limits.memory_budget) is spent")
	// ErrContentEncoding: nobody here asks for a coding, and under one what no client may see could
	// not be found.
	ErrContentEncoding = errors.New("the answer has a content coding that was not asked for")
	// ErrRedirect: the answer has a status of 3xx, and Request.Redirects is false. To follow it would be to let
	// an engine say where requests go; passed on, its Location would send clients there.
	ErrRedirect = errors.New("the answer is a redirection, which is not followed")
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

// ClientMessage is what clients may know of err: of a call that failed what was being done and why,
// without the engine's address and without its words. Other errors are told as they are.
func ClientMessage(err error) string {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return err.Error()
	}
	return "cannot " + e.Phase.String() + " the engine: " + cause(e.Err)
}

func cause(err error) string {
	if errors.Is(err, ErrTooManyConns) {
		return err.Error() // our own words, with the bound
	}
	for _, known := range [...]error{ErrCancelled, ErrFrozen, ErrLocalResources, ErrTimeout, ErrProtocol, ErrTooLarge, ErrMemory, ErrContentEncoding, ErrRedirect} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return "it closed the connection"
	}
	return "the connection failed"
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
