package family

import (
	"bytes"
	"slices"
	"strconv"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/sse"
)

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

// FirstEvent returns the first event of a stream that does more than announce a response, with
// the framing before it. Comments are not events. The stream may have chunk framing. complete
// reports whether the whole event has arrived.
func FirstEvent(prefix []byte) (event []byte, complete bool) {
	for {
		end, size := bytes.Index(prefix, eventEnd), len(eventEnd)
		if i := bytes.Index(prefix, crlfEnd); i >= 0 && (end < 0 || i < end) {
			end, size = i, len(crlfEnd) // this also ends the last chunk, and nothing follows it
		}
		if end < 0 {
			return prefix, false
		}
		if event = prefix[:end]; !bytes.Contains(event, messageStart) && (!bytes.Contains(event, roleOnly) || bytes.Contains(event, toolCalls)) && !isComment(event) {
			return event, true
		}
		prefix = prefix[end+size:]
	}
}

// toolCalls: some engines send the first tool call with the role.
var toolCalls = []byte(`"tool_calls":[`)

// isComment reports whether the lines between two empty lines are comments only, apart from the
// sizes of chunks. Lines that end with the last chunk are the end of the stream.
func isComment(lines []byte) bool {
	comment := false
	for line := range bytes.Lines(lines) {
		switch line = bytes.TrimRight(line, "\r\n"); {
		case len(line) == 0 || string(line) != "0" && isChunkSize(line):
		case line[0] == ':':
			comment = true
		default:
			return false
		}
	}
	return comment
}

// isChunkSize reports whether line is the size of a chunk, possibly with an extension.
func isChunkSize(line []byte) bool {
	size, _, _ := bytes.Cut(line, []byte{';'})
	_, err := strconv.ParseUint(string(bytes.TrimRight(size, " ")), 16, 63)
	return err == nil
}

// BeginsWithComment reports whether a stream begins with a comment.
func BeginsWithComment(prefix []byte) bool {
	for line := range bytes.Lines(prefix) {
		if line = bytes.TrimRight(line, "\r\n"); len(line) > 0 && !isChunkSize(line) {
			return line[0] == ':'
		}
	}
	return false
}

// EndsWithoutOutput reports whether a chunked stream has ended with no more than the announcement
// of a response or a part of an event. prefix includes the framing.
func EndsWithoutOutput(prefix []byte) bool {
	event, complete := FirstEvent(prefix)
	last, over := bytes.CutSuffix(event, []byte("0"))
	return complete && over && (len(last) == 0 || bytes.HasSuffix(last, lineEnd)) && bytes.HasSuffix(prefix, crlfEnd) &&
		!bytes.Contains(last, lastData)
}

// InitialErrorStatus returns the status of the error with which a stream begins, 500 for an error
// without a status, and 0 for no error. prefix is the beginning of the stream, with or without
// chunk framing.
func InitialErrorStatus(prefix []byte) int {
	event, _ := FirstEvent(prefix)
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
		return sse.AnthropicStatus(data[kind.Start:kind.End])
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
		if v, _, err := jsonscan.Find(data, name); err == nil && v.Kind == jsonscan.String && string(jsonscan.Text(data[v.Start:v.End])) == "error" {
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

// AbortedStatus returns the first status of 500 or more that a non-streaming response of SGLang's
// /generate reports, 0 if it reports none. The engine sends such a response with status 200. It is
// an object, an array with one object per prompt and choice of a batch, or the events of a stream
// of known length.
func AbortedStatus(body []byte) int {
	body = bytes.TrimSpace(body)
	switch {
	case bytes.HasPrefix(body, dataLine):
		return InitialErrorStatus(body)
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

// RetryableStatus reports whether a status is about the worker's state and not about the
// request.
func RetryableStatus(status int) bool {
	return status == 500 || status == 502 || status == 503 || status == 504 || status == 429
}

// engineDeadMarkers appear in the last response of an engine, a 500: its core process is dead and
// its HTTP server is about to exit (vLLM, EngineDeadError).
var engineDeadMarkers = [...][]byte{[]byte("EngineCore encountered an issue"), []byte("EngineDeadError")}

// EngineDied reports whether a response says that the engine is about to exit.
func EngineDied(status int, body []byte) bool {
	if status != 500 {
		return false
	}
	for _, d := range engineDeadMarkers {
		if bytes.Contains(body, d) {
			return true
		}
	}
	return false
}

var kvTransferParams = []byte(`"kv_transfer_params"`)

// RedactHandle replaces a KV handle in a decode engine's response with null. Bidirectional engines
// send such a handle, and it names internal hosts. RedactHandle modifies body.
func RedactHandle(body []byte) []byte {
	if !containsHandle(body) {
		return body
	}
	v, ok, err := jsonscan.Find(body, "kv_transfer_params")
	if err != nil || !ok || v.Kind <= jsonscan.Null {
		return body
	}
	return slices.Replace(body, v.Start, v.End, 'n', 'u', 'l', 'l')
}

// containsHandle reports whether body may contain a non-null handle. vLLM writes a null handle into
// every response; this check avoids a JSON scan of those responses.
func containsHandle(body []byte) bool {
	for {
		at := bytes.Index(body, kvTransferParams)
		if at < 0 {
			return false
		}
		body = body[at+len(kvTransferParams):]
		if !bytes.HasPrefix(body, []byte(":null")) {
			return true
		}
	}
}

// transferError occurs in the 500 response of an SGLang decode engine whose KV did not arrive,
// because the prefill engine or the network between them is gone.
var transferError = []byte("KVTransferError(")

// TransferFailed reports whether a decode engine's response or stream says that the KV did not arrive.
func TransferFailed(answer []byte) bool { return bytes.Contains(answer, transferError) }

// SaysDone reports whether the beginning of a stream contains the stream's last event.
func SaysDone(prefix []byte) bool { return bytes.Contains(prefix, lastData) }

// HasEvent reports whether the beginning of a stream contains an event.
func HasEvent(prefix []byte) bool { return bytes.Contains(prefix, dataLine) }
