package transcript

import (
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// PackedIDs are immutable token ids in little memory. Each takes as many bits as the largest needs,
// 15 to 18 for common vocabularies. The zero value is empty.
type PackedIDs struct{ packed string } // their number, the bits of each, then the ids, lowest bit first

const packedHeader = 4 + 1

// PackIDs returns ids packed. It does not keep the slice.
func PackIDs(ids []uint32) PackedIDs {
	if len(ids) == 0 {
		return PackedIDs{}
	}
	var all uint32
	for _, id := range ids {
		all |= id
	}
	width := max(bits.Len32(all), 1)
	p := make([]byte, packedHeader, packedHeader+(len(ids)*width+7)/8)
	binary.LittleEndian.PutUint32(p, uint32(len(ids)))
	p[4] = byte(width)
	var word uint64
	have := 0
	for _, id := range ids {
		word |= uint64(id) << have
		for have += width; have >= 8; have -= 8 {
			p = append(p, byte(word))
			word >>= 8
		}
	}
	if have > 0 {
		p = append(p, byte(word))
	}
	return PackedIDs{unsafe.String(unsafe.SliceData(p), len(p))}
}

// Len returns the number of ids.
func (p PackedIDs) Len() int {
	if len(p.packed) == 0 {
		return 0
	}
	return int(uint32(p.packed[0]) | uint32(p.packed[1])<<8 | uint32(p.packed[2])<<16 | uint32(p.packed[3])<<24)
}

// all calls yield for each id until it returns false.
func (p PackedIDs) all(yield func(uint32) bool) {
	n := p.Len()
	if n == 0 {
		return
	}
	width, from := int(p.packed[4]), p.packed[packedHeader:]
	var word uint64
	have := 0
	for range n {
		for ; have < width; have += 8 {
			word |= uint64(from[0]) << have
			from = from[1:]
		}
		if !yield(uint32(word & (1<<width - 1))) {
			return
		}
		word >>= width
		have -= width
	}
}

// Append appends the ids to dst.
func (p PackedIDs) Append(dst []uint32) []uint32 {
	for id := range p.all {
		dst = append(dst, id)
	}
	return dst
}

// equal reports whether list, a JSON array in the form that engines write, has exactly these ids.
// For an array in another form it may return false.
func (p PackedIDs) equal(list []byte) bool {
	if p.Len() == 0 || list[0] != '[' {
		return false
	}
	at := 0
	for id := range p.all {
		at++ // the bracket or comma
		for at < len(list) && list[at] == ' ' {
			at++
		}
		var value uint64
		from := at
		for ; at < len(list) && list[at]-'0' <= 9 && at-from < 11; at++ {
			value = value*10 + uint64(list[at]-'0')
		}
		if at == from || at == len(list) || value != uint64(id) || list[at] != ',' && list[at] != ']' {
			return false
		}
		if list[at] == ']' {
			at++ // at the end of list the next number is missing
		}
	}
	return at == len(list)
}
