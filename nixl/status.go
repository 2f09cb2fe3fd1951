package nixl

import (
	"errors"
	"fmt"
)

// Status is the result of a call: NIXL's own codes from 0 downwards (they mirror
// nixl_capi_status_t of NIXL 1.5), Sluice's from -100.
type Status int32

// UCX's own statuses (ucs_status_t, negative) are added to ucxBase.
const ucxBase = -200

// The statuses.
const (
	Success      Status = 0
	InProgress   Status = 1
	InvalidParam Status = -1
	BackendError Status = -2 // NIXL reports most of its errors as this one
	InvalidState Status = -3
	Exception    Status = -4
	NoTelemetry  Status = -5
	NotFound     Status = -6 // since NIXL 1.5; before, BackendError

	Garbage    Status = -100 // the library's result is inconsistent
	NoAgent    Status = -101
	BadHandle  Status = -102
	BadPayload Status = -103
	Full       Status = -104
	PeerDead   Status = -105
	Canceled   Status = -106
	Missing    Status = -107
	Hung       Status = -108 // no answer in time
	Closed     Status = -109

	VersionMismatch Status = -110 // the peer's NIXL is known to be incompatible
	Died            Status = -111 // the agent's process has ended
)

var statusTexts = map[Status]string{
	Success:      "success",
	InProgress:   "in progress",
	InvalidParam: "invalid parameter (NIXL -1)",
	BackendError: "backend error (NIXL -2; details are on stderr)",
	InvalidState: "invalid state (NIXL -3)",
	Exception:    "exception (NIXL -4)",
	NoTelemetry:  "no telemetry (NIXL -5)",
	NotFound:     "not found (NIXL -6)",
	Garbage:      "the library's result is inconsistent",
	NoAgent:      "there is no agent with a backend yet",
	BadHandle:    "unknown or released handle",
	BadPayload:   "malformed command",
	Full:         "a table or queue is full",
	PeerDead:     "the peer has failed",
	Canceled:     "canceled",
	Missing:      "the library lacks the call",
	Hung:         "no answer from the library in time",
	Closed:       "the agent is closed",

	VersionMismatch: "its version is incompatible",
	Died:            "the agent's process has ended",
}

// String returns the status in words; those of UCX have its number, too.
func (s Status) String() string {
	if w, ok := statusTexts[s]; ok {
		return w
	}
	if u := int(s) - ucxBase; u < 0 && u >= -100 {
		if w, ok := ucxStatusTexts[u]; ok {
			return fmt.Sprintf("%s (UCX %d)", w, u)
		}
		return fmt.Sprintf("UCX %d", u)
	}
	return fmt.Sprintf("unknown status %d", int32(s))
}

// ucxStatusTexts are the statuses that the UCX calls used here can return.
var ucxStatusTexts = map[int]string{
	-2: "no resource", -3: "input/output error", -4: "out of memory", -5: "invalid parameter", -6: "destination unreachable",
	-7: "invalid address", -8: "not implemented", -12: "no such setting", -14: "no such device", -15: "busy", -16: "canceled",
	-20: "timed out", -22: "unsupported", -23: "rejected", -24: "not connected", -25: "connection reset by the peer", -80: "the endpoint timed out",
}

// Sentinels for errors.Is; each stands for one status of Error.
var (
	ErrPeerDead = errors.New("nixl: the peer has failed")
	ErrFull     = errors.New("nixl: a table or queue is full")
	ErrHung     = errors.New("nixl: no answer from the library in time")
	ErrClosed   = errors.New("nixl: the agent is closed")
	ErrCanceled = errors.New("nixl: canceled")
	ErrDied     = errors.New("nixl: the agent's process has ended")
	ErrVersion  = errors.New("nixl: the peer's version is incompatible")
)

// Error is a rejected or failed call.
type Error struct {
	Operation string // "register 4096 bytes of DRAM"
	Status    Status
	Hint      string // what to do about it; may be empty
}

// Error says what failed and with which status, and then the hint, if there is one.
func (e *Error) Error() string {
	s := "nixl: cannot " + e.Operation + ": " + e.Status.String()
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// Unwrap returns the sentinel of the status, or nil.
func (e *Error) Unwrap() error {
	switch e.Status {
	case PeerDead:
		return ErrPeerDead
	case Full:
		return ErrFull
	case Hung:
		return ErrHung
	case Closed:
		return ErrClosed
	case Canceled:
		return ErrCanceled
	case VersionMismatch:
		return ErrVersion
	case Died:
		return ErrDied
	}
	return nil
}
