package pd

import (
	"time"

	"sluice/dataplane/relay"
	"sluice/router/kvtransfer/completion"
	"sluice/router/requestlog"
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
	Ended(out schedule.Outcome, prompt int, trace [16]byte)
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

// traceID returns the id of the request's trace if it is sampled, otherwise zero: of the trace that
// Sluice exports, or without one of the client's traceparent header.
func (q *request) traceID() requestlog.TraceID {
	if e := q.entry; e != nil && e.Trace.ID != (requestlog.TraceID{}) {
		if e.Trace.Sampled {
			return e.Trace.ID
		}
		return requestlog.TraceID{}
	}
	if c, ok := requestlog.ParseTraceparent(q.x.Header("traceparent")); ok && c.Sampled {
		return c.ID
	}
	return requestlog.TraceID{}
}

// sharedTraceID returns the trace id for a stream that outlives its request; nil for none. Only a
// traced stream has memory for it.
func (q *request) sharedTraceID() *requestlog.TraceID {
	id := q.traceID()
	if id == (requestlog.TraceID{}) {
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
