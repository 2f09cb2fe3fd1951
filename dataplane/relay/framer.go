package relay

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// maxPartialEvent bounds the bytes that are kept of an event spread over several reads.
const maxPartialEvent = 64 << 10

// eventFramer splits a server-sent event stream into events. Its input may be cut anywhere.
// An event that lies in one piece is returned where it lies. Only an event spread over several
// pieces is copied, up to maxEvent bytes.
// LF, CRLF and CR each end a line, and may be mixed. An empty line ends an event.
// The caller passes its input through normalize first, which leaves no CR inside a piece that ends
// a line by itself.
type eventFramer struct {
	partial   *membudget.Buffer // the bytes of the present event so far; nil: none
	maxEvent  int32             // the bound; 0: maxPartialEvent
	line      lineState
	oversized bool // the present event is beyond the bound
	// keepsOversized: partial stays when an event goes beyond the bound. The owner then
	// changes it, and releases it at the event's end.
	keepsOversized bool
	loneCR         bool // a line of this stream has ended with CR alone
}

// lineState is what the present line holds so far.
type lineState uint8

const (
	lineEmpty lineState = iota
	lineCR              // one carriage return
	lineText
	lineTextCR // text, then a carriage return as the last byte of a piece
	lineSkipLF // an event has ended with CR: an LF at the beginning of the next piece is part of it
)

// normalize replaces each carriage return in p that ends a line by itself with LF, so that only LF
// and CRLF are left to look for. It never changes the last byte of p, because the next piece may
// begin with LF.
func (f *eventFramer) normalize(p []byte) {
	for at := 0; ; at++ {
		i := bytes.IndexByte(p[at:], '\r')
		if i < 0 {
			return
		}
		if at += i; at+1 == len(p) {
			return
		}
		if p[at+1] != '\n' {
			p[at], f.loneCR = '\n', true
		}
	}
}

// next consumes p, which is not empty, up to the end of the present event. It returns the number
// of bytes consumed, the event when it is complete (borrowed until the next call and until p
// changes), and whether an event beyond the bound has ended. n is 0 where an event turns out to
// have ended before p.
func (f *eventFramer) next(p []byte) (n int, event []byte, tooBig bool) {
	complete := false
	switch f.line {
	case lineSkipLF:
		if f.line = lineEmpty; p[0] == '\n' {
			return 1, nil, false
		}
	case lineCR, lineTextCR:
		if p[0] != '\n' {
			complete = f.endLineAtCR()
		}
	}
	if !complete {
		n, complete = f.scan(p)
	}
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

// endLineAtCR ends the line whose last byte, a carriage return, was the last of the piece before.
// It returns whether that line was empty.
func (f *eventFramer) endLineAtCR() (empty bool) {
	empty, f.line, f.loneCR = f.line == lineCR, lineEmpty, true
	if f.partial != nil {
		if n := len(f.partial.B); n > 0 && f.partial.B[n-1] == '\r' {
			f.partial.B[n-1] = '\n'
		}
	}
	return empty
}

// scan finds the end of the line that is empty.
func (f *eventFramer) scan(p []byte) (n int, complete bool) {
	for n < len(p) {
		i := bytes.IndexByte(p[n:], '\n')
		if i < 0 {
			rest := p[n:]
			switch {
			case f.line == lineEmpty && len(rest) == 1 && rest[0] == '\r':
				if f.loneCR { // do not wait for an LF that may never come
					f.line = lineSkipLF
					return len(p), true
				}
				f.line = lineCR
			case rest[len(rest)-1] == '\r':
				f.line = lineTextCR
			default:
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

// addPartial appends p to the partial event.
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

// release returns the memory of the partial event. It is called when the event has been handled.
func (f *eventFramer) release() {
	if f.partial != nil {
		membudget.Default.Put(f.partial)
		f.partial = nil
	}
}

// atBoundary reports whether the input so far ends with a whole event.
func (f *eventFramer) atBoundary() bool {
	return f.partial == nil && !f.oversized && (f.line == lineEmpty || f.line == lineSkipLF)
}

// partialSize returns the memory of the partial event.
func (f *eventFramer) partialSize() int {
	if f.partial == nil {
		return 0
	}
	return cap(f.partial.B)
}
