package routed

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/jsonscan"
)

var errNoUTF8 = errors.New("a string that is no UTF-8; want UTF-8, or binary, which becomes base64")

// maxNesting bounds a request's arrays and maps.
const maxNesting = 60

// appendJSON appends a msgpack value as JSON, and gives what follows it. Binary
// becomes base64; extensions, maps with other keys than strings, numbers that JSON
// cannot write and strings that are no UTF-8 are refused: jsonscan would not see what
// stands behind these. A float that is a whole number is written as one, as an integer
// must be.
func appendJSON(dst, b []byte, depth int) (out, rest []byte, err error) {
	if len(b) == 0 {
		return dst, b, msgp.ErrShortBytes
	}
	if depth > maxNesting {
		return dst, b, fmt.Errorf("nesting deeper than %d", maxNesting)
	}
	if b[0] <= 0x7f { // most of what comes: small ids
		return strconv.AppendUint(dst, uint64(b[0]), 10), b[1:], nil
	}
	switch t := msgp.NextType(b); t {
	case msgp.UintType:
		var v uint64
		if v, rest, err = msgp.ReadUint64Bytes(b); err == nil {
			dst = strconv.AppendUint(dst, v, 10)
		}
	case msgp.IntType:
		var v int64
		if v, rest, err = msgp.ReadInt64Bytes(b); err == nil {
			dst = strconv.AppendInt(dst, v, 10)
		}
	case msgp.Float64Type, msgp.Float32Type:
		var v float64
		bits := 64
		if t == msgp.Float32Type {
			var f float32
			f, rest, err = msgp.ReadFloat32Bytes(b)
			v, bits = float64(f), 32
		} else {
			v, rest, err = msgp.ReadFloat64Bytes(b)
		}
		if err == nil && (math.IsNaN(v) || math.IsInf(v, 0)) {
			err = fmt.Errorf("the number %v; want a finite one", v)
		}
		switch {
		case err != nil:
		case v == math.Trunc(v) && math.Abs(v) <= 1<<53:
			dst = strconv.AppendInt(dst, int64(v), 10)
		default:
			dst = strconv.AppendFloat(dst, v, 'g', -1, bits)
		}
	case msgp.BoolType:
		var v bool
		if v, rest, err = msgp.ReadBoolBytes(b); err == nil {
			dst = strconv.AppendBool(dst, v)
		}
	case msgp.NilType:
		if rest, err = msgp.ReadNilBytes(b); err == nil {
			dst = append(dst, "null"...)
		}
	case msgp.StrType:
		var v []byte
		if v, rest, err = msgp.ReadStringZC(b); err == nil {
			if !utf8.Valid(v) {
				return dst, rest, errNoUTF8
			}
			dst = jsonscan.AppendQuoted(dst, v)
		}
	case msgp.BinType:
		var v []byte
		if v, rest, err = msgp.ReadBytesZC(b); err == nil {
			dst = append(dst, '"')
			dst = base64.StdEncoding.AppendEncode(dst, v)
			dst = append(dst, '"')
		}
	case msgp.ArrayType:
		var n uint32
		if n, rest, err = msgp.ReadArrayHeaderBytes(b); err != nil {
			break
		}
		dst = append(dst, '[')
		for i := range n {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, rest, err = appendJSON(dst, rest, depth+1); err != nil {
				return dst, rest, err
			}
		}
		dst = append(dst, ']')
	case msgp.MapType:
		var n uint32
		if n, rest, err = msgp.ReadMapHeaderBytes(b); err != nil {
			break
		}
		dst = append(dst, '{')
		for i := range n {
			if i > 0 {
				dst = append(dst, ',')
			}
			var key []byte
			if key, rest, err = msgp.ReadStringZC(rest); err != nil {
				return dst, rest, fmt.Errorf("a map's key: %w", err)
			}
			if !utf8.Valid(key) {
				return dst, rest, fmt.Errorf("a map's key: %w", errNoUTF8)
			}
			dst = append(jsonscan.AppendQuoted(dst, key), ':')
			if dst, rest, err = appendJSON(dst, rest, depth+1); err != nil {
				return dst, rest, fmt.Errorf("%.40q: %w", cut(string(key[:min(len(key), 80)]), 40), err)
			}
		}
		dst = append(dst, '}')
	default:
		err = fmt.Errorf("a value of msgpack type %s; want nil, a boolean, a number, a string, an array or a map", t)
	}
	return dst, rest, err
}
