package sse

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// MaxPartialEvent bounds the bytes that are kept of an event spread over several reads.
const MaxPartialEvent = 64 << 10

// Framer splits a server-sent event stream into events. Its input may be cut anywhere.
// An event that lies in one piece is returned where it lies. Only an event spread over several
// pieces is copied, up to MaxEvent bytes.
// LF, CRLF and CR each end a line, and may be mixed. An empty line ends an event.
// The caller passes its input through normalize first, which leaves no CR inside a piece that ends
// a line by itself.
type Framer struct {
	Partial   *membudget.Buffer // the bytes of the present event so far; nil: none
	MaxEvent  int32             // the bound; 0: MaxPartialEvent
	line      lineState
	Oversized bool // the present event is beyond the bound
	// KeepsOversized: partial stays when an event goes beyond the bound. The owner then
	// changes it, and releases it at the event's end.
	KeepsOversized bool
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

// Normalize replaces each carriage return in p that ends a line by itself with LF, so that only LF
// and CRLF are left to look for. It never changes the last byte of p, because the next piece may
// begin with LF.
func (f *Framer) Normalize(p []byte) {
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

// Next consumes p, which is not empty, up to the end of the present event. It returns the number
// of bytes consumed, the event when it is complete (borrowed until the next call and until p
// changes), and whether an event beyond the bound has ended. n is 0 where an event turns out to
// have ended before p.
func (f *Framer) Next(p []byte) (n int, event []byte, tooBig bool) {
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
	if f.Oversized {
		f.Oversized = false
		return n, nil, true
	}
	if f.Partial == nil {
		return n, p[:n], false
	}
	f.addPartial(p[:n])
	if f.Oversized {
		f.Oversized = false
		return n, nil, true
	}
	return n, f.Partial.B, false
}

// endLineAtCR ends the line whose last byte, a carriage return, was the last of the piece before.
// It returns whether that line was empty.
func (f *Framer) endLineAtCR() (empty bool) {
	empty, f.line, f.loneCR = f.line == lineCR, lineEmpty, true
	if f.Partial != nil {
		if n := len(f.Partial.B); n > 0 && f.Partial.B[n-1] == '\r' {
			f.Partial.B[n-1] = '\n'
		}
	}
	return empty
}

// EndAtCR returns the event that the end of the body ends, because its last byte is a CR of an empty
// line; nil: none.
func (f *Framer) EndAtCR() (event []byte) {
	if f.line != lineCR || f.Partial == nil || f.Oversized {
		return nil
	}
	f.endLineAtCR()
	return f.Partial.B
}

// scan finds the end of the line that is empty.
func (f *Framer) scan(p []byte) (n int, complete bool) {
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
func (f *Framer) addPartial(p []byte) {
	if f.Oversized || len(p) == 0 {
		return
	}
	have := 0
	if f.Partial != nil {
		have = len(f.Partial.B)
	}
	if have+len(p) > max(int(f.MaxEvent), MaxPartialEvent) {
		if f.Oversized = true; !f.KeepsOversized {
			f.Release()
		}
		return
	}
	if f.Partial == nil || have+len(p) > cap(f.Partial.B) {
		bigger := membudget.Default.Get(have + len(p))
		if f.Partial != nil {
			copy(bigger.B, f.Partial.B)
			membudget.Default.Put(f.Partial)
		}
		f.Partial = bigger
	}
	f.Partial.B = f.Partial.B[:have+len(p)]
	copy(f.Partial.B[have:], p)
}

// Release returns the memory of the partial event. It is called when the event has been handled.
func (f *Framer) Release() {
	if f.Partial != nil {
		membudget.Default.Put(f.Partial)
		f.Partial = nil
	}
}

// AtBoundary reports whether the input so far ends with a whole event.
func (f *Framer) AtBoundary() bool {
	return f.Partial == nil && !f.Oversized && (f.line == lineEmpty || f.line == lineSkipLF)
}

// PartialSize returns the memory of the partial event.
func (f *Framer) PartialSize() int {
	if f.Partial == nil {
		return 0
	}
	return cap(f.Partial.B)
}
