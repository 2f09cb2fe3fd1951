package jsonscan

import (
	"math"
	"strconv"
)

// parseInt reads an integer as engines take it: plain digits, or with a
// fraction of zeros only ("16.0"). Exponents are refused.
func parseInt(raw []byte) (int64, bool) {
	i, neg := 0, false
	if len(raw) > 0 && raw[0] == '-' {
		i, neg = 1, true
	}
	start, n := i, uint64(0)
	for ; i < len(raw) && raw[i]-'0' <= 9; i++ {
		if n > math.MaxInt64/10 {
			return 0, false
		}
		n = n*10 + uint64(raw[i]-'0')
	}
	if i == start {
		return 0, false
	}
	if i < len(raw) && raw[i] == '.' {
		for i++; i < len(raw) && raw[i] == '0'; i++ {
		}
	}
	limit := uint64(math.MaxInt64)
	if neg {
		limit++
	}
	if i != len(raw) || n > limit {
		return 0, false
	}
	if neg {
		return -int64(n), true
	}
	return int64(n), true
}

// TokenIDs appends the token ids of a raw JSON array of non-negative integers.
// It fails with *SyntaxError when raw is something else (also for an array of
// arrays, or an id over 2^32-1); offsets count from the start of raw. On an
// error dst comes back as it was.
func TokenIDs(dst []uint32, raw []byte) ([]uint32, error) {
	out := dst
	i := skipSpace(raw, 0)
	if i >= len(raw) || raw[i] != '[' {
		return dst, badIDs(raw, i, "an array of token ids")
	}
	i = skipSpace(raw, i+1)
	if i < len(raw) && raw[i] == ']' {
		return dst, endIDs(raw, i+1)
	}
	for {
		start, id := i, uint64(0)
		for ; i < len(raw) && raw[i]-'0' <= 9; i++ {
			if id = id*10 + uint64(raw[i]-'0'); id > math.MaxUint32 {
				return dst, badIDs(raw, start, "a token id below 4294967296")
			}
		}
		if i == start || raw[start] == '0' && i > start+1 {
			return dst, badIDs(raw, start, "a token id, an integer from 0 on")
		}
		out = append(out, uint32(id))
		if i < len(raw) && raw[i] <= ' ' {
			i = skipSpace(raw, i)
		}
		if i >= len(raw) {
			return dst, badIDs(raw, i, `"," or "]"`)
		}
		switch raw[i] {
		case ',':
			if i++; i < len(raw) && raw[i] <= ' ' {
				i = skipSpace(raw, i)
			}
		case ']':
			if err := endIDs(raw, i+1); err != nil {
				return dst, err
			}
			return out, nil
		default:
			return dst, badIDs(raw, start, "a token id, an integer from 0 on")
		}
	}
}

func endIDs(raw []byte, i int) error {
	if i = skipSpace(raw, i); i < len(raw) {
		return badIDs(raw, i, "nothing after the array")
	}
	return nil
}

func badIDs(raw []byte, i int, want string) error {
	return &SyntaxError{Offset: i, Got: unexpected(raw, i), Want: want}
}

// AppendTokenIDs appends ids as a JSON array.
func AppendTokenIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}
