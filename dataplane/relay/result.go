package relay

import "time"

// Cause says why a stream ended.
type Cause uint8

// The causes, from the client's and the engine's side.
const (
	Completed           Cause = iota // the answer is whole, by its protocol's proof, and so is the body the client has
	ClientGone                       // the client closed or reset
	ClientStalled                    // a flush took longer than WriteTimeout
	EngineClosed                     // reset or EOF before the end
	EngineStalled                    // IdleTimeout, or the leg's own deadline, or the engine was found frozen
	Cancelled                        // the call was cut by the router
	Drained                          // likewise: the router ends
	Deadline                         // the client's time (Options.By) was over
	EngineMalformed                  // bad framing, or an event that cannot be passed on
	EngineIncomplete                 // the framing ended well before the answer did
	EngineReportedError              // the stream ended well, and the engine said in it that it failed
	BudgetExhausted                  // Options.Budget was spent, and part of an event could not be held
)

var causeNames = [...]string{"completed", "client_gone", "client_stalled", "engine_closed", "engine_stalled", "cut", "drained", "deadline", "engine_broke", "engine_ended", "engine_error", "memory_budget"}

// String gives the cause's name as it stands in metrics and logs.
func (c Cause) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return "unknown"
}

// EngineFailed says whether the engine, or the way to it, failed by itself; of one that
// was silent for too long that is not known, and an error that it told may be the request's.
func (c Cause) EngineFailed() bool {
	return c == EngineClosed || c == EngineMalformed || c == EngineIncomplete
}

// Usage is the token accounting an engine reported; -1 where it said nothing.
type Usage struct {
	Prompt, Completion, Cached int
}

// noUsage is a Usage in which nothing was said.
var noUsage = Usage{-1, -1, -1}

// Result is what was seen of one stream.
type Result struct {
	Cause         Cause
	Err           error     // the cause's detail; nil when Completed
	Bytes         int64     // body bytes sent to the client, framing included
	Events        int64     // events with data, "[DONE]" included, comments not
	Unscanned     int64     // events over the scan's bound even thinned: passed on, not looked into
	FirstByte     time.Time // zero: none came
	FirstToken    time.Time
	LastByte      time.Time
	Finish        string // finish_reason of the last choice that had one; of an error event its type and code
	Usage         Usage
	SawErrorEvent bool // the engine sent an error event, however the stream ended
	Reusable      bool // the client has a body with its proper end, and nothing behind it
}
