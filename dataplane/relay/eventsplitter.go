package relay

import "math"

// EventSplitter cuts a server-sent event stream into events, fed in pieces cut anywhere.
// The zero value is ready; Drop gives back what it holds at the end.
type EventSplitter struct {
	// Most bytes an event in several pieces may have; 0: 64 KiB.
	MaxEvent int

	framer   eventFramer
	returned bool // the last event has been given out
}

// Next takes bytes from p up to the end of the present event. It gives how many
// it took, the event with its empty line when it is complete (borrowed until the
// next call and until p changes), and whether one too large to be held has ended.
func (e *EventSplitter) Next(p []byte) (n int, event []byte, tooBig bool) {
	if e.returned {
		e.Release()
	}
	if len(p) == 0 {
		return 0, nil, false
	}
	e.framer.maxEvent = int32(min(e.MaxEvent, math.MaxInt32))
	n, event, tooBig = e.framer.next(p)
	e.returned = event != nil
	return n, event, tooBig
}

// Release gives the memory of an unfinished event back.
func (e *EventSplitter) Release() {
	e.framer.release()
	e.returned = false
}
