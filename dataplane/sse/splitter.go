package sse

import "math"

// Splitter splits a server-sent event stream, cut anywhere, into events. The zero value is
// ready to use. Release frees its memory at the end. It must not be used by several goroutines.
type Splitter struct {
	// MaxEvent bounds an event that is spread over several pieces, in bytes; 0: 64 KiB.
	MaxEvent int

	framer   Framer
	returned bool // the last event has been returned
}

// Next consumes p up to the end of the present event. It returns the number of bytes consumed, the
// event with its empty line when it is complete (borrowed until the next call and until p changes),
// and whether an event beyond MaxEvent has ended.
func (e *Splitter) Next(p []byte) (n int, event []byte, tooBig bool) {
	if e.returned {
		e.Release()
	}
	if len(p) == 0 {
		return 0, nil, false
	}
	e.framer.MaxEvent = int32(min(e.MaxEvent, math.MaxInt32))
	n, event, tooBig = e.framer.Next(p)
	e.returned = event != nil
	return n, event, tooBig
}

// Release frees the memory of a partial event.
func (e *Splitter) Release() {
	e.framer.Release()
	e.returned = false
}
