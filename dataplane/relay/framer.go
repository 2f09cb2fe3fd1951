package relay

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// maxPartialEvent bounds what is kept of an event that is spread over several reads.
const maxPartialEvent = 64 << 10

// eventFramer cuts a server-sent event stream into events, fed in pieces cut
// anywhere. An event in one piece is looked at where it lies; only one spread
// over pieces is copied, into a carry buffer of at most maxPartialEvent bytes. What is
// longer goes by uncollected, or thinned by the scan. LF and CRLF end lines; an empty line an event.
type eventFramer struct {
	partial   *membudget.Buffer // the event's bytes so far; nil: none
	maxEvent  int32             // the bound; 0: maxPartialEvent
	line      lineState
	oversized bool // the present event is beyond the bound
	// What is carried when an event goes beyond the bound stays: its owner goes on with
	// it, and drops it at its end.
	keepsOversized bool
}

// lineState is what the present line holds so far.
type lineState uint8

const (
	lineEmpty lineState = iota
	lineCR              // one carriage return
	lineText
)

// next takes bytes from p up to the end of the present event. It gives how
// many it took, the event when it is complete (borrowed until the next call
// and until p changes), and whether an event over the bound has ended.
func (f *eventFramer) next(p []byte) (n int, event []byte, tooBig bool) {
	n, complete := f.scan(p)
	if !complete {
		f.addPartial(p[:n])
		return n, nil, false
	}
	if f.oversized {
		f.oversized = false
		return n, nil, true
	}
	if f.partial == nil {
		return n, p[:n], false
	}
	f.addPartial(p[:n])
	if f.oversized {
		f.oversized = false
		return n, nil, true
	}
	return n, f.partial.B, false
}

// scan finds the end of the line that is empty.
func (f *eventFramer) scan(p []byte) (n int, complete bool) {
	for n < len(p) {
		i := bytes.IndexByte(p[n:], '\n')
		if i < 0 {
			rest := p[n:]
			if f.line == lineEmpty && len(rest) == 1 && rest[0] == '\r' {
				f.line = lineCR
			} else {
				f.line = lineText
			}
			return len(p), false
		}
		empty := f.line == lineEmpty && (i == 0 || i == 1 && p[n] == '\r') || f.line == lineCR && i == 0
		f.line = lineEmpty
		n += i + 1
		if empty {
			return n, true
		}
	}
	return n, false
}

// addPartial copies p behind what is carried.
func (f *eventFramer) addPartial(p []byte) {
	if f.oversized || len(p) == 0 {
		return
	}
	have := 0
	if f.partial != nil {
		have = len(f.partial.B)
	}
	if have+len(p) > max(int(f.maxEvent), maxPartialEvent) {
		if f.oversized = true; !f.keepsOversized {
			f.release()
		}
		return
	}
	if f.partial == nil || have+len(p) > cap(f.partial.B) {
		bigger := membudget.Default.Get(have + len(p))
		if f.partial != nil {
			copy(bigger.B, f.partial.B)
			membudget.Default.Put(f.partial)
		}
		f.partial = bigger
	}
	f.partial.B = f.partial.B[:have+len(p)]
	copy(f.partial.B[have:], p)
}

// release gives the carry buffer back; called when an event was looked at.
func (f *eventFramer) release() {
	if f.partial != nil {
		membudget.Default.Put(f.partial)
		f.partial = nil
	}
}

// atBoundary says whether the stream stands behind a whole event.
func (f *eventFramer) atBoundary() bool {
	return f.partial == nil && !f.oversized && f.line == lineEmpty
}
