package jsonscan

import (
	"encoding/binary"
	"unicode/utf8"
	"unsafe"
)

// validUTF8 is utf8.Valid, fast for text in any script.
func validUTF8(b []byte) bool {
	if !wide || len(b) < 32 {
		return validBy8(b)
	}
	at, ok := wideUTF8(unsafe.SliceData(b), len(b))
	if !ok {
		return false
	}
	// The last rune before at may continue after it.
	from := at - 1
	for from > at-utf8.UTFMax && !utf8.RuneStart(b[from]) {
		from--
	}
	return validBy8(b[from:])
}

// validBy8 is utf8.Valid at a steady pace: in text of mixed scripts utf8.Valid costs a branch per
// rune, this a shift per byte. The state is a bit offset into the byte's row, which contains the
// next state for each state. The bits above its low six are the rest of the row.
func validBy8(b []byte) bool {
	var state uint64
	for len(b) >= 8 {
		w := binary.LittleEndian.Uint64(b)
		if w&highBits|state&63 == 0 {
			b = b[8:]
			continue
		}
		p := b[:8:8]
		for _, c := range p {
			state = utf8Rows[c] >> (state & 63)
		}
		b = b[8:]
	}
	for _, c := range b {
		state = utf8Rows[c] >> (state & 63)
	}
	return state&63 == 0
}

// The states of the automaton of RFC 3629, section 4, each of six bits. The first is also the
// accepting state.
const (
	runeStart = iota * 6
	oneMore   // any continuation byte, then the accepting state
	twoMore
	threeMore
	afterE0 // 0xa0 to 0xbf: not overlong
	afterED // 0x80 to 0x9f: not a surrogate
	afterF0 // 0x90 to 0xbf
	afterF4 // 0x80 to 0x8f: not above U+10FFFF
	invalid
)

var utf8Rows = func() (rows [256]uint64) {
	for c := range rows {
		for from := runeStart; from <= invalid; from += 6 {
			rows[c] |= uint64(nextState(from, byte(c))) << from
		}
	}
	return rows
}()

func nextState(from int, c byte) int {
	within := func(lo, hi byte, to int) int {
		if lo <= c && c <= hi {
			return to
		}
		return invalid
	}
	switch from {
	case oneMore:
		return within(0x80, 0xbf, runeStart)
	case twoMore:
		return within(0x80, 0xbf, oneMore)
	case threeMore:
		return within(0x80, 0xbf, twoMore)
	case afterE0:
		return within(0xa0, 0xbf, oneMore)
	case afterED:
		return within(0x80, 0x9f, oneMore)
	case afterF0:
		return within(0x90, 0xbf, twoMore)
	case afterF4:
		return within(0x80, 0x8f, twoMore)
	case invalid:
		return invalid
	}
	switch {
	case c < 0x80:
		return runeStart
	case c >= 0xc2 && c <= 0xdf:
		return oneMore
	case c == 0xe0:
		return afterE0
	case c == 0xed:
		return afterED
	case c >= 0xe1 && c <= 0xef:
		return twoMore
	case c == 0xf0:
		return afterF0
	case c >= 0xf1 && c <= 0xf3:
		return threeMore
	case c == 0xf4:
		return afterF4
	}
	return invalid
}
