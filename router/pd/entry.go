package pd

import (
	"strings"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
	"sluice/router/requestlog"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// beginEntry begins the request's entry in the request log, if there is one that wants it.
func (q *request) beginEntry() {
	x, req := q.x, q.req
	if !q.settings.RequestLog.Wants(req.Received) {
		return
	}
	r := requestlog.Request{
		ID: req.RequestID, Endpoint: req.Endpoint.Path, ModelBytes: req.Doc.String(jsonscan.KeyModel), Client: req.ClientIP, Stream: q.stream,
		Bytes: len(req.Doc.Body), Received: req.Received, Traceparent: x.Header("Traceparent"), Tracestate: x.Header("Tracestate"),
	}
	if p := req.Principal; p != nil {
		r.Key = p.Name()
	}
	q.entry = q.settings.RequestLog.Begin(r)
	req.Reported = true // every end of a request finishes the entry
}

// entryTime returns the current time if the request has an entry, else the zero time: nothing else
// needs it.
func (q *request) entryTime() time.Time {
	if q.entry == nil {
		return time.Time{}
	}
	return time.Now()
}

func (q *request) addEntryChoice(leg schedule.LegKind, r *worker.Rank, began time.Time) {
	switch {
	case q.entry == nil:
	case r == nil:
		q.entry.AddChoice(leg.String(), "", 0, began)
	default:
		q.entry.AddChoice(leg.String(), r.ID.Worker, int(r.ID.Rank), began)
	}
}

// setEntryPlan records whether the plan disaggregates the request.
func (q *request) setEntryPlan() {
	if f := q.plan.Family; f != nil {
		q.entry.SetPlan("disaggregated", f.Name())
	} else {
		q.entry.SetPlan("whole", "")
	}
}

// setTraceparent makes the leg's span the parent of what the engine traces, if the request has a
// trace. Without one the client's traceparent goes to the engine unchanged.
func (q *request) setTraceparent(fields []upstream.Field, l *legRecord) []upstream.Field {
	return withTraceparent(fields, l.entry, int(l.entryLeg))
}

// withTraceparent is setTraceparent for a leg of any entry.
func withTraceparent(fields []upstream.Field, e *requestlog.Entry, leg int) []upstream.Field {
	parent := e.LegTraceparent(leg)
	if parent == "" {
		return fields
	}
	const name = "traceparent"
	for i := range fields {
		if strings.EqualFold(fields[i].Name, name) {
			fields[i].Value = parent
			return fields
		}
	}
	return append(fields, upstream.Field{Name: name, Value: parent})
}

// finishEntry passes the entry of a request that has ended to the request log. outputTokens is -1 if
// the engine did not report them.
func finishEntry(e *requestlog.Entry, out *schedule.Outcome, outputTokens int, events, responseBytes int64) {
	if e == nil {
		return
	}
	e.Finish(requestlog.Outcome{
		Status: out.Status, Reason: out.Reason, CachedTokens: out.CachedTokens, OutputTokens: outputTokens, Events: events,
		FirstToken: out.TTFT, Total: out.Total, ResponseBytes: responseBytes,
		Transfer: requestlog.Transfer{State: out.Transfer.State, Bytes: out.Transfer.Bytes, Span: requestlog.Span{Took: out.Transfer.Delay}},
	}, out.PromptTokens)
}
