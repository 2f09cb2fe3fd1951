package relay

import (
	"bytes"

	"sluice/dataplane/membudget"
)

// maxCarry bounds what is kept of an event that is spread over several reads.
const maxCarry = 64 << 10

// framer cuts a server-sent event stream into events, fed in pieces cut
// anywhere. An event in one piece is looked at where it lies; only one spread
// over pieces is copied, into a carry buffer of at most maxCarry bytes. What is
// longer goes by uncollected, or thinned by the scan. LF and CRLF end lines; an empty line an event.
type framer struct {
	carry *membudget.Buffer // the event's bytes so far; nil: none
	most  int32             // the bound; 0: maxCarry
	line  lineState
	over  bool // the present event is beyond the bound
	// What is carried when an event goes beyond the bound stays: its owner goes on with
	// it, and drops it at its end.
	thins bool
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
func (f *framer) next(p []byte) (n int, event []byte, tooBig bool) {
	n, complete := f.scan(p)
	if !complete {
		f.keep(p[:n])
		return n, nil, false
	}
	if f.over {
		f.over = false
		return n, nil, true
	}
	if f.carry == nil {
		return n, p[:n], false
	}
	f.keep(p[:n])
	if f.over {
		f.over = false
		return n, nil, true
	}
	return n, f.carry.B, false
}

// scan finds the end of the line that is empty.
func (f *framer) scan(p []byte) (n int, complete bool) {
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

// keep copies p behind what is carried.
func (f *framer) keep(p []byte) {
	if f.over || len(p) == 0 {
		return
	}
	have := 0
	if f.carry != nil {
		have = len(f.carry.B)
	}
	if have+len(p) > max(int(f.most), maxCarry) {
		if f.over = true; !f.thins {
			f.drop()
		}
		return
	}
	if f.carry == nil || have+len(p) > cap(f.carry.B) {
		bigger := membudget.Default.Get(have + len(p))
		if f.carry != nil {
			copy(bigger.B, f.carry.B)
			membudget.Default.Put(f.carry)
		}
		f.carry = bigger
	}
	f.carry.B = f.carry.B[:have+len(p)]
	copy(f.carry.B[have:], p)
}

// drop gives the carry buffer back; called when an event was looked at.
func (f *framer) drop() {
	if f.carry != nil {
		membudget.Default.Put(f.carry)
		f.carry = nil
	}
}

// between says whether the stream stands behind a whole event.
func (f *framer) between() bool {
	return f.carry == nil && !f.over && f.line == lineEmpty
}
