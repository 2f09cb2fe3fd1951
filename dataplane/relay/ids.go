package relay

import (
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// PackedIDs are token ids that are kept and seldom read, packed: each takes the bits that the
// largest needs, 15 to 18 of a vocabulary. The zero IDs has none. They are not changed.
type PackedIDs struct{ packed string } // their number, the bits of each, the bits, lowest first

const packedHeader = 4 + 1

// PackIDs keeps ids, which are its caller's again.
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

// Len is how many there are.
func (p PackedIDs) Len() int {
	if len(p.packed) == 0 {
		return 0
	}
	return int(uint32(p.packed[0]) | uint32(p.packed[1])<<8 | uint32(p.packed[2])<<16 | uint32(p.packed[3])<<24)
}

// all goes over them, until yield does not want another.
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

// Append appends them to dst.
func (p PackedIDs) Append(dst []uint32) []uint32 {
	for id := range p.all {
		dst = append(dst, id)
	}
	return dst
}

// equal says whether list, a JSON array, has these ids and no others. One that is written
// otherwise than engines do, or has something else in it, may have them all the same.
func (p PackedIDs) equal(list []byte) bool {
	if p.Len() == 0 || list[0] != '[' {
		return false
	}
	at := 0
	for id := range p.all {
		at++ // the bracket, or the comma
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
			at++ // more of p are not in it: the next number is none
		}
	}
	return at == len(list)
}
