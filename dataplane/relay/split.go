package relay

import "math"

// Events cuts a server-sent event stream into events, fed in pieces cut anywhere.
// The zero value is ready; Drop gives back what it holds at the end.
type Events struct {
	// Most bytes an event in several pieces may have; 0: 64 KiB.
	Most int

	f     framer
	whole bool // the last event has been given out
}

// Next takes bytes from p up to the end of the present event. It gives how many
// it took, the event with its empty line when it is complete (borrowed until the
// next call and until p changes), and whether one too large to be held has ended.
func (e *Events) Next(p []byte) (n int, event []byte, tooBig bool) {
	if e.whole {
		e.Drop()
	}
	e.f.most = int32(min(e.Most, math.MaxInt32))
	n, event, tooBig = e.f.next(p)
	e.whole = event != nil
	return n, event, tooBig
}

// Drop gives the memory of an unfinished event back.
func (e *Events) Drop() {
	e.f.drop()
	e.whole = false
}
