package sse

import (
	"bytes"

	"sluice/dataplane/ascii"
)

// Protocol is the event protocol of a stream. It decides what an error event looks like and what
// ends a complete stream.
type Protocol uint8

// The protocols.
const (
	OpenAI    Protocol = iota // data: {…}, ends with data: [DONE]
	Anthropic                 // event: …, no [DONE]
	Responses                 // event: …, no [DONE]
	Opaque                    // not an event stream: bytes pass, nothing is scanned
)

var eventStreamType = []byte("text/event-stream")

// IsEventStream reports whether a Content-Type is that of server-sent events.
func IsEventStream(contentType []byte) bool {
	n := len(eventStreamType)
	return len(contentType) >= n && ascii.EqualFold(contentType[:n], eventStreamType) &&
		(len(contentType) == n || contentType[n] == ';' || contentType[n] == ' ')
}

// The beginnings of an event's lines, and the data of the last event of OpenAI's protocols.
var (
	DataPrefix  = []byte("data:")
	EventPrefix = []byte("event:")
	DoneData    = []byte("[DONE]")
)

// EventData returns the data of an event that has exactly one data line; nil for others.
func EventData(event []byte) []byte {
	var data []byte
	for len(event) > 0 {
		line := event
		if i := bytes.IndexByte(event, '\n'); i >= 0 {
			line, event = event[:i], event[i+1:]
		} else {
			event = nil
		}
		line = bytes.TrimSuffix(line, []byte{'\r'})
		if !bytes.HasPrefix(line, DataPrefix) {
			continue
		}
		if data != nil {
			return nil
		}
		data = FieldValue(line[len(DataPrefix):])
	}
	return data
}

// FieldValue removes the one space that the format allows after the colon. It never returns nil.
func FieldValue(b []byte) []byte {
	if len(b) > 0 && b[0] == ' ' {
		return b[1:]
	}
	return b
}
