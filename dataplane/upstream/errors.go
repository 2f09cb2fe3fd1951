package upstream

import (
	"errors"
	"fmt"
	"io"
	"syscall"
)

// Errors that callers act on (errors.Is).
var (
	ErrCancelled = errors.New("the call was cancelled")
	// ErrFrozen: the engine neither answers nor closes its connections (Group.Abandon).
	ErrFrozen       = errors.New("the engine is frozen")
	ErrTooManyConns = errors.New("too many connections to the engine")
	// ErrLocalResources: this host has no descriptor, memory or port left for a connection. It says
	// nothing about the engine.
	ErrLocalResources = errors.New("no local resources for another connection")
	ErrTimeout        = errors.New("the engine did not answer in time")
	ErrProtocol       = errors.New("the engine sent malformed HTTP")
	ErrTooLarge       = errors.New("the body exceeds the limit")
	// ErrMemory: the router has no memory for the response, see ReadAllBudgeted. It says nothing
	// about the engine.
	ErrMemory = errors.New("limits.memory_budget is exhausted")
	// ErrContentEncoding: the router never requests a content coding, and could not find private
	// members under one.
	ErrContentEncoding = errors.New("the answer has a content coding that was not asked for")
	// ErrRedirect: the response has a 3xx status and Request.Redirects is false. Following it would
	// let an engine choose where requests go, and passing it on would send clients there.
	ErrRedirect = errors.New("the answer is a redirection, which is not followed")
)

// Phase is how far a failed call had come.
type Phase uint8

// The phases of a call.
const (
	PhaseDial  Phase = iota // no byte was sent; it is always safe to retry elsewhere
	PhaseWrite              // part or all of the request was sent
	PhaseHead               // the request was sent; no complete response head came
	PhaseBody               // the head came; the body did not end properly
)

var phaseVerbs = [...]string{"connect to", "send to", "get an answer from", "read the body of"}

// String returns the attempted action as a verb: "connect to", "send to", ….
func (p Phase) String() string {
	if int(p) < len(phaseVerbs) {
		return phaseVerbs[p]
	}
	return "call"
}

// Error is the error of Do and of a Response's methods.
type Error struct {
	Endpoint string
	Phase    Phase
	Err      error
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("upstream: cannot %s %q: %v", e.Phase, e.Endpoint, e.Err)
}

// ClientMessage returns what clients may know of err: of a failed call the action and the cause,
// without the engine's address and text. Other errors are returned as they are.
func ClientMessage(err error) string {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return err.Error()
	}
	return "cannot " + e.Phase.String() + " the engine: " + cause(e.Err)
}

func cause(err error) string {
	if errors.Is(err, ErrTooManyConns) {
		return err.Error() // the router's own text, with the bound
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

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// protocolError returns an ErrProtocol that describes what the engine sent.
func protocolError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// badRequest returns an error about an invalid Request. Nothing has been sent.
func badRequest(format string, args ...any) error {
	return fmt.Errorf("the request has a bad "+format, args...)
}
