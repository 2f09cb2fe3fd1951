package disagg

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

// maxBeginning bounds what is held of a stream to learn how it begins.
const maxBeginning = 32 << 10

var (
	dataLine = []byte("data: ")
	// errorData opens the event of a request that failed, errorFlat TensorRT-LLM's and that of
	// vLLM up to 0.10.0; Messages and Responses name theirs.
	errorData  = []byte(`{"error"`)
	errorFlat  = []byte(`{"object":"error"`)
	errorNamed = []byte("event: error")
	// These events say that an answer begins and nothing of it. vLLM (0.13 and later)
	// sends a chat's before it looks how the engine ended, so an error may follow.
	roleOnly     = []byte(`"role":"assistant","content":""`)
	messageStart = []byte("event: message_start")
	crlfEnd      = []byte("\r\n\r\n")
	lineEnd      = crlfEnd[:2]
	lastData     = []byte("[DONE]")
)

// firstEvent is the first event of a stream, in whatever framing, that says more than that
// an answer begins, with what stands before it; whole: it is all there.
func firstEvent(seen []byte) (event []byte, whole bool) {
	for {
		end, size := bytes.Index(seen, eventEnd), len(eventEnd)
		if i := bytes.Index(seen, crlfEnd); i >= 0 && (end < 0 || i < end) {
			end, size = i, len(crlfEnd) // the last chunk's end too: nothing comes behind it
		}
		if end < 0 {
			return seen, false
		}
		if event = seen[:end]; !bytes.Contains(event, messageStart) && (!bytes.Contains(event, roleOnly) || bytes.Contains(event, toolCalls)) {
			return event, true
		}
		seen = seen[end+size:]
	}
}

// toolCalls: some engines tell the first call with the role.
var toolCalls = []byte(`"tool_calls":[`)

// errUnsaid is that of a stream which its engine ended well framed, and without a word.
var errUnsaid = errors.New("the engine ended the stream before it said anything")

// saysNothing says whether a chunked stream is over whose beginning says no more than that an
// answer begins, or the half of an event. seen has the framing.
func saysNothing(seen []byte) bool {
	event, whole := firstEvent(seen)
	last, over := bytes.CutSuffix(event, []byte("0"))
	return whole && over && (len(last) == 0 || bytes.HasSuffix(last, lineEnd)) && bytes.HasSuffix(seen, crlfEnd) &&
		!bytes.Contains(last, lastData)
}

// failsAtOnce is the status of an error with which a stream begins, 500 where it names
// none, else 0. seen is the stream's beginning in whatever framing.
func failsAtOnce(seen []byte) int {
	event, _ := firstEvent(seen)
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
	if n := statusIn(data, "code"); n != 0 {
		return n
	}
	if kind, ok, _ := jsonscan.Find(data, "type"); ok {
		return relay.AnthropicStatus(data[kind.Start:kind.End])
	}
	return 500
}

// isError says whether an event is an engine's error, however its members are written and
// whatever stands before them.
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

// abortStatus is the status that meta_info.finish_reason tells, 0 for none and for an abort
// that was asked for. With it ends a sequence of SGLang's /generate whose KV did not come: an
// event like any other, with the status that a whole answer would have had.
func abortStatus(data []byte) int {
	for _, name := range [...]string{"meta_info", "finish_reason"} {
		v, _, err := jsonscan.Find(data, name)
		if err != nil || v.Kind != jsonscan.Object {
			return 0
		}
		data = data[v.Start:v.End]
	}
	return statusIn(data, "status_code")
}

// statusIn is an HTTP status of an error in a member of object, 0 for none.
func statusIn(object []byte, name string) int {
	if code, ok, _ := jsonscan.Find(object, name); ok {
		if n := atoi(string(bytes.Trim(object[code.Start:code.End], `"`))); n >= 400 && n < 600 {
			return n
		}
	}
	return 0
}

// awaitsBeginning says whether a stream is looked at before anything of it goes to the
// client: where a hand-over may be lost, where what follows repeats its first event, and
// where it could be run again and could not go on elsewhere later, unless comments are to
// go out from the engine's head on.
func (q *request) awaitsBeginning(leg schedule.Leg, resp *upstream.Response, rank *worker.Rank) bool {
	switch {
	case q.beside != nil, q.pair.Trial, q.told, q.taking != nil, q.vigil.watches(), q.firstByText(), q.mayHold(resp):
		return true
	}
	return resp.Status == 200 && isEvents(resp) && !q.goesOn(resp) && !q.x.Comments() && q.triesLeft() && q.knowsOthers(leg, rank)
}

// knowsOthers says whether a leg could be run on another rank than one: on one that is ready,
// or that may be by the time it is needed.
func (q *request) knowsOthers(leg schedule.Leg, but *worker.Rank) bool {
	if q.others(q.candidates(leg), but) {
		return true
	}
	workers := 0
	for role, n := range q.pool.Members {
		if q.takes(leg, worker.Role(role)) {
			workers += n
		}
	}
	return workers > 1
}

// goesOn says whether the stream will be carried (see carry), who then takes care of what
// befalls it from its first byte on. Where the prompt's ids are to come with the first
// event it cannot before that.
func (q *request) goesOn(resp *upstream.Response) bool {
	return q.unmovable == "" && q.knowsPrompt() && (q.why == "" || q.why == "engine" && q.ownIDs()) && resp.ContentLength == upstream.LengthChunked
}

// beginning waits for as much of a stream as tells how it begins; declined says that a
// trial is. What is no stream of events is held whole, see holdWhole; where it cannot be, it
// begins with its first bytes.
func (q *request) beginning(resp *upstream.Response) (seen []byte, declined bool, err error) {
	events := isEvents(resp)
	if q.mayHold(resp) {
		if seen, q.whole, err = q.holdWhole(resp); q.whole || err != nil || !q.pair.Trial {
			return seen, false, err
		}
	}
	seen, err = resp.Peek()
	for err == nil && len(seen) < maxBeginning {
		more := false
		if q.pair.Trial {
			declined, more = q.plan.Family.(Trier).Declined(seen)
		} else if events {
			_, whole := firstEvent(seen)
			more = !whole
		}
		if !more {
			break
		}
		have := len(seen)
		if seen, err = resp.PeekMore(maxBeginning); len(seen) == have {
			if err == nil && resp.ContentLength == upstream.LengthToClose && resp.Status == 200 && !bytes.Contains(seen, lastData) {
				err = errUnsaid // the connection has ended
			}
			break
		}
	}
	return seen, declined, err
}

// firstBytes waits for the beginning of a stream, before anything of it goes
// to the client: until then a pair that breaks can be run again, and a trial
// can be declined. on says that the stream is to be relayed.
func (q *request) firstBytes(leg schedule.Leg, choice *schedule.Choice, call *upstream.Call, resp *upstream.Response, began time.Time) (end legEnd, on bool) {
	q.x.OnGone(q.cutBoth(call))
	defer q.x.OnGone(nil)
	_ = resp.SetReadDeadline(time.Now().Add(q.r.opt().Timeouts.StreamIdle))
	seen, declined, err := q.beginning(resp)
	if !isEvents(resp) {
		seen = nil // it has no events to look for
	}
	if err == nil && !declined && resp.Status == 200 && isEvents(resp) && resp.ContentLength == upstream.LengthChunked && saysNothing(seen) {
		err = errUnsaid
	}
	if err == nil && !declined && q.beside == nil && q.told && failsAtOnce(seen) > 0 && q.wait.Await() {
		defer choice.Reservation.Release()
		defer resp.Release()
		return q.lostOn(choice.Rank, time.Since(began)), false
	}
	if b := q.beside; err == nil && b != nil {
		if status := failsAtOnce(seen); worthRetry(status) {
			if err = fmt.Errorf("its stream begins with an error of status %d", status); bytes.Contains(seen, transferError) {
				err = errTransfer
			}
		} else if bytes.Contains(seen, dataLine) && !b.arrived() {
			err = upstream.ErrCut
		} else if resp.Status == 200 {
			err = q.join()
		}
	}
	if err == nil && !declined && q.beside == nil && q.beginsBadly(leg, choice.Rank, seen) {
		defer choice.Reservation.Release()
		defer resp.Release()
		reclaimBehind(q.given, q.grace())
		q.given = nil
		q.r.opt().Observer.LegEnded(leg, choice.Rank.ID, string(front.UpstreamFailed), time.Since(began))
		return legAgain, false
	}
	if err == nil && !declined && q.settle() {
		return legAnswered, true
	}
	defer choice.Reservation.Release()
	defer resp.Release()
	if err != nil {
		reclaimBehind(q.given, q.grace())
		q.given = nil
	}
	opt, took := q.r.opt(), time.Since(began)
	switch {
	case declined:
		opt.Observer.LegEnded(leg, choice.Rank.ID, "ok", took)
		return q.declined(choice.Rank), false
	case q.beside != nil:
		return q.pairBroke(choice, call, err, took), false
	}
	return q.brokeOff(leg, choice.Rank, call, err, took), false
}

// beginsBadly says whether a stream whose first event is an error may be run again; where
// it may not, what the engine says is the client's to see.
func (q *request) beginsBadly(leg schedule.Leg, rank *worker.Rank, seen []byte) bool {
	status := failsAtOnce(seen)
	if !worthRetry(status) || !q.settle() {
		return false
	}
	q.r.opt().Fleet.Answered(rank, status)
	dies := diedOf(status, seen)
	q.note(rank, legName(leg), failure{reason: front.UpstreamFailed, suspect: dies, down: dies}, fmt.Errorf("its stream begins with an error of status %d", status))
	return q.mayRunAgain(leg, dies)
}
