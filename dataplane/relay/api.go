package relay

import (
	"io"
	"time"

	"sluice/dataplane/upstream"
)

// Protocol is the event protocol of a stream; it decides what an error event
// looks like and what a good end is.
type Protocol uint8

// The protocols.
const (
	OpenAI    Protocol = iota // data: {…}, ends with data: [DONE]
	Anthropic                 // event: …, no [DONE]
	Responses                 // event: …, no [DONE]
	Opaque                    // not an event stream: bytes pass, nothing is scanned
)

// Options of one stream.
type Options struct {
	Protocol     Protocol
	WriteTimeout time.Duration // one flush to the client [30s]
	IdleTimeout  time.Duration // between two reads from the engine; 0: none
	// OnFirstToken, when set, is called once, on the relaying goroutine, when
	// the first event with content has been read.
	OnFirstToken func()
}

// Cause says why a stream ended.
type Cause uint8

// The causes, from the client's and the engine's side.
const (
	Completed     Cause = iota // the body came to its end
	ClientGone                 // the client closed or reset
	ClientStalled              // a flush took longer than WriteTimeout
	EngineClosed               // reset, EOF or bad framing before the end
	EngineStalled              // IdleTimeout
	Cut                        // the call was cut by the router
)

var causeNames = [...]string{"completed", "client_gone", "client_stalled", "engine_closed", "engine_stalled", "cut"}

// String gives the cause's name as it stands in metrics and logs.
func (c Cause) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return "unknown"
}

// Usage is the token accounting an engine reported; -1 where it said nothing.
type Usage struct {
	Prompt, Completion, Cached int
}

// Result is what was seen of one stream.
type Result struct {
	Cause      Cause
	Err        error // the cause's detail; nil when Completed
	Bytes      int64 // body bytes sent to the client, framing included
	Events     int64
	FirstByte  time.Time // zero: none came
	FirstToken time.Time
	LastByte   time.Time
	Finish     string // finish_reason of the last choice that had one
	Usage      Usage
	EngineErr  bool // the engine sent an error event
	Reusable   bool // the client's connection stands at a message boundary
}

// ClientConn is the client's connection as relay needs it.
type ClientConn interface {
	io.Writer
	SetWriteDeadline(time.Time) error
}

// Stream passes resp's body to dst until it ends, one way or the other. The
// head has been written by the caller, with the framing of resp (chunked,
// Content-Length or until close). When the engine dies inside a chunked event
// stream at an event boundary, the client gets an error event in its Protocol
// and a proper end; elsewhere Reusable is false and the caller must close.
// Stream does not Release resp.
func Stream(dst ClientConn, resp *upstream.Response, opt Options) Result { panic("contract") }

// UsageOf reads the usage member of a whole JSON response of any protocol
// (usage.prompt_tokens / input_tokens, completion_tokens / output_tokens,
// prompt_tokens_details.cached_tokens / cache_read_input_tokens).
func UsageOf(body []byte) Usage { panic("contract") }
