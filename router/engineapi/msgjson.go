package engineapi

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/membudget"
)

var errNoUTF8 = errors.New("the string is not UTF-8; want UTF-8, or the binary type, which becomes base64")

// maxNesting is the maximum nesting of a request's arrays and maps.
const maxNesting = 60

// errBudgetExhausted means that the request, converted to JSON, may need more than the
// remaining memory budget for requests.
var errBudgetExhausted = errors.New("the memory budget for requests is exhausted; try again")

// allocator leases memory that counts against the budget for requests. It returns false when
// the budget is exhausted.
type allocator func(n int) (membudget.Lease, bool)

// jsonWriter converts a msgpack value to JSON in leased memory. One byte of msgpack may become
// six bytes of JSON (a control character, false), so a request within the budget may exceed it
// as JSON. The writer leases memory before it writes.
type jsonWriter struct {
	dst []byte // part of mem
	mem membudget.Lease
}

// scalarSpace suffices for any value that is not a string; the longest is a float. It includes
// a comma and a bracket after the value.
const scalarSpace = 40

// read converts one msgpack value and returns the bytes after it. Binary becomes base64, and a
// float with an integral value becomes an integer, because integer fields require one. read
// rejects extensions, maps with keys other than strings, numbers that JSON cannot represent and
// strings that are not UTF-8, because jsonscan would misread the text after them. It returns
// errBudgetExhausted when there is no memory.
func (j *jsonWriter) read(b []byte, allocate allocator) (rest []byte, err error) {
	var ok bool
	if j.mem, ok = allocate(membudget.SizeOf(len(b) + len(b)/2 + scalarSpace)); !ok {
		return b, errBudgetExhausted
	}
	j.dst = j.mem.Bytes()[:0]
	return j.writeValue(b, 0)
}

// ensureSpace makes space for n more bytes; b is the unread input.
func (j *jsonWriter) ensureSpace(n int, b []byte) error {
	if cap(j.dst)-len(j.dst) >= n {
		return nil
	}
	return j.grow(n, b)
}

func (j *jsonWriter) grow(n int, b []byte) error {
	least := len(j.dst) + n
	size := membudget.SizeOf(max(least, min(2*cap(j.dst), least+6*len(b))))
	if !j.mem.Grow(size) {
		return errBudgetExhausted
	}
	j.dst = j.mem.Bytes()[:len(j.dst)]
	return nil
}

// writeString writes a string and leaves space for two bytes after it.
func (j *jsonWriter) writeString(v, rest []byte) error {
	if !utf8.Valid(v) {
		return errNoUTF8
	}
	if need := 6*len(v) + 4; cap(j.dst)-len(j.dst) < need {
		if err := j.ensureSpace(jsonscan.QuotedLen(v)+2, rest); err != nil {
			return err
		}
	}
	j.dst = jsonscan.AppendQuoted(j.dst, v)
	return nil
}

func (j *jsonWriter) writeValue(b []byte, depth int) (rest []byte, err error) {
	if len(b) == 0 {
		return b, msgp.ErrShortBytes
	}
	if depth > maxNesting {
		return b, fmt.Errorf("nesting deeper than %d", maxNesting)
	}
	if err = j.ensureSpace(scalarSpace, b); err != nil {
		return b, err
	}
	if b[0] <= 0x7f { // the most frequent case: small ids
		j.dst = strconv.AppendUint(j.dst, uint64(b[0]), 10)
		return b[1:], nil
	}
	switch t := msgp.NextType(b); t {
	case msgp.UintType:
		var v uint64
		if v, rest, err = msgp.ReadUint64Bytes(b); err == nil {
			j.dst = strconv.AppendUint(j.dst, v, 10)
		}
	case msgp.IntType:
		var v int64
		if v, rest, err = msgp.ReadInt64Bytes(b); err == nil {
			j.dst = strconv.AppendInt(j.dst, v, 10)
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
			err = fmt.Errorf("the number %v; want a finite number", v)
		}
		switch {
		case err != nil:
		case v == math.Trunc(v) && math.Abs(v) <= 1<<53:
			j.dst = strconv.AppendInt(j.dst, int64(v), 10)
		default:
			j.dst = strconv.AppendFloat(j.dst, v, 'g', -1, bits)
		}
	case msgp.BoolType:
		var v bool
		if v, rest, err = msgp.ReadBoolBytes(b); err == nil {
			j.dst = strconv.AppendBool(j.dst, v)
		}
	case msgp.NilType:
		if rest, err = msgp.ReadNilBytes(b); err == nil {
			j.dst = append(j.dst, "null"...)
		}
	case msgp.StrType:
		var v []byte
		if v, rest, err = msgp.ReadStringZC(b); err == nil {
			err = j.writeString(v, rest)
		}
	case msgp.BinType:
		var v []byte
		if v, rest, err = msgp.ReadBytesZC(b); err != nil {
			break
		}
		if err = j.ensureSpace(base64.StdEncoding.EncodedLen(len(v))+4, rest); err == nil {
			j.dst = append(j.dst, '"')
			j.dst = base64.StdEncoding.AppendEncode(j.dst, v)
			j.dst = append(j.dst, '"')
		}
	case msgp.ArrayType:
		return j.writeArray(b, depth)
	case msgp.MapType:
		return j.writeObject(b, depth)
	default:
		err = fmt.Errorf("a value of msgpack type %s; want nil, a boolean, a number, a string, an array or a map", t)
	}
	return rest, err
}

func (j *jsonWriter) writeArray(b []byte, depth int) (rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return rest, err
	}
	j.dst = append(j.dst, '[')
	for i := range n {
		if i > 0 {
			j.dst = append(j.dst, ',')
		}
		if rest, err = j.writeValue(rest, depth+1); err != nil {
			return rest, err
		}
	}
	return rest, j.writeEnd(']', rest)
}

func (j *jsonWriter) writeObject(b []byte, depth int) (rest []byte, err error) {
	n, rest, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return rest, err
	}
	j.dst = append(j.dst, '{')
	for i := range n {
		if i > 0 {
			j.dst = append(j.dst, ',')
		}
		var key []byte
		if key, rest, err = msgp.ReadStringZC(rest); err != nil {
			return rest, fmt.Errorf("key of a map: %w", err)
		}
		if err = j.writeString(key, rest); err != nil {
			return rest, fmt.Errorf("key of a map: %w", err)
		}
		j.dst = append(j.dst, ':')
		if rest, err = j.writeValue(rest, depth+1); err != nil {
			return rest, fmt.Errorf("%.40q: %w", truncate(string(key[:min(len(key), 80)]), 40), err)
		}
	}
	return rest, j.writeEnd('}', rest)
}

// writeEnd writes a closing bracket and leaves space for a comma after it.
func (j *jsonWriter) writeEnd(bracket byte, rest []byte) error {
	if err := j.ensureSpace(2, rest); err != nil {
		return err
	}
	j.dst = append(j.dst, bracket)
	return nil
}
