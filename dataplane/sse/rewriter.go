package sse

// Rewriter changes the events of one stream on their way to the client: it removes private members
// or converts events to another shape. Its methods are called by one goroutine at a time.
type Rewriter interface {
	// Event appends to dst what the client gets in place of one event. event includes the empty
	// line and is borrowed. If nothing is appended the event is dropped. Comments and "data:
	// [DONE]" are events too.
	Event(dst, event []byte) []byte
}

// LargeEventRewriter is a Rewriter of events that may be longer than 64 KiB.
type LargeEventRewriter interface {
	// MaxEvent returns the largest event accepted, in bytes. A longer one ends the stream with an
	// error event.
	MaxEvent() int
}

// MaxLargeEvent bounds an event of a stream with a Migration. The first event holds the ids of
// the prompt.
const MaxLargeEvent = 8 << 20
