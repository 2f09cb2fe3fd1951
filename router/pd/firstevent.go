package pd

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
	"sluice/dataplane/upstream"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// maxFirstEvent bounds how much of a stream the runner reads to learn how it begins, in bytes.
const maxFirstEvent = 32 << 10

var (
	dataLine = []byte("data: ")
	// errorData begins the event of a failed request; errorFlat begins that of TensorRT-LLM and of
	// vLLM up to 0.10.0. Messages and Responses name the event.
	errorData  = []byte(`{"error"`)
	errorFlat  = []byte(`{"object":"error"`)
	errorNamed = []byte("event: error")
	// These events announce a response and contain none of it. vLLM (0.13 and later) sends that of
	// a chat before the engine core has a result, so an error may follow.
	roleOnly     = []byte(`"role":"assistant","content":""`)
	messageStart = []byte("event: message_start")
	crlfEnd      = []byte("\r\n\r\n")
	lineEnd      = crlfEnd[:2]
	lastData     = []byte("[DONE]")
)

// firstEvent returns the first event of a stream that does more than announce a response, together
// with what precedes it. The stream may have chunk framing. complete reports whether the whole
// event has arrived.
func firstEvent(prefix []byte) (event []byte, complete bool) {
	for {
		end, size := bytes.Index(prefix, eventEnd), len(eventEnd)
		if i := bytes.Index(prefix, crlfEnd); i >= 0 && (end < 0 || i < end) {
			end, size = i, len(crlfEnd) // this also ends the last chunk, and nothing follows it
		}
		if end < 0 {
			return prefix, false
		}
		if event = prefix[:end]; !bytes.Contains(event, messageStart) && (!bytes.Contains(event, roleOnly) || bytes.Contains(event, toolCalls)) {
			return event, true
		}
		prefix = prefix[end+size:]
	}
}

// toolCalls: some engines send the first tool call with the role.
var toolCalls = []byte(`"tool_calls":[`)

// errNoOutput reports that the engine ended a well-framed stream without any output.
var errNoOutput = errors.New("the engine ended the stream before it said anything")

// endsWithoutOutput reports whether a chunked stream has ended with no more than the announcement
// of a response or a part of an event. prefix includes the framing.
func endsWithoutOutput(prefix []byte) bool {
	event, complete := firstEvent(prefix)
	last, over := bytes.CutSuffix(event, []byte("0"))
	return complete && over && (len(last) == 0 || bytes.HasSuffix(last, lineEnd)) && bytes.HasSuffix(prefix, crlfEnd) &&
		!bytes.Contains(last, lastData)
}

// initialErrorStatus returns the status of the error with which a stream begins, 500 for an error
// without a status, and 0 for no error. prefix is the beginning of the stream, with or without
// chunk framing.
func initialErrorStatus(prefix []byte) int {
	event, _ := firstEvent(prefix)
	i := bytes.Index(event, dataLine)
	if i < 0 {
		return 0
	}
	data := event[i+len(dataLine):]
	if n := abortStatus(data); n != 0 {
		return n
	}
	if !bytes.HasPrefix(data, errorData) && !bytes.HasPrefix(data, errorFlat) && !bytes.Contains(event[:i], errorNamed) && !isError(data) {
		return 0
	}
	if inner, ok, _ := jsonscan.Find(data, "error"); ok && inner.Kind == jsonscan.Object {
		data = data[inner.Start:inner.End]
	}
	if n := statusMember(data, "code"); n != 0 {
		return n
	}
	if kind, ok, _ := jsonscan.Find(data, "type"); ok {
		return relay.AnthropicStatus(data[kind.Start:kind.End])
	}
	return 500
}

// isError reports whether an event is an engine's error, regardless of the escaping and order of
// its members.
func isError(data []byte) bool {
	if v, _, err := jsonscan.Find(data, "error"); err != nil || v.Kind > jsonscan.Null {
		return err == nil
	}
	for _, name := range [...]string{"object", "type"} {
		if v, _, err := jsonscan.Find(data, name); err == nil && v.Kind == jsonscan.String && string(jsonscan.Unquote(nil, data[v.Start:v.End])) == "error" {
			return true
		}
	}
	return false
}

// abortStatus returns the status in meta_info.finish_reason. It returns 0 if there is none or the
// client requested the abort. SGLang's /generate ends a sequence whose KV did not arrive in this
// way: in an ordinary event, with the status that a non-streaming response would have.
func abortStatus(data []byte) int {
	for _, name := range [...]string{"meta_info", "finish_reason"} {
		v, _, err := jsonscan.Find(data, name)
		if err != nil || v.Kind != jsonscan.Object {
			return 0
		}
		data = data[v.Start:v.End]
	}
	return statusMember(data, "status_code")
}

// abortedStatus returns the first status of 500 or more that a non-streaming response of SGLang's
// /generate reports, 0 if it reports none. The engine sends such a response with status 200. It is
// an object, an array with one object per prompt and choice of a batch, or the events of a stream
// of known length.
func abortedStatus(body []byte) int {
	body = bytes.TrimSpace(body)
	switch {
	case bytes.HasPrefix(body, dataLine):
		return initialErrorStatus(body)
	case len(body) == 0 || body[0] != '[':
		return abortStatus(body)
	}
	for it := jsonscan.Walk(body); it.Next(); {
		if n := abortStatus(it.Raw()); n >= 500 {
			return n
		}
	}
	return 0
}

// statusMember returns the HTTP error status in a member of object, 0 if there is none.
func statusMember(object []byte, name string) int {
	if code, ok, _ := jsonscan.Find(object, name); ok {
		if n := atoi(string(bytes.Trim(object[code.Start:code.End], `"`))); n >= 400 && n < 600 {
			return n
		}
	}
	return 0
}

// inspectsFirstEvent reports whether the runner waits for the first event of a stream before the
// client gets anything: if a hand-over may be lost, if later events repeat the first, or if the
// request could run again now but the stream could not migrate later. The last does not apply if
// keep-alive comments start with the engine's head.
func (q *request) inspectsFirstEvent(l *leg, resp *upstream.Response) bool {
	switch {
	case q.concurrent != nil, q.handover.Trial, q.hasConnector, q.resumption != nil, q.downMonitor.inUse(), q.repeatsFirstEvent(), q.mayHold(resp):
		return true
	}
	return resp.Status == 200 && isEventStream(resp) && !q.isResumable(resp) && !q.x.SendsComments() && q.triesLeft() && q.hasAlternative(l.kind, l.rank)
}

// hasAlternative reports whether a leg could run on a rank other than except that is ready or may
// become ready in time.
func (q *request) hasAlternative(leg schedule.LegKind, except *worker.Rank) bool {
	if q.hasOtherCandidate(q.candidates(leg), except) {
		return true
	}
	workers := 0
	for role, n := range q.pool.Members {
		if q.roleServes(leg, worker.Role(role)) {
			workers += n
		}
	}
	return workers > 1
}

// isResumable reports whether the stream can migrate from its first byte on (see
// newMigrationState), so that a failure needs no retry here. A stream whose first event must bring
// the prompt's ids cannot migrate before that event.
func (q *request) isResumable(resp *upstream.Response) bool {
	return q.unmigratable == "" && q.hasExactPrompt() && (q.legUnmigratable == "" || q.legUnmigratable == "engine" && q.clientWantsIDs()) && resp.ContentLength == upstream.LengthChunked
}

// readFirstEvent waits until it is clear how a stream begins. declined reports that a trial decode
// declined. It reads a response that is no event stream whole (holdWhole), or else only its first
// bytes.
func (q *request) readFirstEvent(resp *upstream.Response) (prefix []byte, declined bool, err error) {
	events := isEventStream(resp)
	if q.mayHold(resp) {
		if prefix, q.whole, err = q.holdWhole(resp); q.whole || err != nil || !q.handover.Trial {
			return prefix, false, err
		}
	}
	prefix, err = resp.Peek()
	for err == nil && len(prefix) < maxFirstEvent {
		more := false
		if q.handover.Trial {
			declined, more = q.plan.Family.(TrialFamily).Declined(prefix)
		} else if events {
			_, complete := firstEvent(prefix)
			more = !complete
		}
		if !more {
			break
		}
		have := len(prefix)
		if prefix, err = resp.PeekMore(maxFirstEvent); len(prefix) == have {
			if err == nil && resp.ContentLength == upstream.LengthToClose && resp.Status == 200 && !bytes.Contains(prefix, lastData) {
				err = errNoOutput // the connection has ended
			}
			break
		}
	}
	return prefix, declined, err
}

// awaitFirstEvent waits for the beginning of a stream before the client gets any of it. Until then
// a pair that fails can run again, and a trial can decline. on reports that the caller must relay
// the stream.
func (q *request) awaitFirstEvent(l *leg, resp *upstream.Response) (end legEnd, on bool) {
	q.armAbort(l, phaseAnswer)
	defer q.x.OnClientGone(nil)
	_ = resp.SetReadDeadline(time.Now().Add(q.settings.Timeouts.StreamIdle))
	prefix, declined, err := q.readFirstEvent(resp)
	if !isEventStream(resp) {
		prefix = nil // there are no events to look for
	}
	if err == nil && !declined && resp.Status == 200 && isEventStream(resp) && resp.ContentLength == upstream.LengthChunked && endsWithoutOutput(prefix) {
		err = errNoOutput
	}
	if err == nil && !declined && q.concurrent == nil && q.hasConnector && initialErrorStatus(prefix) > 0 && q.transfer.AwaitLoss() {
		defer resp.Release()
		return q.endLostHandover(l), false
	}
	if b := q.concurrent; err == nil && b != nil {
		if status := initialErrorStatus(prefix); isRetryableStatus(status) {
			if err = fmt.Errorf("its stream begins with an error of status %d", status); bytes.Contains(prefix, transferError) {
				err = errTransfer
			}
		} else if bytes.Contains(prefix, dataLine) && !b.completeHandover() {
			err = upstream.ErrCancelled
		} else if resp.Status == 200 {
			err = q.awaitPrefillAnswer()
		}
	}
	if err == nil && !declined && q.concurrent == nil && q.retriesInitialError(l, prefix) {
		defer resp.Release()
		q.kv.setGrace(q.cutGrace(l))
		q.kv.on(kvGivenUp)
		l.end(string(front.UpstreamFailed))
		return legRetry, false
	}
	if err == nil && !declined && q.acceptAnswer() {
		return legAnswered, true
	}
	defer resp.Release()
	if err != nil {
		q.kv.setGrace(q.cutGrace(l))
		q.kv.on(kvGivenUp)
	}
	switch {
	case declined:
		l.end("ok")
		return q.trialDeclined(l.rank), false
	case q.concurrent != nil:
		return q.handleConcurrentFailure(l, err), false
	}
	return q.handleBrokenAnswer(l, err), false
}

// retriesInitialError reports whether a request runs again whose stream begins with an error. If
// not, the client gets the engine's error.
func (q *request) retriesInitialError(l *leg, prefix []byte) bool {
	status := initialErrorStatus(prefix)
	if !isRetryableStatus(status) || !q.acceptAnswer() {
		return false
	}
	q.settings.Fleet.ReportStatus(l.rank, status)
	died := engineDied(status, prefix)
	q.applyFailure(l.rank, legName(l.kind), failure{reason: front.UpstreamFailed, suspect: died, down: died}, fmt.Errorf("its stream begins with an error of status %d", status))
	return q.mayRetry(l.kind, died)
}
