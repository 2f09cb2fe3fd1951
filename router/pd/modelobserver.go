package pd

import (
	"encoding/hex"
	"time"

	"sluice/dataplane/relay"
	"sluice/router/kvtransfer/completion"
	"sluice/router/schedule"
)

// ModelObserver receives the measurements of one model's requests. Its methods run on the request
// path or on a stream's event loop, and must not block.
type ModelObserver interface {
	// Queued records the time from a request's head until its first leg is sent.
	Queued(took time.Duration)
	// FirstToken records the time from a request's head to its first token. trace is the trace id
	// of the request, zero if it has none.
	FirstToken(took time.Duration, trace [16]byte)
	// Intervals returns the counters of the time between the tokens of a stream.
	Intervals() *relay.Intervals
	// LegEnded records the duration of a leg that succeeded.
	LegEnded(leg schedule.LegKind, took time.Duration)
	// Transferred records the duration of a KV transfer that succeeded.
	Transferred(took time.Duration)
	// Ended counts a request that has ended. prompt is its number of prompt tokens as the router
	// counted them, 0 if unknown.
	Ended(out *schedule.Outcome, prompt int, trace [16]byte)
}

// observeTransfer reports a successful transfer to the model's observer. An engine that reports the
// end of a transfer but not its duration counts from the watch's beginning.
func observeTransfer(o ModelObserver, res *completion.Result) {
	if o == nil || res.State != completion.Done {
		return
	}
	took := res.Duration
	if took <= 0 {
		took = res.Elapsed
	}
	o.Transferred(took)
}

// traceID returns the trace id of the request's traceparent header (W3C Trace Context) if the trace
// is sampled, otherwise zero.
func (q *request) traceID() [16]byte { return parseTraceID(q.x.Header("traceparent")) }

func parseTraceID(parent []byte) (id [16]byte) {
	const version, end, flags = len("00-"), len("00-") + 32, len("00-") + 32 + len("-") + 16 + len("-")
	if len(parent) < flags+2 || parent[end] != '-' || parent[flags-1] != '-' {
		return [16]byte{}
	}
	var flag [1]byte
	if _, err := hex.Decode(flag[:], parent[flags:flags+2]); err != nil || flag[0]&1 == 0 {
		return [16]byte{}
	}
	if _, err := hex.Decode(id[:], parent[version:end]); err != nil {
		return [16]byte{}
	}
	return id
}

// sharedTraceID returns the trace id for a stream that outlives its request; nil for none. Only a
// traced stream has memory for it.
func (q *request) sharedTraceID() *[16]byte {
	id := q.traceID()
	if id == ([16]byte{}) {
		return nil
	}
	return &id
}

// traceOf returns the trace id of a stream.
func (s *streamState) traceOf() (id [16]byte) {
	if s.trace != nil {
		id = *s.trace
	}
	return id
}
