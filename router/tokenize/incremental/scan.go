package incremental

import (
	"bytes"
	"maps"
	"slices"
)

// boundarySet finds the occurrences of the boundary tokens in a text. No two of them overlap, so an
// occurrence is a match whatever else the text contains.
type boundarySet struct {
	ids     map[string]uint32
	isID    map[uint32]bool
	low     uint32               // the least of their ids
	span    uint32               // their greatest id minus the least
	first   []byte               // at most maxFirst bytes with which the tokens begin
	lengths [maxFirst][256][]int // of the tokens, by their first two bytes
}

// maxFirst bounds the different first bytes of the boundary tokens: each is searched for on its
// own. Templates' tokens begin with "<" or "[".
const maxFirst = 2

// newBoundarySet keeps the tokens with the most common first bytes. Leaving a token out is always
// allowed: it only means that no text is cut before it.
func newBoundarySet(tokens []AddedToken) *boundarySet {
	s := &boundarySet{ids: map[string]uint32{}, isID: map[uint32]bool{}}
	var count [256]int
	for _, t := range tokens {
		count[t.Content[0]]++
	}
	for c, n := range count {
		if n > 0 {
			s.first = append(s.first, byte(c))
		}
	}
	slices.SortStableFunc(s.first, func(a, b byte) int { return count[b] - count[a] })
	s.first = s.first[:min(len(s.first), maxFirst)]
	for _, t := range tokens {
		i := slices.Index(s.first, t.Content[0])
		if i < 0 || len(t.Content) < 2 {
			continue
		}
		s.ids[t.Content], s.isID[t.ID] = t.ID, true
		if l := &s.lengths[i][t.Content[1]]; !slices.Contains(*l, len(t.Content)) {
			*l = append(*l, len(t.Content))
		}
	}
	if len(s.isID) > 0 {
		s.low = slices.Min(slices.Collect(maps.Keys(s.isID)))
		s.span = slices.Max(slices.Collect(maps.Keys(s.isID))) - s.low
	}
	return s
}

// isBoundary reports whether id is that of a boundary token. It is asked for every id of a prompt.
// Most vocabularies number these tokens one after the other, so that the range tells nearly always.
func (s *boundarySet) isBoundary(id uint32) bool {
	return id-s.low <= s.span && s.isID[id]
}

// next returns the first occurrence of a boundary token at or after from: its place and length, or
// -1.
func (s *boundarySet) next(text []byte, from int, ahead *[maxFirst]int) (at, length int) {
	for {
		at = -1
		which := 0
		for i, c := range s.first {
			if ahead[i] < from && ahead[i] >= 0 {
				if j := bytes.IndexByte(text[from:], c); j < 0 {
					ahead[i] = -1
				} else {
					ahead[i] = from + j
				}
			}
			if ahead[i] >= 0 && (at < 0 || ahead[i] < at) {
				at, which = ahead[i], i
			}
		}
		if at < 0 || at+1 >= len(text) {
			return -1, 0
		}
		for _, n := range s.lengths[which][text[at+1]] {
			if at+n <= len(text) {
				if _, ok := s.ids[string(text[at:at+n])]; ok {
					return at, n
				}
			}
		}
		from = at + 1
	}
}

// cut is a place where a text may be cut.
type cut struct {
	at      int // in bytes; a boundary token begins here
	ordinal int // how many boundary tokens are before it
}

// minSegment is the least distance of two cuts in bytes: a cut costs memory and a lookup, and what
// follows the last one is encoded again each time.
const minSegment = 512

// cuts appends the places to cut text at, at least least bytes apart. Each depends only on what precedes it and on the token
// there, so a text has all cuts of a text that it begins with.
func (s *boundarySet) cuts(dst []cut, text []byte, least int) (cuts []cut, occurrences int) {
	var ahead [maxFirst]int
	for i := range ahead {
		ahead[i] = -1
		if i < len(s.first) {
			ahead[i] = bytes.IndexByte(text, s.first[i])
		}
	}
	last := 0
	for pos := 0; ; {
		at, n := s.next(text, pos, &ahead)
		if at < 0 {
			return dst, occurrences
		}
		if at-last >= least {
			dst = append(dst, cut{at, occurrences})
			last = at
		}
		occurrences++
		pos = at + n
	}
}
