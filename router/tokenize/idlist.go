package tokenize

import (
	"encoding/binary"
	"slices"
)

// idList is an immutable, compact list of token ids: three bytes per id, or four if one of them is
// at least 1<<24, which no known vocabulary has.
type idList struct {
	count  int
	packed []byte // little-endian, count ids of equal size
}

func packIDs(ids []uint32) *idList {
	all := uint32(0)
	for _, id := range ids {
		all |= id
	}
	size := 3
	if all >= 1<<24 {
		size = 4
	}
	l := &idList{count: len(ids), packed: make([]byte, 0, size*len(ids))}
	for _, id := range ids {
		l.packed = append(l.packed, byte(id), byte(id>>8), byte(id>>16))
		if size == 4 {
			l.packed = append(l.packed, byte(id>>24))
		}
	}
	return l
}

// appendTo appends the ids to dst.
func (l *idList) appendTo(dst []uint32) []uint32 {
	from := len(dst)
	dst = slices.Grow(dst, l.count)[:from+l.count]
	out, p := dst[from:], l.packed
	if len(p) == 4*l.count {
		for i := range out {
			out[i] = binary.LittleEndian.Uint32(p[4*i:])
		}
		return dst
	}
	for i := range out {
		id := p[3*i : 3*i+3]
		out[i] = uint32(id[0]) | uint32(id[1])<<8 | uint32(id[2])<<16
	}
	return dst
}
