package relay

import "time"

// Cause is why a stream ended.
type Cause uint8

// The causes.
const (
	Completed           Cause = iota // the answer is complete by its protocol's proof, and the client has all of it
	ClientGone                       // the client closed or reset its connection
	ClientStalled                    // a flush took longer than WriteTimeout
	EngineClosed                     // reset or EOF before the end
	EngineStalled                    // IdleTimeout or the leg's deadline passed, or the engine was found frozen
	Cancelled                        // the router cancelled the call
	Drained                          // the router cancelled the call because it shuts down
	Deadline                         // Options.ClientDeadline passed
	EngineMalformed                  // bad framing, or an event that cannot be passed on
	EngineIncomplete                 // the framing ended before the answer was complete
	EngineReportedError              // the stream is complete and contains an error event of the engine
	BudgetExhausted                  // Options.Budget was exhausted and a partial event could not be held
)

var causeNames = [...]string{"completed", "client_gone", "client_stalled", "engine_closed", "engine_stalled", "cancelled", "drained", "deadline", "engine_protocol_error", "engine_incomplete", "engine_error", "memory_budget"}

// String returns the cause's name in metrics and logs.
func (c Cause) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return "unknown"
}

// EngineFailed reports whether the engine, or the path to it, certainly failed. An engine that is
// silent for too long may be busy, and an error event may be about the request.
func (c Cause) EngineFailed() bool {
	return c == EngineClosed || c == EngineMalformed || c == EngineIncomplete
}

// Usage is the token usage that an engine reported, in tokens; -1: not reported.
type Usage struct {
	Prompt, Completion, Cached int
}

// noUsage is a Usage without any report.
var noUsage = Usage{-1, -1, -1}

// Result describes one stream that has ended.
type Result struct {
	Cause         Cause
	Err           error     // nil when Completed
	Bytes         int64     // body bytes sent to the client, framing included
	Events        int64     // events with data, "[DONE]" included, comments not
	Unscanned     int64     // events too long for the scan, passed on without being scanned
	FirstByte     time.Time // zero: no byte was read
	FirstToken    time.Time
	LastByte      time.Time
	Finish        string // finish_reason of the last choice that had one; after an error event its type and code
	Usage         Usage
	SawErrorEvent bool // the engine sent an error event, however the stream ended
	Reusable      bool // the client has a properly ended body and nothing after it
}
