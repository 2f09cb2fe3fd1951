package jsonscan

import "encoding/binary"

// EventShape is what the events of one stream have in common: the bytes around the values that
// change from event to event. An event with the same shape has the same members as the learned one,
// at the same depth and with values of the same kinds, so it can be read without being parsed.
//
// Numbers, one text and one array of token ids may change. They are validated by the scan's
// grammar, so that an event on which a parser would stop never matches. The zero EventShape matches
// nothing. Each stream has one, whose memory is reused from event to event.
type EventShape struct {
	// Cumulative: the ids of an event begin with those of the event before (SGLang's cumulative
	// streams). Match then skips the ids that it has read.
	Cumulative bool

	fixed []byte // the bytes between the gaps, concatenated
	gaps  [maxGaps]gap
	n     int

	lastIDs     []byte // if Cumulative: the last array of ids, without its closing bracket
	lastIDCount int    // the number of ids in it
}

// maxGaps bounds the values of an event that may change. Engines' events have up to nine.
const maxGaps = 20

type gap struct {
	kind     gapKind
	before   int32 // end in fixed of the bytes before it
	from, to int32 // in the last event that was learned or matched
}

type gapKind uint8

const (
	numberGap gapKind = iota
	textGap
	idsGap
)

// maxShapeBytes bounds an event that is learned.
const maxShapeBytes = 1 << 20

// Learn learns the shape of an event. text is the position of its one string that changes, ids that
// of its array of token ids; a zero Value: none. It returns whether there is a shape. An event with
// too many numbers, or a malformed one, has none, and nothing matches until another is learned.
func (s *EventShape) Learn(event []byte, text, ids Value) bool {
	s.fixed, s.n = s.fixed[:0], 0
	if len(event) > maxShapeBytes || !s.learn(event, text, ids) {
		s.n = 0
	}
	return s.n > 0
}

// Reset makes s match nothing. It keeps its memory for the next stream unless that is much.
func (s *EventShape) Reset() {
	s.Cumulative, s.n, s.lastIDCount = false, 0, 0
	s.fixed, s.lastIDs = s.fixed[:0], s.lastIDs[:0]
	if cap(s.fixed)+cap(s.lastIDs) > maxRetainedShape {
		s.fixed, s.lastIDs = nil, nil
	}
}

// maxRetainedShape bounds the memory that Reset keeps.
const maxRetainedShape = 16 << 10

func (s *EventShape) learn(event []byte, text, ids Value) bool {
	b := scanner{b: event}
	since := 0
	for i := 0; i < len(event); {
		kind, end := numberGap, 0
		switch c := event[i]; {
		case c == '"':
			if end = b.str(i); text.Kind != String || i != text.Start {
				if end < 0 {
					return false
				}
				i = end
				continue
			}
			kind = textGap
		case c == '[' && ids.Kind == Array && i == ids.Start:
			kind, end = idsGap, ids.End
		case c == '-' || c-'0' <= 9:
			end = b.number(i)
		default:
			i++
			continue
		}
		if end < 0 || s.n == maxGaps {
			return false
		}
		s.fixed = append(s.fixed, event[since:i]...)
		s.gaps[s.n] = gap{kind: kind, before: int32(len(s.fixed)), from: int32(i), to: int32(end)}
		s.n++
		i, since = end, end
	}
	s.fixed = append(s.fixed, event[since:]...)
	return true
}

// Gap returns the index of the value that began at offset start of the event just learned; -1: none
// did, or start is negative.
func (s *EventShape) Gap(start int) int {
	for i := range s.gaps[:s.n] {
		if int(s.gaps[i].from) == start {
			return i
		}
	}
	return -1
}

// Raw returns the value in a gap of event, which was the last to match; nil for gap -1.
func (s *EventShape) Raw(event []byte, gap int) []byte {
	if gap < 0 {
		return nil
	}
	return event[s.gaps[gap].from:s.gaps[gap].to]
}

// Start returns where the value in a gap begins in the last event that matched.
func (s *EventShape) Start(gap int) int { return int(s.gaps[gap].from) }

// Match reports whether event has the shape. If so it appends the token ids to dst, except those
// that it skipped (Cumulative), whose number it returns. Otherwise it returns dst unchanged.
func (s *EventShape) Match(dst []uint32, event []byte) (ids []uint32, skipped int, ok bool) {
	if s.n == 0 || len(event) > maxShapeBytes {
		return dst, 0, false
	}
	b := scanner{b: event}
	ids = dst
	i, at := 0, 0
	for k := range s.gaps[:s.n] {
		g := &s.gaps[k]
		fixed := s.fixed[at:g.before]
		if at = int(g.before); len(event)-i <= len(fixed) || string(event[i:i+len(fixed)]) != string(fixed) {
			return dst, 0, false
		}
		i += len(fixed)
		g.from = int32(i)
		switch c := event[i]; g.kind {
		case textGap:
			if c != '"' {
				return dst, 0, false
			}
			i = b.str(i)
		case idsGap:
			if c != '[' {
				return dst, 0, false
			}
			if ids, skipped, i = s.readIDs(ids, event, i); i < 0 {
				return dst, 0, false
			}
		default:
			if c != '-' && c-'0' > 9 {
				return dst, 0, false
			}
			i = numberEnd(&b, i)
		}
		if i < 0 {
			return dst, 0, false
		}
		g.to = int32(i)
	}
	if string(event[i:]) != string(s.fixed[at:]) {
		return dst, 0, false
	}
	return ids, skipped, true
}

// numberEnd is scanner.number with a fast path for numbers of a few digits.
func numberEnd(s *scanner, i int) int {
	if i+8 <= len(s.b) {
		end := i + digits(binary.LittleEndian.Uint64(s.b[i:]))
		if end == i+8 {
			end = skipDigits(s.b, end)
		}
		if end < len(s.b) && (s.b[i] != '0' && end > i || end == i+1) {
			switch s.b[end] {
			case ',', '}', ']':
				return end
			}
		}
	}
	return s.number(i)
}

// readIDs reads the array at event[i] and returns its end; -1: it is not an array of ids.
func (s *EventShape) readIDs(dst []uint32, event []byte, i int) (ids []uint32, skipped, end int) {
	if !s.Cumulative {
		ids, end, err := idsFrom(dst, event, i)
		if err != nil {
			return dst, 0, -1
		}
		return ids, 0, end
	}
	var err error
	next := i + len(s.lastIDs)
	switch {
	case s.lastIDCount == 0 || next >= len(event) || string(event[i:next]) != string(s.lastIDs):
		s.lastIDs, s.lastIDCount = s.lastIDs[:0], 0
		ids, end, err = idsFrom(dst, event, i)
		next = i
	case event[next] == ',':
		skipped = s.lastIDCount
		ids, end, err = moreIDs(dst, event, next+1)
	case event[next] == ']':
		return dst, s.lastIDCount, next + 1
	default: // the last id continues, or a space follows: read it again
		s.lastIDs, s.lastIDCount = s.lastIDs[:0], 0
		ids, end, err = idsFrom(dst, event, i)
		next = i
	}
	if err != nil {
		s.lastIDs, s.lastIDCount = s.lastIDs[:0], 0
		return dst, 0, -1
	}
	s.lastIDs = append(s.lastIDs, event[next:end-1]...)
	s.lastIDCount = skipped + len(ids) - len(dst)
	return ids, skipped, end
}
